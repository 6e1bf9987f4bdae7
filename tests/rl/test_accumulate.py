"""What a micro-batch adds up: counts, weights and bans of a network of one layer, written out."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.build import build_step
from jaxspec.config.settings import BatchConfig, DataConfig, DraftConfig, LossConfig, RolloutConfig
from jaxspec.inputs.spec import FamilySpec, ModelSpec
from jaxspec.mesh import shard_map_rows
from jaxspec.models.decoder import Decoder
from jaxspec.models.moe import Traffic
from jaxspec.rl.loss_terms import LogprobGap
from jaxspec.rl.train_batch import PlacedBatch, TrainBatch, count_tokens_to_read
from jaxspec.step import Step
from tests.conftest import small_mesh, tiny_config, tiny_model, tiny_network
from tests.twins import numpy_decoder

pytestmark = pytest.mark.usefixtures("x64")

ROWS, SIZE, STOP = 8, 9, 1
MODEL = tiny_model(layers=1)


def step_of(model: ModelSpec = MODEL) -> Step:
    """Two mini-batches, the loss a mean over answers, end tokens banned from the first two."""
    config = tiny_config(
        model,
        rollout=RolloutConfig(max_new_tokens=6, min_new_tokens=2, draft=DraftConfig(kind="none")),
        batch=BatchConfig(prompts=4, group_size=2, mini_batches=2, micro_tokens=20),
        data=DataConfig(max_prompt_length=3),
        loss=LossConfig(kind="reinforce", aggregation="sequence"),
    )
    return build_step(config, small_mesh(), (STOP,), MODEL.vocab)


@functools.cache
def policy() -> Decoder:
    return tiny_network(Decoder, MODEL, 1, 1.5)


def batch_of(step: Step) -> PlacedBatch:
    """Answers of 1 to 6 tokens with gaps in what is learned; the last row has nothing to learn."""
    random = np.random.default_rng(2)
    place = np.arange(SIZE)
    ends = random.integers(4, SIZE + 1, ROWS)[:, None]
    chosen = (place >= 3) & (place < ends)
    chosen[:4, 4] = False  # as where an environment has spoken
    chosen[-1] = False
    parts: dict[str, Any] = {
        "tokens": random.integers(2, MODEL.vocab, (ROWS, SIZE)).astype(np.int32),
        "sampled_logprobs": random.normal(size=(ROWS, SIZE)),
        "loss_mask": chosen,
        "advantages": random.normal(size=ROWS),
        "version": np.zeros(ROWS, np.int32),
    }
    plan = step.plan_batch(np.asarray(count_tokens_to_read(chosen), np.int32))
    batch = TrainBatch(**jax.tree.map(jnp.asarray, parts), plan=jax.tree.map(jnp.asarray, plan))
    return step.learner.passes.place_rows(batch)


def logprobs_of(batch: TrainBatch) -> np.ndarray:
    """Of each token given those before it, by numpy; the end token is banned from the first two."""
    tokens, chosen = np.asarray(batch.tokens), np.asarray(batch.loss_mask)
    found = np.zeros(tokens.shape)
    for row in range(ROWS):
        logits = numpy_decoder(policy(), tokens[row].tolist())[0]
        for place in range(1, SIZE):
            law = logits[place - 1].copy()
            if chosen[row, :place].sum() < 2:
                law[STOP] = -np.inf
            found[row, place] = law[tokens[row, place]] - np.log(np.exp(law).sum())
    return found


def in_mini_batch(batch: TrainBatch, number: int) -> np.ndarray:
    """Labels that a mini-batch learns from."""
    return np.asarray(batch.loss_mask) & (np.asarray(batch.plan.micro_batch)[number] >= 0)[:, None]


@pytest.mark.parametrize("mini", [0, 1])
def test_counts_are_of_the_mini_batch(mini: int) -> None:
    step = step_of()
    batch = batch_of(step)

    def on_a_shard(batch: TrainBatch) -> Any:
        return step.learner.objective.compute_counts(batch, jnp.int32(mini))

    counts = jax.jit(shard_map_rows(step.learner.mesh, on_a_shard, (P(),), P()))(batch)
    here = in_mini_batch(batch, mini)
    assert [float(counts.labels), float(counts.texts)] == [here.sum(), here.any(axis=1).sum()]
    assert float(counts.texts) == (4, 3)[mini]


def test_the_loss_of_a_mini_batch_is_that_written_out() -> None:
    """The mean over its answers of their means over labels."""
    step = step_of()
    batch, losses = batch_of(step), step.learner.passes
    sums, _ = jax.jit(losses.compute_sums)(policy(), None, batch)
    here = in_mini_batch(batch, 0)
    gains = np.asarray(batch.advantages)[:, None] * logprobs_of(batch)
    means = np.where(here, gains, 0).sum(axis=1) / np.maximum(here.sum(axis=1), 1)
    assert float(sums.policy_loss) == pytest.approx(-means.sum() / here.any(axis=1).sum())


def test_ratios_and_advantages_of_labels_are_those_written_out() -> None:
    """Rows 0 and 1 have no advantage; old logprobs are given."""
    step = step_of()
    batch = batch_of(step)
    old = np.random.default_rng(4).normal(size=(ROWS, SIZE)) + logprobs_of(batch)
    advantages = np.where(np.arange(ROWS) < 2, 0, np.asarray(batch.advantages))
    batch = batch.replace(
        old_logprobs=jnp.asarray(old),
        uses_current_pass=jnp.zeros(ROWS, bool),
        advantages=jnp.asarray(advantages),
    )
    sums, counts = jax.jit(step.learner.passes.compute_sums)(policy(), None, batch)
    here = in_mini_batch(batch, 0)
    x = (logprobs_of(batch) - old)[here]
    by_label = np.broadcast_to(advantages[:, None], here.shape)[here]
    wanted = {
        "ratio/max": np.exp(x).max(),
        "ratio/min": np.exp(x).min(),
        "advantage/max": by_label.max(),
        "advantage/min": by_label.min(),
    }
    means = {name: float(value) for name, value in sums.to_metrics(counts).items()}
    assert {name: means[name] for name in wanted} == pytest.approx(wanted)
    assert means["ratio/kl"] == pytest.approx((np.exp(x) - 1 - x).mean())
    assert means["advantage/zero"] == pytest.approx((by_label == 0).mean())
    assert 0 < means["advantage/zero"] < 1


def test_traffic_to_experts_is_that_of_the_labels() -> None:
    """As of whole rows, each position counted that predicts a label of the mini-batch."""
    family = FamilySpec(model_type="qwen3_moe", experts=4, experts_per_token=2)
    model = tiny_model(layers=2, family=family)
    step, network = step_of(model), tiny_network(Decoder, model, 1, 1.5)
    batch = batch_of(step)
    sums, counts = jax.jit(step.learner.passes.compute_sums)(network, None, batch)
    counted = np.roll(in_mini_batch(batch, 0), -1, axis=1)
    places = jnp.broadcast_to(jnp.arange(SIZE, dtype=jnp.int32), counted.shape)
    whole = jax.jit(network)(batch.tokens, places, traffic_mask=jnp.asarray(counted)).traffic
    assert isinstance(sums.traffic, Traffic)
    assert sums.traffic.tokens.shape == (2, 4)
    assert (sums.traffic.tokens.sum(axis=1) == 2 * counts.labels).all()
    for found, wanted in zip(sums.traffic, whole, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_logprobs_of_a_pass_ban_end_tokens_until_the_minimum_length() -> None:
    step = step_of()
    batch = batch_of(step)
    found, _ = jax.jit(step.learner.passes.compute_logprobs)(policy(), jnp.int32(0), batch)
    wanted = np.where(np.asarray(batch.loss_mask), logprobs_of(batch), 0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-11)
    later, _ = jax.jit(step.learner.passes.compute_logprobs)(policy(), jnp.int32(1), batch)
    np.testing.assert_allclose(
        later, np.where(in_mini_batch(batch, 1), wanted, 0), rtol=0, atol=1e-11
    )


def test_the_gap_is_that_written_out() -> None:
    random = np.random.default_rng(3)
    policy, sampled, chosen = (*random.normal(size=(2, 3, 4)), random.random((3, 4)) < 0.6)
    gap = LogprobGap.from_logprobs(*map(jnp.asarray, (policy, sampled, chosen)))
    x = (policy - sampled)[chosen]
    found = [float(value) for value in gap]
    wanted = [
        np.abs(x).sum(),
        np.exp(np.abs(x)).sum(),
        (np.exp(x) - 1 - x).sum(),
        np.abs(x).max(),
        len(x),
    ]
    assert found == pytest.approx(wanted, rel=1e-12)
