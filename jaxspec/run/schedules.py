"""Schedules of a step: its phases as one program, or one by one with their seconds."""

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.build import automatic
from jaxspec.host import fit as memory
from jaxspec.host.job import Job
from jaxspec.host.programs import abstract, ahead, ahead_with, numbers, put, times_real_rounds
from jaxspec.host.round_cost import UNBOUNDED, Advance, OneSlice, RoundTimer
from jaxspec.state import RUNNING, Finished, Prompts, Ready, Rollout, TrainState
from jaxspec.step import Step
from jaxspec.system.compiling import LinePrinter, first_start_notice

Seconds = dict[str, float]


class StepResult(NamedTuple):
    """What one call of the step gives back."""

    state: TrainState
    rollout: Rollout | None
    """None: asked to stop between two slices of generation; the state has already learnt."""
    learned: dict[str, float]
    """Metrics of the batch learnt from, and its phases' seconds where they are measured; NaN where
    there was none."""
    generated: dict[str, float]
    seconds: Seconds
    """Of this batch; what `learnt` counts is not in them."""


Between = Callable[[Rollout], bool]
"""Sees the rows as they stand between slices of generation, where there are any, and says whether
to stop."""


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


def whole_step(step: Step, prompts: int, tell: LinePrinter | None = None) -> Runner:
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


def timing_step(step: Step, prompts: int, slice_rounds: int = 0) -> Runner:
    """Compiles a step whose first rollout times rounds of each draft length.

    Later rollouts are one slice each, unless `slice_rounds` says of how many rounds slices are.
    """
    # Generation is a program of its own here, since the seconds of a whole step cannot tell
    # lengths apart: a rollout has hundreds of rounds, nearly all of the length that seems best,
    # beside an update of the policy. A forced length for a whole rollout would cost as much as it
    # can win. A slice has rounds of one length, and the program that times it is the one that
    # generates: nothing is compiled for the timing.
    timer = RoundTimer(step.generator, slice_rounds or UNBOUNDED)
    runner = staged_step(step, prompts, slicing=timer.begin)

    def call(state: TrainState, finished: Finished, asked: Prompts, between: Between) -> StepResult:
        result = runner(state, finished, asked, between)
        cost = timer.end()
        # A rollout that was stopped is made again, and times its rounds again: a run that goes on
        # chooses by what its own first rollout has shown, or by what its checkpoint holds.
        if cost is None or result.rollout is None:
            return result
        known = result.state.generator
        chooser = known.chooser
        assert chooser is not None, "lengths are chosen by costs"
        chooser = chooser.replace(round_cost=put(cost, chooser.round_cost))
        return result._replace(state=result.state.replace(generator=known.replace(chooser=chooser)))

    return Runner(call, runner.programs, timer.time_anew)


def compile_schedule(job: Job, stack: contextlib.ExitStack) -> tuple[Job, Runner]:
    """Compiles the step of a job as its config says, with sizes that fit the devices.

    Returns the job with these sizes. Memory that runs out until `stack` closes is explained.

    Raises:
      ConfigError: it does not fit.
    """
    config, prompts = job.config, job.config.batch.prompts
    is_timing = times_real_rounds(job.step.generator)
    how = "phase by phase" if config.staged or is_timing else "as one program"
    first = first_start_notice(meshes.accelerated(job.mesh))
    job.say(f"{first}compiling the step {how} for {dict(job.mesh.shape)} devices")
    start_time = time.perf_counter()
    # In slices, so that a signal need not wait for the end of generation.
    slice_rounds = config.rollout.slice_rounds if config.staged else 0

    def compile_step(step: Step) -> Runner:
        if times_real_rounds(step.generator):
            return timing_step(step, prompts, slice_rounds)
        if slice_rounds:
            return staged_step(step, prompts, slices_of(slice_rounds))
        return whole_step(step, prompts)

    fit = memory.fitted(job.step, prompts, compile_step, automatic(config, job.mesh))
    sizes = memory.told(fit.step, fit.parts, fit.limit)
    job.say(f"compiled in {time.perf_counter() - start_time:.1f} s; {sizes}")
    stack.enter_context(memory.explained(fit.parts))
    return job.with_sizes(**fit.step.sizes._asdict()), fit.compiled
