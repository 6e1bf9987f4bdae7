"""Runs RL post-training from start to end: `python -m jaxspec.train --config rl_think.py`."""

import sys

# Runs before the slow imports, so that a signal ends them at once. Nothing needs saving yet.
if __name__ == "__main__":
    from jaxspec.system.begin import prepare_process

    prepare_process()

import contextlib
from pathlib import Path

import jax

from jaxspec.config import algorithms
from jaxspec.config.settings import ResolvedConfig, parse_range
from jaxspec.data.census import take_census
from jaxspec.data.problems import ProblemSets, describe_problems, load_sets
from jaxspec.data.scoring import make_scorers, try_scorers
from jaxspec.host import starts
from jaxspec.host import workdir as workdirs
from jaxspec.host.comparison import SpeedComparison, compare_decoding
from jaxspec.host.job import Job, run_program
from jaxspec.host.prompts import PromptSource
from jaxspec.inputs.checked import ConfigError
from jaxspec.metrics.files import MetricsWriter
from jaxspec.processes.roles import join_side, owns_part
from jaxspec.rewards.scorer import SetScorers
from jaxspec.rl.optimizers import Diverged
from jaxspec.run.batches import BatchSource, make_batch_source
from jaxspec.run.closing import close_run, compares_with_plain
from jaxspec.run.compiling import Schedule, compile_schedule, make_answer_methods, open_loop
from jaxspec.run.evaluations import Evaluations, open_evaluations
from jaxspec.run.loop import Host
from jaxspec.run.pipelined.generation import GenerationSide
from jaxspec.run.pipelined.programs import PipelinedSchedule
from jaxspec.run.pipelined.remote import (
    NO_RESULT,
    announce_start,
    post_status,
    receive_comparison,
    receive_engine_sizes,
    receive_has_ended,
    run_generator,
    wait_for_status,
)
from jaxspec.run.reporting import BatchReporter
from jaxspec.run.start import (
    adapt_filling,
    adapt_run,
    empty_history,
    read_offline_text,
    require_complete_batches,
    start_run,
)
from jaxspec.run.state import CheckpointSaver, RunState, restore_run
from jaxspec.state import PyTree
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress
from jaxspec.system.terminal import LinePrinter
from jaxspec.system.trace import Profiler
from jaxspec.tokens.tokenizer import Tokenizer

ABOUT = "Post-trains a language model with GRPO and lossless speculative rollouts."


def main(job: Job, interrupt: Interrupt) -> int:
    """Trains or resumes a run. Returns the exit status."""
    # At temperature 0, all rewards of a group are equal, and every advantage is 0.
    if job.config.rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature is 0: every answer of a group would be the same, and none better;"
            " set it above 0 to train"
        )
    with workdirs.lock_workdir(job.config, job.say) as workdir:
        try:
            status = run_training(workdirs.restore_sizes(job, workdir), interrupt, workdir)
        except Diverged:
            post_status(job.mesh, NO_RESULT)
            raise
        post_status(job.mesh, status)
        return status


def run_training(job: Job, interrupt: Interrupt, workdir: Path) -> int:
    """Runs from the newest checkpoint, or from the start. Returns the exit status."""
    config = job.config
    with contextlib.ExitStack() as stack:
        with interrupt.exit_on_signal("starting"):
            start_record = starts.report_start(config, job.mesh, workdir, job.say)
            # Scorers come before the problems, which take long to read, so that a faulty reward is
            # reported at once.
            scorers = make_scorers(config)
            sets = _load_problems(config, job.tokenizer, scorers, job.say)
        # From here on, each side of a run in several processes works by itself.
        if not join_side(job.mesh, job.step.generator.mesh):
            return run_generation(job, sets, scorers, interrupt, workdir)
        with interrupt.exit_on_signal("starting"):
            prompts, pad_id = config.batch.prompts, job.tokenizer.pad_id
            offline_text = read_offline_text(config, job.tokenizer, job.say)
            checkpoints = Checkpoints(workdir / starts.CHECKPOINTS, log=job.say)
            run = restore_run(job.step, prompts, checkpoints, empty_history(config))
            has_ended = run is not None and run.has_ended(config.steps)
            announce_start(job.mesh, has_ended)
            if run is None:
                workdirs.require_no_checkpoints(workdir)
            elif has_ended:
                job.say(
                    f"{workdir} has all {config.steps} batches already; raise --steps to go on, or"
                    " choose another --workdir"
                )
                source = PromptSource(sets, job.step.generator, prompts, pad_id, run.history)
                return close_run(config, job.step, source, run, workdir, job.say)
            else:
                job.say(f"resuming {config.workdir} at batch {run.next_batch}")
                require_complete_batches(config, run)
            # What does not fit is refused before any weights are trained.
            job, schedule = compile_schedule(job, stack)
            history = run.history if run else None
            batches = make_batch_source(job, sets, scorers, history)
            methods = make_answer_methods(schedule, job.step, batches)
            evaluations = stack.enter_context(
                open_evaluations(job, batches, scorers, methods, workdir)
            )
            if run is None:
                run = start_run(job, batches, offline_text, interrupt)
            else:
                # Checkpoints have no plans, which depend on the mesh.
                for batch in run.queue:
                    batch.rollout = batches.planner.plan(batch.rollout)
                adapt_run(job.step, run, batches.prompts, schedule.restart_timing, job.say)
            adapt_filling(config, run, batches)
            job.say(f"batch {run.next_batch} of {config.steps} is next")
            if not owns_part(job.step.generator.mesh):
                job = job.with_sizes(**receive_engine_sizes(job.step.sizes)._asdict())
            # Last, so that a start that fails leaves no record.
            starts.record_start(job.config, workdir, start_record)
        return run_loop(job, interrupt, schedule, batches, evaluations, checkpoints, run)


def run_generation(
    job: Job, sets: ProblemSets, scorers: SetScorers, interrupt: Interrupt, workdir: Path
) -> int:
    """Makes batches for the learner, in the processes of the generator's side.

    Returns the exit status.
    """
    with contextlib.ExitStack() as stack:
        with interrupt.exit_on_signal("starting"):
            if receive_has_ended():
                return wait_for_status()
            job, schedule = compile_schedule(job, stack)
            assert isinstance(schedule, PipelinedSchedule), "other schedules have no sides"
            batches = make_batch_source(job, sets, scorers)
            methods = make_answer_methods(schedule, job.step, batches)
            evaluations = stack.enter_context(
                open_evaluations(job, batches, scorers, methods, workdir)
            )
        side = GenerationSide(job.config, schedule, batches, evaluations)

        def compare(published: PyTree, generated: int) -> SpeedComparison:
            prompts = batches.prompts.place_comparison(generated - 1)
            return compare_decoding(job.step, schedule.load(published), prompts)

        comparer = compare if compares_with_plain(job.config, job.step) else None
        return run_generator(side, schedule, evaluations, job.config.steps, interrupt, comparer)


def _load_problems(
    config: ResolvedConfig, tokenizer: Tokenizer, scorers: SetScorers, say: LinePrinter
) -> ProblemSets:
    """Loads the problems, reports on them, and tries the scorers on them."""
    sets = load_sets(config, tokenizer)
    notices = *describe_problems(config, sets), *take_census(config, sets), *scorers.remarks
    for notice in (*algorithms.collect_warnings(config), *notices):
        say(notice)
    try_scorers(config, sets, scorers)
    return sets


def run_loop(
    job: Job,
    interrupt: Interrupt,
    schedule: Schedule,
    batches: BatchSource,
    evaluations: Evaluations,
    checkpoints: Checkpoints,
    run: RunState,
) -> int:
    """Makes the remaining batches, and closes the run unless it is stopped before.

    Returns the exit status.
    """
    config, process, workdir = job.config, jax.process_index(), checkpoints.folder.parent
    with contextlib.closing(checkpoints), MetricsWriter(workdir, process) as writer:
        # Lines of batches that the checkpoint has not learned from are written again.
        writer.truncate_from(run.learned)
        evaluations.truncate_records(run)
        profiled_calls, trace_file = (
            parse_range("profile", config.profile),
            workdir / f"trace-{process}.json.gz",
        )
        profiler = Profiler(profiled_calls, trace_file, tuple(schedule.programs.values()), print)
        with contextlib.closing(profiler), Progress("rl", config.steps, process) as progress:
            saver = CheckpointSaver(job.step, checkpoints, progress.print_line)
            reporter = BatchReporter(config, job.step, writer, progress)
            host = Host(batches, evaluations, saver, reporter, profiler)
            loop = open_loop(config, schedule, interrupt, host)
            is_done = loop.run_to_end(run)
    workdirs.mark_checkpoint_saved(workdir)
    if not is_done:
        remedy = "goes on from there"
        if saver.unsaved:
            has_any = checkpoints.latest_step() is not None
            remedy = "goes on from the newest checkpoint" if has_any else "starts over"
        job.say(f"stopped before batch {run.next_batch}; the same command {remedy}")
        return interrupt.exit_status
    with interrupt.exit_on_signal("comparing with plain decoding"):
        return close_run(
            *(config, job.step, batches.prompts, run, workdir, job.say, saver.unsaved),
            receive_comparison,
        )


if __name__ == "__main__":
    sys.exit(run_program("train", ABOUT, main, splits_devices=True))
