"""The lossless verification rules: whatever the draft proposes, the tokens kept have exactly the target's law."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.sampling import categorical


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
    coins: Float[Array, "B K"],
    next_noise: Float[Array, "B V"],
) -> Verdict:
    """Accepts a draft with probability min(1, target/draft); a rejection draws from the residual (target - draft)+.

    Args:
      target_logprobs: processed log-probabilities at the K+1 verified positions.
      draft_logprobs: the distributions the drafts were sampled from.
      drafted: tokens sampled from `draft_logprobs`.
      coins: uniform in [0, 1), fresh in every round.
      next_noise: Gumbel noise for the one token after the cut, fresh in every round.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318.
    """
    length = drafted.shape[1]
    picked = drafted[:, :, None]
    target_at_draft = jnp.take_along_axis(target_logprobs[:, :length], picked, axis=2)[:, :, 0]
    draft_at_draft = jnp.take_along_axis(draft_logprobs, picked, axis=2)[:, :, 0]
    # Strict: a coin of exactly 0 must not accept a token of target probability 0.
    accepted = leading(coins * jnp.exp(draft_at_draft) < jnp.exp(target_at_draft))
    at_cut = jnp.exp(jnp.take_along_axis(target_logprobs, accepted[:, None, None], axis=1)[:, 0])
    no_draft = jnp.zeros_like(draft_logprobs[:, :1])  # beyond the last draft the residual is the target itself
    draft_probs = jnp.concatenate([jnp.exp(draft_logprobs), no_draft], axis=1)
    residual = jnp.maximum(at_cut - jnp.take_along_axis(draft_probs, accepted[:, None, None], axis=1)[:, 0], 0)
    # Where target and draft agree to rounding, a rejection has probability about 0 and the residual may vanish.
    residual = jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, at_cut)
    return Verdict(accepted, categorical(jnp.log(residual), next_noise))


def coupled_rule(target_logprobs: Float[Array, "B K1 V"], drafted: Int[Array, "B K"], noise: Float[Array, "B K1 V"]) -> Verdict:
    """Samples the target at every position with noise keyed by (row, position) and cuts after the first mismatch.

    The tokens are those of plain decoding, whatever the draft; a draft that adds the same noise to its own logits agrees most often
    (Daliri et al., arXiv 2408.07978). With K = 0 this is plain decoding.
    """
    sampled = categorical(target_logprobs, noise)
    accepted = leading(sampled[:, :-1] == drafted)
    return Verdict(accepted, jnp.take_along_axis(sampled, accepted[:, None], axis=1)[:, 0])
