"""Loop of a run: calls of the step, and the work of the host between two of them."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from jaxspec.config.settings import ResolvedConfig
from jaxspec.host import workdir as workdirs
from jaxspec.rl.optimizers import Diverged
from jaxspec.run.batches import BatchSource, NoBatch, is_evaluation_due
from jaxspec.run.evaluations import Evaluations
from jaxspec.run.reporting import BatchReporter
from jaxspec.run.schedules import StepResult, StepSchedule
from jaxspec.run.state import BatchRecord, CheckpointSaver, RunState
from jaxspec.state import Rollout
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.trace import Profiler


@dataclasses.dataclass(frozen=True)
class Host:
    """Host side of a run, from prompts to checkpoints."""

    batches: BatchSource
    evaluations: Evaluations
    saver: CheckpointSaver
    reporter: BatchReporter
    profiler: Profiler

    @property
    def workdir(self) -> Path:
        """Folder of the run."""
        return self.saver.checkpoints.folder.parent


class Loop:
    """Runs calls of one program after the other, until the run ends or is stopped."""

    def __init__(
        self, config: ResolvedConfig, schedule: StepSchedule, interrupt: Interrupt, host: Host
    ) -> None:
        self.config, self.schedule, self.interrupt, self.host = config, schedule, interrupt, host
        self._stop_checks = 0

    def run_to_end(self, run: RunState) -> bool:
        """Continues a run until it ends or is stopped.

        Updates `run` in place. Returns whether the run has ended.
        """
        config, save = self.config, self.host.saver.save
        while True:
            record = run.queue[-1].record if run.queue else None
            # Also right after a resume: a run that was stopped before its evaluation makes up for
            # it, with the same weights.
            if record is not None and is_evaluation_due(config, record):
                record.metrics |= self._evaluate_policy(run, record.batch, self._should_stop)
            if self.interrupt.stop_requested or self._should_stop():
                save(run)
                return False
            # Saved before the call, which donates the state.
            if run.queue and run.next_batch % config.save_every == 0:
                save(run)
            if not self._run_call(run):
                return False
            workdirs.mark_checkpoint_saved(self.host.workdir)
            if run.has_ended(config.steps):
                save(run)
                return True

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
            host.batches.prompts.place_padding(call)
            if is_final_call
            else host.batches.prompts.place_training(call)
        )
        data_seconds = time.perf_counter() - start_time
        queued_batch = run.queue.pop(0) if run.queue else None
        rollout = queued_batch.rollout if queued_batch else host.batches.planner.empty_rollout()
        with host.profiler.trace_call(call):
            result = self.schedule(
                run.state, rollout, prompts, lambda rows: self._score_slice(call, rows)
            )
        run.state = result.state
        if queued_batch is not None:
            self._finish_record(run, queued_batch.record, result, is_final_call)
        if result.rollout is None:
            host.saver.save(run)
            return False
        if not is_final_call:
            self._queue_rollout(run, result.rollout, result, data_seconds)
        return True

    def _finish_record(
        self, run: RunState, record: BatchRecord, result: StepResult, is_last: bool
    ) -> None:
        """Completes and reports a batch's record after its update."""
        run.learned += 1
        record.metrics |= result.training_metrics
        record.metrics["time/step"] += record.metrics.get("time/train", 0.0)  # if it was timed
        if is_last:
            record.metrics |= self._evaluate_policy(run, record.batch, lambda: False)
        self.host.reporter.report_batch(record)

    def _queue_rollout(
        self, run: RunState, rollout: Rollout, result: StepResult, data_seconds: float
    ) -> None:
        """Scores a rollout, and queues it as a batch.

        With dynamic sampling, a batch is queued once it is complete.

        Raises:
          Diverged: too many rows have no reward, or dynamic sampling finds no group.
        """
        host, seconds = self.host, result.seconds
        metrics = {**seconds, "time/data": data_seconds, **result.rollout_metrics}
        metrics["time/step"] += data_seconds
        try:
            batch = host.batches.maker.add_rollout(run.generation, run.next_batch, rollout, metrics)
        except Diverged as error:
            if isinstance(error, NoBatch):
                host.reporter.write_samples(error.batch, error.samples)
            # Saved, since it is the reward that failed, not the weights.
            host.saver.save(run)
            raise
        # On accelerators, a rollout has just timed its rounds on this machine.
        run.timed_on = run.machine
        if batch is not None:
            batch.rollout = host.batches.planner.plan(batch.rollout)
            run.queue.append(batch)

    def _evaluate_policy(
        self, run: RunState, batch: int, stop: Callable[[], bool]
    ) -> dict[str, float]:
        """Evaluates the policy, and saves a checkpoint of it if it is the best so far.

        Returns the metrics, which are empty if it was stopped.
        """
        evaluations = self.host.evaluations
        run.state, metrics = evaluations(run.state, batch, stop)
        # Weights that a run cannot go on from are not kept, even if they evaluate best.
        if evaluations.is_best(metrics) and not self.host.saver.describe_faults(run):
            evaluations.save_best(run.checkpoint_number, *run.to_checkpoint(), metrics)
        return metrics

    def _score_slice(self, call: int, rollout: Rollout) -> bool:
        """Begins to score rows between slices of generation. Returns whether to stop."""
        self.host.batches.scorer.begin_scoring(call, rollout)
        return self._should_stop()

    def _should_stop(self) -> bool:
        """Returns whether to stop. All processes agree."""
        # Each process numbers its checks, so that all can stop at the same one.
        self._stop_checks += 1
        return self.interrupt.should_stop(self._stop_checks)
