"""Where a row without a reward overflows, the step's gradient is that of the other rows."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.build import build_step
from jaxspec.host.programs import abstract_arguments, put_like
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.models.decoder import Decoder
from jaxspec.rl.draft_objective import DraftObjective, compute_draft_loss
from jaxspec.rl.loss_terms import label_logprobs
from jaxspec.rl.train_batch import response_mask, rows_to_pack
from jaxspec.run.schedules import compile_fused_schedule, compile_staged_schedule
from jaxspec.state import NetworkState, Rollout, ScoredRollout, TrainState
from jaxspec.step import Step
from tests.conftest import small_mesh
from tests.whole_step import (
    FAILED_ROW,
    GROUP,
    MODEL,
    POISON,
    PROMPTS,
    ROWS,
    STOP,
    assert_close,
    config_of,
    drive,
    host,
    nothing_finished,
    poisoned,
    program,
    prompts_of,
    start,
    with_a_failed_row,
    with_poison,
)

pytestmark = pytest.mark.usefixtures("x64")


@functools.cache
def first_rollout() -> Rollout:
    """What the first call of the step in one program generates."""
    return drive(program(), 1).rollouts[0]


def descending(step: Step) -> Step:
    """The step with plain gradient descent at rate 1: what weights lose is the gradient."""
    return dataclasses.replace(
        step,
        learner=dataclasses.replace(
            step.learner,
            # whose state counts updates
            policy_optimizer=optax.sgd(optax.constant_schedule(1.0)),
            draft_optimizer=optax.sgd(1.0),
        ),
    )


def gradients_without(
    step: Step, state: TrainState, finished: ScoredRollout, row: int
) -> tuple[Any, Any]:
    """Of policy and draft, on the rows but `row`, whose partner in its group is then alone and has
    no advantage."""
    assert GROUP == 2
    others = np.arange(ROWS) != row
    rows, rewards = finished.rollout, np.asarray(finished.rewards, np.float64).reshape(-1, GROUP)
    deviation = rewards.std(1, ddof=1, keepdims=True)
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / (deviation + 1e-6)).ravel()
    advantages[row // GROUP * GROUP : row // GROUP * GROUP + GROUP] = 0
    whole = rows.tokens, rows.prompt_lengths, advantages, response_mask(rows)
    tokens, starts, chosen, mask = (jnp.asarray(np.asarray(part)[others]) for part in whole)

    @jax.jit
    def gradients(policy: Decoder, draft: Any) -> tuple[Any, Any]:
        # of the other rows none has it before a token that is learnt
        policy = with_poison(policy, 0)
        texts = rows_to_pack(tokens, mask)
        forward = policy(texts.tokens, texts.positions, taps=step.generator.taps)

        def loss_of(network: Decoder) -> jax.Array:
            logits = network.logits(network(texts.tokens, texts.positions).hidden)
            produced = texts.positions + 1 - starts[:, None]
            logprobs, _ = label_logprobs(logits, texts.labels, produced, step.learner.processing)
            # the ratio is 1 in the one update of a batch, and its slope that of the logprob
            losses = -chosen[:, None] * logprobs
            return jnp.sum(jnp.where(texts.loss_mask, losses, 0)) / jnp.sum(
                texts.loss_mask, dtype=losses.dtype
            )

        def draft_loss_of(network: Any) -> jax.Array:
            assert isinstance(step.learner.draft_objective, DraftObjective)
            return compute_draft_loss(
                network, policy, forward, texts, step.learner.draft_objective
            ).loss

        return jax.grad(loss_of)(policy), jax.grad(draft_loss_of)(draft)

    assert isinstance(state.learner.draft, NetworkState)
    return host(gradients(state.learner.policy.network, state.learner.draft.network))


def assert_learns_from_the_others(step: Step, learn: Any) -> None:
    """`learn` makes of a state and a finished batch the next state and its metrics."""
    state = poisoned(start(step))
    finished = with_a_failed_row(step, first_rollout(), POISON)
    before, wanted = host(state), gradients_without(step, host(state), finished, FAILED_ROW)
    after, means = learn(state, finished)
    metrics = metrics_to_host(means)
    networks = [
        (with_poison(each.learner.policy.network, 0), each.learner.draft.network)
        for each in (jax.tree.map(jnp.asarray, before), after)
    ]
    for name, gradient, old, new in zip(("policy", "draft"), wanted, *networks, strict=True):
        found = jax.tree.map(np.subtract, host(old), host(new))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
        assert_close(found, gradient, 1e-9)
        norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)))
        assert metrics[f"grad_norm/{name}"] == pytest.approx(norm)
        assert norm > 1e-3
        assert np.isfinite(metrics[f"loss/{name}"])
        assert metrics[f"skipped/{name}"] == 0


@pytest.mark.slow
def test_a_failed_row_that_overflows_leaves_the_gradient_of_the_others() -> None:
    step = descending(build_step(config_of(shard_above=0), small_mesh(4, 2), STOP, MODEL.vocab))
    assert_learns_from_the_others(step, jax.jit(step.learn))


@pytest.mark.slow
def test_phase_by_phase_it_does_too() -> None:
    step = descending(build_step(config_of(), small_mesh(2), STOP, MODEL.vocab))
    runner, (*_, like) = compile_staged_schedule(step, PROMPTS), abstract_arguments(step, PROMPTS)
    prompts = put_like(prompts_of(step, 1).replace(history=np.zeros(like.history.shape)), like)

    def learn(state: TrainState, finished: ScoredRollout) -> Any:
        called = runner(state, finished, prompts, lambda _: True)
        return called.state, called.training_metrics

    assert_learns_from_the_others(step, learn)


@pytest.mark.slow
@pytest.mark.parametrize("compile_schedule", [compile_fused_schedule, compile_staged_schedule])
def test_a_batch_of_nothing_to_learn_has_no_metrics_in_any_schedule(compile_schedule: Any) -> None:
    step = build_step(config_of(kind="none"), small_mesh(2), STOP, MODEL.vocab)
    _, scored, like = abstract_arguments(step, PROMPTS)
    prompts = prompts_of(step, 1).replace(history=np.zeros(like.history.shape))
    arguments = put_like((nothing_finished(step), prompts), (scored, like))
    result = compile_schedule(step, PROMPTS)(start(step), *arguments, lambda _: True)
    assert {name for name in result.training_metrics if not name.startswith("time/")} == set()
    assert result.rollout is not None
