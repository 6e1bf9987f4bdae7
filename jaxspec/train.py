"""Runs RL post-training from start to end: `python -m jaxspec.train --config rl_think.py`."""

import sys

# Before the other imports, which take seconds: a signal during them has nothing to save.
if __name__ == "__main__":
    from jaxspec.system.begin import prepare_process

    prepare_process()

import contextlib
from pathlib import Path

import jax

from jaxspec.config import algorithms
from jaxspec.config.settings import parse_range
from jaxspec.data.census import take_census
from jaxspec.data.problems import describe_problems, load_sets
from jaxspec.data.scoring import make_scorers, try_scorers
from jaxspec.host import starts
from jaxspec.host import workdir as workdirs
from jaxspec.host.job import Job, run_program
from jaxspec.host.prompts import PromptSource
from jaxspec.host.scoring import RolloutScorer
from jaxspec.inputs.checked import ConfigError
from jaxspec.run.closing import close_run
from jaxspec.run.dynamic_batch import BatchFiller
from jaxspec.run.evaluations import open_evaluations
from jaxspec.run.loop import Host, Loop
from jaxspec.run.schedules import compile_schedule
from jaxspec.run.start import adapt_run, empty_history, read_offline_text, start_run
from jaxspec.run.state import RunState, restore_run
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.metrics import MetricsWriter
from jaxspec.system.progress import Progress
from jaxspec.system.trace import Profiler

ABOUT = "Post-trains a language model with GRPO and lossless speculative rollouts."


def main(job: Job, interrupt: Interrupt) -> int:
    """Trains or resumes a run. Returns the exit status."""
    # At temperature 0, all rewards of a group are equal, and every advantage is 0.
    if job.config.rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature is 0: every answer of a group would be the same, and none better;"
            " set it above 0 to train"
        )
    with workdirs.lock_workdir(job) as workdir:
        return run_training(workdirs.restore_sizes(job, workdir), interrupt, workdir)


def run_training(job: Job, interrupt: Interrupt, workdir: Path) -> int:
    """Runs from the newest checkpoint, or from the start. Returns the exit status."""
    config = job.config
    with contextlib.ExitStack() as stack:
        with interrupt.exit_on_signal("starting"):
            start_record = starts.report_start(job, workdir)
            scorers = make_scorers(config)  # first, since reading the problems may take long
            sets = load_sets(config, job.tokenizer)
            notices = (
                *describe_problems(config, sets),
                *take_census(config, sets),
                *scorers.remarks,
            )
            for notice in (*algorithms.collect_warnings(config), *notices):
                job.say(notice)
            try_scorers(config, sets, scorers)
            offline_text = read_offline_text(job)
            checkpoints = Checkpoints(workdir / starts.CHECKPOINTS, log=job.say)
            run = restore_run(job, checkpoints, empty_history(config))
            if run is None:
                workdirs.require_no_checkpoints(workdir)
            elif run.has_ended(config.steps):
                job.say(
                    f"{workdir} has all {config.steps} batches already; raise --steps to go on, or"
                    " choose another --workdir"
                )
                return close_run(job, PromptSource(job, sets, run.history), run, workdir)
            else:
                job.say(f"resuming {config.workdir} at batch {run.next_batch}")
            # What does not fit is refused before any weights are trained.
            job, schedule = compile_schedule(job, stack)
            source = PromptSource(job, sets, run.history if run else None)
            scorer = RolloutScorer(job, source, scorers)
            filler = BatchFiller(job, scorer) if job.step.uses_dynamic_sampling else None
            evaluations = stack.enter_context(
                open_evaluations(job, source, scorer, scorers, schedule, workdir)
            )
            if run is None:
                run = start_run(job, interrupt, source, filler, offline_text)
            else:
                # Checkpoints have no plans, which depend on the mesh.
                for batch in run.queue:
                    batch.rollout = scorer.plan_micro_batches(batch.rollout)
                adapt_run(job, run, source, schedule)
            job.say(f"batch {run.next_batch} of {config.steps} is next")
            # Last, so that a start that fails leaves no record.
            starts.record_start(job, workdir, start_record)
        host = Host(source, scorer, filler, evaluations, checkpoints, schedule)
        return run_loop(job, interrupt, host, run)


def run_loop(job: Job, interrupt: Interrupt, host: Host, run: RunState) -> int:
    """Makes the remaining calls, and closes the run. Returns the exit status."""
    config, process, workdir = job.config, jax.process_index(), host.workdir
    with contextlib.closing(host.checkpoints), MetricsWriter(workdir, process) as writer:
        # Lines of batches that the checkpoint has not learned from are written again.
        writer.truncate_from(run.learned)
        host.evaluations.truncate_records(run)
        profiled_calls, trace_file = (
            parse_range("profile", config.profile),
            workdir / f"trace-{process}.json.gz",
        )
        profiler = Profiler(
            profiled_calls, trace_file, tuple(host.schedule.programs.values()), print
        )
        with contextlib.closing(profiler), Progress("rl", config.steps, process) as progress:
            loop = Loop(job, interrupt, host, writer, progress, profiler)
            is_done = loop.run_to_end(run)
    workdirs.mark_saved(workdir)
    if not is_done:
        remedy = "goes on from there"
        if loop.unsaved:
            has_any = host.checkpoints.latest_step() is not None
            remedy = "goes on from the newest checkpoint" if has_any else "starts over"
        job.say(f"stopped before batch {run.next_batch}; the same command {remedy}")
        return interrupt.exit_status
    with interrupt.exit_on_signal("comparing with plain decoding"):
        return close_run(job, host.source, run, workdir, loop.unsaved)


if __name__ == "__main__":
    sys.exit(run_program("train", ABOUT, main))
