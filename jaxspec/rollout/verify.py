"""The lossless verification rules: whatever the draft proposes, the tokens kept have exactly the
target's law.

A row's first `draft_counts` of K drafts are on offer; the rest of `draft_tokens`, and of target
and draft beyond, is not looked at. The target must be finite wherever a draft is offered; a
draft position gone NaN ends the offer there.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.sampling import Noise


class Verdict(NamedTuple):
    """Of K drafted tokens the first `accepted` are kept, and `next_token` follows them."""

    accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]


class Distributions(NamedTuple):
    """Target and draft at the positions of a block, by the questions that rules ask of them."""

    draft_token_logprobs: Callable[
        [Int[Array, "B K"]], tuple[Float[Array, "B K"], Float[Array, "B K"]]
    ]
    """Log-probabilities of the drafted tokens under target and draft."""
    residual_mass: Callable[[Float[Array, "B N"]], Float[Array, "B N"]]
    """Mass of the residual (weight target - draft)+ at each draft but the first, of log-weights."""
    draw_next: Callable[..., Int[Array, " B"]]
    """(accepted, rejected, log_weight, noise) -> the token after the cut.

    It comes from the residual (weight target - draft)+ where a draft was rejected, else from the
    target."""
    draw_target: Callable[[Noise], Int[Array, "B K1"]]
    """Tokens of the target at every position."""


def count_leading(flags: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Number of leading True entries."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def token_rule(
    distributions: Distributions,
    draft_tokens: Int[Array, "B K"],
    draft_counts: Int[Array, " B"],
    coins: Float[Array, "B K"],
    next_noise: Noise,
) -> Verdict:
    """Accepts a draft with probability min(1, target/draft); a rejection draws from the residual
    (target - draft)+.

    Args:
      distributions: the processed target at the K+1 verified positions, and those that the drafts
        were sampled from.
      draft_tokens: tokens sampled from the draft.
      draft_counts: drafts on offer, 0..K, a function of the prefix; after the last one the target
        itself gives the next token.
      coins: uniform in (0, 1), fresh in every round.
      next_noise: for the one token after the cut, fresh in every round.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318.
    """
    target_at_draft, draft_at_draft = distributions.draft_token_logprobs(draft_tokens)
    draft_counts = _count_possible_drafts(draft_at_draft, draft_counts)
    # Strict: a coin of exactly 0 must not accept a token of target probability 0.
    accepts = coins * jnp.exp(draft_at_draft) < jnp.exp(target_at_draft)
    accepted = jnp.minimum(count_leading(accepts), draft_counts)
    log_weight = jnp.zeros(len(draft_tokens), target_at_draft.dtype)
    return Verdict(
        accepted, distributions.draw_next(accepted, accepted < draft_counts, log_weight, next_noise)
    )


def block_rule(
    distributions: Distributions,
    draft_tokens: Int[Array, "B K"],
    draft_counts: Int[Array, " B"],
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
    length = draft_tokens.shape[1]
    target_at_draft, draft_at_draft = distributions.draft_token_logprobs(draft_tokens)
    draft_counts = _count_possible_drafts(draft_at_draft, draft_counts)
    ratios = target_at_draft - draft_at_draft
    log_weight_columns = [jnp.zeros(len(draft_tokens), ratios.dtype)]
    for offset in range(length):
        log_weight_columns.append(jnp.minimum(log_weight_columns[-1] + ratios[:, offset], 0))
    log_weights = jnp.stack(log_weight_columns, axis=1)
    weights = jnp.exp(log_weights[:, 1:])
    inner_chances = weights[:, :-1]
    residual_mass = distributions.residual_mass(log_weights[:, 1:-1])
    # Weight 1 and nothing left over: the laws after it agree and a later draft is kept, but for
    # rounding.
    inner_chances = jnp.where(
        inner_chances == 1,
        1,
        residual_mass / jnp.where(inner_chances == 1, 1, residual_mass + 1 - inner_chances),
    )
    depths = jnp.arange(1, length + 1, dtype=jnp.int32)
    chance = jnp.where(
        depths == draft_counts[:, None],
        weights,
        jnp.concatenate([inner_chances, weights[:, -1:]], axis=1),
    )
    accepts = (coins < chance) & (depths <= draft_counts[:, None])
    accepted = jnp.max(jnp.where(accepts, depths, 0), axis=1, initial=0)
    log_weight = jnp.take_along_axis(log_weights, accepted[:, None], axis=1)[:, 0]
    return Verdict(
        accepted, distributions.draw_next(accepted, accepted < draft_counts, log_weight, next_noise)
    )


def match_rule(
    distributions: Distributions,
    draft_tokens: Int[Array, "B K"],
    draft_counts: Int[Array, " B"],
    noise: Noise,
) -> Verdict:
    """Samples the target at every position with the given noise and cuts after the first mismatch,
    or after `draft_counts` drafts.

    Exact for drafts that nothing was drawn for, and for drafts that add the same noise to their own
    logits: the noise is then keyed by (row, position), the tokens are those of plain decoding
    whatever the draft, and such drafts agree most often (Daliri et al., arXiv 2408.07978). With K =
    0 this is plain decoding.
    """
    sampled = distributions.draw_target(noise)
    accepted = jnp.minimum(count_leading(sampled[:, :-1] == draft_tokens), draft_counts)
    return Verdict(accepted, jnp.take_along_axis(sampled, accepted[:, None], axis=1)[:, 0])


def _count_possible_drafts(
    draft_at_draft: Float[Array, "B K"], draft_counts: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The drafts on offer: only those that their own law can give."""
    return jnp.minimum(draft_counts, count_leading(draft_at_draft > -jnp.inf))
