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
from jaxspec.build import automatic_sizes
from jaxspec.host import memory
from jaxspec.host.fit import fit_step
from jaxspec.host.job import Job
from jaxspec.host.programs import (
    abstract_arguments,
    compile_ahead,
    compile_for_generator,
    metrics_to_host,
    put_like,
    times_real_rounds,
)
from jaxspec.host.round_cost import UNBOUNDED, AdvanceRounds, AdvanceSlice, RoundTimer
from jaxspec.state import RUNNING, Prompts, Rollout, RolloutWeights, ScoredRollout, TrainState
from jaxspec.step import Step
from jaxspec.system.compiling import LinePrinter, first_start_notice

Seconds = dict[str, float]


class StepResult(NamedTuple):
    """What one call of the step gives back."""

    state: TrainState
    rollout: Rollout | None
    """None: asked to stop between two slices of generation; the state has already learnt."""
    training_metrics: dict[str, float]
    """Metrics of the batch learnt from, and its phases' seconds where they are measured; NaN where
    there was none."""
    rollout_metrics: dict[str, float]
    seconds: Seconds
    """Of this batch; what `training_metrics` counts is not in them."""


SliceCallback = Callable[[Rollout], bool]
"""Sees the rows as they stand between slices of generation, where there are any, and says whether
to stop."""


SliceFactory = Callable[[AdvanceRounds, RolloutWeights, Prompts], AdvanceSlice]
"""Says of a rollout, before its first round, how it is cut into slices."""


class StepSchedule(NamedTuple):
    """Makes steps: learn, sync, generate."""

    run_step: Callable[[TrainState, ScoredRollout, Prompts, SliceCallback], StepResult]
    """Consumes the state and, as one program, what is finished: their buffers are donated."""
    programs: Mapping[str, Any]
    """What it has compiled, by phase."""
    restart_timing: Callable[[], None] = lambda: None
    """Makes it time rounds in the next training rollout, where it times any."""

    def __call__(
        self, state: TrainState, scored: ScoredRollout, prompts: Prompts, on_slice: SliceCallback
    ) -> StepResult:
        """One step."""
        return self.run_step(state, scored, prompts, on_slice)


def compile_fused_schedule(
    step: Step, prompt_count: int, print_line: LinePrinter | None = None
) -> StepSchedule:
    """Compiles the step as one program, before anything runs; `print_line` is as in `ahead`."""
    state, scored, prompt_shapes = abstract_arguments(step, prompt_count)
    layout = (
        step.state_shardings(),
        meshes.row_sharding(step.mesh),
        meshes.replicated_sharding(step.mesh),
        meshes.replicated_sharding(step.mesh),
    )
    with warnings.catch_warnings():
        # of what is finished, the plan has no twin among the results
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        program, _ = compile_for_generator(
            step.generator,
            step.train_step,
            *(state, scored, prompt_shapes),
            print_line=print_line,
            donate_argnums=(0, 1),
            out_shardings=layout,
        )

    def run_step(
        state: TrainState, scored: ScoredRollout, prompts: Prompts, on_slice: SliceCallback
    ) -> StepResult:
        start_time = time.perf_counter()
        state, rollout, training_metrics, rollout_metrics = program(state, scored, prompts)
        training_metrics, rollout_metrics = (
            metrics_to_host(training_metrics),
            metrics_to_host(rollout_metrics),
        )
        seconds = time.perf_counter() - start_time
        return StepResult(
            state,
            rollout,
            training_metrics | {"time/learning_call": seconds},
            rollout_metrics,
            {"time/step": seconds},
        )

    return StepSchedule(run_step, {"step": program})


def uniform_slices(rounds: int) -> SliceFactory:
    """Slices of so many rounds."""
    return lambda advance, weights, _: lambda running: advance(weights, running, np.int32(rounds))


def compile_staged_schedule(
    step: Step, prompt_count: int, slice_factory: SliceFactory | None = None
) -> StepSchedule:
    """A step's phases compiled one by one: honest seconds for each, and generation in slices, or
    without `slice_factory` in one piece."""
    replicated, layout = meshes.replicated_sharding(step.mesh), step.state_shardings()
    state, scored, prompt_shapes = abstract_arguments(step, prompt_count)
    learn, (_, learn_metrics) = compile_ahead(
        step.learn, state, scored, donate_argnums=0, out_shardings=(layout, replicated)
    )
    sync, weights = compile_ahead(step.sync, state)
    generation = (
        _compile_sliced_generation(step, weights, prompt_shapes, scored.rollout, slice_factory)
        if slice_factory
        else _compile_whole_generation(step, weights, prompt_shapes)
    )
    generate, programs = generation
    measure, _ = compile_ahead(
        step.generator.measure, scored.rollout, weights, out_shardings=replicated
    )

    def run_step(
        state: TrainState, scored: ScoredRollout, prompts: Prompts, on_slice: SliceCallback
    ) -> StepResult:
        seconds: Seconds = {}

        def run_phase(phase: str, _: Callable, *arguments: Any) -> Any:
            start_time = time.perf_counter()
            match phase:
                case "train":
                    # An evaluation has nothing to learn, and its seconds are not training's.
                    result = (
                        learn(*arguments)
                        if is_learning
                        else (arguments[0], dict.fromkeys(learn_metrics, np.nan))
                    )
                case "prepare":
                    result = sync(*arguments)
                case "generate":
                    result = generate(*arguments, on_slice)
                case _:
                    result = {} if arguments[0] is None else measure(*arguments)
            seconds[f"time/{phase}"] = _wait_seconds(result, start_time)
            return result

        is_learning, start_time = bool(scored.learn), time.perf_counter()
        state, rollout, training_metrics, rollout_metrics = step.train_step(
            state, scored, prompts, run_phase
        )
        step_seconds = time.perf_counter() - start_time
        training_metrics, train_seconds = (
            metrics_to_host(training_metrics),
            {"time/train": seconds.pop("time/train")},
        )
        seconds = {name: seconds[name] for name in ("time/prepare", "time/generate")}
        # The batch that is learnt from is the previous one: its seconds go on its own line.
        step_time = {
            "time/step": step_seconds - (train_seconds["time/train"] if is_learning else 0.0)
        }
        return StepResult(
            state,
            rollout,
            training_metrics | (train_seconds if is_learning else {}),
            metrics_to_host(rollout_metrics),
            seconds | step_time,
        )

    return StepSchedule(run_step, {"train": learn, "prepare": sync, **programs, "measure": measure})


def _wait_seconds(result: Any, start_time: float) -> float:
    """Seconds from `start_time` until a result is there."""
    jax.block_until_ready(result)
    return time.perf_counter() - start_time


def _compile_whole_generation(
    step: Step, weights: RolloutWeights, prompts: Prompts
) -> tuple[Callable, dict[str, Any]]:
    """Generation to its end, without slices to look between; also its program."""
    generator, by_row = step.generator, meshes.row_sharding(step.mesh)
    program, _ = compile_for_generator(
        generator, generator.generate, weights, prompts, out_shardings=by_row
    )

    def generate(weights: RolloutWeights, prompts: Prompts, _: SliceCallback) -> Rollout:
        return program(weights, prompts)

    return generate, {"generate": program}


def _compile_sliced_generation(
    step: Step,
    weights: RolloutWeights,
    prompts: Prompts,
    rollout: Rollout,
    slice_factory: SliceFactory,
) -> tuple[Callable, dict[str, Any]]:
    """Generation that is looked at between slices, and gives None where it is to stop; also its
    programs."""

    prefill, running = compile_for_generator(step.generator, step.generator.begin, weights, prompts)
    running_shardings = jax.tree.map(lambda leaf: leaf.sharding, running)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    advance, _ = compile_for_generator(
        step.generator,
        step.generator.advance,
        *(weights, running, rounds),
        donate_argnums=1,
        out_shardings=running_shardings,
    )
    is_unfinished, _ = compile_ahead(
        lambda status: jnp.any(status == RUNNING),
        running.rollout.status,
        out_shardings=meshes.replicated_sharding(step.mesh),
    )
    by_row = jax.tree.map(lambda leaf: leaf.sharding, rollout)

    def generate(
        weights: RolloutWeights, prompts: Prompts, on_slice: SliceCallback
    ) -> Rollout | None:
        running, run_slice = prefill(weights, prompts), slice_factory(advance, weights, prompts)
        while bool(is_unfinished(running.rollout.status)):
            if on_slice(running.rollout):
                return None
            running = run_slice(running)
        # what has no elements comes without its sharding
        return jax.device_put(step.generator.collect(weights, running), by_row)

    return generate, {"prefill": prefill, "slice": advance, "unfinished": is_unfinished}


def compile_timing_schedule(step: Step, prompt_count: int, slice_rounds: int = 0) -> StepSchedule:
    """Compiles a step whose first rollout times rounds of each draft length.

    Later rollouts are one slice each, unless `slice_rounds` says of how many rounds slices are.
    """
    # Generation is a program of its own here, since the seconds of a whole step cannot tell
    # lengths apart: a rollout has hundreds of rounds, nearly all of the length that seems best,
    # beside an update of the policy. A forced length for a whole rollout would cost as much as it
    # can win. A slice has rounds of one length, and the program that times it is the one that
    # generates: nothing is compiled for the timing.
    timer = RoundTimer(step.generator, slice_rounds or UNBOUNDED)
    schedule = compile_staged_schedule(step, prompt_count, slice_factory=timer.begin_rollout)

    def run_step(
        state: TrainState, scored: ScoredRollout, prompts: Prompts, on_slice: SliceCallback
    ) -> StepResult:
        result = schedule(state, scored, prompts, on_slice)
        cost = timer.end_rollout()
        # A rollout that was stopped is made again, and times its rounds again: a run that goes on
        # chooses by what its own first rollout has shown, or by what its checkpoint holds.
        if cost is None or result.rollout is None:
            return result
        generator_state = result.state.generator
        chooser = generator_state.chooser
        assert chooser is not None, "lengths are chosen by costs"
        chooser = chooser.replace(round_cost=put_like(cost, chooser.round_cost))
        return result._replace(
            state=result.state.replace(generator=generator_state.replace(chooser=chooser))
        )

    return StepSchedule(run_step, schedule.programs, timer.time_next_rollout)


def compile_schedule(job: Job, stack: contextlib.ExitStack) -> tuple[Job, StepSchedule]:
    """Compiles the step of a job as its config says, with sizes that fit the devices.

    Returns the job with these sizes. Memory that runs out until `stack` closes is explained.

    Raises:
      ConfigError: it does not fit.
    """
    config, prompts = job.config, job.config.batch.prompts
    is_timing = times_real_rounds(job.step.generator)
    how = "phase by phase" if config.staged or is_timing else "as one program"
    first_start = first_start_notice(meshes.has_accelerators(job.mesh))
    job.say(f"{first_start}compiling the step {how} for {dict(job.mesh.shape)} devices")
    start_time = time.perf_counter()
    # In slices, so that a signal need not wait for the end of generation.
    slice_rounds = config.rollout.slice_rounds if config.staged else 0

    def compile_step(step: Step) -> StepSchedule:
        if times_real_rounds(step.generator):
            return compile_timing_schedule(step, prompts, slice_rounds)
        if slice_rounds:
            return compile_staged_schedule(step, prompts, uniform_slices(slice_rounds))
        return compile_fused_schedule(step, prompts)

    fit = fit_step(job.step, prompts, compile_step, automatic_sizes(config, job.mesh))
    sizes = memory.report_memory(fit.step, fit.memory_uses, fit.limit)
    job.say(f"compiled in {time.perf_counter() - start_time:.1f} s; {sizes}")
    stack.enter_context(memory.explain_memory_errors(fit.memory_uses))
    return job.with_sizes(**fit.step.sizes._asdict()), fit.compiled
