"""The compiled calls of a run: the whole step as one program, or its phases one by one with their
seconds."""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array

from jaxspec import mesh as meshes
from jaxspec.rl.train_batch import plan_layout
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.generator import Generator
from jaxspec.state import RUNNING, Drafter, Finished, Prompts, PyTree, Ready, Rollout, TrainState
from jaxspec.step import Step
from jaxspec.storage.cache import cache_folder
from jaxspec.system.compiling import Tell, compile_progress

Seconds = dict[str, float]


class StepResult(NamedTuple):
    """What one call of the step gives back."""

    state: TrainState
    rollout: Rollout | None
    """None: asked to stop between two slices of generation; the state has already learnt."""
    learnt: dict[str, float]
    """Metrics of the batch learnt from, and its phases' seconds where they are measured; NaN where
    there was none."""
    generated: dict[str, float]
    seconds: Seconds
    """Of this batch; what `learnt` counts is not in them."""


Between = Callable[[Rollout], bool]
"""Sees the rows as they stand between slices of generation, where there are any, and says whether
to stop."""


Advance = Callable[[Ready, DecodeState, np.int32], DecodeState]
"""Makes so many rounds. Consumes the rollout that it is given."""
OneSlice = Callable[[DecodeState], DecodeState]
"""Makes the rounds until the next look."""
Slicing = Callable[[Advance, Ready, Prompts], OneSlice]
"""Says of a rollout, before its first round, how it is cut into slices."""


class Runner(NamedTuple):
    """Makes steps: learn, sync, generate."""

    call: Callable[[TrainState, Finished, Prompts, Between], StepResult]
    """Consumes the state and, as one program, what is finished: their buffers are donated."""
    programs: Mapping[str, Any]
    """What it has compiled, by phase."""
    time_anew: Callable[[], None] = lambda: None
    """Makes it time rounds in the next training rollout, where it times any."""

    def __call__(
        self, state: TrainState, finished: Finished, prompts: Prompts, between: Between
    ) -> StepResult:
        """One step."""
        return self.call(state, finished, prompts, between)


def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array that is not there, with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract(step: Step, prompts: int) -> tuple[TrainState, Finished, Prompts]:
    """Shapes, types and shardings of the step's arguments: nothing is allocated."""
    mesh = step.mesh
    state = jax.tree.map(placed, jax.eval_shape(step.fresh), step.state_shardings())
    shapes = jax.eval_shape(
        lambda: step.nothing_finished(prompts * step.generator.settings.group_size)
    )
    finished = _by_row(shapes, mesh).replace(
        plan=jax.tree.map(placed, shapes.plan, plan_layout(mesh))
    )
    return state, finished, abstract_prompts(step.generator, prompts)


def abstract_prompts(generator: Generator, prompts: int) -> Prompts:
    """Shapes, types and shardings of a generator's prompts."""
    return _by_row(jax.eval_shape(lambda: generator.no_prompts(prompts)), generator.mesh)


def _by_row(tree: PyTree, mesh: Mesh) -> PyTree:
    """Shapes whose first axis is rows, with the sharding of rows; scalars are everywhere."""
    rows, whole = meshes.rows_sharding(mesh), meshes.replicated(mesh)
    return jax.tree.map(lambda leaf: placed(leaf, rows if leaf.ndim else whole), tree)


def put(tree: PyTree, like: PyTree) -> PyTree:
    """Host arrays, known to every process where it needs them, as global arrays placed as
    `like`."""

    return jax.tree.map(
        lambda values, leaf: meshes.from_host(leaf, np.asarray(values, leaf.dtype)), tree, like
    )


def numbers(metrics: dict[str, Array | float]) -> dict[str, float]:
    """Metrics on the host."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def ahead(
    function: Callable, *arguments: PyTree, tell: Tell | None = None, **options: Any
) -> tuple[Callable, PyTree]:
    """Compiles a function for abstract arguments; returns it with its result's shapes and
    shardings, to compile the next one for. Reports slow compiles through `tell`."""
    lowered = jax.jit(function, **options).lower(*arguments)
    with compile_progress(function, arguments, cache_folder() / "compile_seconds", tell):
        program = lowered.compile()
    return program, jax.tree.map(placed, lowered.out_info, program.output_shardings)


def ahead_with(
    generator: Generator, function: Callable, *arguments: PyTree, **options: Any
) -> tuple[Callable, PyTree]:
    """`ahead` for what generates, by the options of the generator's programs."""
    return ahead(function, *arguments, compiler_options=generator.compiler_options, **options)


def whole_step(step: Step, prompts: int, tell: Tell | None = None) -> Runner:
    """Compiles the step as one program, before anything runs; `tell` is as in `ahead`."""
    state, finished, wanted = abstract(step, prompts)
    layout = (
        step.state_shardings(),
        meshes.rows_sharding(step.mesh),
        meshes.replicated(step.mesh),
        meshes.replicated(step.mesh),
    )
    with warnings.catch_warnings():
        # of what is finished, the plan has no twin among the results
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        program, _ = ahead_with(
            step.generator,
            step.train_step,
            *(state, finished, wanted),
            tell=tell,
            donate_argnums=(0, 1),
            out_shardings=layout,
        )

    def call(
        state: TrainState, finished: Finished, prompts: Prompts, between: Between
    ) -> StepResult:
        began = time.perf_counter()
        state, rollout, learnt, generated = program(state, finished, prompts)
        learnt, generated = numbers(learnt), numbers(generated)
        seconds = time.perf_counter() - began
        return StepResult(
            state,
            rollout,
            learnt | {"time/learning_call": seconds},
            generated,
            {"time/step": seconds},
        )

    return Runner(call, {"step": program})


def times_real_rounds(generator: Generator) -> bool:
    """Whether a run's first rollout times rounds of each draft length, in place of a pilot.

    So do accelerators, on which compiling a pilot takes minutes.
    """
    return bool(generator.settings.lengths) and meshes.accelerated(generator.mesh)


def slices_of(rounds: int) -> Slicing:
    """Slices of so many rounds."""
    return lambda advance, ready, _: lambda running: advance(ready, running, np.int32(rounds))


def staged_step(step: Step, prompts: int, slicing: Slicing | None = None) -> Runner:
    """A step's phases compiled one by one: honest seconds for each, and generation in slices, or
    without `slicing` in one piece."""
    whole, layout = meshes.replicated(step.mesh), step.state_shardings()
    state, finished, wanted = abstract(step, prompts)
    learn, (_, learn_metrics) = ahead(
        step.learn, state, finished, donate_argnums=0, out_shardings=(layout, whole)
    )
    sync, ready = ahead(step.sync, state)
    generating = (
        _in_slices(step, ready, wanted, finished.rollout, slicing)
        if slicing
        else _in_one_piece(step, ready, wanted)
    )
    generate, slices = generating
    measure, _ = ahead(step.generator.measure, finished.rollout, ready, out_shardings=whole)

    def call(
        state: TrainState, finished: Finished, prompts: Prompts, between: Between
    ) -> StepResult:
        seconds: Seconds = {}

        def do(phase: str, _: Callable, *arguments: Any) -> Any:
            began = time.perf_counter()
            match phase:
                case "train":
                    # An evaluation has nothing to learn, and its seconds are not training's.
                    result = (
                        learn(*arguments)
                        if learning
                        else (arguments[0], dict.fromkeys(learn_metrics, np.nan))
                    )
                case "prepare":
                    result = sync(*arguments)
                case "generate":
                    result = generate(*arguments, between)
                case _:
                    result = {} if arguments[0] is None else measure(*arguments)
            seconds[f"time/{phase}"] = _until(result, began)
            return result

        learning, began = bool(finished.learn), time.perf_counter()
        state, rollout, learnt, generated = step.train_step(state, finished, prompts, do)
        taken = time.perf_counter() - began
        learnt, train = numbers(learnt), {"time/train": seconds.pop("time/train")}
        seconds = {name: seconds[name] for name in ("time/prepare", "time/generate")}
        # The batch that is learnt from is the previous one: its seconds go on its own line.
        own = {"time/step": taken - (train["time/train"] if learning else 0.0)}
        return StepResult(
            state, rollout, learnt | (train if learning else {}), numbers(generated), seconds | own
        )

    return Runner(call, {"train": learn, "prepare": sync, **slices, "measure": measure})


def _until(result: Any, began: float) -> float:
    """Seconds from `began` until a result is there."""
    jax.block_until_ready(result)
    return time.perf_counter() - began


def _in_one_piece(step: Step, ready: Ready, prompts: Prompts) -> tuple[Callable, dict[str, Any]]:
    """Generation to its end, without slices to look between; also its program."""
    made, by_row = step.generator, meshes.rows_sharding(step.mesh)
    program, _ = ahead_with(made, made.generate, ready, prompts, out_shardings=by_row)

    def generate(ready: Ready, prompts: Prompts, _: Between) -> Rollout:
        return program(ready, prompts)

    return generate, {"generate": program}


def _in_slices(
    step: Step, ready: Ready, prompts: Prompts, rollout: Rollout, slicing: Slicing
) -> tuple[Callable, dict[str, Any]]:
    """Generation that is looked at between slices, and gives None where it is to stop; also its
    programs."""

    begin, running = ahead_with(step.generator, step.generator.begin, ready, prompts)
    same = jax.tree.map(lambda leaf: leaf.sharding, running)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    advance, _ = ahead_with(
        step.generator,
        step.generator.advance,
        *(ready, running, rounds),
        donate_argnums=1,
        out_shardings=same,
    )
    unfinished, _ = ahead(
        lambda status: jnp.any(status == RUNNING),
        running.rollout.status,
        out_shardings=meshes.replicated(step.mesh),
    )
    by_row = jax.tree.map(lambda leaf: leaf.sharding, rollout)

    def generate(ready: Ready, prompts: Prompts, between: Between) -> Rollout | None:
        running, one_slice = begin(ready, prompts), slicing(advance, ready, prompts)
        while bool(unfinished(running.rollout.status)):
            if between(running.rollout):
                return None
            running = one_slice(running)
        # what has no elements comes without its sharding
        return jax.device_put(step.generator.collect(ready, running), by_row)

    return generate, {"prefill": begin, "slice": advance, "unfinished": unfinished}


def generation_alone(step: Step, prompts: int) -> Any:
    """The program of generation by itself, for what it takes of memory."""
    state, _, wanted = abstract(step, prompts)
    _, ready = ahead(step.sync, state)
    return _in_one_piece(step, ready, wanted)[1]["generate"]


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

    def __init__(self, generator: Generator, ready: Ready, prompts: Prompts):
        def to_the_end(ready: Ready, running: DecodeState) -> DecodeState:
            return generator.advance(ready, running, jnp.int32(np.iinfo(np.int32).max))

        self._generator = generator
        self._begin, running = ahead_with(generator, generator.begin, ready, prompts)
        same = jax.tree.map(lambda leaf: leaf.sharding, running)
        self._advance, _ = ahead_with(
            generator, to_the_end, ready, running, donate_argnums=1, out_shardings=same
        )

    def __call__(self, ready: Ready, prompts: Prompts) -> Timed:
        """Answers all prompts."""
        began = time.perf_counter()
        running = jax.block_until_ready(self._begin(ready, prompts))
        middle = time.perf_counter()
        rollout = jax.block_until_ready(
            self._generator.collect(ready, self._advance(ready, running))
        )
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
    """Seconds of a round of draft and verification over seconds of a plain step, prefill left
    out."""


def compare(
    step: Step, state: TrainState, prompts: Prompts, repeats: int = 5, budget: float = 10.0
) -> Comparison:
    """Times generation of the same prompts with and without the draft, in turn; medians, and target
    passes a sequence.

    Of the `repeats` pairs no more than take about `budget` seconds are made, but at least one.
    """
    ready = jax.jit(step.sync)(state)
    nothing = Drafter(network=None, choice=jnp.zeros((0,), jnp.int32))
    made = (step.generator.plain(), ready.replace(drafter=nothing)), (step.generator, ready)
    calls = [(TimedGeneration(generator, weights, prompts), weights) for generator, weights in made]

    def pair() -> list[Timed]:
        return [call(weights, prompts) for call, weights in calls]

    began = time.perf_counter()
    # The same prompts in both, so that lengths differ by chance alone.
    passes = [int(jnp.sum(each.rollout.statistics.rounds)) for each in pair()]  # also warms up
    once = np.float32(time.perf_counter() - began)
    if jax.process_count() > 1:  # all must make the same number of calls
        once = multihost_utils.broadcast_one_to_all(once)
    pairs = [pair() for _ in range(max(1, min(repeats, int(budget / once))))]
    taken = np.median(
        [[(each.seconds, each.loop_seconds / each.rounds) for each in timed] for timed in pairs],
        axis=0,
    )
    rows = int(prompts.tokens.shape[0]) * step.generator.settings.group_size
    return Comparison(
        rows=rows,
        plain_passes=passes[0] / rows,
        spec_passes=passes[1] / rows,
        plain_seconds=float(taken[0, 0]),
        spec_seconds=float(taken[1, 0]),
        round_cost=float(taken[1, 1] / taken[0, 1]),
    )
