"""The lossless verification rules: whatever the draft proposes, the tokens kept have exactly the
target's law.

A row's first `offered` of K drafts are on offer; the rest of `drafted` and `draft_logprobs`, and
the target beyond, are not looked at. The target must be finite wherever a draft is offered; a draft
position gone NaN ends the offer there.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.sampling import Noise, categorical


class Verdict(NamedTuple):
    """Of K drafted tokens the first `accepted` are kept, and `next_token` follows them."""

    accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]


def leading(agree: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Number of leading True entries."""
    return jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def token_rule(
    target_logprobs: Float[Array, "B K1 V"],
    draft_logprobs: Float[Array, "B K V"],
    drafted: Int[Array, "B K"],
    offered: Int[Array, " B"],
    coins: Float[Array, "B K"],
    next_noise: Noise,
) -> Verdict:
    """Accepts a draft with probability min(1, target/draft); a rejection draws from the residual
    (target - draft)+.

    Args:
      target_logprobs: processed log-probabilities at the K+1 verified positions.
      draft_logprobs: the distributions the drafts were sampled from.
      drafted: tokens sampled from `draft_logprobs`.
      offered: drafts on offer, 0..K, a function of the prefix; after the last one the target itself
        gives the next token.
      coins: uniform in (0, 1), fresh in every round.
      next_noise: for the one token after the cut, fresh in every round.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318.
    """
    target_at_draft, draft_at_draft, offered = _at_draft(
        target_logprobs, draft_logprobs, drafted, offered
    )
    # Strict: a coin of exactly 0 must not accept a token of target probability 0.
    keep = coins * jnp.exp(draft_at_draft) < jnp.exp(target_at_draft)
    accepted = jnp.minimum(leading(keep), offered)
    return _cut(
        target_logprobs,
        draft_logprobs,
        accepted,
        offered,
        jnp.zeros_like(target_logprobs[:, 0, 0]),
        next_noise,
    )


def block_rule(
    target_logprobs: Float[Array, "B K1 V"],
    draft_logprobs: Float[Array, "B K V"],
    drafted: Int[Array, "B K"],
    offered: Int[Array, " B"],
    coins: Float[Array, "B K"],
    next_noise: Noise,
) -> Verdict:
    """Verifies the drafts together: keeps at least as many as `token_rule` on average, with the
    same law. See there for the arguments.

    With weight_0 = 1 and weight_i = min(weight_{i-1} target/draft, 1) at draft i, the longest i is
    kept whose coin is below spare_i / (spare_i + 1 - weight_i), where spare_i is the mass of the
    residual (weight_i target - draft)+ after it; the last draft on offer is kept where its coin is
    below its weight.

    Source: Sun et al., arXiv 2403.10444, algorithm 2.
    """
    length = drafted.shape[1]
    target_at_draft, draft_at_draft, offered = _at_draft(
        target_logprobs, draft_logprobs, drafted, offered
    )
    ratios = target_at_draft - draft_at_draft
    logs = [jnp.zeros_like(target_logprobs[:, 0, 0])]
    for offset in range(length):
        logs.append(jnp.minimum(logs[-1] + ratios[:, offset], 0))
    log_weights = jnp.stack(logs, axis=1)
    weights = jnp.exp(log_weights[:, 1:])
    inner = weights[:, :-1]
    residuals = jnp.exp(log_weights[:, 1:-1, None] + target_logprobs[:, 1:length]) - jnp.exp(
        draft_logprobs[:, 1:]
    )
    left_over = jnp.sum(jnp.maximum(residuals, 0), axis=-1)
    # Weight 1 and nothing to left_over: the laws after it agree and a later draft is kept, but for
    # rounding.
    inner = jnp.where(inner == 1, 1, left_over / jnp.where(inner == 1, 1, left_over + 1 - inner))
    depths = jnp.arange(1, length + 1, dtype=jnp.int32)
    chance = jnp.where(
        depths == offered[:, None], weights, jnp.concatenate([inner, weights[:, -1:]], axis=1)
    )
    keep = (coins < chance) & (depths <= offered[:, None])
    accepted = jnp.max(jnp.where(keep, depths, 0), axis=1, initial=0)
    log_weight = jnp.take_along_axis(log_weights, accepted[:, None], axis=1)[:, 0]
    return _cut(target_logprobs, draft_logprobs, accepted, offered, log_weight, next_noise)


def match_rule(
    target_logprobs: Float[Array, "B K1 V"],
    drafted: Int[Array, "B K"],
    offered: Int[Array, " B"],
    noise: Noise,
) -> Verdict:
    """Samples the target at every position with the given noise and cuts after the first mismatch,
    or after `offered` drafts.

    Exact for drafts that nothing was drawn for, and for drafts that add the same noise to their own
    logits: the noise is then keyed by (row, position), the tokens are those of plain decoding
    whatever the draft, and such drafts agree most often (Daliri et al., arXiv 2408.07978). With K =
    0 this is plain decoding.
    """
    sampled = categorical(target_logprobs, noise)
    accepted = jnp.minimum(leading(sampled[:, :-1] == drafted), offered)
    return Verdict(accepted, jnp.take_along_axis(sampled, accepted[:, None], axis=1)[:, 0])


def _at_draft(
    target_logprobs: Float[Array, "B K1 V"],
    draft_logprobs: Float[Array, "B K V"],
    drafted: Int[Array, "B K"],
    offered: Int[Array, " B"],
) -> tuple[Float[Array, "B K"], Float[Array, "B K"], Int[Array, " B"]]:
    """Log-probabilities of the drafted tokens under target and draft, and the drafts on offer: only
    those their own law can give."""
    picked = drafted[:, :, None]
    target_at_draft = jnp.take_along_axis(target_logprobs[:, : drafted.shape[1]], picked, axis=2)[
        :, :, 0
    ]
    draft_at_draft = jnp.take_along_axis(draft_logprobs, picked, axis=2)[:, :, 0]
    return target_at_draft, draft_at_draft, jnp.minimum(offered, leading(draft_at_draft > -jnp.inf))


def _cut(
    target_logprobs: Float[Array, "B K1 V"],
    draft_logprobs: Float[Array, "B K V"],
    accepted: Int[Array, " B"],
    offered: Int[Array, " B"],
    log_weight: Float[Array, " B"],
    next_noise: Noise,
) -> Verdict:
    """Draws the next token from the residual (weight target - draft)+ at the cut; from the target
    where no draft was on offer."""
    at_cut = accepted[:, None, None]
    target = jnp.take_along_axis(target_logprobs, at_cut, axis=1)[:, 0]
    # beyond the last draft it is not used
    draft = jnp.take_along_axis(draft_logprobs, at_cut, axis=1, mode="clip")[:, 0]
    residual = jnp.maximum(jnp.exp(log_weight[:, None] + target) - jnp.exp(draft), 0)
    # Where weighted target and draft agree to rounding, a cut has probability about 0 and the
    # residual may vanish.
    rejected = (accepted < offered)[:, None] & (jnp.sum(residual, axis=-1, keepdims=True) > 0)
    return Verdict(
        accepted, categorical(jnp.where(rejected, jnp.log(residual), target), next_noise)
    )
