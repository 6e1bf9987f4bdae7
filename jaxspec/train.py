"""The RL run, top to bottom: `python -m jaxspec.train --config rl_think.py`."""

import sys

# a stop while the rest is imported, which takes seconds, has nothing to save
if __name__ == "__main__":
    from jaxspec.system.begin import begin

    begin()

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec import mesh as meshes
from jaxspec.build import automatic
from jaxspec.config import algorithms
from jaxspec.config.settings import numbers_of
from jaxspec.data.census import take_census
from jaxspec.data.problems import load_sets, remarks
from jaxspec.data.scoring import scorer_of, try_scorers
from jaxspec.evaluation.evaluator import measured
from jaxspec.evaluation.in_run import Evaluations, in_run
from jaxspec.host import memory, run_state
from jaxspec.host import workdir as workdirs
from jaxspec.host.batches import Batches, Scored
from jaxspec.host.job import Job
from jaxspec.host.job import run as run_program
from jaxspec.host.round_cost import timing_step
from jaxspec.host.run_state import Pending, RunState
from jaxspec.host.runner import (
    Runner,
    compare,
    slices_of,
    staged_step,
    times_real_rounds,
    whole_step,
)
from jaxspec.inputs.checked import ConfigError
from jaxspec.processes.process_0 import agreed_by_process_0
from jaxspec.rl.optimizers import BROKEN, SKIPPED, SOUND, Diverged, condition, require_progress
from jaxspec.state import Rollout, TrainState
from jaxspec.step import Step
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system import alarms
from jaxspec.system import metrics as measures
from jaxspec.system.closing_table import closing_table, missing, without_result
from jaxspec.system.compiling import before_the_first
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.metrics import MetricsWriter
from jaxspec.system.progress import Progress, Screen
from jaxspec.system.trace import Profiler

ABOUT = "Post-trains a language model with GRPO and lossless speculative rollouts."
KEPT_SAMPLES = 4
"""Responses kept for reading at every evaluation."""
_FAULTS = {
    SKIPPED: "last update was skipped, because its loss or gradient was not finite",
    BROKEN: "weights or moments are not finite",
}


def main(job: Job, interrupt: Interrupt) -> int:
    """Trains, or resumes; returns the exit status."""
    if job.config.rollout.temperature == 0:
        raise ConfigError(
            "rollout.temperature is 0: every answer of a group would be the same, and none better;"
            " set it above 0 to train"
        )
    with workdirs.held(job) as workdir:
        return train(workdirs.as_begun(job, workdir), interrupt, workdir)


def train(job: Job, interrupt: Interrupt, workdir: Path) -> int:
    """From the newest checkpoint in `workdir`, or from the start, to the closing table."""
    config = job.config
    with contextlib.ExitStack() as stack:
        with interrupt.nothing_unsaved("starting"):
            this_start = workdirs.announced(job, workdir)
            scorers = scorer_of(config)  # reading the problems may take long
            sets = load_sets(config, job.tokenizer)
            remarked = *remarks(config, sets), *take_census(config, sets), *scorers.remarks
            for line in (*algorithms.remarks(config), *remarked):
                job.say(line)
            try_scorers(config, sets, scorers)
            text = run_state.offline_text(job)
            checkpoints = Checkpoints(workdir / workdirs.CHECKPOINTS, say=job.say)
            # Before any weights are loaded or trained: what does not fit is refused here. A run
            # that has ended, whose checkpoint has an odd number, needs no step.
            newest = checkpoints.latest() or 0
            runner = evaluations = None
            if newest <= 2 * config.steps or newest % 2 == 0 or job.step.fills:
                job, runner = compiled(job, stack)
            batches = Batches(job, sets, scorers)
            if runner is not None:
                evaluations = stack.enter_context(in_run(job, batches, scorers, runner, workdir))
            run = run_state.resume(job, checkpoints, batches, runner)
            if run is None:
                workdirs.require_no_checkpoints(workdir)
                run = run_state.start(job, interrupt, batches, text)
            if run.batch >= config.steps and run.pending is None:
                has_all = f"{workdir} has all {config.steps} batches already"
                job.say(f"{has_all}; raise --steps to go on, or choose another --workdir")
                return close(job, batches, run, workdir)
            if runner is None or evaluations is None:
                # The checkpoint of its end was damaged; the one before it has a batch, which is
                # planned anew for the micro-batches of the programs that are compiled only here.
                job, runner = compiled(job, stack)
                history, batches = batches.history, Batches(job, sets, scorers)
                batches.history, run.finished = history, batches.replanned(run.finished)
                evaluations = stack.enter_context(in_run(job, batches, scorers, runner, workdir))
            job.say(f"batch {run.batch} of {config.steps} is next")
            workdirs.claim(job, workdir, this_start)
        parts = interrupt, batches, evaluations, checkpoints, runner
        return loop_to_the_end(job, workdir, *parts, run)


def loop_to_the_end(
    job: Job,
    workdir: Path,
    interrupt: Interrupt,
    batches: Batches,
    evaluations: Evaluations,
    checkpoints: Checkpoints,
    runner: Runner,
    run: RunState,
) -> int:
    """All calls that are left, and the closing table."""
    config, process = job.config, jax.process_index()
    with contextlib.closing(checkpoints), MetricsWriter(workdir, process) as writer:
        writer.cut_back(run.over)
        evaluations.cut_back(run)
        calls, trace = numbers_of("profile", config.profile), workdir / f"trace-{process}.json.gz"
        profiler = Profiler(calls, trace, tuple(runner.programs.values()), print)
        with contextlib.closing(profiler), Progress("rl", config.steps, process) as progress:
            parts = interrupt, batches, evaluations, checkpoints, writer, progress, runner
            loop = Loop(job, *parts, profiler)
            done = loop.go(run)
    workdirs.note_saved(workdir)
    if not done:
        where = "goes on from there"
        if loop.unsaved:
            has = checkpoints.latest() is not None
            where = "goes on from the newest checkpoint" if has else "starts over"
        job.say(f"stopped before batch {run.batch}; the same command {where}")
        return interrupt.status
    with interrupt.nothing_unsaved("comparing with plain decoding"):
        return close(job, batches, run, workdir, loop.unsaved)


def compiled(job: Job, stack: contextlib.ExitStack) -> tuple[Job, Runner]:
    """The step's programs, and the job with the sizes that fit the devices; from then on, memory
    that runs out is explained.

    Raises:
      ConfigError: it does not fit.
    """
    config, prompts = job.config, job.config.batch.prompts
    in_phases = config.staged or times_real_rounds(job.step.generator)
    how = "phase by phase" if in_phases else "as one program"
    first = before_the_first(meshes.accelerated(job.mesh))
    job.say(f"{first}compiling the step {how} for {dict(job.mesh.shape)} devices")
    began = time.perf_counter()

    def runner_of(step: Step) -> Runner:
        # in slices, so that a signal need not wait for the end of generation
        slice_rounds = config.rollout.slice_rounds if config.staged else 0
        if times_real_rounds(step.generator):
            return timing_step(step, prompts, slice_rounds)
        if slice_rounds:
            return staged_step(step, prompts, slices_of(slice_rounds))
        return whole_step(step, prompts)

    fit = memory.fitted(job.step, prompts, runner_of, automatic(config, job.mesh))
    sizes = memory.told(fit.step, fit.parts, fit.limit)
    job.say(f"compiled in {time.perf_counter() - began:.1f} s; {sizes}")
    stack.enter_context(memory.explained(fit.parts))
    return job.with_sizes(**fit.step.sizes._asdict()), fit.runner


@dataclasses.dataclass
class Loop:
    """Calls, and what the host does between two of them."""

    job: Job
    interrupt: Interrupt
    batches: Batches
    evaluations: Evaluations
    checkpoints: Checkpoints
    writer: MetricsWriter
    progress: Progress
    runner: Runner
    profiler: Profiler
    acceptance: float = 0.0
    """Acceptance length of the batch before; 0: there was none in this start."""
    unsaved: str = ""
    """Why the run that was last to be saved is not; empty where it is."""

    def __post_init__(self) -> None:
        self._looks = 0
        folder, seen = self.checkpoints.folder.parent, jax.process_index() == 0
        self.stalls = run_state.stall_watch(self.job.config, measures.read(folder) if seen else [])
        self._conditions = jax.jit(_conditions, out_shardings=meshes.replicated(self.job.mesh))

    def go(self, run: RunState) -> bool:
        """Runs from `run`, which it moves, to the end; False when asked to stop before."""
        config = self.job.config
        while True:
            # Also right after a resume: a run that was stopped before its evaluation makes up for
            # it, with the same weights.
            if run.pending is not None and self.due(run.pending.line):
                run.pending.line |= self.evaluate(run, run.pending.line["step"], self.stop)
            if self.interrupt.requested or self.stop():
                self.save(run)
                return False
            if run.pending is not None and run.batch % config.save_every == 0:
                self.save(run)
            if not self.call(run):
                return False
            workdirs.note_saved(self.checkpoints.folder.parent)
            if run.batch >= config.steps and run.pending is None:
                self.save(run)
                return True

    def due(self, line: dict[str, Any]) -> bool:
        """Whether a batch's line lacks an evaluation of the weights that sampled it; the last
        batch's evaluation comes after its update."""
        last = line["step"] == self.job.config.steps - 1
        turn = line["step"] % self.job.config.eval.every == 0
        return turn and not last and not measured(line)

    def call(self, run: RunState) -> bool:
        """Learns what is pending, generates and scores what is left; False when interrupted."""
        number, last = run.rollouts, run.batch >= self.job.config.steps
        began = time.perf_counter()
        prompts = self.batches.nothing(number) if last else self.batches.train(number)
        data_seconds = time.perf_counter() - began
        with self.profiler.call(number):
            result = self.runner(run.state, run.finished, prompts, self.between)
        learnt, run.state, run.pending = run.pending, result.state, None
        if last or result.rollout is None:
            run.finished = self.batches.nothing_finished()
        if learnt is not None:
            step: int = learnt.line["step"]
            after = self.evaluate(run, step, lambda: False) if last else {}
            self.report(learnt.line | result.learnt | after, learnt.samples)
        if result.rollout is None:
            self.save(run)
            return False
        if not last:
            began = time.perf_counter()
            try:
                scored = self.batches.score_training(number, result.rollout)
            except Diverged:  # as in `take`
                run.finished = self.batches.nothing_finished()
                self.save(run)
                raise
            host = {"time/data": data_seconds, "time/reward": time.perf_counter() - began}
            seconds = result.seconds | host
            seconds["time/step"] += sum(host.values())
            run.rollouts, run.timed_on = number + 1, run.here
            line = {"step": run.batch, **seconds, **scored.metrics, **result.generated}
            self.take(run, scored, line)
        return True

    def take(self, run: RunState, scored: Scored, line: dict[str, Any]) -> None:
        """A rollout as the next batch, or as part of it."""
        finished = scored.finished
        if run.pool is not None:
            run.finished = self.batches.nothing_finished()
            try:
                run.pool, finished, line = self.batches.taken(run.pool, scored, line)
            except Diverged:  # what was learnt so far is as good as ever
                self.writer.write_samples(run.batch, scored.samples[:KEPT_SAMPLES])
                self.save(run)
                raise
        if finished is None:
            return
        kept = KEPT_SAMPLES if run.batch % self.job.config.eval.every == 0 else 0
        run.finished, run.pending = finished, Pending(line, scored.samples[:kept])
        run.batch += 1

    def report(self, line: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        """Writes a batch's complete line, shows it, and stops a run that has diverged."""
        line["time/step"] += line.get("time/train", 0.0)  # only where it was timed by itself
        line |= measures.token_rates(line)
        self.writer.write(line)
        self.writer.write_samples(line["step"], samples)
        self.progress.update(line["step"] + 1, **measures.headline(line))
        before, self.acceptance = self.acceptance, line.get("rollout/acceptance_length", 0.0)
        config = self.job.config
        for alarm in (
            alarms.of_gap(line, self.job.step.learner.largest_factor),
            alarms.of_acceptance(line, before, config.draft_training.alarm),
            alarms.of_short_batch(line, config.batch.prompts),
            *self.stalls.look(line),
        ):
            if alarm:
                self.progress.say(alarm)
        unrewarded = "None of its rows has a reward. " if np.isnan(line["reward/mean"]) else ""
        for name in ("policy", "draft"):
            look = (
                f"{unrewarded}Look at loss/{name}, grad_norm/{name}, status/failed and"
                f" rollout/logprob_gap_max in {config.workdir}/metrics.jsonl, and at samples.jsonl"
                " beside it. A lower learning rate often helps. Earlier checkpoints are intact."
            )
            skipped = line.get(f"skipped_in_row/{name}", 0.0)
            require_progress(skipped, name, f"batch {line['step']}", look)

    def evaluate(self, run: RunState, step: int, stop: Callable[[], bool]) -> dict[str, float]:
        """Metrics of the policy on the problems that it is measured on, which change nothing in the
        run; nothing when asked to stop."""
        run.state, metrics = self.evaluations(run.state, step, stop)
        if self.evaluations.is_best(metrics) and not self.faults(run):
            self.evaluations.keep(run.number, *run.to_save(self.batches.history), metrics)
        return metrics

    def save(self, run: RunState) -> None:
        """Starts a checkpoint of everything the next call needs, unless it is nothing to go on
        from: then `unsaved` says why."""
        self.unsaved = self.faults(run)
        if self.unsaved:
            newest, kept = self.checkpoints.latest(), "there is none before it"
            if newest is not None:
                kept = f"checkpoint {newest} stays the newest"
            self.progress.say(f"checkpoint {run.number} is not saved: {self.unsaved}; {kept}")
            return
        self.checkpoints.save(run.number, *run.to_save(self.batches.history))

    def faults(self, run: RunState) -> str:
        """Why the state is nothing to go on from; empty where it is sound."""
        conditions = np.asarray(self._conditions(run.state)).tolist()
        found = zip(("policy", "draft"), conditions, strict=False)
        return " and ".join(f"the {name}'s {_FAULTS[how]}" for name, how in found if how != SOUND)

    def between(self, rollout: Rollout) -> bool:
        """Looks at the rows between slices of generation; whether to stop."""
        self.batches.begin_scoring(rollout)
        return self.stop()

    def stop(self) -> bool:
        """Whether to stop now, the same in every process."""
        self._looks += 1
        return self.interrupt.agreed(self._looks)


def _conditions(state: TrainState) -> Int[Array, " n"]:
    """Of the policy and, if there is one, the draft."""
    trained = state.learner.policy, state.learner.draft
    return jnp.stack([condition(each) for each in trained if each is not None])


def close(job: Job, batches: Batches, run: RunState, workdir: Path, unsaved: str = "") -> int:
    """Prints the closing table: what was learnt, and what speculation gave on the run's own last
    batch; returns the exit status.

    Raises:
      Diverged: the last batch or the last evaluation has no number, or the end of the run is not
        saved, as `unsaved` says.
    """
    summary: dict[str, float] = {}
    if job.config.compare_plain and job.step.generator.draft is not None:
        job.say("comparing with plain decoding of the last batch")
        made = compare(job.step, run.state, batches.compare(run.rollouts - 1))
        summary = {
            "rows": made.rows,
            "plain/passes": made.plain_passes,
            "spec/passes": made.spec_passes,
            "plain/seconds": made.plain_seconds,
            "spec/seconds": made.spec_seconds,
            "round_cost": made.round_cost,
        }
    why = ""
    if unsaved:
        goes_on = "the same command goes on from the newest checkpoint, with more --steps"
        why = f"the end of the run is not saved, because {unsaved}; {goes_on} beyond this end"
    if jax.process_index() == 0:  # the only one that surely sees the run's folder
        lines = measures.read(workdir)
        if gone := missing(lines, run.batch):
            job.say(f"warning: {gone}")
        signs = run_state.stall_watch(job.config, lines).summary()
        Screen().print(closing_table(lines, summary, signs))
        why = "; ".join(filter(None, (without_result(lines), why)))
    if remark := run_state.random_draft(job.config):
        job.say(remark)
    if agreed_by_process_0(bool(why)):
        raise Diverged(why or "the run ended without a result; process 0 says which")
    return 0


if __name__ == "__main__":
    sys.exit(run_program("train", ABOUT, main))
