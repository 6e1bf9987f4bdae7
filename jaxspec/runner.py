"""The compiled calls of a run: the whole step as one program, or its phases one by one with their seconds."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from jaxspec import mesh as meshes
from jaxspec.models.decoder import Decoder
from jaxspec.rollout import generate as engine
from jaxspec.state import RUNNING, Finished, Prompts, PyTree, Rollout, TrainState
from jaxspec.step import Step, rollout_metrics

Seconds = dict[str, float]


class Called(NamedTuple):
    """What one call of the step gives back."""

    state: TrainState
    rollout: Rollout | None
    """None: asked to stop between two slices of generation; the state has already learnt."""
    learnt: dict[str, float]
    """Metrics of the batch learnt from; NaN where there was none."""
    generated: dict[str, float]
    seconds: Seconds


class Runner(Protocol):
    """Makes one step: learn, sync, generate."""

    def __call__(self, state: TrainState, finished: Finished, prompts: Prompts, stop: Callable[[], bool]) -> Called:
        """Consumes `state` and `finished` (their buffers are donated); `stop` is asked between slices, where there are any."""
        ...


def abstract(step: Step, prompts: int) -> tuple[TrainState, Finished, Prompts]:
    """Shapes, types and shardings of the step's arguments: nothing is allocated."""
    rows, whole = meshes.rows_sharding(step.mesh), meshes.replicated(step.mesh)

    def placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def by_row(leaf: Any) -> jax.ShapeDtypeStruct:
        return placed(leaf, rows if leaf.ndim else whole)

    state = jax.tree.map(placed, jax.eval_shape(step.fresh), step.state_shardings())
    finished = jax.tree.map(by_row, jax.eval_shape(lambda: step.nothing_finished(prompts * step.settings.group_size)))
    number, width = jax.ShapeDtypeStruct((), jnp.int32), step.config.data.max_prompt_length
    tokens, lengths = jax.ShapeDtypeStruct((prompts, width), jnp.int32), jax.ShapeDtypeStruct((prompts,), jnp.int32)
    live = jax.ShapeDtypeStruct((prompts,), bool)
    return state, finished, jax.tree.map(by_row, Prompts(tokens=tokens, lengths=lengths, live=live, stream=number, batch=number))  # pyright: ignore[reportArgumentType]


def put(tree: PyTree, like: PyTree) -> PyTree:
    """Host arrays, known to every process where it needs them, as global arrays placed as `like`."""

    def one(leaf: Any, shape: Any) -> jax.Array:
        host = np.asarray(leaf, shape.dtype)
        return jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: host[index])

    return jax.tree.map(one, tree, like)


def numbers(metrics: dict[str, Array]) -> dict[str, float]:
    """Metrics on the host."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def whole_step(step: Step, prompts: int) -> Runner:
    """Compiles the step as one program, before anything runs."""
    state, finished, wanted = abstract(step, prompts)
    layout = jax.tree.map(lambda leaf: leaf.sharding, state), meshes.rows_sharding(step.mesh), None, None
    program = jax.jit(step.train_step, donate_argnums=(0, 1), out_shardings=layout).lower(state, finished, wanted).compile()

    def call(state: TrainState, finished: Finished, prompts: Prompts, stop: Callable[[], bool]) -> Called:
        began = time.perf_counter()
        state, rollout, learnt, generated = program(state, finished, prompts)
        learnt, generated = numbers(learnt), numbers(generated)
        return Called(state, rollout, learnt, generated, {"time/step": time.perf_counter() - began})

    return call


class _Clock:
    """Adds the seconds of phases, each until its result is there."""

    def __init__(self) -> None:
        self.seconds: Seconds = {}

    def __call__(self, phase: str, function: Callable, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        self.seconds[f"time/{phase}"] = self.seconds.get(f"time/{phase}", 0.0) + time.perf_counter() - began
        return result


def staged_step(step: Step, prompts: int) -> Runner:
    """The same phases, jitted one by one: honest seconds for each, and generation in slices of `rollout.slice_rounds`."""
    layout = step.state_shardings()
    slice_rounds = np.int32(step.config.rollout.slice_rounds)
    prepare, logprob = jax.jit(step.prepare), jax.jit(step.logprob)
    train_policy = jax.jit(step.train_policy, donate_argnums=(0, 1), out_shardings=(layout.policy, None))
    maybe_train_draft = jax.jit(step.maybe_train_draft, out_shardings=(layout.draft, None))
    begin, advance = jax.jit(step.begin), jax.jit(step.advance, donate_argnums=2)
    measure = jax.jit(rollout_metrics)
    nothing = {name: float("nan") for name in _learn_metrics(step, prompts)}

    def unfinished(running: engine.Engine) -> bool:
        return bool(jnp.any(running.status == RUNNING))

    def learn(state: TrainState, finished: Finished, clock: _Clock) -> tuple[TrainState, dict[str, float]]:
        recomputed = clock("logprob", logprob, state, finished.rollout)
        # The draft first: it learns from the weights that sampled, which the policy's update consumes.
        draft, draft_metrics = clock("draft", maybe_train_draft, state, finished, recomputed)
        policy, metrics = clock("train", train_policy, state.policy, finished, recomputed)
        clock.seconds["time/train"] += clock.seconds["time/draft"]
        return state.replace(policy=policy, draft=draft), numbers({**metrics, **draft_metrics})

    def generate(target: Decoder, network: PyTree, prompts: Prompts, stop: Callable[[], bool]) -> Rollout | None:
        running = begin(target, network, prompts)
        while unfinished(running):
            if stop():
                return None
            running = advance(target, network, running, slice_rounds)
        return engine.collect(running)

    def call(state: TrainState, finished: Finished, prompts: Prompts, stop: Callable[[], bool]) -> Called:
        clock, learnt, began = _Clock(), nothing, time.perf_counter()
        if bool(finished.learn):
            state, learnt = learn(state, finished, clock)
        target, network = clock("prepare", prepare, state)
        rollout = clock("generate", generate, target, network, prompts, stop)
        generated = {} if rollout is None else numbers(measure(rollout))
        return Called(state, rollout, learnt, generated, {**clock.seconds, "time/step": time.perf_counter() - began})

    return call


def _learn_metrics(step: Step, prompts: int) -> dict[str, Any]:
    state, finished, _ = abstract(step, prompts)
    return jax.eval_shape(step.learn, state, finished)[1]


class Comparison(NamedTuple):
    """Plain and speculative decoding of the same rows."""

    rows: int
    plain_passes: float
    spec_passes: float
    plain_seconds: float
    spec_seconds: float


def compare(step: Step, plain: Step, state: TrainState, prompts: Prompts, repeats: int = 5) -> Comparison:
    """Times generation of the same prompts with and without the draft, in turn; medians, and target passes a sequence."""
    target, network = jax.jit(step.prepare)(state)
    speculative = jax.jit(step.generate)
    plainly = jax.jit(lambda target, prompts: plain.generate(target, None, prompts))
    calls = {"spec": lambda: speculative(target, network, prompts), "plain": lambda: plainly(target, prompts)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    passes: dict[str, float] = {}
    for repeat in range(repeats + 1):  # the first compiles
        for name, call in calls.items():
            began = time.perf_counter()
            rollout = jax.block_until_ready(call())
            if repeat:
                seconds[name].append(time.perf_counter() - began)
            passes[name] = numbers(rollout_metrics(rollout))["rollout/rounds"]
    rows = int(prompts.tokens.shape[0]) * step.settings.group_size
    return Comparison(rows, passes["plain"], passes["spec"], float(np.median(seconds["plain"])), float(np.median(seconds["spec"])))
