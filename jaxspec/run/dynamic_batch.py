"""Batches that several rollouts fill with groups whose rewards differ (dynamic sampling, DAPO,
arXiv 2503.14476, section 3.2)."""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.host.job import Job
from jaxspec.host.programs import abstract_finished, put
from jaxspec.host.scoring import RolloutScorer, ScoringResult, outcome_metric
from jaxspec.rewards.outcome import Outcome
from jaxspec.rl import dynamic_sampling
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import Finished
from jaxspec.system.metrics import merge_rollout_metrics


@dataclasses.dataclass
class PartialBatch:
    """A batch that is being filled."""

    rows: Finished
    """Rows on the devices, without a plan."""
    groups: int = 0
    """Groups that it holds."""
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Metrics of each rollout that it was filled from."""


class BatchFiller:
    """Fills batches of a job with groups of rollouts."""

    def __init__(self, job: Job, scorer: RolloutScorer) -> None:
        self._job, self._scorer = job, scorer
        self._prompts = job.config.batch.prompts
        like = abstract_finished(job.step, self._prompts).replace(plan=None)
        self._layout = jax.tree.map(lambda leaf: leaf.sharding, like)

    def empty_batch(self) -> PartialBatch:
        """Returns a batch without groups."""
        return PartialBatch(self._scorer.empty_rollout().replace(plan=None))

    def add_rollout(
        self, batch: PartialBatch, scored: ScoringResult, metrics: dict[str, Any]
    ) -> tuple[PartialBatch, Finished | None, dict[str, Any]]:
        """Adds the groups of a rollout whose rewards differ.

        Returns the batch to fill next, and the complete batch with its metrics if there is one.

        Raises:
          Diverged: `dynamic_sampling.max_batches` rollouts had no such group. `batch` is unchanged.
        """
        settings, capacity = self._job.config.dynamic_sampling, self._prompts
        groups = np.flatnonzero(scored.differing)
        by_rollout = [*batch.metrics, metrics]
        is_last = len(by_rollout) >= settings.max_batches
        if not batch.groups and not len(groups) and is_last:
            raise Diverged(_no_group_message(by_rollout, capacity))
        new, surplus = np.split(groups, [capacity - batch.groups])
        rows = self._add_groups(batch.rows, scored.finished, new, batch.groups)
        count = batch.groups + len(new)
        if count < capacity and not is_last:
            return PartialBatch(rows, count, by_rollout), None, {}
        carried = surplus if settings.surplus == "carry" else surplus[:0]
        following = self.empty_batch()
        if len(carried):
            carried_rows = self._add_groups(following.rows, scored.finished, carried, 0)
            following = PartialBatch(carried_rows, len(carried))
        counts = {
            "dynamic_sampling/rollouts": len(by_rollout),
            "dynamic_sampling/groups": count,
            "dynamic_sampling/carried": len(carried),
            "dynamic_sampling/dropped": len(surplus) - len(carried),
        }
        full = self._scorer.is_learnable(self._scorer.plan(rows))
        return following, full, merge_rollout_metrics(by_rollout) | counts

    def _add_groups(
        self, rows: Finished, rollout: Finished, groups: np.ndarray, first: int
    ) -> Finished:
        """Writes groups of a rollout behind the first groups of a batch."""
        places = dynamic_sampling.places(
            groups, first, self._prompts, self._job.config.batch.mini_batches
        )
        by_row = meshes.rows_sharding(self._job.mesh)
        like = jax.ShapeDtypeStruct(places.shape, places.dtype, sharding=by_row)
        return self._fill(rows, rollout.replace(plan=None), put(places, like))

    @cached_property
    def _fill(self) -> Callable[[Finished, Finished, jax.Array], Finished]:
        fill = partial(dynamic_sampling.filled, mesh=self._job.mesh)
        return jax.jit(fill, donate_argnums=0, out_shardings=self._layout)


def _no_group_message(by_rollout: list[dict[str, Any]], prompts: int) -> str:
    rollouts, means = len(by_rollout), merge_rollout_metrics(by_rollout)
    shares = ", ".join(
        f"{outcome.name.lower()} {means[outcome_metric(outcome)]:.0%}" for outcome in Outcome
    )
    return (
        f"dynamic sampling has found no group whose answers earn different rewards: none of"
        f" {rollouts * prompts} in {rollouts} rollouts, whose mean reward is"
        f" {means['reward/mean']:.3g}"
        f" ({shares}; samples.jsonl has some answers). Near 1 the problems are too easy for this"
        " policy; near 0 they are too hard, or the reward finds no answer. The same command makes"
        " one more rollout; in a new --workdir other problems, a larger --batch.group_size, a"
        f" higher --rollout.temperature or more --dynamic_sampling.max_batches, now {rollouts},"
        " may find some"
    )
