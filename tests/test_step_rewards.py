"""Rewards on their way to the learner: which rows, at what cost, weighed by what."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import AdvantageConfig, BatchConfig, KlConfig
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.rl.accumulate import Passes
from jaxspec.rl.learner import Learner
from jaxspec.rl.train_batch import TrainBatch
from jaxspec.state import PROMPT, UNDRAFTED, ScoredRollout
from jaxspec.step import Step
from tests.conftest import small_mesh, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("x64")

ROWS, BETA = 8, 0.25
PLAIN = AdvantageConfig(baseline="none", std="none")


def step_of(advantage: AdvantageConfig, **parts: Any) -> Step:
    batch = BatchConfig(prompts=4, group_size=2)
    config = tiny_config(tiny_model(layers=1), batch=batch, advantage=advantage, **parts)
    return build_step(config, small_mesh(), (1,), 11)


def finished_on(step: Step) -> ScoredRollout:
    """Responses of 1 to 6 tokens behind prompts of 1 to 4; row 2 has no reward."""
    random = np.random.default_rng(0)
    rollout = step.generator.empty_rollout(ROWS)
    starts = random.integers(1, 5, ROWS)
    ends = starts + random.integers(1, 7, ROWS)
    valid = np.arange(ROWS) != 2
    places = np.arange(rollout.tokens.shape[1])
    sampled = (places >= starts[:, None]) & (places < ends[:, None])
    rollout = rollout.replace(
        origin=jnp.asarray(np.where(sampled, UNDRAFTED, PROMPT), jnp.int8),
        tokens=jnp.asarray(random.integers(2, 11, rollout.tokens.shape), jnp.int32),
        logprobs=jnp.asarray(random.normal(size=rollout.tokens.shape)),
        prompt_lengths=jnp.asarray(starts, jnp.int32),
        lengths=jnp.asarray(ends, jnp.int32),
    )
    return step.empty_scored_rollout(ROWS).replace(
        rollout=rollout,
        rewards=jnp.asarray(random.normal(size=ROWS), jnp.float32),
        valid=jnp.asarray(valid),
        plan=jax.tree.map(
            jnp.asarray, step.plan_batch(np.where(valid, ends - 1, 0).astype(np.int32))
        ),
        learn=jnp.ones((), bool),
    )


def responses(finished: ScoredRollout) -> np.ndarray:
    """Which positions are of a response."""
    rollout, place = finished.rollout, np.arange(finished.rollout.tokens.shape[1])
    starts, ends = np.asarray(rollout.prompt_lengths), np.asarray(rollout.lengths)
    return (place >= starts[:, None]) & (place < ends[:, None])


@pytest.mark.slow
def test_leaving_the_reference_costs_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """By k1: the sum of sampled less reference logprobs over the response, times beta."""
    step = step_of(PLAIN, kl=KlConfig(beta=BETA, estimator="k1", where="reward"))
    finished, learned = finished_on(step), []
    reference = np.random.default_rng(1).normal(size=finished.rollout.tokens.shape)

    def logprobs(self: Passes, policy: Any, first: Any, batch: TrainBatch) -> Any:
        by_place = np.asarray(batch.plan.row_order)
        return jnp.asarray(reference[by_place]), batch

    def learn(self: Learner, state: Any, batch: TrainBatch, wanted: Any) -> Any:
        learned.append(batch)
        return state, {}

    monkeypatch.setattr(Passes, "compute_logprobs", logprobs)
    monkeypatch.setattr(Learner, "learn", learn)
    state: Any = jax.eval_shape(step.init_random_state)
    number = jnp.zeros((), jnp.int32)
    # nothing is read of it, as `logprobs` knows the answer
    reference_policy = state.learner.policy.network
    learner = state.learner.replace(online=number > 0, version=number, reference=reference_policy)
    _, metrics = step.learn(
        state.replace(learner=learner, generator=step.generator.init_state()), finished
    )
    recorded = np.asarray(finished.rollout.logprobs)
    kl = np.where(responses(finished), recorded - reference, 0).sum(axis=1)
    valid = np.asarray(finished.valid)
    wanted = np.where(valid, np.asarray(finished.rewards) - BETA * kl, 0)
    np.testing.assert_allclose(learned[0].advantages, wanted, atol=1e-6)
    assert metrics_to_host(metrics)["reward/kl"] == pytest.approx(kl[valid].mean(), abs=1e-6)


def test_a_row_is_whitened_by_the_tokens_of_its_response() -> None:
    """Not by those of its prompt, which nobody learns from."""
    step = step_of(AdvantageConfig(baseline="none", std="whiten"))
    finished = finished_on(step)
    found = np.asarray(step.build_batch(finished).advantages)
    valid, counts = np.asarray(finished.valid), responses(finished).sum(axis=1)
    by_token = np.repeat(found[valid], counts[valid])
    assert by_token.mean() == pytest.approx(0, abs=1e-6)
    assert by_token.var() == pytest.approx(1, abs=1e-5)


def test_the_batch_is_of_the_responses_that_have_a_reward() -> None:
    step = step_of(PLAIN)
    finished = finished_on(step)
    batch = step.build_batch(finished)
    wanted = responses(finished) & np.asarray(finished.valid)[:, None]
    np.testing.assert_array_equal(batch.loss_mask, wanted)
    assert np.asarray(batch.advantages)[2] == 0
