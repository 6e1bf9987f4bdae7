"""Statistics of speculation.

They are measured in every round, summed for each row, and reported as metrics.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxspec.metrics.mean import Mean, Metrics
from jaxspec.rollout.verify import Verdict
from jaxspec.state import Statistics

QUARTERS = 4
"""Parts of the maximum response length with separate acceptance metrics."""


class DraftOverlap(NamedTuple):
    """Overlap of target and draft at each depth.

    Overlap is the sum of min(target, draft) over the vocabulary.
    """

    overlap: Float[Array, "B K"]
    """Overlap at the temperature that drafts were sampled at."""
    overlap_by_factor: Float[Array, "n K F"]
    """Overlap at each factor of the grid, in the measured slots."""
    draft_entropy: Float[Array, "B K"]
    """Entropy of the draft in nats."""


def init_statistics(
    row_count: int, group_size: int, draft_length: int, factor_count: int, dtype: Any
) -> Statistics:
    """Returns statistics of zero rounds."""
    by_row, by_depth = (
        jnp.zeros((row_count,), jnp.int32),
        jnp.zeros((row_count, draft_length), jnp.int32),
    )
    by_quarter = jnp.zeros((row_count, QUARTERS), jnp.int32)
    return Statistics(
        rounds=by_row,
        draft_rounds=by_depth,
        reached=by_depth,
        accepted=by_depth,
        quarter_tokens=by_quarter,
        quarter_rounds=by_quarter,
        overlap=jnp.zeros((row_count, draft_length), dtype),
        overlap_by_factor=jnp.zeros((row_count // group_size, draft_length, factor_count), dtype),
        draft_entropy=jnp.zeros((row_count, draft_length), dtype),
        start_round=by_row,
        end_round=by_row,
        target_entropy=jnp.zeros((row_count,), dtype),
    )


def count_round(
    running: Bool[Array, " B"],
    verdict: Verdict,
    draft_counts: Int[Array, " B"],
    draft_overlap: DraftOverlap,
    entropy: Float[Array, "B K1"],
    token_counts: Int[Array, " B"],
    measured_slots: slice | Int[Array, " m"],
    quarter: Int[Array, " B"],
) -> Statistics:
    """Counts one round of all slots.

    Args:
      running: slots with a running row.
      verdict: result of verification.
      draft_counts: number of valid drafts.
      draft_overlap: overlap of target and draft.
      entropy: entropy of the target at each position, in nats.
      token_counts: number of tokens that the row keeps of the block.
      measured_slots: slots of `draft_overlap.overlap_by_factor`.
      quarter: quarter of the maximum response length that the round starts in.
    """
    depths = jnp.arange(1, draft_overlap.overlap.shape[1] + 1, dtype=jnp.int32)
    has_draft = running[:, None] & (depths <= draft_counts[:, None])
    # All tokens before the draft were kept. Drafts beyond the cut follow another text.
    reached = has_draft & (depths <= token_counts[:, None])
    # The end of a row may cut accepted drafts.
    accepted = depths <= jnp.minimum(verdict.accepted, token_counts)[:, None]
    is_committed = jnp.arange(entropy.shape[1], dtype=jnp.int32) < token_counts[:, None]
    zeros = jnp.zeros_like(token_counts)
    quarters = jnp.arange(QUARTERS, dtype=jnp.int32)
    in_quarter = (quarter[:, None] == quarters) & (running & (draft_counts > 0))[:, None]
    return Statistics(
        rounds=running.astype(jnp.int32),
        draft_rounds=has_draft.astype(jnp.int32),
        reached=reached.astype(jnp.int32),
        accepted=accepted.astype(jnp.int32),
        quarter_tokens=jnp.where(in_quarter, token_counts[:, None], 0),
        quarter_rounds=in_quarter.astype(jnp.int32),
        overlap=jnp.where(reached, draft_overlap.overlap, 0),
        overlap_by_factor=jnp.where(
            reached[measured_slots][:, :, None], draft_overlap.overlap_by_factor, 0
        ),
        draft_entropy=jnp.where(reached, draft_overlap.draft_entropy, 0),
        start_round=zeros,
        end_round=zeros,
        target_entropy=jnp.sum(jnp.where(is_committed, entropy, 0), axis=1),
    )


def acceptance_metrics(
    statistics: Statistics,
    tokens: Num[Array, ""],
    factor_index: Int[Array, " K"],
    grid: tuple[float, ...],
) -> Metrics:
    """Returns metrics of speculation over all rows.

    Acceptance rates by depth are over all rounds with a draft. Conditional rates, overlap and draft
    entropy are over rounds that kept every earlier draft. They are absent for a depth without such
    rounds. Acceptance lengths are absent for a quarter without drafts.

    Args:
      statistics: statistics of each row.
      tokens: number of response tokens of all rows.
      factor_index: index in `grid` of the temperature factor at each depth.
      grid: draft temperature factors.
    """
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0).astype(jnp.float32), statistics)

    def divide(numerator: Array, denominator: Array) -> Array:
        return numerator / jnp.maximum(denominator, 1)

    by_depth = {
        "acceptance_rate": divide(total.accepted, total.draft_rounds[:1]),
        "draft_temperature": jnp.asarray(grid, jnp.float32)[factor_index],
    }
    by_reached_depth = {
        "conditional_rate": total.accepted,
        "expected_acceptance": total.overlap,
        "draft_entropy": total.draft_entropy,
    }
    by_quarter = divide(total.quarter_tokens, total.quarter_rounds)
    draft_rounds, generated = jnp.sum(total.draft_rounds[:1]), tokens.astype(jnp.float32)
    return {
        "rollout/tokens_per_target_pass": divide(generated, total.rounds),
        # Without drafts each round keeps one token.
        "rollout/acceptance_length": jnp.where(
            draft_rounds > 0, divide(jnp.sum(total.quarter_tokens), draft_rounds), 1
        ),
        "rollout/acceptance_rate": divide(jnp.sum(total.accepted), jnp.sum(total.draft_rounds)),
        "rollout/coverage": divide(draft_rounds, total.rounds),
        "rollout/target_entropy": divide(total.target_entropy, generated),
        **{
            f"rollout/{name}_{depth}": value
            for name, values in by_depth.items()
            for depth, value in enumerate(values, start=1)
        },
        **_number_metrics("acceptance_length_quarter", by_quarter, total.quarter_rounds > 0),
        **{
            name: mean
            for family, sums in by_reached_depth.items()
            for name, mean in _number_metrics(
                family, divide(sums, total.reached), total.reached > 0
            ).items()
        },
    }


def _number_metrics(
    family: str, values: Float[Array, " N"], is_present: Bool[Array, " N"]
) -> dict[str, Mean]:
    """Returns a family of metrics, numbered from 1. Those without a value are absent."""
    return {
        f"rollout/{family}_{number}": Mean.from_value(value, has_value)
        for number, (value, has_value) in enumerate(zip(values, is_present, strict=True), start=1)
    }
