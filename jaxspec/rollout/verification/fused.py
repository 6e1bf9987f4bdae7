"""The fast form of verification: three passes over the vocabulary, which hold no array of it.

1. Each distribution's summary: its largest logit, its sum of exponentials, and its entropy.
2. Overlaps and residuals of target and draft, over the draft's own vocabulary.
3. The token after the cut, at that one position of a row.

Everything between is computed element by element inside each pass. The form is for processing that
does the same, without top-k, top-p or temperature 0. The plain form is its twin: it draws the same
tokens, but for rounding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import sampling
from jaxspec.rollout.acceptance import Comparison
from jaxspec.rollout.verification.block import Block, Compared, Verification
from jaxspec.rollout.verification.summary import Summary, logprobs_by, summarize, total_up
from jaxspec.rollout.verify import Distributions
from jaxspec.sampling import Noise, Processing, Uniforms


def is_supported(processing: Processing) -> bool:
    """Whether each logit is processed by itself."""
    return processing.top_k == 0 and processing.top_p >= 1 and processing.temperature > 0


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
        sampling.processed_logits(
            promoted, processing, produced, factor, may_be_zero=may_be_zero, ids=ids
        ),
        noise,
    )
    return drawn if ids is None else ids[drawn]


def compare(block: Block) -> Compared:
    """Compares target and draft by their summaries; a draft gone NaN covers nothing."""
    places, may_be_zero = _places(block), 0.0 in block.grid
    target, moments = summarize(
        _masked(block, block.logits, block.produced, None),
        block.processing.temperature,
        outside=None if places is None else places < 0,
    )
    draft = None
    entropy = jnp.zeros(block.proposal.tokens.shape, moments.entropy.dtype)
    if block.proposal.logits is not None:
        temperature = block.processing.temperature * block.factors
        draft, of_draft = summarize(_draft_logits(block), temperature, may_be_zero)
        entropy = jnp.nan_to_num(of_draft.entropy)
    # Without the barrier XLA holds arrays of the first pass for the second.
    block, target, draft = _after_pass(block, target, draft)
    return Compared(
        distributions=_distributions(block, _Known(target, moments.outside, draft, places)),
        finite=jnp.isfinite(block.logits).all(axis=-1) & ~jnp.isnan(target.log_total),
        logprobs=lambda tokens: _token_logprobs(block, target, tokens),
        entropy=moments.entropy,
        comparison=_compare_drafts(block, target, draft, entropy),
    )


FUSED = Verification(draw, compare)


def _places(block: Block) -> Int[Array, " V"] | None:
    """The place of each of the target's tokens among the draft's, or -1. None: all have theirs."""
    ids = block.proposal.ids
    if ids is None:
        return None
    order = jnp.arange(len(ids), dtype=jnp.int32)
    nowhere = jnp.full((block.logits.shape[-1],), -1, jnp.int32)
    return nowhere.at[ids].set(order, indices_are_sorted=True, unique_indices=True)


# ---- processed logits, but for the temperature: element by element


def _masked(
    block: Block,
    logits: Float[Array, "*B N"],
    produced: Int[Array, "*B"],
    ids: Int[Array, "*#B N"] | None,
) -> Float[Array, "*B N"]:
    """Logits without the excluded tokens."""
    untempered = block.processing._replace(temperature=1.0)
    return sampling.processed_logits(logits, untempered, produced, ids=ids)


def _draft_logits(block: Block) -> Float[Array, "B K W"]:
    """The draft's over its own tokens."""
    assert block.proposal.logits is not None, "drafts are compared with what they were drawn from"
    logits = sampling.promote_logits(block.proposal.logits)
    return _masked(block, logits, block.produced[:, : logits.shape[1]], block.proposal.ids)


def _token_logprobs(
    block: Block, target: Summary, tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """The target's log-probability of one token at each of the first positions."""
    here, chosen = slice(tokens.shape[1]), tokens[:, :, None]
    logits = jnp.take_along_axis(block.logits[:, here], chosen, axis=2)
    masked = _masked(block, logits, block.produced[:, here], chosen)
    return logprobs_by(target.at(slice(None), here), masked)[:, :, 0]


def _target_logprobs(
    block: Block, target: Summary, rows: slice | Int[Array, " m"]
) -> Float[Array, "b K W"]:
    """The target's log-probabilities over the draft's tokens, at each draft of some rows."""
    ids, here = block.proposal.ids, slice(block.proposal.tokens.shape[1])
    logits = block.logits[rows][:, here]
    masked = _masked(
        block,
        logits if ids is None else jnp.take(logits, ids, axis=-1),
        block.produced[rows][:, here],
        ids,
    )
    return logprobs_by(target.at(rows).at(slice(None), here), masked)


# ---- comparison


def _after_pass(
    block: Block, target: Summary, draft: Summary | None
) -> tuple[Block, Summary, Summary | None]:
    """The same, as if the draft's logits were others than those that were summarized."""
    logits, target, draft = jax.lax.optimization_barrier((block.proposal.logits, target, draft))
    return block._replace(proposal=block.proposal._replace(logits=logits)), target, draft


def _compare_drafts(
    block: Block, target: Summary, draft: Summary | None, entropy: Float[Array, "B K"]
) -> Comparison:
    """How much of the target the draft covers."""
    if draft is None:
        overlap = jnp.exp(_token_logprobs(block, target, block.proposal.tokens))
        everywhere = jnp.repeat(overlap[block.measured][:, :, None], len(block.grid), axis=2)
        return Comparison(overlap, everywhere, entropy)
    draft_logprobs = logprobs_by(draft, _draft_logits(block), 0.0 in block.grid)
    overlap = _overlap(_target_logprobs(block, target, slice(None)), draft_logprobs)
    by_factor = (
        _overlap_by_factor(block, target, draft)
        if len(block.grid) > 1
        else overlap[block.measured][:, :, None]
    )
    return Comparison(overlap, by_factor, entropy)


def _overlap(
    target_logprobs: Float[Array, "*B W"], draft_logprobs: Float[Array, "*B W"]
) -> Float[Array, "*B"]:
    return jnp.nan_to_num(jnp.sum(jnp.exp(jnp.minimum(target_logprobs, draft_logprobs)), axis=-1))


def _overlap_by_factor(block: Block, target: Summary, draft: Summary) -> Float[Array, "m K F"]:
    """The overlap at all factors of the grid, in the measured slots."""
    rows, may_be_zero = block.measured, 0.0 in block.grid
    logits = _draft_logits(block)[rows]
    shape = (*logits.shape[:2], len(block.grid), logits.shape[2])
    temperatures = block.processing.temperature * jnp.asarray(block.grid, logits.dtype)

    def by_factor(values: Float[Array, "m K W"]) -> Float[Array, "m K F W"]:
        return jnp.broadcast_to(values[:, :, None], shape)

    largest, place = (
        jnp.broadcast_to(part[rows][:, :, None], shape[:3]) for part in (draft.largest, draft.place)
    )
    nothing = jnp.zeros(shape[:3], logits.dtype)
    known = Summary(largest, place, jnp.broadcast_to(temperatures, shape[:3]), nothing)
    summary, _ = total_up(by_factor(logits), known, may_be_zero)
    return _overlap(
        by_factor(_target_logprobs(block, target, rows)),
        logprobs_by(summary, by_factor(logits), may_be_zero),
    )


# ---- the questions of rules


class _Known(NamedTuple):
    """Numbers that rules are answered from."""

    target: Summary
    outside: Float[Array, "B K1"]
    """The target's mass on tokens that the draft does not have."""
    draft: Summary | None
    """None: no draft can be rejected."""
    places: Int[Array, " V"] | None
    """See `_places`."""


def _distributions(block: Block, known: _Known) -> Distributions:
    length, places, may_be_zero = block.proposal.tokens.shape[1], known.places, 0.0 in block.grid

    def of_draft() -> Summary:
        assert known.draft is not None, "drafts are compared with what they were drawn from"
        return known.draft

    def at_drafted(drafted: Int[Array, "B K"]) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
        place = (drafted if places is None else places[drafted])[:, :, None]
        logits = jnp.take_along_axis(_draft_logits(block), jnp.maximum(place, 0), axis=2)
        # a draft is never a token that it does not have
        logprobs = jnp.where(
            place < 0, -jnp.inf, logprobs_by(of_draft(), logits, may_be_zero, place)
        )
        return _token_logprobs(block, known.target, drafted), logprobs[:, :, 0]

    def left_over(log_weights: Float[Array, "B N"]) -> Float[Array, "B N"]:
        # At the first draft, too: in the shape of the overlap, both are one pass.
        weights = jnp.pad(log_weights, ((0, 0), (1, 0)))[:, :length]
        target = weights[:, :, None] + _target_logprobs(block, known.target, slice(None))
        draft = logprobs_by(of_draft(), _draft_logits(block), may_be_zero)
        inside = jnp.sum(jnp.maximum(jnp.exp(target) - jnp.exp(draft), 0), axis=-1)
        return (inside + jnp.exp(weights) * known.outside[:, :length])[:, 1:]

    def draft_at(
        rows: Int[Array, " B"], depth: Int[Array, " B"], produced: Int[Array, " B"]
    ) -> Float[Array, "B V"]:
        """The draft's probabilities of the target's tokens, at one draft of each row."""
        assert block.proposal.logits is not None, "a draft that was drawn has logits"
        logits, order = block.proposal.logits[rows, depth], places
        if places is not None:
            order = jnp.maximum(places, 0)
            logits = jnp.take(logits, order, axis=-1)
        masked = _masked(block, sampling.promote_logits(logits), produced, None)
        own = jnp.exp(logprobs_by(of_draft().at(rows, depth), masked, may_be_zero, order))
        return own if places is None else jnp.where(places < 0, 0, own)

    def draw_next(
        accepted: Int[Array, " B"],
        rejected: Bool[Array, " B"],
        log_weight: Float[Array, " B"],
        noise: Noise,
    ) -> Int[Array, " B"]:
        rows = jnp.arange(len(accepted), dtype=jnp.int32)
        # beyond the last draft, none is used
        depth = jnp.minimum(accepted, length - 1)
        produced = block.produced[rows, accepted]
        logprobs = logprobs_by(
            known.target.at(rows, accepted),
            _masked(block, block.logits[rows, accepted], produced, None),
        )
        draft = draft_at(rows, depth, produced) if length else jnp.zeros_like(logprobs)
        residual = jnp.maximum(jnp.exp(log_weight[:, None] + logprobs) - draft, 0)
        if isinstance(noise, Uniforms):
            return sampling.drawn_of_either(residual, jnp.exp(logprobs), rejected, noise)
        # Where weighted target and draft agree to rounding, a cut has probability about 0 and the
        # residual may vanish.
        from_residual = rejected[:, None] & jnp.any(residual > 0, axis=-1, keepdims=True)
        return sampling.categorical(jnp.where(from_residual, jnp.log(residual), logprobs), noise)

    def draw_target(noise: Noise) -> Int[Array, "B K1"]:
        logprobs = logprobs_by(known.target, _masked(block, block.logits, block.produced, None))
        if isinstance(noise, Uniforms):
            return sampling.drawn(jnp.exp(logprobs), noise)
        return sampling.categorical(logprobs, noise)

    return Distributions(at_drafted, left_over, draw_next, draw_target)
