"""How far a draft covers the target: measured in every round, summed for each row, and told as metrics (drafters.md, section 8)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxspec import sampling
from jaxspec.drafts.base import Proposal
from jaxspec.rollout.verify import Verdict
from jaxspec.state import RUNNING, Rollout, Statistics


class Comparison(NamedTuple):
    """Target and draft at each depth."""

    draft_logprobs: Float[Array, "B K V"] | None
    """None: nothing was drawn."""
    overlap: Float[Array, "B K"]
    overlap_by_factor: Float[Array, "n K F"]
    draft_entropy: Float[Array, "B K"]


def no_statistics(rows: int, group_size: int, draft_length: int, factors: int, dtype: Any) -> Statistics:
    """Zeros."""
    count, by_depth = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows, draft_length), jnp.int32)
    return Statistics(
        rounds=count,
        drafted=by_depth,
        reached=by_depth,
        accepted=by_depth,
        kept=count,
        overlap=jnp.zeros((rows, draft_length), dtype),
        overlap_by_factor=jnp.zeros((rows // group_size, draft_length, factors), dtype),
        draft_entropy=jnp.zeros((rows, draft_length), dtype),
        target_entropy=jnp.zeros((rows,), dtype),
    )


def compare(
    proposal: Proposal,
    target_logprobs: Float[Array, "B K1 V"],
    produced: Int[Array, "B K1"],
    processing: sampling.Processing,
    factors: Float[Array, " K"] | float,
    grid: tuple[float, ...],
    group_size: int,
) -> Comparison:
    """The draft's distributions, and how much of the target's they cover; a draft gone NaN covers nothing.

    Args:
      proposal: what was drafted; without logits the drafted tokens count as certain.
      target_logprobs: processed.
      produced: response tokens before each position.
      processing: the target's, and with `factors` the draft's.
      factors: on the temperature, at which the drafts were drawn.
      grid: other factors to measure, in the first row of each group only: a pass over the vocabulary for each would cost as much as a step
        of a small model.
      group_size: rows of a group, which are adjacent.
    """
    (rows, length), logits = proposal.tokens.shape, proposal.logits
    target_logprobs, produced = target_logprobs[:, :length], produced[:, :length]
    if logits is None:
        overlap = jnp.exp(jnp.take_along_axis(target_logprobs, proposal.tokens[:, :, None], axis=2))[:, :, 0]
        everywhere = jnp.broadcast_to(overlap[::group_size, :, None], (rows // group_size, length, len(grid)))
        return Comparison(None, overlap, everywhere, jnp.zeros_like(overlap))

    def at(factor: Float[Array, " K"] | float, rows: slice) -> tuple[Float[Array, "b K V"], Float[Array, "b K"]]:
        draft_logprobs = sampling.processed_logprobs(logits[rows], processing, produced[rows], factor)
        return draft_logprobs, jnp.nan_to_num(jnp.sum(jnp.exp(jnp.minimum(target_logprobs[rows], draft_logprobs)), axis=-1))

    draft_logprobs, overlap = at(factors, slice(None))
    first = slice(None, None, group_size)
    by_factor = [at(factor, first)[1] for factor in grid] if len(grid) > 1 else [overlap[first]]
    return Comparison(draft_logprobs, overlap, jnp.stack(by_factor, axis=-1), jnp.nan_to_num(sampling.entropy(draft_logprobs)))


def count(
    rollout: Rollout,
    verdict: Verdict,
    offered: Int[Array, " B"],
    comparison: Comparison,
    entropy: Float[Array, "B K1"],
    kept: Int[Array, " B"],
    group_size: int,
) -> Statistics:
    """Adds one round, in which each row was offered `offered` drafts and kept `kept` tokens."""
    statistics, ran = rollout.statistics, rollout.status == RUNNING
    depths = jnp.arange(1, comparison.overlap.shape[1] + 1, dtype=jnp.int32)
    drafted = ran[:, None] & (depths <= offered[:, None])
    reached = drafted & (depths <= kept[:, None])  # what stands before it was kept
    accepted = depths <= jnp.minimum(verdict.accepted, kept)[:, None]
    inside = jnp.arange(entropy.shape[1], dtype=jnp.int32) < kept[:, None]
    by_factor = jnp.where(reached[::group_size, :, None], comparison.overlap_by_factor, 0)
    return Statistics(
        rounds=statistics.rounds + ran.astype(jnp.int32),
        drafted=statistics.drafted + drafted.astype(jnp.int32),
        reached=statistics.reached + reached.astype(jnp.int32),
        accepted=statistics.accepted + accepted.astype(jnp.int32),
        kept=statistics.kept + jnp.where(offered > 0, kept, 0),
        overlap=statistics.overlap + jnp.where(reached, comparison.overlap, 0),
        overlap_by_factor=statistics.overlap_by_factor + by_factor,
        draft_entropy=statistics.draft_entropy + jnp.where(reached, comparison.draft_entropy, 0),
        target_entropy=statistics.target_entropy + jnp.sum(jnp.where(inside, entropy, 0), axis=1),
    )


def acceptance_metrics(
    statistics: Statistics, tokens: Num[Array, ""], choice: Int[Array, " K"], grid: tuple[float, ...]
) -> dict[str, Num[Array, ""]]:
    """What speculation did, over all rows of `statistics`, which hold `tokens` response tokens.

    Rates by depth are unconditional (of the rounds with a draft) or conditional (of those that kept every draft before); `choice` are the
    draft temperatures of `grid` that were used.
    """
    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0).astype(jnp.float32), statistics)

    def share(part: Array, whole: Array) -> Array:
        return part / jnp.maximum(whole, 1)

    by_depth = {
        "acceptance_rate": share(total.accepted, total.drafted[:1]),
        "conditional_rate": share(total.accepted, total.reached),
        "expected_acceptance": share(total.overlap, total.reached),
        "draft_entropy": share(total.draft_entropy, total.reached),
        "draft_temperature": jnp.asarray(grid, jnp.float32)[choice],
    }
    drafted, generated = jnp.sum(total.drafted[:1]), tokens.astype(jnp.float32)
    return {
        "rollout/tokens_per_target_pass": share(generated, total.rounds),
        "rollout/acceptance_length": jnp.where(drafted > 0, share(total.kept, drafted), 1),
        "rollout/acceptance_rate": share(jnp.sum(total.accepted), jnp.sum(total.drafted)),
        "rollout/coverage": share(drafted, total.rounds),
        "rollout/target_entropy": share(total.target_entropy, generated),
        **{f"rollout/{name}_{depth}": value for name, values in by_depth.items() for depth, value in enumerate(values, start=1)},
    }
