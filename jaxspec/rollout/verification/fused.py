"""The fast form of verification: three passes over the vocabulary, which hold no array of it.

1. Each distribution's summary: its largest logit, its sum of exponentials, and its entropy.
2. Overlaps and residuals of target and draft, over the draft's own vocabulary.
3. The token after the cut, at that one position of a row.

Everything between is computed element by element inside each pass. The form is for processing that
does the same, without top-k, top-p, min-p or temperature 0. The plain form is its twin: of given
drafts it keeps and draws the same tokens, but for rounding. Drafts from a vocabulary of their own
are other draws of the same distribution.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import sampling
from jaxspec.rollout.feedback.acceptance import Comparison
from jaxspec.rollout.verification.block import Block, Compared, Verification
from jaxspec.rollout.verification.summary import Summary, logprobs_by, summarize
from jaxspec.rollout.verify import Distributions
from jaxspec.sampling import Noise, Processing, Uniforms


def is_supported(processing: Processing) -> bool:
    """Whether each logit is processed by itself."""
    truncated = processing.top_k > 0 or processing.top_p < 1 or processing.min_p > 0
    return not truncated and processing.temperature > 0


def draw(
    logits: Float[Array, "B W"],
    ids: Int[Array, " W"] | None,
    vocab: int,
    processing: Processing,
    produced: Int[Array, " B"],
    factor: Float[Array, ""] | float,
    may_be_zero: bool,
    noise: Noise,
) -> Int[Array, " B"]:
    """Draws drafts among the draft's own tokens."""
    promoted = sampling.promote_logits(logits)
    drawn = sampling.categorical(
        sampling.process_logits(
            promoted, processing, produced, factor, may_be_zero=may_be_zero, ids=ids
        ),
        noise,
    )
    return drawn if ids is None else ids[drawn]


class _Known(NamedTuple):
    """Summaries of each distribution; log-probabilities follow from them and the logits."""

    ids: Int[Array, " W"] | None
    """The draft's vocabulary; None: the target's."""
    places: Int[Array, " V"] | None
    """The place of each of the target's tokens in it, or -1."""
    target: Summary
    outside: Float[Array, "B K1"]
    """The target's mass outside the draft's vocabulary."""
    draft: Summary | None
    """None: nothing was drawn."""


def compare(block: Block) -> Compared:
    """Compares target and draft by their summaries; a draft gone NaN covers nothing."""
    ids, vocab = block.proposal.ids, block.logits.shape[-1]
    places = None if ids is None else _places(ids, vocab)
    target, moments = summarize(
        _masked(block, block.logits, block.produced, None),
        block.processing.temperature,
        outside=None if places is None else places < 0,
        raw=block.logits,
    )
    draft = None
    entropy = jnp.zeros(block.proposal.tokens.shape, moments.entropy.dtype)
    if block.proposal.logits is not None:
        temperature = block.processing.temperature * block.factors
        draft, of_draft = summarize(_draft_logits(block, ids), temperature, 0.0 in block.grid)
        entropy = jnp.nan_to_num(of_draft.entropy)
    known = _Known(ids, places, target, moments.outside, draft)
    return Compared(
        distributions=_distributions(block, known),
        finite=moments.finite & ~jnp.isnan(target.log_total),
        logprobs=lambda tokens: _token_logprobs(block, known, tokens),
        entropy=moments.entropy,
        comparison=_compare_drafts(block, known, entropy),
    )


FUSED = Verification("fused", draw, compare)


def _places(ids: Int[Array, " W"], vocab: int) -> Int[Array, " V"]:
    """The place of each token among `ids`, or -1."""
    order = jnp.arange(len(ids), dtype=jnp.int32)
    nowhere = jnp.full((vocab,), -1, jnp.int32)
    return nowhere.at[ids].set(order, indices_are_sorted=True, unique_indices=True)


# ---- log-probabilities, element by element


def _masked(
    block: Block,
    logits: Float[Array, "*B N"],
    produced: Int[Array, "*B"],
    ids: Int[Array, "*#B N"] | None,
) -> Float[Array, "*B N"]:
    """Logits without the excluded tokens, before the temperature."""
    untempered = block.processing._replace(temperature=1.0)
    return sampling.process_logits(logits, untempered, produced, ids=ids)


def _draft_logits(block: Block, ids: Int[Array, " W"] | None) -> Float[Array, "B K W"]:
    """The draft's over its own tokens."""
    assert block.proposal.logits is not None, "drafts are compared with what they were drawn from"
    logits = sampling.promote_logits(block.proposal.logits)
    return _masked(block, logits, block.produced[:, : logits.shape[1]], ids)


def _draft_logprobs(block: Block, known: _Known) -> Float[Array, "B K W"]:
    """The draft's over its own tokens."""
    logits = _draft_logits(block, known.ids)
    return logprobs_by(_drawn(known), logits, 0.0 in block.grid)


def _drawn(known: _Known) -> Summary:
    assert known.draft is not None, "drafts are compared with what they were drawn from"
    return known.draft


def _token_logprobs(block: Block, known: _Known, tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The target's log-probability of one token at each of the first positions."""
    here, chosen = slice(tokens.shape[1]), tokens[:, :, None]
    logits = jnp.take_along_axis(block.logits[:, here], chosen, axis=2)
    masked = _masked(block, logits, block.produced[:, here], chosen)
    return logprobs_by(known.target.at(slice(None), here), masked)[:, :, 0]


def _target_logprobs(
    block: Block, known: _Known, rows: slice | Int[Array, " m"]
) -> Float[Array, "b K W"]:
    """The target's over the draft's tokens, at each draft of some rows."""
    ids, here = known.ids, slice(block.proposal.tokens.shape[1])
    logits = block.logits[rows][:, here]
    masked = _masked(
        block,
        logits if ids is None else jnp.take(logits, ids, axis=-1),
        block.produced[rows][:, here],
        ids,
    )
    return logprobs_by(known.target.at(rows).at(slice(None), here), masked)


# ---- comparison


def _compare_drafts(block: Block, known: _Known, entropy: Float[Array, "B K"]) -> Comparison:
    """How much of the target the draft covers."""
    if known.draft is None:
        overlap = jnp.exp(_token_logprobs(block, known, block.proposal.tokens))
        everywhere = jnp.repeat(overlap[block.measured][:, :, None], len(block.grid), axis=2)
        return Comparison(overlap, everywhere, entropy)
    overlap = _overlap(_target_logprobs(block, known, slice(None)), _draft_logprobs(block, known))
    by_factor = (
        _overlap_by_factor(block, known)
        if len(block.grid) > 1
        else overlap[block.measured][:, :, None]
    )
    return Comparison(overlap, by_factor, entropy)


def _overlap(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    return jnp.nan_to_num(jnp.sum(jnp.exp(jnp.minimum(target_logprobs, draft_logprobs)), axis=-1))


def _overlap_by_factor(block: Block, known: _Known) -> Float[Array, "m K F"]:
    """The overlap at all factors of the grid, in the measured slots."""
    rows, may_be_zero = block.measured, 0.0 in block.grid

    def by_factor(values: Float[Array, "m K *W"]) -> Float[Array, "m K F *W"]:
        shape = *values.shape[:2], len(block.grid), *values.shape[2:]
        return jnp.broadcast_to(jnp.expand_dims(values, 2), shape)

    logits = by_factor(_draft_logits(block, known.ids)[rows])
    temperatures = block.processing.temperature * jnp.asarray(block.grid, logits.dtype)
    summary, _ = summarize(logits, temperatures, may_be_zero)
    return _overlap(
        by_factor(_target_logprobs(block, known, rows)), logprobs_by(summary, logits, may_be_zero)
    )


# ---- the questions of rules


def _distributions(block: Block, known: _Known) -> Distributions:
    length, may_be_zero = block.proposal.tokens.shape[1], 0.0 in block.grid

    def at_drafted(drafted: Int[Array, "B K"]) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
        place = (drafted if known.places is None else known.places[drafted])[:, :, None]
        drawn_from = _draft_logits(block, known.ids)
        logits = jnp.take_along_axis(drawn_from, jnp.maximum(place, 0), axis=2)
        # a draft is never a token that it does not have
        logprobs = jnp.where(
            place < 0, -jnp.inf, logprobs_by(_drawn(known), logits, may_be_zero, place)
        )
        return _token_logprobs(block, known, drafted), logprobs[:, :, 0]

    def left_over(log_weights: Float[Array, "B N"]) -> Float[Array, "B N"]:
        # At the first draft, too: of that shape, it is in one pass with the overlap.
        weights = jnp.pad(log_weights, ((0, 0), (1, 0)))[:, :length]
        target = weights[:, :, None] + _target_logprobs(block, known, slice(None))
        residual = jnp.maximum(jnp.exp(target) - jnp.exp(_draft_logprobs(block, known)), 0)
        inside = jnp.sum(residual, axis=-1)
        return (inside + jnp.exp(weights) * known.outside[:, :length])[:, 1:]

    def draw_next(
        accepted: Int[Array, " B"],
        rejected: Bool[Array, " B"],
        log_weight: Float[Array, " B"],
        noise: Noise,
    ) -> Int[Array, " B"]:
        def target(tokens: Int[Array, "B N"] | None = None) -> Float[Array, "B N"]:
            return jnp.exp(_logprobs_at(block, known, accepted, tokens))

        def residual(tokens: Int[Array, "B N"] | None = None) -> Float[Array, "B N"]:
            weighted = log_weight[:, None] + _logprobs_at(block, known, accepted, tokens)
            draft = _draft_at(block, known, accepted, tokens) if length else 0
            return jnp.maximum(jnp.exp(weighted) - draft, 0)

        if isinstance(noise, Uniforms):
            weights = residual(), target()
            return sampling.draw_from_either(*weights, rejected, noise, (residual, target))
        # Where weighted target and draft agree to rounding, a cut has probability about 0 and the
        # residual may vanish.
        left = residual()
        from_residual = rejected[:, None] & jnp.any(left > 0, axis=-1, keepdims=True)
        return sampling.categorical(jnp.log(jnp.where(from_residual, left, target())), noise)

    def draw_target(noise: Noise) -> Int[Array, "B K1"]:
        def weigh(tokens: Int[Array, "B K1 M"]) -> Float[Array, "B K1 M"]:
            logits = jnp.take_along_axis(block.logits, tokens, axis=2)
            masked = _masked(block, logits, block.produced, tokens)
            return jnp.exp(logprobs_by(known.target, masked))

        logprobs = logprobs_by(known.target, _masked(block, block.logits, block.produced, None))
        if isinstance(noise, Uniforms):
            return sampling.draw_by_weight(jnp.exp(logprobs), noise, weigh)
        return sampling.categorical(logprobs, noise)

    return Distributions(at_drafted, left_over, draw_next, draw_target)


def _logprobs_at(
    block: Block, known: _Known, cut: Int[Array, " B"], tokens: Int[Array, "B N"] | None
) -> Float[Array, "B N"]:
    """The target's log-probabilities of tokens, at one position of each row; None: of all."""
    rows = jnp.arange(len(cut), dtype=jnp.int32)
    logits = (
        block.logits[rows, cut]
        if tokens is None
        else block.logits[rows[:, None], cut[:, None], tokens]
    )
    masked = _masked(block, logits, block.produced[rows, cut], tokens)
    return logprobs_by(known.target.at(rows, cut), masked)


def _draft_at(
    block: Block, known: _Known, cut: Int[Array, " B"], tokens: Int[Array, "B N"] | None
) -> Float[Array, "B N"]:
    """The draft's probabilities of tokens, at one draft of each row; beyond the last one, nothing
    that is used."""
    assert block.proposal.logits is not None, "a draft that was drawn has logits"
    rows = jnp.arange(len(cut), dtype=jnp.int32)
    depth = jnp.minimum(cut, block.proposal.tokens.shape[1] - 1)
    if known.places is None:
        places = tokens
    else:
        places = known.places if tokens is None else known.places[tokens]
    order = None if places is None else jnp.maximum(places, 0)
    logits = block.proposal.logits
    if tokens is not None:
        logits = logits[rows[:, None], depth[:, None], order]
    elif order is None:
        logits = logits[rows, depth]
    else:
        logits = jnp.take(logits[rows, depth], order, axis=-1)
    masked = _masked(block, sampling.promote_logits(logits), block.produced[rows, cut], tokens)
    summary = _drawn(known).at(rows, depth)
    own = jnp.exp(logprobs_by(summary, masked, 0.0 in block.grid, order))
    return own if places is None else jnp.where(places < 0, 0, own)
