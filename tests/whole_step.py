"""The whole step as one compiled program on prompts and rewards made by hand, and runs of it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxspec.build import build_step
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    EngineConfig,
    KlConfig,
    MeshConfig,
    OptimizerConfig,
    RolloutConfig,
)
from jaxspec.inputs.spec import FamilySpec, ModelSpec
from jaxspec.mesh import replicated_sharding, row_sharding
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.models.decoder import Decoder
from jaxspec.rl.train_batch import plan_shardings, response_mask
from jaxspec.rollout.generator import Generator
from jaxspec.state import FAILED, Prompts, Rollout, RolloutWeights, ScoredRollout, TrainState
from jaxspec.step import Step
from jaxspec.transfer import export_weights
from tests.conftest import (
    eagle3,
    small_mesh,
    tiny_config,
    tiny_model,
    tiny_network,
    tiny_prompts,
    with_weights,
)

PROMPTS, GROUP, WIDTH, NEW, LENGTH = 8, 2, 5, 6, 2
ROWS = PROMPTS * GROUP
TOKENS = 40
"""Of a micro-batch: one shard alone has three of them, each of several texts."""
MODEL = tiny_model(vocab=16, kv_heads=4)
WITH_EXPERTS = tiny_model(
    vocab=16,
    kv_heads=4,
    family=FamilySpec(model_type="qwen3_moe", experts=4, experts_per_token=2),
)
STOP = (1,)


def config_of(
    verify: Any = "coupled",
    kind: Any = "eagle3",
    shard_above: int = 2**20,
    temperature: float = 1.0,
    sampling: Any = "sample",
    mini_batches: int = 1,
    every: Any = 1,
    model: ModelSpec = MODEL,
    **algorithm: Any,
) -> Any:
    draft = DraftConfig(kind=kind, draft_length=LENGTH, sampling=sampling)
    engine = algorithm.pop("engine", EngineConfig(tail=False))
    max_new_tokens = algorithm.pop("max_new_tokens", NEW)
    return tiny_config(
        model,
        batch=BatchConfig(
            micro_tokens=TOKENS, prompts=PROMPTS, group_size=GROUP, mini_batches=mini_batches
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=2),
        rollout=RolloutConfig(
            max_new_tokens=max_new_tokens,
            verify=verify,
            draft=draft,
            engine=engine,
            temperature=temperature,
        ),
        data=DataConfig(max_prompt_length=WIDTH),
        mesh=MeshConfig(shard_above=shard_above),
        draft_training=DraftTrainingConfig(ttt_steps=2, learning_rate=5e-3, every=every),
        **algorithm,
    )


class Program(NamedTuple):
    step: Step
    call: Any
    traces: list[int]
    """Grows by one entry with each trace."""


@functools.cache
def program(data: int = 1, tensor: int = 1, expert: int = 1, **options: Any) -> Program:
    config = config_of(**options)
    step = build_step(config, small_mesh(data, tensor, expert), STOP, config.model.vocab)
    traces: list[int] = []

    def train_step(state: TrainState, finished: ScoredRollout, prompts: Prompts) -> Any:
        traces.append(len(traces))
        return step.train_step(state, finished, prompts)

    return Program(
        step,
        jax.jit(
            train_step,
            out_shardings=(step.state_shardings(), row_sharding(step.learner.mesh), None, None),
        ),
        traces,
    )


def start(step: Step, online: bool = True) -> TrainState:
    model = jax.eval_shape(step.init_policy).config
    network = tiny_network(eagle3, model, 2) if step.generator.draft_length else None
    state = jax.jit(step.init_state, out_shardings=step.state_shardings())(
        tiny_network(Decoder, model, 1), network
    )
    online_there = jax.device_put(jnp.asarray(online), replicated_sharding(step.learner.mesh))
    return state.replace(learner=state.learner.replace(online=online_there))


def place(step: Step, tree: Any) -> Any:
    def one(leaf: Any) -> jax.Array:
        mesh = step.learner.mesh
        sharding: NamedSharding = row_sharding(mesh) if np.ndim(leaf) else replicated_sharding(mesh)
        return jax.device_put(np.asarray(leaf), sharding)

    return jax.tree.map(one, tree)


def finish(step: Step, rollout: Rollout, rewards: np.ndarray, valid: np.ndarray) -> ScoredRollout:
    """A finished batch with its plan, on the mesh; only valid rows are read."""
    read = np.where(valid, np.asarray(rollout.lengths) - 1, 0).astype(np.int32)
    plan = step.plan_batch(read)
    parts: dict[str, Any] = {
        "rewards": rewards.astype(np.float32),
        "valid": valid,
        "learn": np.asarray(True),
    }
    return ScoredRollout(
        rollout=place(step, rollout),
        plan=jax.device_put(plan, plan_shardings(step.learner.mesh)),
        **place(step, parts),
    )


def nothing_finished(step: Step, rows: int = ROWS) -> ScoredRollout:
    """What a first call learns from."""
    nothing = step.empty_scored_rollout(rows)
    placed: ScoredRollout = place(step, nothing.replace(plan=None))
    return placed.replace(plan=jax.device_put(nothing.plan, plan_shardings(step.learner.mesh)))


def load_weights(generator: Generator, policy: Decoder, draft: Any) -> RolloutWeights:
    """Weights as a generator reads them, without a learner."""

    def load(policy: Decoder, draft: Any) -> RolloutWeights:
        exported = export_weights(policy, draft, generator.dtype)
        return generator.load(exported, generator.init_state())

    return jax.jit(load)(policy, draft)


def prompts_of(step: Step, batch: int) -> Prompts:
    vocab = step.generator.settings.processing.vocab_size
    return place(step, tiny_prompts(PROMPTS, WIDTH, vocab, seed=batch))


def assert_same_rollout(found: Rollout, wanted: Rollout) -> None:
    """Tokens and counts exactly, sums of logprobs and laws to rounding."""
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10),
        host(found),
        host(wanted),
    )


def score(step: Step, rollout: Rollout, batch: int = 0) -> ScoredRollout:
    """A reward anyone can recompute: the share of response tokens divisible by 3; one row of each
    batch has none."""
    host = jax.tree.map(np.asarray, rollout)
    at = np.arange(host.tokens.shape[1])
    inside = (at >= host.prompt_lengths[:, None]) & (at < host.lengths[:, None])
    rewards = ((host.tokens % 3 == 0) & inside).sum(1) / np.maximum(inside.sum(1), 1)
    valid = np.arange(ROWS) != batch % ROWS
    return finish(step, host, rewards, valid)


class Run(NamedTuple):
    states: list[Any]
    """After each call; the first call learns nothing."""
    rollouts: list[Rollout]
    rewards: list[np.ndarray]
    learnt: list[dict[str, float]]


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def drive(made: Program, calls: int, online: bool = True) -> Run:
    step, run = made.step, Run([], [], [], [])
    state, finished = start(step, online), nothing_finished(step)
    for batch in range(calls):
        state, rollout, learnt, _ = made.call(state, finished, prompts_of(step, batch))
        finished = score(step, rollout, batch)
        run.states.append(host(state))
        run.rollouts.append(host(rollout))
        run.rewards.append(np.asarray(finished.rewards))
        run.learnt.append(metrics_to_host(learnt))
    return run


TWO_UPDATES: dict[str, Any] = {"mini_batches": 2, "kl": KlConfig(beta=0.1)}
"""Also a penalty for leaving a reference policy."""


@functools.cache
def twenty(online: bool, /, **options: Any) -> Run:
    return drive(program(**options), 20, online)


def assert_bitwise(found: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def assert_close(found: Any, wanted: Any, relative: float) -> None:
    def one(left: np.ndarray, right: np.ndarray) -> None:
        np.testing.assert_allclose(
            left, right, rtol=0, atol=relative * max(np.abs(right).max(initial=0), 1e-30)
        )

    jax.tree.map(one, found, wanted)


def moved(after: Any, before: Any) -> bool:
    return any(
        np.any(left != right)
        for left, right in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
    )


POISON = 9
"""A token with an infinite embedding: whoever reads it has NaN for activations."""
FAILED_ROW = 5
LAST_WORDS = (0, 10)
"""Rows with a reward whose last token is the poison: generation never read it."""


def poisoned(state: TrainState) -> TrainState:
    learner = state.learner
    poisonous = learner.policy.replace(network=with_poison(learner.policy.network, jnp.inf))
    return state.replace(learner=learner.replace(policy=poisonous))


def with_poison(network: Decoder, value: float) -> Decoder:
    return with_weights(network, embedding=network.embedding[...].at[POISON].set(value))


def with_a_failed_row(step: Step, rollout: Rollout, says: int) -> ScoredRollout:
    """One row says nothing but `says` and has no reward; others say `POISON` at most at their
    end."""
    tokens = np.where(rollout.tokens == POISON, POISON + 1, rollout.tokens)
    tokens[LAST_WORDS, rollout.lengths[list(LAST_WORDS)] - 1] = POISON
    row = np.arange(ROWS)[:, None] == FAILED_ROW
    tokens = np.where(
        row & np.asarray(response_mask(jax.tree.map(jnp.asarray, rollout))), says, tokens
    ).astype(np.int32)
    return score(
        step,
        rollout.replace(tokens=tokens, status=np.where(row[:, 0], FAILED, rollout.status)),
        batch=FAILED_ROW,
    )
