"""Offline training of the draft: interrupted anywhere it ends in the same weights; what it reports
is what the draft reaches."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.data.arithmetic import SftBatch
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.drafts.model.settings import DraftModelConfig
from jaxspec.host.job import Job
from jaxspec.inputs.checked import ConfigError
from jaxspec.mesh import replicated_sharding
from jaxspec.models.decoder import Decoder
from jaxspec.models.mtp import Mtp
from jaxspec.preparation import draft_data, draft_training
from jaxspec.preparation import policy as warm_start
from jaxspec.preparation.draft_data import (
    TextRows,
    abstract_responses,
    compute_states,
    make_responder,
    rows_from_sft,
    should_keep_states,
)
from jaxspec.preparation.draft_training import (
    DraftTexts,
    acceptance_lengths,
    collect_responses,
    measure_acceptance,
    train_draft,
)
from jaxspec.rl.objective import FrozenPolicy
from jaxspec.rl.train_batch import NO_STATES, NoStates, PolicyStates, count_tokens_to_read
from jaxspec.state import PyTree
from jaxspec.storage.cache import save_tree
from tests.conftest import small_mesh, tiny_network
from tests.host.training_jobs import VOCAB, Killed, Seen, a_job, always_kept, same_bits
from tests.twins import numpy_decoder, numpy_softmax, numpy_taps


def random_rows(count: int, seed: int = 0) -> TextRows:
    """Prompts of 2 to 6 tokens and responses of 0 to 6."""
    random = np.random.default_rng(seed)
    starts = random.integers(2, 7, count).astype(np.int32)
    tokens = random.integers(0, VOCAB, (count, 12)).astype(np.int32)
    lengths = (starts + random.integers(0, 7, count)).astype(np.int32)
    return rows_from_sft(SftBatch(tokens, starts, lengths))


def trained(
    job: Job,
    policy: Decoder,
    rows: TextRows,
    folder: Path,
    progress: Seen,
    states: PolicyStates | NoStates = NO_STATES,
) -> PyTree:
    texts = DraftTexts(rows, states)
    return train_draft(job.config, job.step, policy, texts, folder, progress)


def states_of(job: Job, policy: Decoder, rows: TextRows, progress: Seen) -> PolicyStates:
    learner = job.step.learner.for_supervised_texts(FrozenPolicy(), micro_tokens=24)
    return compute_states(learner, policy, rows, job.config.offline.rows, progress)


def collected(
    job: Job, policy: Decoder, numbers: list[int], folder: Path, progress: Seen
) -> dict[int, TextRows]:
    generator = job.step.generator
    return collect_responses(
        lambda: make_responder(job.config, generator, job.tokenizer, policy),
        abstract_responses(job.config, generator.mesh),
        numbers,
        folder,
        progress,
    )


class TestTrain:
    @pytest.mark.parametrize(
        ("kind", "draft"),
        [
            pytest.param("eagle3", {"eagle3": Eagle3Config(vocab=12)}, marks=pytest.mark.slow),
            pytest.param("model", {"model": DraftModelConfig(ffn=8)}, marks=pytest.mark.sweep),
        ],
    )
    def test_a_killed_training_goes_on_to_the_same_weights_in_every_bit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind, draft
    ) -> None:
        job, rows = a_job(kind, draft=draft), random_rows(13)
        policy = tiny_network(Decoder, job.config.model)
        monkeypatch.setattr(warm_start, "KEEP_SECONDS", float("inf"))
        whole = trained(job, policy, rows, tmp_path, Seen())
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
            trained(job, policy, rows, tmp_path, Seen(dies_at=4))
        (tmp_path / "learner.npz.tmp").write_bytes(b"half a file")
        seen = Seen()
        resumed = trained(job, policy, rows, tmp_path, seen)
        assert seen.steps == [3, 4, 5, 6]
        assert same_bits(whole, resumed)
        again = trained(job, policy, rows, tmp_path, Seen())
        assert same_bits(whole, again)  # nothing left to do
        kept = tmp_path / "learner.npz"
        kept.write_bytes(kept.read_bytes()[:-100])
        seen = Seen()
        assert same_bits(whole, trained(job, policy, rows, tmp_path, seen))
        assert seen.steps == [1, 2, 3, 4, 5, 6]
        assert [str(kept) in line and "made anew" in line for line in seen.said] == [True]

    def test_the_drafts_own_vocabulary_is_counted_from_the_rows(self, tmp_path: Path) -> None:
        job = a_job(draft={"eagle3": Eagle3Config(vocab=12)})
        rows = TextRows(np.full((4, 12), 17, np.int32), np.full((4, 12), True))
        network = trained(job, tiny_network(Decoder, job.config.model), rows, tmp_path, Seen())
        assert network.vocabulary[...].tolist() == [*range(11), 17]  # the end token is 1


class TestStates:
    @pytest.mark.parametrize("shards", [1, 4])
    def test_they_are_what_numpy_computes_at_every_token_that_is_read(self, shards: int) -> None:
        job, rows = a_job(shards=shards), random_rows(13)
        policy = tiny_network(Decoder, job.config.model)
        seen = Seen()
        states = states_of(job, policy, rows, seen)
        assert seen.steps[-1] == len(states.hidden) == 13
        for row, length in enumerate(count_tokens_to_read(rows.mask)):
            _, hidden, boundaries = numpy_decoder(policy, rows.tokens[row, :length])
            found = states.hidden[row, :length]
            np.testing.assert_allclose(found, hidden, rtol=1e-4, atol=1e-5)
            assert states.taps is not None
            found = states.taps[row, :length]
            np.testing.assert_allclose(found, numpy_taps(boundaries), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        "kind",
        [
            "eagle3",
            pytest.param("mtp", marks=pytest.mark.slow),
            pytest.param("model", marks=pytest.mark.sweep),
        ],
    )
    def test_a_draft_learns_from_them_what_it_learns_from_the_policy(
        self, tmp_path: Path, kind: str
    ) -> None:
        job, rows = a_job(kind, shards=2), random_rows(13)
        policy = tiny_network(Decoder, job.config.model)
        direct = trained(job, policy, rows, tmp_path / "direct", Seen())
        states = states_of(job, policy, rows, Seen())
        # one that would teach something else, but for its embedding and its head
        other = tiny_network(Decoder, job.config.model, 5)
        other.embedding, other.head = policy.embedding, policy.head
        taught = trained(job, other, rows, tmp_path / "kept", Seen(), states)
        for one, two in zip(jax.tree.leaves(direct), jax.tree.leaves(taught), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)

    def test_only_states_that_are_needed_again_and_fit_are_kept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = a_job()  # 6 updates of 4 rows
        config, learner = job.config, job.step.learner
        assert should_keep_states(config, learner, random_rows(23))
        assert not should_keep_states(config, learner, random_rows(24))
        monkeypatch.setattr(draft_data, "MAX_STATE_BYTES", 8 * 12 * 4 * 4 * job.config.model.embed)
        assert should_keep_states(config, learner, random_rows(8))
        assert not should_keep_states(config, learner, random_rows(9))


class TestKept:
    def layout(self, **arrays: Any) -> dict[str, jax.ShapeDtypeStruct]:
        whole = replicated_sharding(small_mesh())
        return {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=whole)
            for name, array in arrays.items()
        }

    def test_a_folder_in_its_place_is_discarded(self, tmp_path: Path) -> None:
        file, seen = tmp_path / "learner.npz", Seen()
        (file / "inside").mkdir(parents=True)
        assert draft_training._load_partial_together(file, self.layout(a=np.zeros(3)), seen) is None
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
            draft_training._load_partial_together(file, self.layout(a=np.zeros(3)), Seen())
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
            draft_training._load_partial_together(file, self.layout(a=np.zeros(3)), Seen())


class TestCollect:
    def test_responses_are_kept_as_they_come_and_never_sampled_twice(self, tmp_path: Path) -> None:
        job = a_job()
        policy, other = (tiny_network(Decoder, job.config.model, seed=seed) for seed in (0, 1))
        kept, killed = tmp_path / "kept", tmp_path / "killed"
        kept.mkdir()
        killed.mkdir()
        whole = collected(job, policy, [0, 1, 5], kept, Seen())
        with pytest.raises(Killed):
            collected(job, policy, [0, 1, 5], killed, Seen(dies_at=4))
        (killed / "responses-1.npz.tmp").write_bytes(b"half a file")
        mixed = collected(job, other, [0, 1, 5], killed, Seen())
        assert same_bits(mixed[0], whole[0])  # kept
        assert not same_bits(mixed[1], whole[1])  # sampled now, from the other policy
        damaged = killed / "responses-1.npz"
        damaged.write_bytes(damaged.read_bytes()[:-100])
        seen = Seen()
        assert same_bits(collected(job, other, [5, 1, 0], killed, seen), mixed)
        assert [str(damaged) in line and "made anew" in line for line in seen.said] == [True]


class TestMeasure:
    def test_a_small_model_overlaps_the_policy_as_numpy_says(self) -> None:
        job = a_job("model", draft={"model": DraftModelConfig(layers=4)})
        policy, network = (
            tiny_network(Decoder, job.config.model, seed=seed, scale=2.0) for seed in (0, 1)
        )
        # three turns each
        chats = TextRows(random_rows(4, seed=4).tokens, np.tile(np.arange(12) % 4 > 1, (4, 1)))
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
        acceptance = measure_acceptance(job.config, job.step.learner, policy, network, held_out)
        np.testing.assert_allclose(acceptance, [np.mean(overlaps)], rtol=1e-4)

    def test_deeper_than_it_was_trained_or_is_used_and_each_depth_after_those_before(self) -> None:
        job = a_job("mtp")
        policy = tiny_network(Decoder, job.config.model)
        network = tiny_network(Mtp, job.config.model)
        acceptance = measure_acceptance(
            job.config, job.step.learner, policy, network, [random_rows(4)]
        )
        assert len(acceptance) == draft_training.MIN_DEPTHS
        assert all(0 < share < 1 for share in acceptance)

    def test_tokens_kept(self) -> None:
        assert acceptance_lengths([0.5, 0.5, 1.0]) == pytest.approx([1.5, 1.75, 2.0])
