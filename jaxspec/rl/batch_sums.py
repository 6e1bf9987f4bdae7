"""Sums over the labels of a mini-batch, and the counts that they are divided by."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxspec.mesh import ROWS
from jaxspec.models.moe import AnyTraffic
from jaxspec.rl.draft_objective import DraftComparison
from jaxspec.rl.loss_terms import LogprobGap


class BatchSums(NamedTuple):
    """Sums over the loss mask. The draft has A depths."""

    policy_loss: Float[Array, ""]
    """Weighted label losses, whose sum is the loss of the batch."""
    entropy: Float[Array, ""]
    gap: LogprobGap
    loss_metrics: dict[str, Float[Array, ""]]
    """Metrics of the policy loss."""
    maxima: dict[str, Float[Array, ""]]
    """Maxima in place of sums: of `NAME/max`, and of the negative of `NAME/min`."""
    traffic: AnyTraffic
    """Expert traffic of a policy that has experts and is trained."""
    draft: DraftComparison

    def merge_with(self, other: "BatchSums") -> "BatchSums":
        """Merges the sums of two micro-batches."""
        maxima = jax.tree.map(jnp.maximum, self.maxima, other.maxima)
        sums = jax.tree.map(jnp.add, self, other)
        return sums._replace(gap=self.gap.merge_with(other.gap), maxima=maxima)

    def sum_over_shards(self) -> "BatchSums":
        """Sums over all row shards. Takes the maximum of maxima. Runs inside `shard_map_rows`."""
        max_gap, maxima = lax.pmax((self.gap.max_absolute, self.maxima), ROWS)
        sums = lax.psum(self, ROWS)
        return sums._replace(gap=sums.gap._replace(max_absolute=max_gap), maxima=maxima)

    def to_metrics(self, counts: "BatchCounts") -> dict[str, Float[Array, ""]]:
        """Returns means over labels, and extremes, of a policy that is trained."""
        return {
            "entropy": self.entropy / counts.labels,
            **{name: value / counts.labels for name, value in self.loss_metrics.items()},
            **{
                name: -value if name.endswith("/min") else value
                for name, value in self.maxima.items()
            },
            **self.traffic.to_metrics(counts.labels),
        }


class BatchCounts(NamedTuple):
    """Divisors of the sums, counted over the whole mini-batch and all shards."""

    # Counted before the first micro-batch is read, so that losses can be weighed as they are added.

    labels: Float[Array, ""]
    """Labels in the loss mask."""
    texts: Float[Array, ""]
    """Rows with such labels."""
    labels_by_depth: Float[Array, " A"]
    """Labels predicted by each depth of the draft."""
    positions: Float[Array, ""]
    """Positions with a text."""
