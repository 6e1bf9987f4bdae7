"""Batches of a run: made of scored rollouts, and planned for the learner."""

import dataclasses
import time
from typing import Any

import numpy as np

from jaxspec.config.settings import ResolvedConfig
from jaxspec.data.history import AnswerHistory
from jaxspec.data.problems import ProblemSets
from jaxspec.data.scoring import Judge
from jaxspec.evaluation.evaluator import has_evaluation
from jaxspec.host.job import Job
from jaxspec.host.programs import abstract_scored_rollout, put_like
from jaxspec.host.prompts import PromptSource
from jaxspec.host.scoring import RolloutScorer
from jaxspec.processes import global_arrays
from jaxspec.rewards.scorer import SetScorers
from jaxspec.rl.optimizers import Diverged
from jaxspec.run.dynamic_batch import BatchFiller
from jaxspec.run.state import BatchRecord, GenerationProgress, QueuedBatch
from jaxspec.state import LENGTH, Rollout, ScoredRollout
from jaxspec.step import Step

SAMPLE_COUNT = 4
"""Answers kept for reading at every evaluation."""


class NoBatch(Diverged):
    """Error of a batch that cannot be made."""

    def __init__(self, message: str, batch: int, samples: list[dict[str, Any]]) -> None:
        super().__init__(message)
        # No record of a batch keeps the samples.
        self.batch, self.samples = batch, samples


class BatchMaker:
    """Scores rollouts, and makes batches of them.

    Args:
      config: the run's config.
      scorer: scores the rollouts.
      filler: fills batches from several rollouts. None: each rollout is a batch.
    """

    def __init__(
        self, config: ResolvedConfig, scorer: RolloutScorer, filler: BatchFiller | None
    ) -> None:
        self._config, self._scorer, self.filler = config, scorer, filler

    def add_rollout(
        self,
        progress: GenerationProgress,
        batch: int,
        rollout: Rollout,
        metrics: dict[str, Any],
    ) -> QueuedBatch | None:
        """Scores a rollout, and updates `progress`.

        Returns batch number `batch` if the rollout completes it. The batch has no plan.

        Args:
          progress: progress of generation before the rollout.
          batch: number of the batch that is being made.
          rollout: the rollout.
          metrics: its metrics and seconds. `time/step` has those of the whole step.

        Raises:
          Diverged: too many rows have no reward.
          NoBatch: dynamic sampling finds no group.
        """
        start_time = time.perf_counter()
        scoring = self._scorer.score_training(progress.generated, rollout)
        reward_seconds = time.perf_counter() - start_time
        metrics = metrics | {"time/reward": reward_seconds}
        metrics["time/step"] += reward_seconds
        metrics |= scoring.metrics
        # Counted only once it is scored, so that a resume generates an unscored rollout again.
        progress.generated += 1
        scored = scoring.scored
        if self.filler is not None:
            assert progress.filling is not None, "a filler has a batch to fill"
            try:
                progress.filling, scored, metrics = self.filler.add_rollout(
                    progress.filling, scoring, metrics
                )
            except Diverged as error:
                # The message refers to these samples.
                raise NoBatch(str(error), batch, scoring.samples[:SAMPLE_COUNT]) from error
        if scored is None:
            return None
        is_evaluated = batch % self._config.eval.every == 0
        samples = scoring.samples[:SAMPLE_COUNT] if is_evaluated else []
        return QueuedBatch(scored, BatchRecord(batch, metrics, samples))


def is_evaluation_due(config: ResolvedConfig, record: BatchRecord) -> bool:
    """Returns whether to evaluate the weights that sampled a batch now.

    If it is the last batch, its weights are evaluated after the update instead.
    """
    is_last = record.batch == config.steps - 1
    is_evaluated = record.batch % config.eval.every == 0
    return is_evaluated and not is_last and not has_evaluation(record.metrics)


class BatchPlanner:
    """Plans the micro-batches of scored rollouts, which are on the learner's mesh."""

    def __init__(self, config: ResolvedConfig, step: Step) -> None:
        self._config, self._step, self.prompts = config, step, config.batch.prompts
        self._layout = abstract_scored_rollout(step, config.batch.prompts, step.learner.mesh)
        self._local_rows = global_arrays.own_rows(step.learner.mesh, len(self._layout.rewards))

    def empty_rollout(self) -> ScoredRollout:
        """Returns a scored rollout with nothing to learn."""
        rows = len(self._layout.rewards)
        return put_like(self._step.empty_scored_rollout(rows), self._layout)

    def plan(self, scored: ScoredRollout) -> ScoredRollout:
        """Plans the micro-batches of a batch, and sets whether to learn from it."""
        rows = self._local_rows
        lengths, status, valid = (
            global_arrays.read_local_rows(leaf, rows)
            for leaf in (scored.rollout.lengths, scored.rollout.status, scored.valid)
        )
        is_filtered = (status == LENGTH) & self._config.overlong.filter
        # A process knows its own rows, and the sum joins them.
        columns = np.zeros((2, len(self._layout.rewards)), np.float32)
        columns[0, rows] = np.where(valid & ~is_filtered, lengths - 1, 0)
        columns[1, rows] = valid
        token_counts, valid = global_arrays.sum_over_processes(columns)
        # A batch without labels counts as a skipped update. One that only overlong.filter has
        # emptied must not, so it is not learned from. One without any reward still counts.
        learn = bool(token_counts.any() or not valid.any())
        plan: Any = self._step.plan_batch(token_counts.astype(np.int32))
        layout = self._layout
        plan, learn = put_like((plan, learn), (layout.plan, layout.learn))
        return scored.replace(plan=plan, learn=learn)


@dataclasses.dataclass(frozen=True)
class BatchSource:
    """Parts that make batches, from prompts to plans."""

    prompts: PromptSource
    scorer: RolloutScorer
    maker: BatchMaker
    planner: BatchPlanner

    def make_progress(self, generated: int = 0) -> GenerationProgress:
        """Returns the progress of generation between two batches."""
        filler = self.maker.filler
        return GenerationProgress(generated, filler.empty_batch() if filler else None)


def make_batch_source(
    job: Job, sets: ProblemSets, scorers: SetScorers, history: AnswerHistory | None = None
) -> BatchSource:
    """Makes the source of a job's batches.

    `history` has the earlier answers of a resumed run.
    """
    config, step, prompts = job.config, job.step, job.config.batch.prompts
    source = PromptSource(sets, step.generator, prompts, job.tokenizer.pad_id, history)
    judge = Judge(scorers, job.tokenizer, source.group_size)
    scorer = RolloutScorer(config, step, source, judge, job.say)
    sampling = config.dynamic_sampling
    filler = None
    if step.uses_dynamic_sampling:
        # A pipelined run has no incomplete batch between two calls.
        is_kept = config.schedule.kind != "pipelined"
        filler = BatchFiller(sampling, step, prompts, is_kept)
    planner = BatchPlanner(config, step)
    return BatchSource(source, scorer, BatchMaker(config, scorer, filler), planner)
