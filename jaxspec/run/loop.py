"""Loop of a run: calls of the step, and the work of the host between two of them."""

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
from jaxspec.evaluation.evaluator import has_evaluation
from jaxspec.host import workdir as workdirs
from jaxspec.host.job import Job
from jaxspec.host.prompts import PromptSource
from jaxspec.host.scoring import RolloutScorer, ScoringResult
from jaxspec.rl.optimizers import BROKEN, SKIPPED, SOUND, Diverged, condition, require_progress
from jaxspec.run.dynamic_batch import BatchFiller
from jaxspec.run.evaluations import Evaluations
from jaxspec.run.schedules import Runner, StepResult
from jaxspec.run.stalls import stall_watch
from jaxspec.run.state import BatchRecord, QueuedBatch, RunState
from jaxspec.state import Rollout, TrainState
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system import alarms
from jaxspec.system import metrics as measures
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.metrics import MetricsWriter
from jaxspec.system.progress import Progress
from jaxspec.system.trace import Profiler

SAMPLE_COUNT = 4
"""Answers kept for reading at every evaluation."""
_FAULTS = {
    SKIPPED: "last update was skipped, because its loss or gradient was not finite",
    BROKEN: "weights or moments are not finite",
}


@dataclasses.dataclass(frozen=True)
class Host:
    """Parts of a run on the host, from prompts to checkpoints."""

    source: PromptSource
    scorer: RolloutScorer
    filler: BatchFiller | None
    """Fills batches from several rollouts. None: each rollout is a batch."""
    evaluations: Evaluations
    checkpoints: Checkpoints
    runner: Runner

    @property
    def workdir(self) -> Path:
        """Folder of the run."""
        return self.checkpoints.folder.parent


class Loop:
    """Runs calls until all batches are learned from, or until it is asked to stop."""

    def __init__(
        self,
        job: Job,
        interrupt: Interrupt,
        host: Host,
        writer: MetricsWriter,
        progress: Progress,
        profiler: Profiler,
    ) -> None:
        self.job, self.interrupt, self.host = job, interrupt, host
        self.writer, self.progress, self.profiler = writer, progress, profiler
        self.unsaved = ""
        """Why the run could not be saved last. Empty if it was saved."""
        self._acceptance = 0.0
        """Acceptance length of the batch before. 0 if there was none since the start."""
        self._looks = 0
        lines = measures.read_metrics(host.workdir) if jax.process_index() == 0 else []
        self._stalls = stall_watch(job.config, lines)
        self._conditions = jax.jit(_conditions, out_shardings=meshes.replicated(job.mesh))

    def go(self, run: RunState) -> bool:
        """Runs from `run`, which it changes, to the end. False if it was asked to stop before."""
        config = self.job.config
        while True:
            record = run.queue[-1].record if run.queue else None
            # Also right after a resume: a run that was stopped before its evaluation makes up for
            # it, with the same weights.
            if record is not None and self._is_due(record):
                record.metrics |= self._evaluate(run, record.batch, self._stop)
            if self.interrupt.stop_requested or self._stop():
                self.save(run)
                return False
            if run.queue and run.next_batch % config.save_every == 0:
                self.save(run)
            if not self._call(run):
                return False
            workdirs.note_saved(self.host.workdir)
            if run.has_ended(config.steps):
                self.save(run)
                return True

    def _is_due(self, record: BatchRecord) -> bool:
        """Whether the weights that sampled a batch are to be evaluated now.

        The last batch is evaluated after its update.
        """
        is_last = record.batch == self.job.config.steps - 1
        is_turn = record.batch % self.job.config.eval.every == 0
        return is_turn and not is_last and not has_evaluation(record.metrics)

    def _call(self, run: RunState) -> bool:
        """Learns from the oldest queued batch, then generates and scores the next rollout.

        False if generation was interrupted.
        """
        host, number = self.host, run.generated
        has_all = run.next_batch >= self.job.config.steps
        start_time = time.perf_counter()
        prompts = (
            host.source.place_nothing(number) if has_all else host.source.place_training(number)
        )
        data_seconds = time.perf_counter() - start_time
        queued = run.queue.pop(0) if run.queue else None
        rollout = queued.rollout if queued else host.scorer.empty_rollout()
        with self.profiler.trace_call(number):
            result = host.runner(
                run.state, rollout, prompts, lambda rows: self._between(number, rows)
            )
        run.state = result.state
        if queued is not None:
            self._finish(run, queued.record, result, has_all)
        if result.rollout is None:
            self.save(run)
            return False
        if not has_all:
            self._take(run, result.rollout, result, {"time/data": data_seconds})
        return True

    def _finish(
        self, run: RunState, record: BatchRecord, result: StepResult, is_last: bool
    ) -> None:
        """Completes the record of the batch that was learned from."""
        run.learned += 1
        record.metrics |= result.learned
        if is_last:
            record.metrics |= self._evaluate(run, record.batch, lambda: False)
        self.report(record)

    def _take(
        self, run: RunState, rollout: Rollout, result: StepResult, seconds: dict[str, float]
    ) -> None:
        """Scores a rollout, and queues it as a batch or adds it to one."""
        start_time = time.perf_counter()
        try:
            scored = self.host.scorer.score_training(run.generated, rollout)
        except Diverged:
            # The weights are as good as before.
            self.save(run)
            raise
        seconds |= {"time/reward": time.perf_counter() - start_time}
        metrics = {**result.seconds, **seconds}
        metrics["time/step"] += sum(seconds.values())
        metrics |= scored.metrics | result.generated
        run.generated += 1
        run.timed_on = run.machine
        finished = scored.finished
        if self.host.filler is not None:
            assert run.filling is not None, "a filler has a batch to fill"
            try:
                run.filling, finished, metrics = self.host.filler.add_rollout(
                    run.filling, scored, metrics
                )
            except Diverged:
                self.writer.write_samples(run.next_batch, scored.samples[:SAMPLE_COUNT])
                self.save(run)
                raise
        if finished is not None:
            record = BatchRecord(run.next_batch, metrics, self._samples(run.next_batch, scored))
            run.queue.append(QueuedBatch(finished, record))

    def _samples(self, batch: int, scored: ScoringResult) -> list[dict[str, Any]]:
        is_evaluated = batch % self.job.config.eval.every == 0
        return scored.samples[:SAMPLE_COUNT] if is_evaluated else []

    def report(self, record: BatchRecord) -> None:
        """Writes a batch's complete line, shows it, and stops a run that has diverged."""
        config, line = self.job.config, record.line
        line["time/step"] += line.get("time/train", 0.0)  # only where it was timed by itself
        line |= measures.token_rates(line)
        self.writer.write_record(line)
        self.writer.write_samples(record.batch, record.samples)
        self.progress.update(record.batch + 1, **measures.headline_numbers(line))
        before, self._acceptance = self._acceptance, line.get("rollout/acceptance_length", 0.0)
        for alarm in (
            alarms.logprob_gap_warning(line, self.job.step.learner.largest_factor),
            alarms.acceptance_warning(line, before, config.draft_training.alarm),
            alarms.short_batch_warning(line, config.batch.prompts),
            *self._stalls.add_record(line),
        ):
            if alarm:
                self.progress.print_line(alarm)
        unrewarded = "None of its rows has a reward. " if np.isnan(line["reward/mean"]) else ""
        for name in ("policy", "draft"):
            remedy = (
                f"{unrewarded}Look at loss/{name}, grad_norm/{name}, status/failed and"
                f" rollout/logprob_gap_max in {config.workdir}/metrics.jsonl, and at samples.jsonl"
                " beside it. A lower learning rate often helps. Earlier checkpoints are intact."
            )
            skipped = line.get(f"skipped_in_row/{name}", 0.0)
            require_progress(skipped, name, f"batch {record.batch}", remedy)

    def _evaluate(self, run: RunState, batch: int, stop: Callable[[], bool]) -> dict[str, float]:
        """Evaluates the policy, which changes nothing in the run. Empty when asked to stop."""
        evaluations = self.host.evaluations
        run.state, metrics = evaluations(run.state, batch, stop)
        if evaluations.is_best(metrics) and not self._faults(run):
            evaluations.keep(run.number, *run.to_save(), metrics)
        return metrics

    def save(self, run: RunState) -> None:
        """Starts a checkpoint of everything that the next call needs.

        Weights that are not sound are not saved. Then `unsaved` says why.
        """
        checkpoints = self.host.checkpoints
        self.unsaved = self._faults(run)
        if self.unsaved:
            newest = checkpoints.latest_step()
            remark = (
                "there is none before it"
                if newest is None
                else f"checkpoint {newest} stays the newest"
            )
            self.progress.print_line(
                f"checkpoint {run.number} is not saved: {self.unsaved}; {remark}"
            )
            return
        checkpoints.save(run.number, *run.to_save())

    def _faults(self, run: RunState) -> str:
        """Describes weights that a run cannot go on from. Empty if they are sound."""
        conditions = np.asarray(self._conditions(run.state)).tolist()
        by_network = zip(("policy", "draft"), conditions, strict=False)
        return " and ".join(
            f"the {name}'s {_FAULTS[state]}" for name, state in by_network if state != SOUND
        )

    def _between(self, number: int, rollout: Rollout) -> bool:
        """Begins to score rows between slices of generation. True to stop."""
        self.host.scorer.begin_scoring(number, rollout)
        return self._stop()

    def _stop(self) -> bool:
        """Whether to stop now, the same in every process."""
        self._looks += 1
        return self.interrupt.should_stop(self._looks)


def _conditions(state: TrainState) -> Int[Array, " n"]:
    """Conditions of the policy and, if there is one, of the draft."""
    trained = state.learner.policy, state.learner.draft
    return jnp.stack([condition(network) for network in trained if network is not None])
