"""Schedules of a step: all phases in one program, or each phase in its own."""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.host.programs import (
    ALL_ROUNDS,
    SlicedAnswerer,
    abstract_arguments,
    compile_ahead,
    compile_answerer,
    compile_for_generator,
    put_like,
)
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.rollout.generator import Generator
from jaxspec.run.round_timer import AdvanceRounds, AdvanceSlice, RoundTimer
from jaxspec.state import (
    RUNNING,
    LengthChooser,
    Prompts,
    Rollout,
    RolloutWeights,
    ScoredRollout,
    TrainState,
)
from jaxspec.step import Step
from jaxspec.system.terminal import LinePrinter

Seconds = dict[str, float]


class StepResult(NamedTuple):
    """Result of one call of a step."""

    state: TrainState
    rollout: Rollout | None
    """None if generation was interrupted. The state has learned from its batch even then."""
    training_metrics: dict[str, float]
    """Metrics of the batch that was learned from. They include seconds: of learning, or of the
    whole call if it is one program."""
    rollout_metrics: dict[str, float]
    seconds: Seconds
    """Seconds of the other phases, by metric name."""


SliceCallback = Callable[[Rollout], bool]
"""Function that gets the rows between two slices of generation, and returns True to stop."""


SliceFactory = Callable[[AdvanceRounds, RolloutWeights, Prompts], AdvanceSlice]
"""Function that is called before the first round of a rollout, and returns one that runs a slice
of it."""


class StepSchedule(NamedTuple):
    """A compiled step: learn, sync, generate."""

    run_step: Callable[[TrainState, ScoredRollout, Prompts, SliceCallback], StepResult]
    """Runs one step. Donates the state, and in a fused schedule also the scored rollout."""
    programs: Mapping[str, Any]
    """Compiled programs, by phase."""
    restart_timing: Callable[[], None] = lambda: None
    """Requests that the next training rollout times rounds again, if the schedule times any."""

    def __call__(
        self, state: TrainState, scored: ScoredRollout, prompts: Prompts, on_slice: SliceCallback
    ) -> StepResult:
        """Runs one step."""
        return self.run_step(state, scored, prompts, on_slice)


def compile_fused_schedule(
    step: Step, prompt_count: int, print_line: LinePrinter | None = None
) -> StepSchedule:
    """Compiles the step as one program. Slow compiles are reported through `print_line`."""
    state, scored, prompt_shapes = abstract_arguments(step, prompt_count)
    mesh = step.learner.mesh
    assert mesh == step.generator.mesh, "one program has one mesh"
    replicated = meshes.replicated_sharding(mesh)
    layout = (step.state_shardings(), meshes.row_sharding(mesh), replicated, replicated)
    with warnings.catch_warnings():
        # Buffers of the plan are donated too, but no result has their size.
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
            # A single program cannot tell the seconds of its phases.
            training_metrics | {"time/learning_call": seconds},
            rollout_metrics,
            {"time/step": seconds},
        )

    return StepSchedule(run_step, {"step": program})


def uniform_slices(rounds: int) -> SliceFactory:
    """Returns a factory of slices of `rounds` rounds."""
    return lambda advance, weights, _: lambda running: advance(weights, running, np.int32(rounds))


class _StagedPrograms(NamedTuple):
    """Compiled phases of a step."""

    learn: Callable
    sync: Callable
    generate: Callable
    """Also gets the callback between slices."""
    measure: Callable


class _TimedPhases:
    """Runs the phases of one call, and times each."""

    def __init__(self, phases: _StagedPrograms, is_learning: bool, on_slice: SliceCallback) -> None:
        self._phases, self._is_learning, self._on_slice = phases, is_learning, on_slice
        self.seconds: Seconds = {}

    def __call__(self, phase: str, _: Callable, *arguments: Any) -> Any:
        """Runs and times a phase."""
        start_time = time.perf_counter()
        match phase:
            case "train" if self._is_learning:
                result = self._phases.learn(*arguments)
            case "train":
                # An evaluation has nothing to learn, and its seconds are not those of training.
                result = arguments[0], {}
            case "prepare":
                result = self._phases.sync(*arguments)
            case "generate":
                result = self._phases.generate(*arguments, self._on_slice)
            case "measure":
                result = {} if arguments[0] is None else self._phases.measure(*arguments)
            case _:
                raise AssertionError(f"no program for the phase {phase}")
        self.seconds[f"time/{phase}"] = _time_until_ready(result, start_time)
        return result


def compile_staged_schedule(
    step: Step, prompt_count: int, slice_factory: SliceFactory | None = None
) -> StepSchedule:
    """Compiles each phase of a step by itself, so that each can be timed.

    Generation runs in the slices of `slice_factory`, or in one piece if it is None.
    """
    phases, programs = _compile_phases(step, prompt_count, slice_factory)

    def run_step(
        state: TrainState, scored: ScoredRollout, prompts: Prompts, on_slice: SliceCallback
    ) -> StepResult:
        is_learning, start_time = bool(scored.learn), time.perf_counter()
        run_phase = _TimedPhases(phases, is_learning, on_slice)
        state, rollout, training_metrics, rollout_metrics = step.train_step(
            state, scored, prompts, run_phase
        )
        step_seconds, seconds = time.perf_counter() - start_time, run_phase.seconds
        train_seconds = {"time/train": seconds["time/train"]} if is_learning else {}
        # The seconds of learning belong to the record of the batch that is learned from, which is
        # the previous one.
        step_time = {"time/step": step_seconds - sum(train_seconds.values())}
        return StepResult(
            state,
            rollout,
            metrics_to_host(training_metrics) | train_seconds,
            metrics_to_host(rollout_metrics),
            {name: seconds[name] for name in ("time/prepare", "time/generate")} | step_time,
        )

    return StepSchedule(run_step, programs)


def _compile_phases(
    step: Step, prompt_count: int, slice_factory: SliceFactory | None
) -> tuple[_StagedPrograms, dict[str, Any]]:
    """Compiles the phases of a step. Also returns their programs by name."""
    state, scored, prompt_shapes = abstract_arguments(step, prompt_count)
    learn = compile_learning(step, state, scored)
    sync, weights = compile_ahead(step.sync, state)
    generate, programs = (
        compile_sliced_generation(step, weights, prompt_shapes, slice_factory)
        if slice_factory
        else _compile_whole_generation(step, weights, prompt_shapes)
    )
    measure = compile_measurement(step.generator, scored.rollout, weights)
    phases = _StagedPrograms(learn, sync, generate, measure)
    return phases, {"train": learn, "prepare": sync, **programs, "measure": measure}


def compile_learning(step: Step, state: TrainState, scored: ScoredRollout) -> Callable:
    """Compiles the learning from a batch, which donates the state."""
    return compile_ahead(
        step.learn,
        *(state, scored),
        donate_argnums=0,
        out_shardings=(step.state_shardings(), meshes.replicated_sharding(step.learner.mesh)),
    )[0]


def compile_measurement(
    generator: Generator, rollout: Rollout, weights: RolloutWeights
) -> Callable:
    """Compiles the metrics of a rollout."""
    replicated = meshes.replicated_sharding(generator.mesh)
    return compile_ahead(generator.measure_rollout, rollout, weights, out_shardings=replicated)[0]


def _time_until_ready(result: Any, start_time: float) -> float:
    """Waits for a result, and returns the seconds since `start_time`."""
    # JAX returns before devices have finished.
    jax.block_until_ready(result)
    return time.perf_counter() - start_time


def _compile_whole_generation(
    step: Step, weights: RolloutWeights, prompts: Prompts
) -> tuple[Callable, dict[str, Any]]:
    """Compiles generation without slices. Returns a function and its program by phase."""
    answerer = compile_answerer(step.generator, weights, prompts)

    def generate(weights: RolloutWeights, prompts: Prompts, _: SliceCallback) -> Rollout:
        return answerer(weights, prompts)

    return generate, {"generate": answerer}


def compile_sliced_generation(
    step: Step,
    weights: RolloutWeights,
    prompts: Prompts,
    slice_factory: SliceFactory,
) -> tuple[Callable, dict[str, Any]]:
    """Compiles generation in slices. Returns a function and its programs by phase.

    The function returns None if `on_slice` asked it to stop.
    """
    answerer = SlicedAnswerer(step.generator, weights, prompts)
    # The host cannot read a global array of several processes, only a replicated flag.
    is_unfinished, _ = compile_ahead(
        lambda status: jnp.any(status == RUNNING),
        answerer.decode_state.rollout.status,
        out_shardings=meshes.replicated_sharding(step.generator.mesh),
    )

    def generate(
        weights: RolloutWeights, prompts: Prompts, on_slice: SliceCallback
    ) -> Rollout | None:
        running = answerer.begin(weights, prompts)
        run_slice = slice_factory(answerer.advance, weights, prompts)
        while bool(is_unfinished(running.rollout.status)):
            if on_slice(running.rollout):
                return None
            running = run_slice(running)
        return answerer.collect(weights, running)

    programs = {"prefill": answerer.begin, "slice": answerer.advance, "unfinished": is_unfinished}
    return generate, programs


def compile_timing_schedule(step: Step, prompt_count: int, slice_rounds: int = 0) -> StepSchedule:
    """Compiles a step whose first rollout times rounds of each draft length.

    Later rollouts run in slices of `slice_rounds` rounds, or in one piece if it is 0.
    """
    # The seconds of a full step cannot tell lengths apart. It has hundreds of rounds, nearly all
    # of the length that seems best, and an update of the policy. To force a length for a full
    # rollout would cost as much as it can win. So generation has its own program here, and a slice
    # with rounds of one length is timed. Nothing is compiled for the timing alone.
    timer = RoundTimer(step.generator, slice_rounds or ALL_ROUNDS)
    schedule = compile_staged_schedule(step, prompt_count, slice_factory=timer.prepare_rollout)

    def run_step(
        state: TrainState, scored: ScoredRollout, prompts: Prompts, on_slice: SliceCallback
    ) -> StepResult:
        result = schedule(state, scored, prompts, on_slice)
        cost = timer.finish_rollout()
        # An interrupted rollout is generated again later, and times its rounds then.
        if cost is None or result.rollout is None:
            return result
        generator_state = result.state.generator
        chooser = generator_state.chooser
        assert isinstance(chooser, LengthChooser), "lengths are chosen by costs"
        chooser = chooser.replace(round_cost=put_like(cost, chooser.round_cost))
        return result._replace(
            state=result.state.replace(generator=generator_state.replace(chooser=chooser))
        )

    return StepSchedule(run_step, schedule.programs, timer.request_timing)
