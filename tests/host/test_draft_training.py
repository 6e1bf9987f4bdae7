"""Offline training of the draft: interrupted anywhere it ends in the same weights; what it reports
is what the draft reaches."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxspec.config.settings import (
    Config,
    ConfigError,
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    MeshConfig,
    OfflineConfig,
    RolloutConfig,
    SftConfig,
)
from jaxspec.data.arithmetic import SftBatch
from jaxspec.data.problems import PromptStream, load_problems
from jaxspec.data.tokenizer import character_tokenizer
from jaxspec.host import draft_training, round_cost
from jaxspec.host.draft_data import Rows, answered, training_text
from jaxspec.host.draft_training import (
    ACCEPTANCE,
    cached_draft,
    collect,
    measure,
    tokens_kept,
    train,
)
from jaxspec.host.job import Job, make_job, sources
from jaxspec.host.warm_start import policy_key
from jaxspec.mesh import replicated
from jaxspec.models.decoder import Decoder
from jaxspec.models.mtp import Mtp
from jaxspec.rl.optimizers import Diverged
from jaxspec.storage.cache import save_tree
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress
from jaxspec.train_draft import closing_table, main
from tests.conftest import eagle3, small_mesh, tiny_model, tiny_network, with_weights
from tests.twins import numpy_decoder, numpy_softmax

ROOT = Path(__file__).parents[2]
VOCAB = character_tokenizer().size


class Killed(Exception):
    """Stands for a kill between two steps."""


class Seen(Progress):
    """Remembers the steps it is told of, and dies at one."""

    def __init__(self, dies_at: int | None = None) -> None:
        super().__init__("", 1, console=Console(quiet=True))
        self.steps: list[int] = []
        self.said: list[str] = []
        self._dies_at = dies_at

    def say(self, message: str) -> None:
        self.said.append(message)

    def update(self, step: int, **numbers: float | int | None) -> None:
        self.steps.append(step)
        if step == self._dies_at:
            raise Killed


def a_job(
    kind: Any = "eagle3", shards: int = 1, draft: dict[str, Any] | None = None, **parts: Any
) -> Job:
    """One-digit sums, a random float32 policy, 8 samples in batches of 4, 6 updates."""
    config = Config(
        **{
            "model": tiny_model(vocab=VOCAB, dtype="float32"),
            "rollout": RolloutConfig(
                max_new_tokens=6, draft=DraftConfig(kind=kind, draft_length=2, **(draft or {}))
            ),
            "data": DataConfig(digits=1, max_prompt_length=6),
            "sft": SftConfig(steps=0),
            "draft_training": DraftTrainingConfig(ttt_steps=2),
            "offline": OfflineConfig(samples=8, rows=4, steps=6, learning_rate=1e-2),
            "mesh": MeshConfig(data=shards),
            **parts,
        }
    )
    return make_job(config, small_mesh(shards))


def trained_draft(job: Job, interrupt: Interrupt) -> Path:
    return cached_draft(job, interrupt, training_text(job.config, job.tokenizer, job.say))


def random_rows(count: int, seed: int = 0) -> Rows:
    """Prompts of 2 to 6 tokens and responses of 0 to 6."""
    random = np.random.default_rng(seed)
    starts = random.integers(2, 7, count).astype(np.int32)
    tokens, lengths = (
        random.integers(0, VOCAB, (count, 12)).astype(np.int32),
        (starts + random.integers(0, 7, count)).astype(np.int32),
    )
    return answered(SftBatch(tokens, starts, lengths))


def always_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is kept after every step."""
    monkeypatch.setattr(draft_training, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(draft_training, "KEEP_COST", 0.0)


def same_bits(one: Any, other: Any) -> bool:
    return jax.tree.all(
        jax.tree.map(
            lambda left, right: np.array_equal(np.asarray(left), np.asarray(right)), one, other
        )
    )


class TestTrain:
    @pytest.mark.parametrize(
        ("kind", "draft"),
        [("eagle3", {"vocab": 12}), pytest.param("model", {"ffn": 8}, marks=pytest.mark.slow)],
    )
    def test_a_killed_training_goes_on_to_the_same_weights_in_every_bit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind, draft
    ) -> None:
        job, rows = a_job(kind, draft=draft), random_rows(13)
        policy = tiny_network(Decoder, job.config.model)
        monkeypatch.setattr(draft_training, "KEEP_SECONDS", float("inf"))
        whole = train(job, policy, rows, tmp_path, Seen())
        assert not list(tmp_path.iterdir())
        always_kept(monkeypatch)
        keeps = iter([True, True, False, False])  # the last steps before the kill are lost
        original = draft_training.save_tree
        monkeypatch.setattr(
            draft_training,
            "save_tree",
            lambda file, tree: original(file, tree) if next(keeps, True) else None,
        )
        with pytest.raises(Killed):
            train(job, policy, rows, tmp_path, Seen(dies_at=4))
        (tmp_path / "learner.npz.tmp").write_bytes(b"half a file")
        seen = Seen()
        resumed = train(job, policy, rows, tmp_path, seen)
        assert seen.steps == [3, 4, 5, 6]
        assert same_bits(whole, resumed)
        again = train(job, policy, rows, tmp_path, Seen())
        assert same_bits(whole, again)  # nothing left to do
        kept = tmp_path / "learner.npz"
        kept.write_bytes(kept.read_bytes()[:-100])
        seen = Seen()
        assert same_bits(whole, train(job, policy, rows, tmp_path, seen))
        assert seen.steps == [1, 2, 3, 4, 5, 6]
        assert [str(kept) in line and "made anew" in line for line in seen.said] == [True]

    def test_the_drafts_own_vocabulary_is_counted_from_the_rows(self, tmp_path: Path) -> None:
        job = a_job(draft={"vocab": 12})
        rows = Rows(np.full((4, 12), 17, np.int32), np.full((4, 12), True))
        network = train(job, tiny_network(Decoder, job.config.model), rows, tmp_path, Seen())
        assert network.vocabulary[...].tolist() == [*range(11), 17]  # the end token is 1


class TestKept:
    def layout(self, **arrays: Any) -> dict[str, jax.ShapeDtypeStruct]:
        whole = replicated(small_mesh())
        return {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=whole)
            for name, array in arrays.items()
        }

    def test_a_folder_in_its_place_is_discarded(self, tmp_path: Path) -> None:
        file, seen = tmp_path / "learner.npz", Seen()
        (file / "inside").mkdir(parents=True)
        assert draft_training._kept(file, self.layout(a=np.zeros(3)), seen) is None
        assert not file.exists()
        assert [str(file) in line and "made anew" in line for line in seen.said] == [True]

    def test_one_that_cannot_be_read_now_is_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "learner.npz"
        save_tree(file, {"a": np.zeros(3)})

        def refused(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied", str(file))

        monkeypatch.setattr(np, "load", refused)
        with pytest.raises(ConfigError, match=r"learner.npz cannot be read: Permission denied"):
            draft_training._kept(file, self.layout(a=np.zeros(3)), Seen())
        assert file.exists()

    def test_one_with_other_arrays_is_to_be_removed(self, tmp_path: Path) -> None:
        file = tmp_path / "learner.npz"
        save_tree(file, {"b": np.zeros(3)})
        with pytest.raises(
            ConfigError,
            match=(
                r"another config: a is missing; b is not part of this run. Remove it, and it is"
                r" made anew$"
            ),
        ):
            draft_training._kept(file, self.layout(a=np.zeros(3)), Seen())


class TestCollect:
    def test_responses_are_kept_as_they_come_and_never_sampled_twice(self, tmp_path: Path) -> None:
        job = a_job()
        policy, other = (tiny_network(Decoder, job.config.model, seed=seed) for seed in (0, 1))
        kept, killed = tmp_path / "kept", tmp_path / "killed"
        kept.mkdir()
        killed.mkdir()
        whole = collect(job, policy, [0, 1, 5], kept, Seen())
        with pytest.raises(Killed):
            collect(job, policy, [0, 1, 5], killed, Seen(dies_at=4))
        (killed / "responses-1.npz.tmp").write_bytes(b"half a file")
        mixed = collect(job, other, [0, 1, 5], killed, Seen())
        assert same_bits(mixed[0], whole[0])  # kept
        assert not same_bits(mixed[1], whole[1])  # sampled now, from the other policy
        damaged = killed / "responses-1.npz"
        damaged.write_bytes(damaged.read_bytes()[:-100])
        seen = Seen()
        assert same_bits(collect(job, other, [5, 1, 0], killed, seen), mixed)
        assert [str(damaged) in line and "made anew" in line for line in seen.said] == [True]


class TestMeasure:
    def test_a_small_model_overlaps_the_policy_as_numpy_says(self) -> None:
        job = a_job("model", draft={"layers": 4})
        policy, network = (
            tiny_network(Decoder, job.config.model, seed=seed, scale=2.0) for seed in (0, 1)
        )
        # three turns each
        chats = Rows(random_rows(4, seed=4).tokens, np.tile(np.arange(12) % 4 > 1, (4, 1)))
        held_out, overlaps = [random_rows(4, seed=3), chats], []
        for batch in held_out:
            for tokens, mask in zip(*batch, strict=True):
                target, draft = (
                    numpy_softmax(numpy_decoder(model, tokens)[0]) for model in (policy, network)
                )
                overlaps += [
                    np.minimum(target[place - 1], draft[place - 1]).sum()
                    for place in np.flatnonzero(mask)
                ]
        assert len(overlaps) > 20
        np.testing.assert_allclose(
            measure(job, policy, network, held_out), [np.mean(overlaps)], rtol=1e-4
        )

    def test_deeper_than_it_was_trained_or_is_used_and_each_depth_after_those_before(self) -> None:
        job = a_job("mtp")
        policy, network = (
            tiny_network(Decoder, job.config.model),
            tiny_network(Mtp, job.config.model),
        )
        acceptance = measure(job, policy, network, [random_rows(4)])
        assert len(acceptance) == draft_training.DEPTHS
        assert all(0 < share < 1 for share in acceptance)

    def test_tokens_kept(self) -> None:
        assert tokens_kept([0.5, 0.5, 1.0]) == pytest.approx([1.5, 1.75, 2.0])


class TestClosingTable:
    def shown(self, depths: int, **changes: Any) -> str:
        reached = {
            "kind": "eagle3",
            "responses": 128,
            "vocabulary": None,
            "coverage": None,
            "acceptance": [0.9, 0.8, 0.7],
            **changes,
        }
        text = io.StringIO()
        Console(file=text, width=100).print(closing_table(reached, depths))
        return text.getvalue()

    def test_depths_and_the_tokens_they_would_keep(self) -> None:
        lines = [line.split() for line in self.shown(2).splitlines()]
        assert ["1", "0.900", "1.90"] in lines
        assert ["2", "0.800", "2.62"] in lines
        assert not any(line and line[0] == "3" for line in lines)
        assert "eagle3 on 128 held-out responses" in self.shown(2)

    def test_what_limits_the_numbers_is_said(self) -> None:
        assert "24 tokens are 99.50%" in self.shown(3, vocabulary=24, coverage=0.995)
        assert "true tokens only" in self.shown(3, kind="model", acceptance=[0.9])
        assert "true tokens" not in self.shown(3)


class TestCachedDraft:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    @pytest.mark.slow
    def test_killed_and_called_again_it_holds_what_an_uninterrupted_one_does(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        job = a_job("mtp", 2, offline=OfflineConfig(samples=12, rows=4, steps=5))
        (cache / "0123456789abcdef.partial").mkdir(parents=True)  # of another key
        (cache / "0123456789abcdef.partial" / "learner.npz").write_bytes(b"another draft's")
        always_kept(monkeypatch)
        original = draft_training.Progress.update

        def killed(progress: Any, step: int, **numbers: float) -> None:
            original(progress, step, **numbers)
            if "loss" in numbers and step == 3:
                raise Killed

        with Interrupt() as interrupt:
            monkeypatch.setattr(draft_training.Progress, "update", killed)
            with pytest.raises(Killed):
                trained_draft(job, interrupt)
            monkeypatch.setattr(draft_training.Progress, "update", original)
            assert not list(cache.glob("*/weights.npz"))
            capsys.readouterr()
            weights = trained_draft(job, interrupt)
            assert "going on at step 3 of 5" in capsys.readouterr().out
            first, reached = np.load(weights), json.loads(weights.with_name(ACCEPTANCE).read_text())
            assert [path.name for path in cache.glob("*.partial")] == ["0123456789abcdef.partial"]
            assert reached["responses"] == 4
            assert len(reached["acceptance"]) == draft_training.DEPTHS
            monkeypatch.setenv("JAXSPEC_CACHE", str(cache.with_name("another")))
            second = np.load(trained_draft(job, interrupt))
        assert all(np.array_equal(first[name], second[name]) for name in first.files)

    def test_a_text_replaces_the_samples_but_not_those_held_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "corpus.jsonl"
        path.write_text('{"text": "1+1=2"}\n{"text": "#"}\n')
        job = a_job(offline=OfflineConfig(samples=12, rows=4, steps=1, text=str(path)))
        trained, measured = [], []

        def remember_training(job: Job, policy: Any, rows: Rows, *rest: Any) -> Any:
            trained.append(rows)
            return tiny_network(eagle3, job.config.model)

        monkeypatch.setattr(draft_training, "train", remember_training)
        monkeypatch.setattr(
            draft_training,
            "measure",
            lambda job, policy, network, held_out: measured.append(held_out) or [0.5],
        )
        with Interrupt() as interrupt:
            trained_draft(job, interrupt)
            trained_draft(a_job(offline=OfflineConfig(samples=12, rows=4, steps=1)), interrupt)
        texts = [job.tokenizer.decode(row[mask]) for row, mask in zip(*trained[0], strict=True)]
        assert texts == ["1+1=2", "#"]
        assert len(trained[1].tokens) == 8
        assert same_bits(measured[0], measured[1])
        assert not any(
            np.array_equal(row, other)
            for row in measured[0][0].tokens
            for other in trained[1].tokens
        )

    def test_a_file_where_work_is_kept_on_the_way_is_replaced(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = a_job(offline=OfflineConfig(samples=8, rows=4, steps=1))
        monkeypatch.setattr(
            draft_training, "train", lambda job, *_: tiny_network(eagle3, job.config.model)
        )
        monkeypatch.setattr(draft_training, "measure", lambda *_: [0.5])
        cache.mkdir()
        (cache / f"{draft_training._key(job, None)}.partial").write_text("no folder")
        with Interrupt() as interrupt:
            assert trained_draft(job, interrupt).exists()
        assert not list(cache.glob("*.partial"))

    def test_the_code_that_shapes_what_is_kept_is_found_and_that_of_prompts_is_part_of_it(
        self,
    ) -> None:
        job = a_job()
        # every name matches a file
        assert all(
            [
                policy_key(job),
                draft_training._key(job, None),
                round_cost._key(job.step.generator, 6),
            ]
        )
        assert {"data/problems.py", "data/chat_template.py", "data/template_process.py"} <= set(
            draft_training.CODE
        )
        with pytest.raises(ValueError, match=r"nothing\*\.py"):
            sources("step.py", "nothing*.py")

    def test_responses_that_failed_are_neither_trained_on_nor_measured(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Those to prompts with a seven, which no response may have; the policy's embedding of it
        is NaN."""
        seven = character_tokenizer().encode("7")[0]
        rollout = RolloutConfig(
            max_new_tokens=6,
            draft=DraftConfig(kind="model", layers=4, draft_length=2),
            banned=(seven,),
        )
        job = a_job(rollout=rollout, offline=OfflineConfig(samples=24, rows=8, steps=2))
        policy = tiny_network(Decoder, job.config.model)
        policy = with_weights(policy, embedding=policy.embedding[...].at[seven].set(np.nan))
        monkeypatch.setattr(draft_training, "load_policy", lambda job, interrupt: policy)
        trained = []
        plain = draft_training.train

        def remember(job: Job, policy: Any, rows: Rows, *rest: Any) -> Any:
            trained.append(rows)
            return plain(job, policy, rows, *rest)

        monkeypatch.setattr(draft_training, "train", remember)
        with Interrupt() as interrupt:
            weights = trained_draft(job, interrupt)
        assert all(
            np.isfinite(array).all() for name, array in np.load(weights).items() if name != "index"
        )
        reached, stream = (
            json.loads(weights.with_name(ACCEPTANCE).read_text()),
            PromptStream(load_problems(job.config.data, job.tokenizer)[0], 0),
        )
        good = (
            np.array([seven not in stream[number].ids for number in range(24)]).reshape(3, 8).sum(1)
        )
        assert (len(trained[0].tokens), reached["responses"]) == (good[:2].sum(), good[2])
        assert 0 < good[2] < 8
        assert f"{24 - good.sum()} of 24 responses failed" in capsys.readouterr().out
        assert not (trained[0].tokens == seven).any()
        assert all(0 < share < 1 for share in reached["acceptance"])

    def test_all_that_shapes_the_draft_names_its_entry_and_nothing_else_does(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = tmp_path / "corpus.jsonl"

        def build(job: Job, interrupt: Interrupt, text: Any, partial: Path, folder: Path) -> None:
            (folder / "weights.npz").write_bytes(b"")

        monkeypatch.setattr(draft_training, "build", build)

        def rollout(draft: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
            return {
                "rollout": RolloutConfig(
                    max_new_tokens=6,
                    draft=DraftConfig(**{"draft_length": 2, **(draft or {})}),
                    **changes,
                )
            }

        def offline(**changes: Any) -> dict[str, Any]:
            return {
                "offline": OfflineConfig(
                    **{"samples": 8, "rows": 4, "steps": 6, "learning_rate": 1e-2, **changes}
                )
            }

        def training(**changes: Any) -> dict[str, Any]:
            return {"draft_training": DraftTrainingConfig(**{"ttt_steps": 2, **changes})}

        shaping = [
            *(
                {"seed": 1},
                {"sft": SftConfig(steps=0, wrong_steps=0.1)},
                {"model": tiny_model(vocab=VOCAB, ffn=32, dtype="float32")},
            ),
            *(
                rollout({"kind": "mtp"}),
                rollout({"vocab": 12}),
                rollout({"ffn": 8}),
                rollout({"kind": "mtp", "layers": 2}),
            ),
            *(
                rollout({"kind": "mtp", "embedding_first": False}),
                rollout(temperature=0.5),
                rollout(top_k=3),
                rollout(top_p=0.5),
            ),
            *(
                rollout(min_new_tokens=1),
                rollout(banned=(3,)),
                {"data": DataConfig(digits=1, max_prompt_length=6, task="subtract")},
            ),
            *(
                offline(samples=12),
                offline(steps=7),
                offline(rows=2),
                offline(learning_rate=1e-3),
                offline(text=str(text)),
            ),
            *(
                training(loss="lk"),
                training(ttt_steps=3),
                training(decay=0.5),
                training(grad_clip=1.0),
            ),
        ]
        free = [
            *(
                {"steps": 3},
                {"workdir": "elsewhere"},
                training(online=False),
                training(learning_rate=1.0),
            ),
            *(
                rollout({"draft_length": 3}),
                rollout({"sampling": "argmax"}),
                rollout(verify="token"),
            ),
        ]
        with Interrupt() as interrupt:

            def entry(**parts: Any) -> Path:
                return trained_draft(a_job(**parts), interrupt)

            text.write_text('{"text": "1"}\n')
            shaped = [entry(**parts) for parts in shaping]
            text.write_text('{"text": "2"}\n')
            shaped += [entry(), entry(**offline(text=str(text)))]
            assert len(set(shaped)) == len(shaped)
            assert {entry(**parts) for parts in free} == {entry()}

    @pytest.mark.slow
    def test_one_that_diverges_is_not_cached(self, cache: Path) -> None:
        job = a_job(offline=OfflineConfig(samples=8, rows=4, steps=9, learning_rate=1e30))
        with (
            Interrupt() as interrupt,
            pytest.raises(Diverged, match=r"draft's .* offline training.*--offline.learning_rate"),
        ):
            trained_draft(job, interrupt)
        assert not list(cache.glob("*/weights.npz"))
        assert not list(cache.glob("*.partial"))


SMALL = [
    *(
        "--config",
        "draft_offline.py",
        "--model.layers",
        "4",
        "--model.embed",
        "16",
        "--model.ffn",
        "16",
        "--model.head_size",
        "4",
    ),
    *(
        "--sft.steps",
        "0",
        "--data.digits",
        "1",
        "--rollout.max_new_tokens",
        "6",
        "--offline.samples",
        "32",
        "--offline.rows",
        "16",
    ),
    *("--mesh.data", "1"),
]


class TestProgram:
    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "jaxspec.train_draft", *SMALL, *options]

    def test_nothing_to_train_is_said_with_what_would_be(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for job in (a_job("ngram"), a_job(offline=OfflineConfig(steps=0))):
            with (
                Interrupt() as interrupt,
                pytest.raises(
                    ConfigError,
                    match=r"nothing to train; set --offline.steps, .*eagle3, mtp, model",
                ),
            ):
                main(job, interrupt)

    @pytest.mark.slow
    def test_stopped_it_says_that_it_goes_on_and_does_and_a_cached_draft_shows_the_same_table(
        self, tmp_path: Path
    ) -> None:
        environment = {**os.environ, "JAXSPEC_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        options = {
            "cwd": ROOT,
            "env": environment,
            "text": True,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        command = self.command("--offline.steps", "6000")
        with subprocess.Popen(command, **options) as process:
            deadline = time.monotonic() + 300
            while not list(tmp_path.glob("*.partial/learner.npz")) and time.monotonic() < deadline:
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            told = process.communicate(timeout=60)[0]
        assert process.returncode == 143
        assert "stopped while training the draft" in told
        assert "goes on from there" in told
        first, second = (
            subprocess.run(command, **options, timeout=600, check=True).stdout for _ in range(2)
        )
        assert "going on at step" in first
        assert "6000/6000" not in second
        start = "eagle3 on 16 held-out responses"
        assert first[first.index(start) :] == second[second.index(start) :]
