"""Loop of a pipelined run: the learner's side."""

from typing import Any

import jax

from jaxspec.config.settings import ResolvedConfig
from jaxspec.host import workdir as workdirs
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.processes.global_arrays import gather_over_processes
from jaxspec.run.batches import NoBatch
from jaxspec.run.evaluations import count_evaluated
from jaxspec.run.loop import Host
from jaxspec.run.pipelined.account import Account
from jaxspec.run.pipelined.generation import GenerationSide
from jaxspec.run.pipelined.programs import PipelinedSchedule, Placement
from jaxspec.run.pipelined.queue import BatchPlan, BatchQueue, ThreadQueue, TurnQueue
from jaxspec.run.pipelined.remote import ProcessQueue
from jaxspec.run.state import BatchRecord, QueuedBatch, RunState
from jaxspec.system.interrupt import Interrupt


class PipelinedLoop:
    """Learns from batches in order, while the generator makes the next ones."""

    def __init__(
        self,
        config: ResolvedConfig,
        schedule: PipelinedSchedule,
        interrupt: Interrupt,
        host: Host,
    ) -> None:
        self._config, self._schedule, self._interrupt, self._host = (
            config,
            schedule,
            interrupt,
            host,
        )
        self._account = Account()
        self._unreported: BatchRecord | None = None

    def run_to_end(self, run: RunState) -> bool:
        """Continues a run until it ends or is stopped.

        Updates `run` in place. Returns whether the run has ended.
        """
        self._plan = BatchPlan(self._schedule.lag, run.next_batch, run.learned, self._config.steps)
        queue = self._open_queue(run, self._plan)
        try:
            return self._learn_batches(run, queue)
        except NoBatch as error:
            self._host.reporter.write_samples(error.batch, error.samples)
            raise
        finally:
            try:
                self._report_batch()
            finally:
                queue.close()

    def _open_queue(self, run: RunState, plan: BatchPlan) -> BatchQueue:
        """Opens the queue, whose generator begins to wait for weights."""
        host, schedule = self._host, self._schedule
        # JAX's own notice of a signal counts steps that all processes of a job make together.
        self._interrupt.keep_signals()
        if schedule.placement == Placement.PROCESSES:
            return ProcessQueue(schedule, plan, run.generated, count_evaluated(run))
        side = GenerationSide(self._config, schedule, host.batches, host.evaluations)
        # The run's own progress is that of the last batch taken, which a checkpoint holds.
        progress = side.make_progress(run.generated)
        # Two threads would start programs on the same devices in an order that is not fixed, and
        # collectives of several devices could then wait for each other.
        if schedule.placement == Placement.TURNS:
            return TurnQueue(side, plan, progress)
        return ThreadQueue(side, plan, progress, schedule.weight_link.move, schedule.send_batch)

    def _learn_batches(self, run: RunState, queue: BatchQueue) -> bool:
        config = self._config
        self._publish(run, queue)
        self._account.take_seconds()  # the start belongs to no batch
        first_version = run.learned
        while not run.has_ended(config.steps):
            if self._should_stop(queue):
                self._save_checkpoint(run, queue)
                return False
            if run.learned % config.save_every == 0 and run.learned > first_version:
                self._save_checkpoint(run, queue)
            if not run.queue:
                self._take_batch(run, queue)
            self._learn_batch(run, queue)
            workdirs.mark_checkpoint_saved(self._host.workdir)
        self._save_checkpoint(run, queue)
        return True

    def _take_batch(self, run: RunState, queue: BatchQueue) -> None:
        """Takes the next batch from the generator, and plans it."""
        with self._account.charge("exposed_generation"):
            sent = queue.take_batch()
            jax.block_until_ready(sent.rollout)
        with self._account.charge("plan"):
            rollout = self._host.batches.planner.plan(sent.rollout)
        run.generation.generated = sent.generated
        run.queue.append(QueuedBatch(rollout, sent.record))

    def _learn_batch(self, run: RunState, queue: BatchQueue) -> None:
        """Learns from the oldest batch, and publishes the new weights."""
        host, queue_depth = self._host, len(run.queue) + queue.count_waiting()
        batch = run.queue.pop(0)
        with host.profiler.trace_call(run.learned):
            with self._account.charge("train"):
                run.state, training_metrics = self._schedule.learn(run.state, batch.rollout)
            run.learned += 1
            self._publish(run, queue)
            # The devices are learning meanwhile.
            self._report_batch()
            with self._account.charge("train"):
                metrics = metrics_to_host(training_metrics)
        record = batch.record
        record.metrics |= metrics | {"pipeline/queue_depth": queue_depth}
        if run.has_ended(self._config.steps):
            with self._account.charge("evaluate"):
                record.metrics |= queue.evaluate_last()
        record.metrics |= _name_seconds(self._account.take_seconds())
        self._unreported = record

    def _report_batch(self) -> None:
        """Reports the batch that was learned from last, unless that is done."""
        record, self._unreported = self._unreported, None
        if record is not None:
            self._host.reporter.report_batch(record)

    def _save_checkpoint(self, run: RunState, queue: BatchQueue) -> None:
        """Starts to save a checkpoint.

        It has the batches that versions before this one make. The next batch is then made by the
        present version, so that no older one need be saved.
        """
        self._report_batch()
        while run.next_batch < min(run.learned + self._schedule.lag, self._config.steps):
            self._take_batch(run, queue)
        self._host.saver.save(run)

    def _publish(self, run: RunState, queue: BatchQueue) -> None:
        """Gives the weights of the state to the generator, if it uses them."""
        if self._plan.is_used(run.learned):
            with self._account.charge("swap"):
                queue.publish(run.learned, self._schedule.pack_weights(run.state))

    def _should_stop(self, queue: BatchQueue) -> bool:
        """Returns whether to stop. All processes of this side agree."""
        number = max(self._interrupt.received_signal, queue.received_signal())
        number = int(gather_over_processes(number).max())
        if number:
            self._interrupt.request_stop(number)
        return self._interrupt.stop_requested


def _name_seconds(seconds: dict[str, float]) -> dict[str, Any]:
    """Names the seconds of an account of learning as metrics."""
    total = sum(seconds.values())
    named = {f"time/{name}": value for name, value in seconds.items()}
    # A batch may be there already, with a plan, and its new weights may have no use.
    absent = ("time/exposed_generation", "time/plan", "time/swap")
    return {**dict.fromkeys(absent, 0.0), **named, "time/step": total}
