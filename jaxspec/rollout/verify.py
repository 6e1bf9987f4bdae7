"""Lossless verification rules.

For any draft, the kept tokens have exactly the target's distribution.

The first `draft_counts` of a row's K draft tokens are valid. Rules ignore the other tokens, and the
distributions there. The target must be finite at every valid draft token. At a position where the
draft's distribution is NaN, the valid drafts end.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.sampling import Noise


class Verdict(NamedTuple):
    """Result of verification."""

    accepted: Int[Array, " B"]
    """Number of leading draft tokens to keep."""
    next_token: Int[Array, " B"]
    """Token after the accepted drafts."""


class Distributions(NamedTuple):
    """Target and draft distributions of a block, as functions that rules call."""

    draft_token_logprobs: Callable[
        [Int[Array, "B K"]], tuple[Float[Array, "B K"], Float[Array, "B K"]]
    ]
    """(draft tokens) -> their log-probabilities under target and draft."""
    residual_mass: Callable[[Float[Array, "B N"]], Float[Array, "B N"]]
    """(log-weights) -> mass of the residual (weight target - draft)+ at each draft after the
    first."""
    draw_next: Callable[..., Int[Array, " B"]]
    """(accepted, rejected, log_weight, noise) -> token after the cut.

    It is drawn from the residual (weight target - draft)+ if a draft was rejected, else from the
    target.
    """
    draw_target: Callable[[Noise], Int[Array, "B K1"]]
    """(noise) -> target samples at every position."""


def count_leading(flags: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Counts leading True entries."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def token_rule(
    distributions: Distributions,
    draft_tokens: Int[Array, "B K"],
    draft_counts: Int[Array, " B"],
    coins: Float[Array, "B K"],
    next_noise: Noise,
) -> Verdict:
    """Accepts each draft with probability min(1, target/draft).

    After a rejection, the next token is drawn from the residual (target - draft)+. If all valid
    drafts are accepted, it is drawn from the target.

    Args:
      distributions: processed target at the K+1 verified positions, and the distributions that the
        drafts were sampled from.
      draft_tokens: tokens sampled from the draft.
      draft_counts: number of valid drafts, 0..K. It may depend on the prefix only.
      coins: uniform in (0, 1), fresh in every round.
      next_noise: noise of the token after the cut, fresh in every round.

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
    """Verifies the drafts of a block together.

    On average it keeps at least as many as `token_rule`, with the same distribution. The arguments
    are the same too.

    Let weight_0 = 1 and weight_i = min(weight_{i-1} target/draft, 1) at draft i. Let spare_i be the
    mass of the residual (weight_i target - draft)+ after draft i. Draft i passes if its coin is
    below spare_i / (spare_i + 1 - weight_i). The last valid draft passes if its coin is below its
    weight. All drafts up to the last that passes are kept.

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
    # With weight 1 and no residual the quotient is 0/0. The distributions after this draft agree
    # then, so a later draft is kept, except for rounding.
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
    # Leading passes do not decide: a draft that fails is kept if a later one passes.
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
    """Samples the target, and keeps drafts up to the first mismatch.

    At most `draft_counts` drafts are kept. With K = 0 this is plain decoding.

    The rule is exact for deterministic drafts, and for drafts that add the same noise to their own
    logits. Noise keyed by (row, position) gives the tokens of plain decoding for any draft. Drafts
    that share the noise agree most often (Daliri et al., arXiv 2408.07978).
    """
    sampled = distributions.draw_target(noise)
    accepted = jnp.minimum(count_leading(sampled[:, :-1] == draft_tokens), draft_counts)
    return Verdict(accepted, jnp.take_along_axis(sampled, accepted[:, None], axis=1)[:, 0])


def _count_possible_drafts(
    draft_at_draft: Float[Array, "B K"], draft_counts: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Counts leading valid drafts that the draft can sample."""
    # A draft that is NaN fails this comparison too.
    return jnp.minimum(draft_counts, count_leading(draft_at_draft > -jnp.inf))
