"""Plain form of verification.

It holds the log-probabilities of all tokens of the vocabulary.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import sampling
from jaxspec.rollout.feedback.acceptance import DraftOverlap
from jaxspec.rollout.verification.block import (
    Block,
    BlockComparison,
    Verification,
    read_draft_logits,
)
from jaxspec.rollout.verify import Distributions
from jaxspec.sampling import Noise, Processing


def draw_drafts(
    logits: Float[Array, "B W"],
    ids: Int[Array, " W"] | None,
    vocab: int,
    processing: Processing,
    response_positions: Int[Array, " B"],
    factor: Float[Array, ""] | float,
    may_be_zero: bool,
    noise: Noise,
) -> Int[Array, " B"]:
    """Draws drafts from their logits over the target's vocabulary."""
    full_logits = sampling.scatter_to_vocabulary(sampling.promote_logits(logits), ids, vocab)
    return sampling.categorical(
        sampling.process_logits(
            full_logits, processing, response_positions, factor, may_be_zero=may_be_zero
        ),
        noise,
    )


def compare_block(block: Block) -> BlockComparison:
    """Compares target and draft by their log-probabilities.

    A draft that is NaN has an overlap of 0.
    """
    target_logprobs = sampling.compute_logprobs(
        block.logits, block.processing, block.response_positions
    )
    draft_logprobs, draft_overlap = _compare_drafts(block, target_logprobs)
    return BlockComparison(
        distributions=make_distributions(target_logprobs, draft_logprobs),
        # A distribution without a possible token, or with a logit that overflows, is NaN at all
        # tokens, so one token is checked.
        finite=jnp.isfinite(block.logits).all(axis=-1) & ~jnp.isnan(target_logprobs[:, :, 0]),
        logprobs=lambda tokens: _pick_tokens(target_logprobs, tokens),
        entropy=sampling.entropy(target_logprobs),
        draft_overlap=draft_overlap,
    )


PLAIN = Verification("plain", draw_drafts, compare_block)


def make_distributions(
    target_logprobs: Float[Array, "B K1 V"], draft_logprobs: Float[Array, "B K V"]
) -> Distributions:
    """Builds the functions of `Distributions` from log-probabilities."""

    def draft_token_logprobs(
        draft_tokens: Int[Array, "B K"],
    ) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
        return _pick_tokens(
            target_logprobs[:, : draft_tokens.shape[1]], draft_tokens
        ), _pick_tokens(draft_logprobs, draft_tokens)

    def residual_mass(log_weights: Float[Array, "B N"]) -> Float[Array, "B N"]:
        length = draft_logprobs.shape[1]
        residuals = jnp.exp(log_weights[:, :, None] + target_logprobs[:, 1:length]) - jnp.exp(
            draft_logprobs[:, 1:]
        )
        return jnp.sum(jnp.maximum(residuals, 0), axis=-1)

    def draw_next(
        accepted: Int[Array, " B"],
        rejected: Bool[Array, " B"],
        log_weight: Float[Array, " B"],
        noise: Noise,
    ) -> Int[Array, " B"]:
        at_cut = accepted[:, None, None]
        target = jnp.take_along_axis(target_logprobs, at_cut, axis=1)[:, 0]
        # After the last draft the index is clipped, and `rejected` is False.
        draft = jnp.take_along_axis(draft_logprobs, at_cut, axis=1, mode="clip")[:, 0]
        residual = jnp.maximum(jnp.exp(log_weight[:, None] + target) - jnp.exp(draft), 0)
        # If weighted target and draft agree up to rounding, a cut has probability about 0, and the
        # residual may be zero everywhere.
        from_residual = rejected[:, None] & (jnp.sum(residual, axis=-1, keepdims=True) > 0)
        return sampling.categorical(jnp.where(from_residual, jnp.log(residual), target), noise)

    return Distributions(
        draft_token_logprobs,
        residual_mass,
        draw_next,
        draw_target=lambda noise: sampling.categorical(target_logprobs, noise),
    )


def _pick_tokens(logprobs: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns the log-probability of one token per position."""
    return jnp.take_along_axis(logprobs, tokens[:, :, None], axis=2)[:, :, 0]


def _compare_drafts(
    block: Block, target_logprobs: Float[Array, "B K1 V"]
) -> tuple[Float[Array, "B K V"], DraftOverlap]:
    """Returns the draft's log-probabilities, and its overlap with the target."""
    drafts, grid, measured_slots = read_draft_logits(block), block.grid, block.measured_slots
    length = drafts.logits.shape[1]
    target_logprobs, response_positions = (
        target_logprobs[:, :length],
        block.response_positions[:, :length],
    )
    logits = sampling.scatter_to_vocabulary(
        sampling.promote_logits(drafts.logits), drafts.vocabulary.ids, target_logprobs.shape[-1]
    )
    # All mass is on the draft's token, so the overlap is the target's probability.
    if drafts.is_certain:
        overlap = jnp.exp(_pick_tokens(target_logprobs, block.proposal.tokens))
        repeated_overlap = jnp.repeat(overlap[measured_slots][:, :, None], len(grid), axis=2)
        return logits, DraftOverlap(overlap, repeated_overlap, jnp.zeros_like(overlap))

    def compare_at_factor(
        factor: Float[Array, " K"] | float, rows: slice | Int[Array, " m"]
    ) -> tuple[Float[Array, "b K V"], Float[Array, "b K"]]:
        draft_logprobs = sampling.compute_logprobs(
            logits[rows],
            block.processing,
            response_positions[rows],
            factor,
            may_be_zero=0.0 in grid,
        )
        return draft_logprobs, jnp.nan_to_num(
            jnp.sum(jnp.exp(jnp.minimum(target_logprobs[rows], draft_logprobs)), axis=-1)
        )

    draft_logprobs, overlap = compare_at_factor(block.factors, slice(None))
    # The only factor of a grid of one is that of `factors`.
    by_factor = (
        [compare_at_factor(factor, measured_slots)[1] for factor in grid]
        if len(grid) > 1
        else [overlap[measured_slots]]
    )
    # 0 for a draft that is NaN.
    entropy = jnp.nan_to_num(sampling.entropy(draft_logprobs))
    return draft_logprobs, DraftOverlap(overlap, jnp.stack(by_factor, axis=-1), entropy)
