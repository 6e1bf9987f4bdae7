"""Fast form of verification.

It makes three passes over the vocabulary, and holds no array over it:

1. The summary of each distribution: its largest logit, sum of exponentials, and entropy.
2. Overlaps and residuals of target and draft, over the draft's own vocabulary.
3. The draw of the token after the cut, at one position per row.

All other work is element-wise inside these passes. The processing must be element-wise too, hence
without top-k, top-p, min-p or temperature 0.

For given drafts, it keeps and draws the same tokens as the plain form, up to rounding. Drafts from
a smaller vocabulary are other samples of the same distribution.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import sampling
from jaxspec.rollout.feedback.acceptance import DraftOverlap
from jaxspec.rollout.verification.block import Block, BlockComparison, Verification
from jaxspec.rollout.verification.summary import Summary, logprobs_from_summary, summarize
from jaxspec.rollout.verify import Distributions
from jaxspec.sampling import Noise, Processing, Uniforms


def is_supported(processing: Processing) -> bool:
    """Returns whether each logit is processed independently of the others."""
    truncates = processing.top_k > 0 or processing.top_p < 1 or processing.min_p > 0
    return not truncates and processing.temperature > 0


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
    """Draws drafts from the draft's own vocabulary."""
    promoted_logits = sampling.promote_logits(logits)
    indices = sampling.categorical(
        sampling.process_logits(
            promoted_logits,
            processing,
            response_positions,
            factor,
            may_be_zero=may_be_zero,
            ids=ids,
        ),
        noise,
    )
    return indices if ids is None else ids[indices]


class _Summaries(NamedTuple):
    """Summaries of target and draft.

    With the logits, they give all log-probabilities.
    """

    ids: Int[Array, " W"] | None
    """The target's ids of the draft's vocabulary. None if the draft has the target's vocabulary."""
    draft_indices: Int[Array, " V"] | None
    """Index of each token of the target in the draft's vocabulary, or -1."""
    target: Summary
    outside_mass: Float[Array, "B K1"]
    """Mass of the target outside the draft's vocabulary."""
    draft: Summary | None
    """None for deterministic drafts."""


def compare_block(block: Block) -> BlockComparison:
    """Compares target and draft by their summaries.

    A draft that is NaN has an overlap of 0.
    """
    ids, vocab = block.proposal.ids, block.logits.shape[-1]
    draft_indices = None if ids is None else _index_draft_tokens(ids, vocab)
    target, moments = summarize(
        _mask_logits(block, block.logits, block.response_positions, None),
        block.processing.temperature,
        outside_mask=None if draft_indices is None else draft_indices < 0,
        raw_logits=block.logits,
    )
    draft = None
    entropy = jnp.zeros(block.proposal.tokens.shape, moments.entropy.dtype)
    if block.proposal.logits is not None:
        temperature = block.processing.temperature * block.factors
        draft, draft_moments = summarize(_draft_logits(block, ids), temperature, 0.0 in block.grid)
        entropy = jnp.nan_to_num(draft_moments.entropy)
    summaries = _Summaries(ids, draft_indices, target, moments.outside_mass, draft)
    return BlockComparison(
        distributions=_make_distributions(block, summaries),
        finite=moments.finite & ~jnp.isnan(target.log_total),
        logprobs=lambda tokens: _token_logprobs(block, summaries, tokens),
        entropy=moments.entropy,
        draft_overlap=_compare_drafts(block, summaries, entropy),
    )


FUSED = Verification("fused", draw_drafts, compare_block)


def _index_draft_tokens(ids: Int[Array, " W"], vocab: int) -> Int[Array, " V"]:
    """Returns the index of each token in `ids`, or -1."""
    indices = jnp.arange(len(ids), dtype=jnp.int32)
    # `ids` are ascending.
    no_indices = jnp.full((vocab,), -1, jnp.int32)
    return no_indices.at[ids].set(indices, indices_are_sorted=True, unique_indices=True)


# ---- log-probabilities, element by element


def _mask_logits(
    block: Block,
    logits: Float[Array, "*B N"],
    response_positions: Int[Array, "*B"],
    ids: Int[Array, "*#B N"] | None,
) -> Float[Array, "*B N"]:
    """Masks excluded tokens, before the temperature is applied."""
    # The summary divides by the temperature.
    untempered = block.processing._replace(temperature=1.0)
    return sampling.process_logits(logits, untempered, response_positions, ids=ids)


def _draft_logits(block: Block, ids: Int[Array, " W"] | None) -> Float[Array, "B K W"]:
    """Returns the draft's masked logits over its own vocabulary."""
    assert block.proposal.logits is not None, "only drafts with logits have distributions"
    logits = sampling.promote_logits(block.proposal.logits)
    return _mask_logits(block, logits, block.response_positions[:, : logits.shape[1]], ids)


def _draft_logprobs(block: Block, summaries: _Summaries) -> Float[Array, "B K W"]:
    """Returns the draft's log-probabilities over its own vocabulary."""
    logits = _draft_logits(block, summaries.ids)
    return logprobs_from_summary(_require_draft(summaries), logits, 0.0 in block.grid)


def _require_draft(summaries: _Summaries) -> Summary:
    assert summaries.draft is not None, "only drafts with logits have distributions"
    return summaries.draft


def _token_logprobs(
    block: Block, summaries: _Summaries, tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns the target's log-probability of one token at each of the first positions."""
    positions, token_ids = slice(tokens.shape[1]), tokens[:, :, None]
    logits = jnp.take_along_axis(block.logits[:, positions], token_ids, axis=2)
    masked = _mask_logits(block, logits, block.response_positions[:, positions], token_ids)
    return logprobs_from_summary(summaries.target.select_at(slice(None), positions), masked)[
        :, :, 0
    ]


def _target_logprobs(
    block: Block, summaries: _Summaries, rows: slice | Int[Array, " m"]
) -> Float[Array, "b K W"]:
    """Returns the target's log-probabilities over the draft's vocabulary."""
    ids, positions = summaries.ids, slice(block.proposal.tokens.shape[1])
    logits = block.logits[rows][:, positions]
    masked = _mask_logits(
        block,
        logits if ids is None else jnp.take(logits, ids, axis=-1),
        block.response_positions[rows][:, positions],
        ids,
    )
    return logprobs_from_summary(
        summaries.target.select_at(rows).select_at(slice(None), positions), masked
    )


# ---- comparison


def _compare_drafts(
    block: Block, summaries: _Summaries, entropy: Float[Array, "B K"]
) -> DraftOverlap:
    """Returns the overlap of target and draft at each draft."""
    # All mass of a deterministic draft is on its token, so the overlap is the target's probability.
    if summaries.draft is None:
        overlap = jnp.exp(_token_logprobs(block, summaries, block.proposal.tokens))
        repeated_overlap = jnp.repeat(
            overlap[block.measured_slots][:, :, None], len(block.grid), axis=2
        )
        return DraftOverlap(overlap, repeated_overlap, entropy)
    overlap = _compute_overlap(
        _target_logprobs(block, summaries, slice(None)), _draft_logprobs(block, summaries)
    )
    by_factor = (
        _overlap_by_factor(block, summaries)
        if len(block.grid) > 1
        else overlap[block.measured_slots][:, :, None]
    )
    return DraftOverlap(overlap, by_factor, entropy)


def _compute_overlap(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    return jnp.nan_to_num(jnp.sum(jnp.exp(jnp.minimum(target_logprobs, draft_logprobs)), axis=-1))


def _overlap_by_factor(block: Block, summaries: _Summaries) -> Float[Array, "m K F"]:
    """Returns the overlap at all factors of the grid, in the measured slots."""
    rows, may_be_zero = block.measured_slots, 0.0 in block.grid

    def add_factor_axis(values: Float[Array, "m K *W"]) -> Float[Array, "m K F *W"]:
        shape = *values.shape[:2], len(block.grid), *values.shape[2:]
        return jnp.broadcast_to(jnp.expand_dims(values, 2), shape)

    logits = add_factor_axis(_draft_logits(block, summaries.ids)[rows])
    temperatures = block.processing.temperature * jnp.asarray(block.grid, logits.dtype)
    summary, _ = summarize(logits, temperatures, may_be_zero)
    return _compute_overlap(
        add_factor_axis(_target_logprobs(block, summaries, rows)),
        logprobs_from_summary(summary, logits, may_be_zero),
    )


# ---- distributions


def _make_distributions(block: Block, summaries: _Summaries) -> Distributions:
    length, may_be_zero = block.proposal.tokens.shape[1], 0.0 in block.grid

    def draft_token_logprobs(
        draft_tokens: Int[Array, "B K"],
    ) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
        indices = (
            draft_tokens
            if summaries.draft_indices is None
            else summaries.draft_indices[draft_tokens]
        )[:, :, None]
        draft_logits = _draft_logits(block, summaries.ids)
        logits = jnp.take_along_axis(draft_logits, jnp.maximum(indices, 0), axis=2)
        # A token outside the draft's vocabulary has draft probability 0.
        logprobs = jnp.where(
            indices < 0,
            -jnp.inf,
            logprobs_from_summary(_require_draft(summaries), logits, may_be_zero, indices),
        )
        return _token_logprobs(block, summaries, draft_tokens), logprobs[:, :, 0]

    def residual_mass(log_weights: Float[Array, "B N"]) -> Float[Array, "B N"]:
        # Includes the first draft, which is not needed. With the same shape as the overlap, both
        # are computed in one pass.
        weights = jnp.pad(log_weights, ((0, 0), (1, 0)))[:, :length]
        target = weights[:, :, None] + _target_logprobs(block, summaries, slice(None))
        residual = jnp.maximum(jnp.exp(target) - jnp.exp(_draft_logprobs(block, summaries)), 0)
        residual_inside = jnp.sum(residual, axis=-1)
        return (residual_inside + jnp.exp(weights) * summaries.outside_mass[:, :length])[:, 1:]

    def draw_next(
        accepted: Int[Array, " B"],
        rejected: Bool[Array, " B"],
        log_weight: Float[Array, " B"],
        noise: Noise,
    ) -> Int[Array, " B"]:
        def target(tokens: Int[Array, "B N"] | None = None) -> Float[Array, "B N"]:
            return jnp.exp(_target_logprobs_at(block, summaries, accepted, tokens))

        def residual(tokens: Int[Array, "B N"] | None = None) -> Float[Array, "B N"]:
            weighted = log_weight[:, None] + _target_logprobs_at(block, summaries, accepted, tokens)
            draft = _draft_probs_at(block, summaries, accepted, tokens) if length else 0
            return jnp.maximum(jnp.exp(weighted) - draft, 0)

        if isinstance(noise, Uniforms):
            weights = residual(), target()
            return sampling.draw_from_either(*weights, rejected, noise, (residual, target))
        # If weighted target and draft agree up to rounding, a cut has probability about 0, and the
        # residual may be zero everywhere.
        residual_weights = residual()
        from_residual = rejected[:, None] & jnp.any(residual_weights > 0, axis=-1, keepdims=True)
        return sampling.categorical(
            jnp.log(jnp.where(from_residual, residual_weights, target())), noise
        )

    def draw_target(noise: Noise) -> Int[Array, "B K1"]:
        def weigh(tokens: Int[Array, "B K1 M"]) -> Float[Array, "B K1 M"]:
            logits = jnp.take_along_axis(block.logits, tokens, axis=2)
            masked = _mask_logits(block, logits, block.response_positions, tokens)
            return jnp.exp(logprobs_from_summary(summaries.target, masked))

        logprobs = logprobs_from_summary(
            summaries.target, _mask_logits(block, block.logits, block.response_positions, None)
        )
        if isinstance(noise, Uniforms):
            return sampling.draw_by_weight(jnp.exp(logprobs), noise, weigh)
        return sampling.categorical(logprobs, noise)

    return Distributions(draft_token_logprobs, residual_mass, draw_next, draw_target)


def _target_logprobs_at(
    block: Block, summaries: _Summaries, cut: Int[Array, " B"], tokens: Int[Array, "B N"] | None
) -> Float[Array, "B N"]:
    """Returns the target's log-probabilities at one position per row.

    They are those of `tokens`, or of all tokens if None.
    """
    rows = jnp.arange(len(cut), dtype=jnp.int32)
    logits = (
        block.logits[rows, cut]
        if tokens is None
        else block.logits[rows[:, None], cut[:, None], tokens]
    )
    masked = _mask_logits(block, logits, block.response_positions[rows, cut], tokens)
    return logprobs_from_summary(summaries.target.select_at(rows, cut), masked)


def _draft_probs_at(
    block: Block, summaries: _Summaries, cut: Int[Array, " B"], tokens: Int[Array, "B N"] | None
) -> Float[Array, "B N"]:
    """Returns the draft's probabilities at one position per row.

    They are those of `tokens`, or of all tokens if None.
    """
    assert block.proposal.logits is not None, "only drafts with logits have distributions"
    rows = jnp.arange(len(cut), dtype=jnp.int32)
    # After the last draft nothing is rejected, and the values are not used.
    depth = jnp.minimum(cut, block.proposal.tokens.shape[1] - 1)
    if summaries.draft_indices is None:
        indices = tokens
    else:
        indices = summaries.draft_indices if tokens is None else summaries.draft_indices[tokens]
    # Clipped so that the gather is valid. The last line sets tokens outside to 0.
    clipped_indices = None if indices is None else jnp.maximum(indices, 0)
    logits = block.proposal.logits
    if tokens is not None:
        logits = logits[rows[:, None], depth[:, None], clipped_indices]
    elif clipped_indices is None:
        logits = logits[rows, depth]
    else:
        logits = jnp.take(logits[rows, depth], clipped_indices, axis=-1)
    masked = _mask_logits(
        block, sampling.promote_logits(logits), block.response_positions[rows, cut], tokens
    )
    summary = _require_draft(summaries).select_at(rows, depth)
    draft_probs = jnp.exp(
        logprobs_from_summary(summary, masked, 0.0 in block.grid, clipped_indices)
    )
    return draft_probs if indices is None else jnp.where(indices < 0, 0, draft_probs)
