"""How far a draft covers the target: measured in every round, summed for each row, and told as
metrics."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxspec.rollout.verify import Verdict
from jaxspec.state import Statistics

QUARTERS = 4
"""Parts of the longest response for which acceptance is told."""


class Comparison(NamedTuple):
    """How a draft covers the target at each depth: the sum of min(target, draft)."""

    overlap: Float[Array, "B K"]
    overlap_by_factor: Float[Array, "n K F"]
    draft_entropy: Float[Array, "B K"]


def no_statistics(
    rows: int, group_size: int, draft_length: int, factors: int, dtype: Any
) -> Statistics:
    """Zeros."""
    count, by_depth = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows, draft_length), jnp.int32)
    by_quarter = jnp.zeros((rows, QUARTERS), jnp.int32)
    return Statistics(
        rounds=count,
        draft_rounds=by_depth,
        reached=by_depth,
        accepted=by_depth,
        quarter_tokens=by_quarter,
        quarter_rounds=by_quarter,
        overlap=jnp.zeros((rows, draft_length), dtype),
        overlap_by_factor=jnp.zeros((rows // group_size, draft_length, factors), dtype),
        draft_entropy=jnp.zeros((rows, draft_length), dtype),
        start_round=count,
        end_round=count,
        target_entropy=jnp.zeros((rows,), dtype),
    )


def of_round(
    running: Bool[Array, " B"],
    verdict: Verdict,
    offered: Int[Array, " B"],
    comparison: Comparison,
    entropy: Float[Array, "B K1"],
    kept: Int[Array, " B"],
    measured: slice | Int[Array, " m"],
    quarter: Int[Array, " B"],
) -> Statistics:
    """Counts one round, in which each running slot was offered `offered` drafts and kept `kept` new
    tokens; `quarter` is that of the longest response in which it began."""
    depths = jnp.arange(1, comparison.overlap.shape[1] + 1, dtype=jnp.int32)
    drafted = running[:, None] & (depths <= offered[:, None])
    offered_in_turn = drafted & (depths <= kept[:, None])  # what stands before it was kept
    accepted = depths <= jnp.minimum(verdict.accepted, kept)[:, None]
    inside = jnp.arange(entropy.shape[1], dtype=jnp.int32) < kept[:, None]
    nothing = jnp.zeros_like(kept)
    quarters = jnp.arange(QUARTERS, dtype=jnp.int32)
    here = (quarter[:, None] == quarters) & (running & (offered > 0))[:, None]
    return Statistics(
        rounds=running.astype(jnp.int32),
        draft_rounds=drafted.astype(jnp.int32),
        reached=offered_in_turn.astype(jnp.int32),
        accepted=accepted.astype(jnp.int32),
        quarter_tokens=jnp.where(here, kept[:, None], 0),
        quarter_rounds=here.astype(jnp.int32),
        overlap=jnp.where(offered_in_turn, comparison.overlap, 0),
        overlap_by_factor=jnp.where(
            offered_in_turn[measured][:, :, None], comparison.overlap_by_factor, 0
        ),
        draft_entropy=jnp.where(offered_in_turn, comparison.draft_entropy, 0),
        start_round=nothing,
        end_round=nothing,
        target_entropy=jnp.sum(jnp.where(inside, entropy, 0), axis=1),
    )


def acceptance_metrics(
    statistics: Statistics,
    tokens: Num[Array, ""],
    choice: Int[Array, " K"],
    grid: tuple[float, ...],
) -> dict[str, Num[Array, ""]]:
    """What speculation did, over all rows of `statistics`, which hold `tokens` response tokens.

    Rates by depth are unconditional (of the rounds with a draft) or conditional (of those that kept
    every draft before); `choice` are the draft temperatures of `grid` that were used.
    """
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0).astype(jnp.float32), statistics)

    def share(part: Array, whole: Array) -> Array:
        return part / jnp.maximum(whole, 1)

    by_depth = {
        "acceptance_rate": share(total.accepted, total.draft_rounds[:1]),
        "conditional_rate": share(total.accepted, total.reached),
        "expected_acceptance": share(total.overlap, total.reached),
        "draft_entropy": share(total.draft_entropy, total.reached),
        "draft_temperature": jnp.asarray(grid, jnp.float32)[choice],
    }
    # no number where no round began, or none had a draft
    by_quarter = total.quarter_tokens / jnp.where(
        total.quarter_rounds > 0, total.quarter_rounds, jnp.nan
    )
    drafted, generated = jnp.sum(total.draft_rounds[:1]), tokens.astype(jnp.float32)
    return {
        "rollout/tokens_per_target_pass": share(generated, total.rounds),
        "rollout/acceptance_length": jnp.where(
            drafted > 0, share(jnp.sum(total.quarter_tokens), drafted), 1
        ),
        "rollout/acceptance_rate": share(jnp.sum(total.accepted), jnp.sum(total.draft_rounds)),
        "rollout/coverage": share(drafted, total.rounds),
        "rollout/target_entropy": share(total.target_entropy, generated),
        **{
            f"rollout/{name}_{depth}": value
            for name, values in by_depth.items()
            for depth, value in enumerate(values, start=1)
        },
        **{
            f"rollout/acceptance_length_quarter_{number}": length
            for number, length in enumerate(by_quarter, start=1)
        },
    }
