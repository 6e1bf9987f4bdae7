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
from jaxspec.config.settings import ResolvedConfig
from jaxspec.evaluation.evaluator import has_evaluation
from jaxspec.host import workdir as workdirs
from jaxspec.host.prompts import PromptSource
from jaxspec.host.scoring import RolloutScorer, ScoringResult
from jaxspec.metrics.batch import headline_numbers, token_rates
from jaxspec.metrics.files import MetricsWriter, read_metrics
from jaxspec.rl.optimizers import (
    BROKEN,
    SKIPPED,
    SOUND,
    Diverged,
    assess_condition,
    require_progress,
)
from jaxspec.run.dynamic_batch import BatchFiller
from jaxspec.run.evaluations import Evaluations
from jaxspec.run.schedules import StepResult, StepSchedule
from jaxspec.run.stalls import make_stall_watch
from jaxspec.run.state import BatchRecord, QueuedBatch, RunState
from jaxspec.state import NetworkState, Rollout, TrainState
from jaxspec.step import Step
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system import alarms
from jaxspec.system.interrupt import Interrupt
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
    """Host side of a run, from prompts to checkpoints."""

    source: PromptSource
    scorer: RolloutScorer
    filler: BatchFiller | None
    """Fills batches from several rollouts. None: each rollout is a batch."""
    evaluations: Evaluations
    checkpoints: Checkpoints
    schedule: StepSchedule

    @property
    def workdir(self) -> Path:
        """Folder of the run."""
        return self.checkpoints.folder.parent


class Loop:
    """Runs calls until the run ends or is stopped."""

    def __init__(
        self,
        config: ResolvedConfig,
        step: Step,
        interrupt: Interrupt,
        host: Host,
        writer: MetricsWriter,
        progress: Progress,
        profiler: Profiler,
    ) -> None:
        self.config, self.interrupt, self.host = config, interrupt, host
        self.writer, self.progress, self.profiler = writer, progress, profiler
        self.unsaved = ""
        """Why the run could not be saved last. Empty if it was saved."""
        self._acceptance = 0.0
        """Acceptance length of the batch reported last. 0 before the first since this start."""
        self._stop_checks = 0
        records = read_metrics(host.workdir) if jax.process_index() == 0 else []
        self._stalls = make_stall_watch(config, records)
        self._max_probability_factor = step.learner.max_probability_factor
        self._read_conditions = jax.jit(
            _network_conditions, out_shardings=meshes.replicated_sharding(step.learner.mesh)
        )

    def run_to_end(self, run: RunState) -> bool:
        """Continues a run until it ends or is stopped.

        Updates `run` in place. Returns whether the run has ended.
        """
        config = self.config
        while True:
            record = run.queue[-1].record if run.queue else None
            # Also right after a resume: a run that was stopped before its evaluation makes up for
            # it, with the same weights.
            if record is not None and self._is_evaluation_due(record):
                record.metrics |= self._evaluate_policy(run, record.batch, self._should_stop)
            if self.interrupt.stop_requested or self._should_stop():
                self.save_checkpoint(run)
                return False
            # Saved before the call, which donates the state.
            if run.queue and run.next_batch % config.save_every == 0:
                self.save_checkpoint(run)
            if not self._run_call(run):
                return False
            workdirs.mark_checkpoint_saved(self.host.workdir)
            if run.has_ended(config.steps):
                self.save_checkpoint(run)
                return True

    def _is_evaluation_due(self, record: BatchRecord) -> bool:
        """Returns whether to evaluate the weights that sampled a batch now.

        If it is the last batch, its weights are evaluated after the update instead.
        """
        is_last = record.batch == self.config.steps - 1
        is_evaluated = record.batch % self.config.eval.every == 0
        return is_evaluated and not is_last and not has_evaluation(record.metrics)

    def _run_call(self, run: RunState) -> bool:
        """Makes one call of the step.

        It learns from the oldest queued batch, then generates the next rollout, which is scored.
        Returns False if generation was interrupted.
        """
        host, call = self.host, run.generated
        # After N batches, one more call learns from the last and generates nothing.
        is_final_call = run.next_batch >= self.config.steps
        start_time = time.perf_counter()
        prompts = (
            host.source.place_padding(call) if is_final_call else host.source.place_training(call)
        )
        data_seconds = time.perf_counter() - start_time
        queued_batch = run.queue.pop(0) if run.queue else None
        rollout = queued_batch.rollout if queued_batch else host.scorer.empty_rollout()
        with self.profiler.trace_call(call):
            result = host.schedule(
                run.state, rollout, prompts, lambda rows: self._score_slice(call, rows)
            )
        run.state = result.state
        if queued_batch is not None:
            self._finish_record(run, queued_batch.record, result, is_final_call)
        if result.rollout is None:
            self.save_checkpoint(run)
            return False
        if not is_final_call:
            self._queue_rollout(run, result.rollout, result, {"time/data": data_seconds})
        return True

    def _finish_record(
        self, run: RunState, record: BatchRecord, result: StepResult, is_last: bool
    ) -> None:
        """Completes and reports a batch's record after its update."""
        run.learned += 1
        record.metrics |= result.training_metrics
        if is_last:
            record.metrics |= self._evaluate_policy(run, record.batch, lambda: False)
        self.report_batch(record)

    def _queue_rollout(
        self, run: RunState, rollout: Rollout, result: StepResult, seconds: dict[str, float]
    ) -> None:
        """Scores a rollout, and queues it as a batch.

        With dynamic sampling, a batch is queued once it is complete.

        Raises:
          Diverged: too many rows have no reward, or dynamic sampling finds no group.
        """
        start_time = time.perf_counter()
        try:
            scoring = self.host.scorer.score_training(run.generated, rollout)
        except Diverged:
            # Saved, since it is the reward that failed, not the weights.
            self.save_checkpoint(run)
            raise
        seconds |= {"time/reward": time.perf_counter() - start_time}
        metrics = {**result.seconds, **seconds}
        metrics["time/step"] += sum(seconds.values())
        metrics |= scoring.metrics | result.rollout_metrics
        # Counted only once it is scored, so that a resume generates an unscored rollout again.
        run.generated += 1
        # On accelerators, a rollout has just timed its rounds on this machine.
        run.timed_on = run.machine
        scored_rollout = scoring.scored
        if self.host.filler is not None:
            assert run.filling is not None, "a filler has a batch to fill"
            try:
                run.filling, scored_rollout, metrics = self.host.filler.add_rollout(
                    run.filling, scoring, metrics
                )
            except Diverged:
                # The message refers to these samples, and no batch has a record to keep them in.
                self.writer.write_samples(run.next_batch, scoring.samples[:SAMPLE_COUNT])
                self.save_checkpoint(run)
                raise
        if scored_rollout is not None:
            record = BatchRecord(
                run.next_batch, metrics, self._select_samples(run.next_batch, scoring)
            )
            run.queue.append(QueuedBatch(scored_rollout, record))

    def _select_samples(self, batch: int, scoring: ScoringResult) -> list[dict[str, Any]]:
        is_evaluated = batch % self.config.eval.every == 0
        return scoring.samples[:SAMPLE_COUNT] if is_evaluated else []

    def report_batch(self, record: BatchRecord) -> None:
        """Writes and shows the complete record of a batch.

        Raises:
          Diverged: too many updates in a row were skipped.
        """
        config, metrics = self.config, record.metrics_line
        metrics["time/step"] += metrics.get("time/train", 0.0)  # if it was timed by itself
        metrics |= token_rates(metrics)
        self.writer.write_record(metrics)
        self.writer.write_samples(record.batch, record.samples)
        self.progress.update(record.batch + 1, **headline_numbers(metrics))
        previous_length, self._acceptance = (
            self._acceptance,
            metrics.get("rollout/acceptance_length", 0.0),
        )
        for alarm in (
            alarms.logprob_gap_warning(metrics, self._max_probability_factor),
            alarms.acceptance_warning(metrics, previous_length, config.draft_training.alarm),
            alarms.short_batch_warning(metrics, config.batch.prompts),
            *self._stalls.add_record(metrics),
        ):
            if alarm:
                self.progress.print_line(alarm)
        unrewarded = "" if "reward/mean" in metrics else "None of its rows has a reward. "
        for name in ("policy", "draft"):
            remedy = (
                f"{unrewarded}Look at loss/{name}, grad_norm/{name}, status/failed and"
                f" rollout/logprob_gap_max in {config.workdir}/metrics.jsonl, and at samples.jsonl"
                " beside it. A lower learning rate often helps. Earlier checkpoints are intact."
            )
            skipped = metrics.get(f"skipped_in_row/{name}", 0.0)
            require_progress(skipped, name, f"batch {record.batch}", remedy)

    def _evaluate_policy(
        self, run: RunState, batch: int, stop: Callable[[], bool]
    ) -> dict[str, float]:
        """Evaluates the policy, and saves a checkpoint of it if it is the best so far.

        Returns the metrics, which are empty if it was stopped.
        """
        evaluations = self.host.evaluations
        run.state, metrics = evaluations(run.state, batch, stop)
        # Weights that a run cannot go on from are not kept, even if they evaluate best.
        if evaluations.is_best(metrics) and not self._describe_faults(run):
            evaluations.save_best(run.checkpoint_number, *run.to_checkpoint(), metrics)
        return metrics

    def save_checkpoint(self, run: RunState) -> None:
        """Starts to save a checkpoint with all that the next call needs.

        Weights that are not sound are not saved, and `unsaved` gets the reason.
        """
        # No resume could recover from unsound weights, and they would replace sound checkpoints.
        checkpoints = self.host.checkpoints
        self.unsaved = self._describe_faults(run)
        if self.unsaved:
            newest = checkpoints.latest_step()
            remark = (
                "there is none before it"
                if newest is None
                else f"checkpoint {newest} stays the newest"
            )
            self.progress.print_line(
                f"checkpoint {run.checkpoint_number} is not saved: {self.unsaved}; {remark}"
            )
            return
        checkpoints.save(run.checkpoint_number, *run.to_checkpoint())

    def _describe_faults(self, run: RunState) -> str:
        """Describes faults that a run cannot go on from. Returns "" if the weights are sound."""
        conditions = np.asarray(self._read_conditions(run.state)).tolist()
        # Without a draft that has weights, there is one condition only.
        by_network = zip(("policy", "draft"), conditions, strict=False)
        return " and ".join(
            f"the {name}'s {_FAULTS[condition_code]}"
            for name, condition_code in by_network
            if condition_code != SOUND
        )

    def _score_slice(self, call: int, rollout: Rollout) -> bool:
        """Begins to score rows between slices of generation. Returns whether to stop."""
        self.host.scorer.begin_scoring(call, rollout)
        return self._should_stop()

    def _should_stop(self) -> bool:
        """Returns whether to stop. All processes agree."""
        # Each process numbers its checks, so that all can stop at the same one.
        self._stop_checks += 1
        return self.interrupt.should_stop(self._stop_checks)


def _network_conditions(state: TrainState) -> Int[Array, " n"]:
    """Returns the condition of the policy and, if it has weights, of the draft."""
    states = state.learner.policy, state.learner.draft
    return jnp.stack([assess_condition(item) for item in states if isinstance(item, NetworkState)])
