"""A run's checkpoint on disk, in the rollout layout, and prompts as the run had them; what is
refused, and how."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.as_json import to_json
from jaxspec.config.settings import MeshConfig
from jaxspec.host.job import make_job
from jaxspec.host.loaded_run import (
    LoadedRun,
    PromptAnswer,
    SavedRun,
    encode_prompt,
    find_run,
    restore_weights,
)
from jaxspec.inputs.checked import ConfigError
from jaxspec.models.decoder import Decoder
from jaxspec.models.weight_layout import apply_layout
from jaxspec.state import EOS, NetworkState, RolloutWeights
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.conftest import answering_config, small_mesh, tiny_network

CONFIG = answering_config()
BEST = (7, 0, 3)
"""Places in the grid of the draft temperatures that the run has found best, by depth."""


def policy() -> Decoder:
    return tiny_network(Decoder, CONFIG.model, seed=3)


def draft() -> Decoder:
    return tiny_network(Decoder, CONFIG.model, seed=9)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints 3 and 12 of a mesh of eight, in which there is only what
    answering needs."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text(json.dumps(to_json(CONFIG)))
    step = make_job(CONFIG, small_mesh(8)).step
    state = jax.jit(step.init_state, out_shardings=step.state_shardings())(policy(), draft())
    assert isinstance(state.learner.draft, NetworkState), "the config has a draft with weights"
    best = jnp.asarray(
        np.arange(len(step.generator.settings.grid)) == np.asarray(BEST)[:, None], jnp.float32
    )
    bare = {
        name: getattr(state.learner, name).replace(optimizer=None) for name in ("policy", "draft")
    }
    state = state.replace(
        learner=state.learner.replace(**bare),
        generator=state.generator.replace(overlap_by_factor=best),
    )
    save = Checkpoints(folder / "checkpoints")
    for number in (3, 12):
        save.save(number, (state, None), {"batch": number})
    save.close()
    return folder


def restored(run: Path, **changes: Any) -> RolloutWeights:
    """Policy and draft for a session whose draft settings differ from the run's."""
    rollout = dataclasses.replace(
        CONFIG.rollout, draft=dataclasses.replace(CONFIG.rollout.draft, **changes)
    )
    job = make_job(dataclasses.replace(CONFIG, rollout=rollout, mesh=MeshConfig()), small_mesh(1))
    return restore_weights(find_run(str(run)), job.config, job.step, 2)


class TestFindRun:
    def test_the_newest_or_the_one_that_is_named(self, run: Path) -> None:
        assert find_run(str(run)) == SavedRun(run, 12, CONFIG)
        assert find_run(str(run / "checkpoints" / "3")) == SavedRun(run, 3, CONFIG)

    def test_a_checkpoint_that_is_not_there(self, run: Path) -> None:
        with pytest.raises(ConfigError, match="no checkpoint 2; it has 3, 12"):
            find_run(str(run / "checkpoints" / "2"))

    def test_a_best_checkpoint_that_was_never_kept(self, run: Path) -> None:
        with pytest.raises(ConfigError, match=r"the run keeps one if --eval\.keep_best names"):
            find_run(str(run / "best"))

    @pytest.mark.parametrize(
        ("config", "words"),
        [
            (None, ["no config.json", "the folder of a training run"]),
            ("{", ["config.json is not JSON", "the folder of a training run"]),
            ('{"model_type": "qwen3"}', ["not that of a training run", "RUN/checkpoints/NUMBER"]),
            (json.dumps(to_json(CONFIG)), ["no checkpoint yet", "after 20 batches"]),
        ],
    )
    def test_folders(self, tmp_path: Path, config: str | None, words: list[str]) -> None:
        (tmp_path / "checkpoints").mkdir()
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(ConfigError) as caught:
            find_run(str(tmp_path))
        assert [word for word in (str(tmp_path), *words) if word not in str(caught.value)] == []

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (
                lambda saved: saved.pop("steps"),
                ["another version of jaxspec: it lacks steps", "use that version"],
            ),
            (lambda saved: saved.update(steps="x"), ["steps is 'x'", "a whole number"]),
            (
                lambda saved: saved["rollout"]["draft"].update(kind="eagle4"),
                ["rollout.draft.kind is 'eagle4'", "one of eagle3, mtp"],
            ),
        ],
    )
    def test_a_config_that_cannot_be_used_is_named_with_its_file(
        self, tmp_path: Path, damage: Callable[[dict[str, Any]], None], words: list[str]
    ) -> None:
        (tmp_path / "checkpoints" / "1").mkdir(parents=True)
        saved = to_json(CONFIG)
        damage(saved)
        (tmp_path / "config.json").write_text(json.dumps(saved))
        with pytest.raises(ConfigError) as caught:
            find_run(str(tmp_path))
        assert [
            word
            for word in (str(tmp_path / "config.json"), *words)
            if word not in str(caught.value)
        ] == []


class TestRestore:
    def test_only_what_answering_needs_is_read(self, run: Path) -> None:
        ready = restored(run)
        weight_layouts = (
            make_job(CONFIG, small_mesh(1))
            .step.generator.make_variant(prompts=1, group_size=2)
            .weight_layouts
        )
        for found, wanted, how in zip(
            (ready.target, ready.drafter.network), (policy(), draft()), weight_layouts, strict=True
        ):
            jax.tree.map(np.testing.assert_array_equal, found, apply_layout(wanted, how))
        assert ready.drafter.factor_index.tolist() == list(BEST)

    @pytest.mark.parametrize(("length", "choice"), [(5, [*BEST, 5, 5]), (2, [*BEST[:2]])])
    def test_a_deeper_draft_goes_on_at_factor_1(
        self, run: Path, length: int, choice: list[int]
    ) -> None:
        assert restored(run, draft_length=length).drafter.factor_index.tolist() == choice

    def test_another_way_to_draw_starts_anew(self, run: Path) -> None:
        assert restored(run, sampling="argmax").drafter.factor_index.tolist() == [0, 0, 0]

    def test_without_the_draft(self, run: Path) -> None:
        drafter = restored(run, kind="none").drafter
        assert drafter.network is None
        assert drafter.factor_index.shape == (0,)

    def test_weights_that_do_not_fit_the_config_are_named_with_a_remedy(self, run: Path) -> None:
        edited = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, ffn=32))
        step = make_job(edited, small_mesh(1)).step
        with pytest.raises(
            ConfigError,
            match=r"/12 was written by another config: .*float32\[4, 24, 16\].*config\.json back",
        ) as caught:
            restore_weights(SavedRun(run, 12, edited), edited, step, 2)
        assert "--workdir" not in str(caught.value)


@pytest.mark.slow
def test_answers_end_with_the_stop_strings_of_the_run(run: Path) -> None:
    def texts(*stop: str) -> tuple[list[str], list[int]]:
        rollout = dataclasses.replace(CONFIG.rollout, stop=stop)
        config = dataclasses.replace(CONFIG, rollout=rollout, mesh=MeshConfig())
        job = make_job(config, small_mesh(1))
        weights = restore_weights(find_run(str(run)), config, job.step, 2)
        loaded = LoadedRun(job.step, job.tokenizer.pad_id, weights, 2)
        rows = [], []
        for given in loaded.generate_rounds(encode_prompt("3+4=", config, job.tokenizer)):
            if isinstance(given, PromptAnswer):
                return [job.tokenizer.decode(row) for row in rows], given.status
            for row, piece in zip(rows, given, strict=True):
                row += piece.tokens
        raise AssertionError("no answer")

    whole, _ = texts()
    longest = max(whole, key=len)
    string = longest[3:5]
    wanted = [before + found for before, found, _ in (text.partition(string) for text in whole)]
    stopped, status = texts(string)
    assert stopped == wanted
    assert len(wanted[whole.index(longest)]) <= 5 < len(longest)
    assert status[whole.index(longest)] == EOS


class TestReadPrompt:
    def test_as_training_did(self) -> None:
        assert encode_prompt("3+4=", CONFIG, character_tokenizer()).ids == tuple(
            character_tokenizer().encode_prompt("3+4=")
        )

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("12345+67890=", ["13 tokens", "limit is 6", "--max_prompt_length 13"]),
            ("who?", ["'who'", "27+85="]),
        ],
    )
    def test_what_does_not_fit(self, text: str, words: list[str]) -> None:
        with pytest.raises(ConfigError) as caught:
            encode_prompt(text, CONFIG, character_tokenizer())
        assert [word for word in words if word not in str(caught.value)] == []
