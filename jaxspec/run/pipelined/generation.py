"""Generator's side of a pipelined run: makes batches with published weights."""

import dataclasses
import threading
from typing import Any

from jaxspec.config.settings import ResolvedConfig
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.processes.global_arrays import any_over_processes
from jaxspec.run.batches import BatchSource, is_evaluation_due
from jaxspec.run.evaluations import Evaluations
from jaxspec.run.pipelined.account import Account
from jaxspec.run.pipelined.programs import PipelinedSchedule
from jaxspec.run.state import BatchRecord, GenerationProgress
from jaxspec.state import PyTree, Rollout, RolloutWeights


@dataclasses.dataclass
class SentBatch:
    """A batch on its way to the learner."""

    rollout: PyTree
    """Scored rollout: packed for its link on the way, and on the learner's mesh without a plan once
    a queue gives it to the learner."""
    record: BatchRecord
    generated: int
    """Number of rollouts until it was complete."""


class GenerationSide:
    """Makes the batches of a run."""

    def __init__(
        self,
        config: ResolvedConfig,
        schedule: PipelinedSchedule,
        batches: BatchSource,
        evaluations: Evaluations,
    ) -> None:
        self._config, self._schedule, self._evaluations = config, schedule, evaluations
        self._batches = batches
        self.account = Account()
        self._abort = threading.Event()

    def make_progress(self, generated: int) -> GenerationProgress:
        """Returns the progress of generation between two batches."""
        return self._batches.make_progress(generated)

    def abort(self) -> None:
        """Asks to stop at the next slice. May be called from another thread."""
        self._abort.set()

    def make_batch(
        self, batch: int, published: PyTree, progress: GenerationProgress
    ) -> SentBatch | None:
        """Makes a batch with published weights, and packs it. Updates `progress`.

        Returns None if it was asked to stop.

        Raises:
          Diverged: too many rows have no reward, or dynamic sampling finds no group.
        """
        account = self.account
        with account.charge("prepare"):
            weights = self._schedule.load(published)
        queued = None
        while queued is None:
            generated = self._generate_rollout(progress.generated, weights)
            if generated is None:
                return None
            rollout, metrics = generated
            with account.charge("reward"):
                queued = self._batches.maker.add_rollout(progress, batch, rollout, metrics)
        # An evaluation loads the weights again.
        del weights
        record = queued.record
        if is_evaluation_due(self._config, record):
            record.metrics |= self.evaluate(published, batch)
        with account.charge("send"):
            rollout = self._schedule.pack_batch(queued.rollout)
        record.metrics |= _name_seconds(account.take_seconds())
        return SentBatch(rollout, record, progress.generated)

    def _generate_rollout(
        self, number: int, weights: RolloutWeights
    ) -> tuple[Rollout, dict[str, Any]] | None:
        """Generates a rollout. Returns it with its metrics, or None if it was asked to stop."""
        account, schedule = self.account, self._schedule
        with account.charge("data"):
            prompts = self._batches.prompts.place_training(number)
        with account.charge("generate"):
            rollout = schedule.generate(
                weights, prompts, lambda rows: self._check_slice(number, rows)
            )
            if rollout is None:
                return None
            metrics = metrics_to_host(schedule.measure(rollout, weights))
        return rollout, {"time/step": 0.0, **metrics}

    def evaluate(self, published: PyTree, batch: int) -> dict[str, float]:
        """Evaluates published weights. Returns metrics, which are empty if asked to stop."""
        with self.account.charge("evaluate"):
            _, metrics = self._evaluations(published, batch, self._should_stop)
        return metrics

    def _check_slice(self, number: int, rows: Rollout) -> bool:
        """Begins to score rows between slices of generation. Returns whether to stop."""
        self._batches.scorer.begin_scoring(number, rows)
        return self._should_stop()

    def _should_stop(self) -> bool:
        """Returns whether to stop. All processes of this side agree."""
        return any_over_processes(self._abort.is_set())


def _name_seconds(seconds: dict[str, float]) -> dict[str, float]:
    """Names the seconds of an account of generation as metrics."""
    total = sum(seconds.values())
    # The learner has other seconds of its own.
    other = seconds.pop("other")
    named = {f"time/{name}": value for name, value in seconds.items()}
    return {
        "time/idle_generate": 0.0,
        **named,
        "time/generator_other": other,
        "time/generator_step": total,
    }
