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

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import sampling
from jaxspec.rollout.feedback.acceptance import DraftOverlap
from jaxspec.rollout.verification.block import (
    Block,
    BlockComparison,
    DraftLogits,
    Verification,
    read_draft_logits,
)
from jaxspec.rollout.verification.summary import (
    Summary,
    logprobs_at_any_temperature,
    logprobs_from_summary,
    summarize_logits,
)
from jaxspec.rollout.verification.vocabulary import make_vocabulary
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
    return make_vocabulary(ids, vocab).find_ids(indices)


class _Summaries(NamedTuple):
    """Summaries of target and draft.

    With the logits, they give all log-probabilities.
    """

    drafts: DraftLogits
    target: Summary
    outside_mass: Float[Array, "B K1"]
    """Mass of the target outside the draft's vocabulary."""
    draft: Summary


def compare_block(block: Block) -> BlockComparison:
    """Compares target and draft by their summaries.

    A draft that is NaN has an overlap of 0.
    """
    drafts = read_draft_logits(block)
    target, moments = summarize_logits(
        _mask_logits(block, block.logits, block.response_positions, None),
        block.processing.temperature,
        outside_mask=drafts.vocabulary.outside_mask,
        finite_mask=jnp.isfinite(block.logits),
    )
    temperature = block.processing.temperature * block.factors
    draft, draft_moments = summarize_logits(
        _draft_logits(block, drafts), temperature, 0.0 in block.grid
    )
    summaries = _Summaries(drafts, target, moments.outside_mass, draft)
    entropy = (
        jnp.zeros(block.proposal.tokens.shape, moments.entropy.dtype)
        if drafts.is_certain
        else jnp.nan_to_num(draft_moments.entropy)
    )
    return BlockComparison(
        distributions=Distributions(
            draft_token_logprobs=partial(_draft_token_logprobs, block, summaries),
            residual_mass=partial(_residual_mass, block, summaries),
            draw_next=partial(_draw_next, block, summaries),
            draw_target=partial(_draw_target, block, summaries),
        ),
        finite=moments.finite & ~jnp.isnan(target.log_total),
        logprobs=lambda tokens: _token_logprobs(block, summaries, tokens),
        entropy=moments.entropy,
        draft_overlap=_compare_drafts(block, summaries, entropy),
    )


FUSED = Verification("fused", draw_drafts, compare_block)


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


def _draft_logits(block: Block, drafts: DraftLogits) -> Float[Array, "B K W"]:
    """Returns the draft's masked logits over its own vocabulary."""
    logits = sampling.promote_logits(drafts.logits)
    positions = block.response_positions[:, : logits.shape[1]]
    return _mask_logits(block, logits, positions, drafts.vocabulary.ids)


def _logprobs_of_draft(
    block: Block,
    summary: Summary,
    logits: Float[Array, "*B N"],
    indices: Int[Array, "*#B N"],
) -> Float[Array, "*B N"]:
    """Returns the draft's log-probabilities of masked logits.

    `indices` are the draft's indices of their tokens.
    """
    if 0.0 in block.grid:
        return logprobs_at_any_temperature(summary, logits, indices)
    return logprobs_from_summary(summary, logits)


def _draft_logprobs(block: Block, summaries: _Summaries) -> Float[Array, "B K W"]:
    """Returns the draft's log-probabilities over its own vocabulary."""
    logits = _draft_logits(block, summaries.drafts)
    indices = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return _logprobs_of_draft(block, summaries.draft, logits, indices)


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
    vocabulary, positions = summaries.drafts.vocabulary, slice(block.proposal.tokens.shape[1])
    logits = block.logits[rows][:, positions]
    masked = _mask_logits(
        block,
        vocabulary.select(logits),
        block.response_positions[rows][:, positions],
        vocabulary.ids,
    )
    return logprobs_from_summary(
        summaries.target.select_at(rows).select_at(slice(None), positions), masked
    )


# ---- comparison


def _compare_drafts(
    block: Block, summaries: _Summaries, entropy: Float[Array, "B K"]
) -> DraftOverlap:
    """Returns the overlap of target and draft at each draft."""
    # All mass is on the draft's token, so the overlap is the target's probability.
    if summaries.drafts.is_certain:
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
    rows = block.measured_slots

    def add_factor_axis(values: Float[Array, "m K *W"]) -> Float[Array, "m K F *W"]:
        shape = *values.shape[:2], len(block.grid), *values.shape[2:]
        return jnp.broadcast_to(jnp.expand_dims(values, 2), shape)

    logits = add_factor_axis(_draft_logits(block, summaries.drafts)[rows])
    temperatures = block.processing.temperature * jnp.asarray(block.grid, logits.dtype)
    indices = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    summary, _ = summarize_logits(logits, temperatures, may_be_zero=0.0 in block.grid)
    return _compute_overlap(
        add_factor_axis(_target_logprobs(block, summaries, rows)),
        _logprobs_of_draft(block, summary, logits, indices),
    )


# ---- distributions


def _draft_token_logprobs(
    block: Block, summaries: _Summaries, draft_tokens: Int[Array, "B K"]
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """Returns the draft tokens' log-probabilities under target and draft."""
    indices = summaries.drafts.vocabulary.find_indices(draft_tokens)[:, :, None]
    draft_logits = _draft_logits(block, summaries.drafts)
    logits = jnp.take_along_axis(draft_logits, jnp.maximum(indices, 0), axis=2)
    # A token outside the draft's vocabulary has draft probability 0.
    logprobs = jnp.where(
        indices < 0, -jnp.inf, _logprobs_of_draft(block, summaries.draft, logits, indices)
    )
    return _token_logprobs(block, summaries, draft_tokens), logprobs[:, :, 0]


def _residual_mass(
    block: Block, summaries: _Summaries, log_weights: Float[Array, "B N"]
) -> Float[Array, "B N"]:
    """Returns the mass of the residual at each draft after the first."""
    # The first draft needs no residual. It is included, because XLA computes arrays of the
    # overlap's shape in the same pass as the overlap.
    length = block.proposal.tokens.shape[1]
    weights = jnp.pad(log_weights, ((0, 0), (1, 0)))[:, :length]
    target = weights[:, :, None] + _target_logprobs(block, summaries, slice(None))
    residual = jnp.maximum(jnp.exp(target) - jnp.exp(_draft_logprobs(block, summaries)), 0)
    residual_inside = jnp.sum(residual, axis=-1)
    return (residual_inside + jnp.exp(weights) * summaries.outside_mass[:, :length])[:, 1:]


def _draw_next(
    block: Block,
    summaries: _Summaries,
    accepted: Int[Array, " B"],
    rejected: Bool[Array, " B"],
    log_weight: Float[Array, " B"],
    noise: Noise,
) -> Int[Array, " B"]:
    """Draws the token after the cut from the residual or the target."""
    # Only the rules of `RejectionNoise` draw here. Its rounds have at least one draft.
    target = _target_logprobs_at(block, summaries, accepted)
    draft = _draft_distribution(block, summaries, accepted)
    weighted = log_weight[:, None] + target
    residual, weights = jnp.maximum(jnp.exp(weighted) - draft, 0), jnp.exp(target)

    def weigh_target(tokens: Int[Array, "B N"]) -> Float[Array, "B N"]:
        return jnp.exp(_target_token_logprobs(block, summaries, accepted, tokens))

    def weigh_residual(tokens: Int[Array, "B N"]) -> Float[Array, "B N"]:
        target = _target_token_logprobs(block, summaries, accepted, tokens)
        draft = _draft_token_probs(block, summaries, accepted, tokens)
        return jnp.maximum(jnp.exp(log_weight[:, None] + target) - draft, 0)

    if isinstance(noise, Uniforms):
        weigh = weigh_residual, weigh_target
        return sampling.draw_from_either(residual, weights, rejected, noise, weigh)
    # If weighted target and draft agree up to rounding, a cut has probability about 0, and the
    # residual may be zero everywhere.
    from_residual = rejected[:, None] & jnp.any(residual > 0, axis=-1, keepdims=True)
    return sampling.categorical(jnp.log(jnp.where(from_residual, residual, weights)), noise)


def _draw_target(block: Block, summaries: _Summaries, noise: Noise) -> Int[Array, "B K1"]:
    """Draws target samples at every position."""

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


# ---- distributions at the cut, one position per row


def _target_logprobs_at(
    block: Block, summaries: _Summaries, cut: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Returns the target's log-probabilities of all tokens."""
    rows = jnp.arange(len(cut), dtype=jnp.int32)
    masked = _mask_logits(block, block.logits[rows, cut], block.response_positions[rows, cut], None)
    return logprobs_from_summary(summaries.target.select_at(rows, cut), masked)


def _target_token_logprobs(
    block: Block, summaries: _Summaries, cut: Int[Array, " B"], tokens: Int[Array, "B N"]
) -> Float[Array, "B N"]:
    """Returns the target's log-probabilities of some tokens."""
    rows = jnp.arange(len(cut), dtype=jnp.int32)
    logits = block.logits[rows[:, None], cut[:, None], tokens]
    masked = _mask_logits(block, logits, block.response_positions[rows, cut], tokens)
    return logprobs_from_summary(summaries.target.select_at(rows, cut), masked)


def _draft_distribution(
    block: Block, summaries: _Summaries, cut: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Returns the draft's probabilities of all tokens of the target."""
    rows, depth = jnp.arange(len(cut), dtype=jnp.int32), _last_depth(block, cut)
    vocabulary = summaries.drafts.vocabulary
    logits = sampling.promote_logits(vocabulary.expand(summaries.drafts.logits[rows, depth]))
    masked = _mask_logits(block, logits, block.response_positions[rows, cut], None)
    summary = summaries.draft.select_at(rows, depth)
    indices = jnp.maximum(vocabulary.indices, 0)
    return vocabulary.clear_outside(jnp.exp(_logprobs_of_draft(block, summary, masked, indices)))


def _draft_token_probs(
    block: Block, summaries: _Summaries, cut: Int[Array, " B"], tokens: Int[Array, "B N"]
) -> Float[Array, "B N"]:
    """Returns the draft's probabilities of some tokens of the target."""
    rows, depth = jnp.arange(len(cut), dtype=jnp.int32), _last_depth(block, cut)
    indices = summaries.drafts.vocabulary.find_indices(tokens)
    # A token outside the draft's vocabulary has index -1. Any entry serves for it, since the last
    # line sets its probability to 0.
    clipped_indices = jnp.maximum(indices, 0)
    logits = sampling.promote_logits(
        summaries.drafts.logits[rows[:, None], depth[:, None], clipped_indices]
    )
    masked = _mask_logits(block, logits, block.response_positions[rows, cut], tokens)
    summary = summaries.draft.select_at(rows, depth)
    draft_probs = jnp.exp(_logprobs_of_draft(block, summary, masked, clipped_indices))
    return jnp.where(indices < 0, 0, draft_probs)


def _last_depth(block: Block, cut: Int[Array, " B"]) -> Int[Array, " B"]:
    """Returns the depth of the draft at the cut, at most the last."""
    # After the last draft nothing is rejected, and the values are not used.
    return jnp.minimum(cut, block.proposal.tokens.shape[1] - 1)
