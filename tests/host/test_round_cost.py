"""What draft lengths are chosen by: a cost table of this machine, kept for the next run, and the
draft's acceptance."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    EngineConfig,
    RolloutConfig,
)
from jaxspec.host.round_cost import _save, _saved, measured_chooser
from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.decoder import Decoder
from jaxspec.state import LengthChooser
from jaxspec.storage.cache import content_key
from jaxspec.tokens.stop_strings import stop_table
from tests.conftest import eagle3, small_mesh, tiny_config, tiny_model, tiny_network, tiny_prompts

MODEL = tiny_model(vocab=16, dtype="float32")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    return tmp_path / "costs"


def chooser_of(draft: DraftConfig) -> LengthChooser:
    config = tiny_config(
        MODEL,
        rollout=RolloutConfig(max_new_tokens=24, draft=draft, engine=EngineConfig(tail=False)),
        batch=BatchConfig(prompts=8, group_size=4),
        data=DataConfig(max_prompt_length=5),
        draft_model=MODEL if draft.kind == "model" else ModelSpec(),
    )
    # every token would end a row, if stop strings were not off
    stop = stop_table(("a",), [b"a"] * MODEL.vocab, "its")
    generator = build_step(config, small_mesh(2, 1), (1,), MODEL.vocab, stop).generator
    network = (
        tiny_network(Decoder, MODEL, 1) if draft.kind == "model" else tiny_network(eagle3, MODEL, 2)
    )
    sync = jax.jit(lambda policy, network: generator.sync(policy, network, generator.start()))
    ready = sync(tiny_network(Decoder, MODEL, 1), network)
    return jax.tree.map(
        np.asarray, measured_chooser(generator, ready, tiny_prompts(8, 5, MODEL.vocab))
    )


COST = np.asarray([[1.25, 2.5], [3.0, 4.75]], np.float32)


def test_a_table_is_kept_without_a_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "key.json"
    assert not _saved(file, COST.shape).any()
    _save(file, COST)
    np.testing.assert_array_equal(_saved(file, COST.shape), COST)
    assert not _saved(file, (3, 3)).any()  # of another shape
    assert [each.name for each in folder.iterdir()] == ["key.json"]
    assert capsys.readouterr().out == ""


def _instead(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.unlink()
        make(file)

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.write_text(""), "is damaged"),
        (lambda file: file.write_text(file.read_text().replace("4.75", "4.25")), "is damaged"),
        (lambda file: file.write_text("[" * 100_000), "is damaged"),
        (lambda file: file.write_text("{}"), "is damaged"),
        (_instead(lambda file: file.mkdir()), "cannot be read (Is a directory)"),
        (
            _instead(lambda file: file.symlink_to(file)),
            "cannot be read (Too many levels of symbolic links)",
        ),
    ],
)
def test_a_table_that_is_not_what_was_written_is_told_and_measured_anew(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], Any], said: str
) -> None:
    file = folder / "key.json"
    _save(file, COST)
    damage(file)
    assert not _saved(file, COST.shape).any()
    assert capsys.readouterr().out == f"warning: {file} {said}: rounds are timed anew\n"


@pytest.mark.parametrize("place", ["costs", "costs/key.json"])
def test_a_table_that_cannot_be_written_is_no_reason_to_stop(
    folder: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    file = folder / "key.json"
    if place == "costs":
        folder.write_text("no folder")
    else:
        file.mkdir(parents=True)
    _save(file, COST)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {file} cannot be written: ")
    assert line.endswith("; the next run times its rounds anew")


@pytest.mark.slow
def test_costs_are_measured_once_and_kept_for_the_machine_model_and_shape(folder: Path) -> None:
    auto = DraftConfig(draft_length="auto")
    first = chooser_of(auto)
    (file,) = folder.iterdir()
    assert first.round_cost.shape == (4, 3, 1)
    assert (first.round_cost > 0).all()
    np.testing.assert_array_equal(
        first.round_cost, np.asarray(json.loads(file.read_text())["cost"], np.float32)
    )
    doubled = (np.asarray(first.round_cost) * 2).tolist()
    file.write_text(json.dumps({"cost": doubled, "digest": content_key(doubled)}))
    np.testing.assert_array_equal(
        chooser_of(auto).round_cost, first.round_cost * 2
    )  # what is kept is what counts
    # of another shape
    file.write_text(json.dumps({"cost": [[1.0]], "digest": content_key([[1.0]])}))
    assert chooser_of(auto).round_cost.shape == (4, 3, 1)
    chooser_of(DraftConfig(kind="model", draft_length="auto"))
    assert len(list(folder.iterdir())) == 2


@pytest.mark.slow
def test_acceptance_is_that_of_the_draft_on_some_prompts(folder: Path) -> None:
    """Random weights keep some of what they draft, the policy's own weights all."""
    random = chooser_of(DraftConfig(draft_length="auto")).acceptance
    same = chooser_of(DraftConfig(kind="model", draft_length="auto")).acceptance
    drafted = 2 * 16 * 3  # three rounds of both shards' slots
    assert random.offered_in_turn[0] == drafted
    np.testing.assert_array_equal(random.offered_in_turn[1:], random.accepted[:-1])
    assert 0 < random.accepted[0] < drafted
    np.testing.assert_array_equal(same.offered_in_turn, drafted)
    np.testing.assert_array_equal(same.accepted, drafted)
    assert random.seconds_to_lose == 0
