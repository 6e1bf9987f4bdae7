"""Compilation of a run's schedule."""

import contextlib
import time

from jaxspec import mesh as meshes
from jaxspec.build import AutomaticSizes, automatic_sizes
from jaxspec.config.settings import ResolvedConfig
from jaxspec.evaluation.program import WeightSource
from jaxspec.host import memory
from jaxspec.host.fit import fit_step
from jaxspec.host.job import Job
from jaxspec.host.programs import abstract_arguments, times_real_rounds
from jaxspec.inputs.checked import require
from jaxspec.processes.roles import owns_part
from jaxspec.run.batches import BatchSource
from jaxspec.run.evaluations import AnswerMethods, StepAnswerer
from jaxspec.run.loop import Host, Loop
from jaxspec.run.pipelined.loop import PipelinedLoop
from jaxspec.run.pipelined.programs import PipelinedSchedule, compile_pipelined_schedule
from jaxspec.run.pipelined.remote import send_engine_sizes
from jaxspec.run.schedules import (
    StepSchedule,
    compile_fused_schedule,
    compile_staged_schedule,
    compile_timing_schedule,
    uniform_slices,
)
from jaxspec.state import TrainState
from jaxspec.step import Step
from jaxspec.system.compiling import first_start_notice
from jaxspec.system.interrupt import Interrupt

Schedule = StepSchedule | PipelinedSchedule
"""Compiled programs of a run, and the order in which they run."""


def compile_schedule(job: Job, stack: contextlib.ExitStack) -> tuple[Job, Schedule]:
    """Compiles the schedule of a job's config.

    Sizes that the config leaves open are chosen to fit the devices. Returns the job with these
    sizes, and the schedule. Until `stack` closes, out-of-memory errors name the owners of memory.

    Raises:
      ConfigError: the step does not fit, or the schedule cannot run on these devices.
    """
    config, prompts, settings = job.config, job.config.batch.prompts, job.config.schedule
    is_timing, is_pipelined = times_real_rounds(job.step.generator), settings.kind == "pipelined"
    require(
        not (is_timing and is_pipelined),
        "schedule.kind pipelined with rollout.draft.draft_length auto: accelerators time rounds in"
        " the first rollout, whose results the learner would have to wait for; give a number",
    )
    how = "as one program"
    if is_pipelined:
        how = f"side by side, {settings.lag} updates apart,"
    elif settings.kind == "staged" or is_timing:
        how = "phase by phase"
    first_start = first_start_notice(meshes.has_accelerators(job.mesh))
    job.say(f"{first_start}compiling the step {how} for {_describe_meshes(job.step)}")
    start_time = time.perf_counter()
    # With slices, a signal need not wait for the end of generation.
    slice_rounds = settings.slice_rounds if settings.kind == "staged" else 0

    def compile_step(step: Step) -> Schedule:
        if is_pipelined:
            return compile_pipelined_schedule(step, prompts, settings.lag, settings.slice_rounds)
        if times_real_rounds(step.generator):
            return compile_timing_schedule(step, prompts, slice_rounds)
        if slice_rounds:
            return compile_staged_schedule(step, prompts, uniform_slices(slice_rounds))
        return compile_fused_schedule(step, prompts)

    auto = automatic_sizes(config, job.mesh)
    learns, generates = map(owns_part, (job.mesh, job.step.generator.mesh))
    if not (learns and generates):
        # Each side chooses the sizes of its own programs.
        auto = AutomaticSizes(auto.tokens) if learns else auto._replace(tokens=False)
    versions = 0
    if is_pipelined:
        # Threads publish versions that no batch needs yet.
        has_threads = learns and generates and not job.step.shares_devices
        versions = 1 + settings.lag if has_threads else 1
    fit = fit_step(job.step, prompts, compile_step, auto, published_versions=versions)
    sizes = memory.format_memory_uses(fit.step, fit.memory_uses, fit.limit, learns, generates)
    job.say(f"compiled in {time.perf_counter() - start_time:.1f} s; {sizes}")
    stack.enter_context(memory.explain_memory_errors(fit.memory_uses))
    if not learns:
        send_engine_sizes(fit.step.sizes)
    return job.with_sizes(**fit.step.sizes._asdict()), fit.compiled


def _describe_meshes(step: Step) -> str:
    learner, generator = step.learner.mesh, step.generator.mesh
    if step.shares_devices:
        return f"{dict(learner.shape)} devices"
    return f"{dict(learner.shape)} devices that learn and {dict(generator.shape)} that generate"


def make_answer_methods(schedule: Schedule, step: Step, batches: BatchSource) -> AnswerMethods:
    """Returns the ways in which evaluations can answer prompts."""
    if isinstance(schedule, PipelinedSchedule):
        return schedule.answer_methods
    state, _, _ = abstract_arguments(step, batches.planner.prompts)

    def bind(state: TrainState) -> StepAnswerer:
        return StepAnswerer(schedule, batches.planner, state)

    return AnswerMethods(bind, WeightSource(state, step.export))


def open_loop(
    config: ResolvedConfig, schedule: Schedule, interrupt: Interrupt, host: Host
) -> Loop | PipelinedLoop:
    """Opens the loop that runs a schedule."""
    if isinstance(schedule, PipelinedSchedule):
        return PipelinedLoop(config, schedule, interrupt, host)
    return Loop(config, schedule, interrupt, host)
