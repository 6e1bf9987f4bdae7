"""Dynamic sampling: batches of groups whose rewards differ.

Source: DAPO, arXiv 2503.14476, section 3.2.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from jaxspec import mesh as meshes
from jaxspec.config.settings import DynamicSamplingConfig
from jaxspec.host.programs import abstract_scored_rollout, put_like
from jaxspec.host.scoring import ScoringResult, outcome_metric
from jaxspec.metrics.batch import merge_rollout_metrics
from jaxspec.rewards.outcome import Outcome
from jaxspec.rl import dynamic_sampling
from jaxspec.rl.optimizers import Diverged
from jaxspec.state import ScoredRollout
from jaxspec.step import Step


@dataclasses.dataclass
class PartialBatch:
    """A batch that is being filled."""

    rows: ScoredRollout
    """Rows on the devices, without a plan."""
    groups: int = 0
    """Number of groups in the batch so far."""
    metrics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Metrics of the rollouts generated for it so far."""


class BatchFiller:
    """Fills batches with groups from several rollouts.

    Args:
      settings: settings of dynamic sampling.
      step: the run's step.
      prompts: number of prompts in a batch.
      is_kept: whether checkpoints keep a batch that is not complete.
    """

    def __init__(
        self, settings: DynamicSamplingConfig, step: Step, prompts: int, is_kept: bool = True
    ) -> None:
        self._settings, self._step, self._prompts = settings, step, prompts
        self._is_kept = is_kept
        self._mesh = step.generator.mesh
        template = abstract_scored_rollout(step, prompts, self._mesh).replace(plan=None)
        self._template = template
        self._layout = jax.tree.map(lambda leaf: leaf.sharding, template)

    def empty_batch(self) -> PartialBatch:
        """Returns a batch without groups."""
        rows = self._step.empty_scored_rollout(len(self._template.rewards)).replace(plan=None)
        return PartialBatch(put_like(rows, self._template))

    def add_rollout(
        self, batch: PartialBatch, scoring: ScoringResult, metrics: dict[str, Any]
    ) -> tuple[PartialBatch, ScoredRollout | None, dict[str, Any]]:
        """Adds a rollout to a batch.

        Only groups with differing rewards are added. The rows of `batch` are donated. Returns the
        batch to fill next, and the complete batch with its metrics if there is one. Batches have no
        plans.

        Raises:
          Diverged: `dynamic_sampling.max_batches` rollouts had no such group. `batch` is unchanged.
        """
        settings, capacity = self._settings, self._prompts
        groups = np.flatnonzero(scoring.differing_groups)
        rollout_metrics = [*batch.metrics, metrics]
        is_last = len(rollout_metrics) >= settings.max_batches
        if not batch.groups and not len(groups) and is_last:
            raise Diverged(_no_group_message(rollout_metrics, capacity, self._is_kept))
        # In a group with equal rewards all advantages are 0, so nothing is learned from it.
        added_groups, surplus = np.split(groups, [capacity - batch.groups])
        rows = self._add_groups(batch.rows, scoring.scored, added_groups, batch.groups)
        group_count = batch.groups + len(added_groups)
        # After `max_batches` rollouts, the batch is used with empty places.
        if group_count < capacity and not is_last:
            return PartialBatch(rows, group_count, rollout_metrics), None, {}
        carried_groups = surplus if settings.surplus == "carry" else surplus[:0]
        next_batch = self.empty_batch()
        if len(carried_groups):
            carried_rows = self._add_groups(next_batch.rows, scoring.scored, carried_groups, 0)
            next_batch = PartialBatch(carried_rows, len(carried_groups))
        counts = {
            "dynamic_sampling/rollouts": len(rollout_metrics),
            "dynamic_sampling/groups": group_count,
            "dynamic_sampling/carried": len(carried_groups),
            "dynamic_sampling/dropped": len(surplus) - len(carried_groups),
        }
        return next_batch, rows, merge_rollout_metrics(rollout_metrics) | counts

    def _add_groups(
        self, rows: ScoredRollout, rollout: ScoredRollout, groups: np.ndarray, first_group: int
    ) -> ScoredRollout:
        """Writes groups of a rollout into a batch that has `first_group` groups already."""
        group_at_place = dynamic_sampling.assign_places(
            groups, first_group, self._prompts, self._step.mini_batches
        )
        by_row = meshes.row_sharding(self._mesh)
        layout = jax.ShapeDtypeStruct(group_at_place.shape, group_at_place.dtype, sharding=by_row)
        return self._fill_rows(rows, rollout.replace(plan=None), put_like(group_at_place, layout))

    # Compiled on first use, and once for all batches.
    @cached_property
    def _fill_rows(self) -> Callable[[ScoredRollout, ScoredRollout, jax.Array], ScoredRollout]:
        fill_rows = partial(dynamic_sampling.insert_groups, mesh=self._mesh)
        return jax.jit(fill_rows, donate_argnums=0, out_shardings=self._layout)


def _no_group_message(rollout_metrics: list[dict[str, Any]], prompts: int, is_kept: bool) -> str:
    rollouts, means = len(rollout_metrics), merge_rollout_metrics(rollout_metrics)
    shares = ", ".join(
        f"{outcome.name.lower()} {means.get(outcome_metric(outcome), math.nan):.0%}"
        for outcome in Outcome
    )
    repetition = "makes one more rollout" if is_kept else "makes the same rollouts again"
    return (
        f"dynamic sampling has found no group whose answers earn different rewards: none of"
        f" {rollouts * prompts} in {rollouts} rollouts, whose mean reward is"
        f" {means.get('reward/mean', math.nan):.3g}"
        f" ({shares}; samples.jsonl has some answers). Near 1 the problems are too easy for this"
        " policy; near 0 they are too hard, or the reward finds no answer. The same command"
        f" {repetition}; in a new --workdir other problems, a larger --batch.group_size, a"
        f" higher --rollout.temperature or more --dynamic_sampling.max_batches, now {rollouts},"
        " may find some"
    )
