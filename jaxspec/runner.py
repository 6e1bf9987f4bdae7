"""The compiled calls of a run: the whole step as one program, or its phases one by one with their seconds."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array

from jaxspec import mesh as meshes
from jaxspec.models.decoder import Decoder
from jaxspec.rollout import generate as engine
from jaxspec.state import RUNNING, Drafter, Finished, Prompts, PyTree, Rollout, TrainState
from jaxspec.step import Step

Seconds = dict[str, float]


class Called(NamedTuple):
    """What one call of the step gives back."""

    state: TrainState
    rollout: Rollout | None
    """None: asked to stop between two slices of generation; the state has already learnt."""
    learnt: dict[str, float]
    """Metrics of the batch learnt from, and its phases' seconds where they are measured; NaN where there was none."""
    generated: dict[str, float]
    seconds: Seconds
    """Of this batch; what `learnt` counts is not in them."""


class Runner(NamedTuple):
    """Makes steps: learn, sync, generate."""

    call: Callable[[TrainState, Finished, Prompts, Callable[[], bool]], Called]
    """Consumes state and finished (their buffers are donated); the last argument is asked between slices of generation, where there are
    any, whether to stop."""
    programs: tuple[Any, ...]
    """What it has compiled."""

    def __call__(self, state: TrainState, finished: Finished, prompts: Prompts, stop: Callable[[], bool]) -> Called:
        """One step."""
        return self.call(state, finished, prompts, stop)


def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array that is not there, with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract(step: Step, prompts: int) -> tuple[TrainState, Finished, Prompts]:
    """Shapes, types and shardings of the step's arguments: nothing is allocated."""
    rows, whole = meshes.rows_sharding(step.mesh), meshes.replicated(step.mesh)

    def by_row(leaf: Any) -> jax.ShapeDtypeStruct:
        return placed(leaf, rows if leaf.ndim else whole)

    def nothing_asked() -> Prompts:
        tokens, lengths = jnp.zeros((prompts, step.config.data.max_prompt_length), jnp.int32), jnp.zeros((prompts,), jnp.int32)
        number, past = jnp.zeros((), jnp.int32), step.config.rollout.past
        history = jnp.zeros((prompts, past, tokens.shape[1] + step.settings.max_new_tokens), jnp.int32)
        return Prompts(
            tokens=tokens,
            lengths=lengths,
            live=jnp.zeros((prompts,), bool),
            stream=number,
            batch=number,
            history=history,
            history_lengths=jnp.zeros((prompts, past), jnp.int32),
        )

    state = jax.tree.map(placed, jax.eval_shape(step.fresh), step.state_shardings())
    finished = jax.tree.map(by_row, jax.eval_shape(lambda: step.nothing_finished(prompts * step.settings.group_size)))
    return state, finished, jax.tree.map(by_row, jax.eval_shape(nothing_asked))


def put(tree: PyTree, like: PyTree) -> PyTree:
    """Host arrays, known to every process where it needs them, as global arrays placed as `like`."""

    return jax.tree.map(lambda values, leaf: meshes.from_host(leaf, np.asarray(values, leaf.dtype)), tree, like)


def numbers(metrics: dict[str, Array]) -> dict[str, float]:
    """Metrics on the host."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def ahead(function: Callable, *arguments: PyTree, **options: Any) -> tuple[Callable, PyTree]:
    """Compiles a function for abstract arguments; returns it with its result's shapes and shardings, to compile the next one for."""
    lowered = jax.jit(function, **options).lower(*arguments)
    program = lowered.compile()
    return program, jax.tree.map(placed, lowered.out_info, program.output_shardings)


def whole_step(step: Step, prompts: int) -> Runner:
    """Compiles the step as one program, before anything runs."""
    state, finished, wanted = abstract(step, prompts)
    layout = step.state_shardings(), meshes.rows_sharding(step.mesh), meshes.replicated(step.mesh), meshes.replicated(step.mesh)
    program, _ = ahead(step.train_step, state, finished, wanted, donate_argnums=(0, 1), out_shardings=layout)

    def call(state: TrainState, finished: Finished, prompts: Prompts, stop: Callable[[], bool]) -> Called:
        began = time.perf_counter()
        state, rollout, learnt, generated = program(state, finished, prompts)
        learnt, generated = numbers(learnt), numbers(generated)
        return Called(state, rollout, learnt, generated, {"time/step": time.perf_counter() - began})

    return Runner(call, (program,))


class _Clock:
    """Adds the seconds of phases, each until its result is there."""

    def __init__(self) -> None:
        self.seconds: Seconds = {}

    def __call__(self, phase: str, function: Callable, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        self.seconds[f"time/{phase}"] = time.perf_counter() - began
        return result


class _Phases(NamedTuple):
    """The phases, each compiled on its own."""

    prepare: Callable
    begin: Callable
    advance: Callable
    unfinished: Callable
    measure: Callable
    logprob: Callable
    tune: Callable
    train_draft: Callable
    train_policy: Callable


def _compile_phases(step: Step, prompts: int) -> tuple[_Phases, PyTree]:
    """Compiles each phase for what the one before gives; also returns the shapes of the metrics of learning."""

    def one_slice(target: Decoder, drafter: Drafter, running: engine.Engine) -> engine.Engine:
        return step.advance(target, drafter, running, jnp.int32(step.config.rollout.slice_rounds))

    whole, layout = meshes.replicated(step.mesh), step.state_shardings()
    state, finished, wanted = abstract(step, prompts)
    prepare, (target, drafter) = ahead(step.prepare, state)
    begin, running = ahead(step.begin, target, drafter, wanted)
    same = jax.tree.map(lambda leaf: leaf.sharding, running)
    advance, _ = ahead(one_slice, target, drafter, running, donate_argnums=2, out_shardings=same)
    unfinished, _ = ahead(lambda status: jnp.any(status == RUNNING), running.rollout.status, out_shardings=whole)
    measure, _ = ahead(step.measure, finished.rollout, drafter, out_shardings=whole)
    logprob, recomputed = ahead(step.logprob, state, finished)
    tuned = layout.overlap_by_factor, layout.pace
    tune, _ = ahead(step.tune, state.overlap_by_factor, state.pace, finished, out_shardings=tuned)
    train_draft, (_, draft_metrics) = ahead(step.maybe_train_draft, state, finished, recomputed, out_shardings=(layout.draft, whole))
    train_policy, (_, metrics) = ahead(
        step.train_policy, state.policy, finished, recomputed, donate_argnums=0, out_shardings=(layout.policy, whole)
    )
    return _Phases(prepare, begin, advance, unfinished, measure, logprob, tune, train_draft, train_policy), {**metrics, **draft_metrics}


def staged_step(step: Step, prompts: int) -> Runner:
    """The same phases compiled one by one: honest seconds for each, and generation in slices of `rollout.slice_rounds`."""
    phases, learn_metrics = _compile_phases(step, prompts)
    by_row = jax.tree.map(lambda leaf: leaf.sharding, abstract(step, prompts)[1].rollout)

    def learn(state: TrainState, finished: Finished) -> tuple[TrainState, dict[str, float]]:
        clock = _Clock()
        recomputed = clock("logprob", phases.logprob, state, finished)
        # The draft first: it learns from the weights that sampled, which the policy's update consumes.
        draft, draft_metrics = clock("draft", phases.train_draft, state, finished, recomputed)
        policy, metrics = clock("train", phases.train_policy, state.policy, finished, recomputed)
        clock.seconds["time/train"] += clock.seconds["time/draft"]
        measured, pace = phases.tune(state.overlap_by_factor, state.pace, finished)
        state = state.replace(policy=policy, draft=draft, overlap_by_factor=measured, pace=pace)
        return state, numbers({**metrics, **draft_metrics}) | clock.seconds

    def generate(target: Decoder, drafter: Drafter, prompts: Prompts, stop: Callable[[], bool]) -> Rollout | None:
        running = phases.begin(target, drafter, prompts)
        while bool(phases.unfinished(running.rollout.status)):
            if stop():
                return None
            running = phases.advance(target, drafter, running)
        return jax.device_put(engine.collect(running), by_row)  # what has no elements comes without its sharding

    def call(state: TrainState, finished: Finished, prompts: Prompts, stop: Callable[[], bool]) -> Called:
        learnt = dict.fromkeys(learn_metrics, float("nan"))
        if bool(finished.learn):
            state, learnt = learn(state, finished)
        clock, began = _Clock(), time.perf_counter()
        target, drafter = clock("prepare", phases.prepare, state)
        rollout = clock("generate", generate, target, drafter, prompts, stop)
        generated = {} if rollout is None else numbers(phases.measure(rollout, drafter))
        return Called(state, rollout, learnt, generated, {**clock.seconds, "time/step": time.perf_counter() - began})

    return Runner(call, tuple(phases))


class Timed(NamedTuple):
    """A rollout against the clock."""

    rollout: Rollout
    prefill_seconds: float
    loop_seconds: float
    rounds: int
    """Of the longest loop: that of the shard that made most."""

    @property
    def seconds(self) -> float:
        """Prefill and loop together."""
        return self.prefill_seconds + self.loop_seconds


class TimedGeneration:
    """Generation compiled in two parts, so that its rounds are timed without the prefill."""

    def __init__(self, step: Step, target: Decoder, drafter: Drafter, prompts: Prompts):
        def to_the_end(target: Decoder, drafter: Drafter, running: engine.Engine) -> engine.Engine:
            return step.advance(target, drafter, running, jnp.int32(np.iinfo(np.int32).max))

        self._begin, running = ahead(step.begin, target, drafter, prompts)
        same = jax.tree.map(lambda leaf: leaf.sharding, running)
        self._advance, _ = ahead(to_the_end, target, drafter, running, donate_argnums=2, out_shardings=same)

    def __call__(self, target: Decoder, drafter: Drafter, prompts: Prompts) -> Timed:
        """Answers all prompts."""
        began = time.perf_counter()
        running = jax.block_until_ready(self._begin(target, drafter, prompts))
        middle = time.perf_counter()
        rollout = jax.block_until_ready(engine.collect(self._advance(target, drafter, running)))
        end = time.perf_counter()
        return Timed(rollout, middle - began, end - middle, int(jnp.max(rollout.statistics.ended)))


class Comparison(NamedTuple):
    """Plain and speculative decoding of the same rows."""

    rows: int
    plain_passes: float
    spec_passes: float
    plain_seconds: float
    spec_seconds: float
    round_cost: float
    """Seconds of a round of draft and verification over seconds of a plain step, prefill left out."""


def compare(step: Step, state: TrainState, prompts: Prompts, repeats: int = 5, budget: float = 10.0) -> Comparison:
    """Times generation of the same prompts with and without the draft, in turn; medians, and target passes a sequence.

    Of the `repeats` pairs no more than take about `budget` seconds are made, but at least one.
    """
    target, drafter = jax.jit(step.prepare)(state)
    nothing = Drafter(network=None, choice=jnp.zeros((0,), jnp.int32))
    drafters, made = (nothing, drafter), (step.plain(), step)
    calls = [TimedGeneration(each, target, drafter, prompts) for each, drafter in zip(made, drafters, strict=True)]

    def pair() -> list[Timed]:
        return [call(target, drafter, prompts) for call, drafter in zip(calls, drafters, strict=True)]

    began = time.perf_counter()
    passes = [int(jnp.sum(each.rollout.statistics.rounds)) for each in pair()]  # also warms up
    once = np.float32(time.perf_counter() - began)
    if jax.process_count() > 1:  # all must make the same number of calls
        once = multihost_utils.broadcast_one_to_all(once)
    pairs = [pair() for _ in range(max(1, min(repeats, int(budget / once))))]
    taken = np.median([[(each.seconds, each.loop_seconds / each.rounds) for each in timed] for timed in pairs], axis=0)
    rows = int(prompts.tokens.shape[0]) * step.settings.group_size
    return Comparison(
        rows=rows,
        plain_passes=passes[0] / rows,
        spec_passes=passes[1] / rows,
        plain_seconds=float(taken[0, 0]),
        spec_seconds=float(taken[1, 0]),
        round_cost=float(taken[1, 1] / taken[0, 1]),
    )
