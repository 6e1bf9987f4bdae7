"""Losses of the policy, label by label, and how labels are weighed in a batch.

The learner sums the losses of the labels to learn, each with its weight in the batch.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxspec.rl.loss_terms import (
    Correction,
    KlPenalty,
    Loss,
    LossInputs,
    PerLabel,
    inside,
    over_text,
    ratio_of,
)

PolicyLoss = Callable[[LossInputs], Loss]


def policy_gradient(
    inputs: LossInputs,
    surrogate: "Surrogate",
    correction: Correction | None = None,
    kl: KlPenalty | None = None,
    entropy_weight: float = 0.0,
) -> Loss:
    """correction * surrogate + beta * KL - entropy_weight * entropy, and the measures of each."""
    loss, measured = surrogate(inputs)
    if correction is not None:
        weights, of_weights = correction(inputs)
        loss, measured = loss * weights, measured | of_weights
    if kl is not None:
        penalty = kl.by_label(inputs)
        loss, measured = loss + kl.beta * penalty, measured | {"kl": lax.stop_gradient(penalty)}
    if entropy_weight:
        loss = loss - entropy_weight * inputs.entropy
    return Loss(loss, measured)


def negative_log_likelihood(inputs: LossInputs) -> Loss:
    """In nats, of supervised training."""
    return Loss(-inputs.policy_logprobs)


# ---- surrogates: what the policy gradient is taken of

Surrogate = Callable[[LossInputs], Loss]


def clipped_ratio(
    inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 0.0
) -> Loss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), the ratio being that of policy
    to old policy; where A < 0 at most `dual_clip` times -A, unless that is 0.

    The first update on a batch has ratio 1 everywhere, so the clip binds only where a batch is used
    more than once, or was sampled by an older policy.

    Source: arXiv 2402.03300, equation 3 without the KL term; asymmetric clip as in DAPO, arXiv
    2503.14476; dual clip, arXiv 1912.09729, equation 5.
    """
    ratio = ratio_of(_log_ratio(inputs))
    return _clipped(inputs, ratio, clip_low, clip_high, dual_clip)


def sequence_ratio(
    inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float = 0.0
) -> Loss:
    """The same with one ratio for a whole response: the geometric mean of those of its tokens.

    Source: GSPO, arXiv 2507.18071, equations 5 to 7.
    """
    ratio = ratio_of(over_text(_log_ratio(inputs), inputs))
    return _clipped(inputs, ratio, clip_low, clip_high, dual_clip)


def _clipped(
    inputs: LossInputs, ratio: PerLabel, clip_low: float, clip_high: float, dual_clip: float
) -> Loss:
    advantages = inputs.advantages
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -jnp.minimum(ratio * advantages, clipped * advantages)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    if dual_clip:
        high |= (advantages < 0) & (ratio > dual_clip)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)
    return Loss(loss, _of_ratio(ratio, low, high))


def clipped_weight(inputs: LossInputs, clip_low: float = 1.0, clip_high: float = 4.0) -> Loss:
    """-stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob: a ratio that is
    clipped still has a gradient.

    Source: CISPO (MiniMax-M1), arXiv 2506.13585, equations 4 and 5.
    """
    ratio = lax.stop_gradient(ratio_of(_log_ratio(inputs)))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -clipped * inputs.advantages * inside(inputs, inputs.policy_logprobs)
    return Loss(loss, _of_ratio(ratio, ratio < 1 - clip_low, ratio > 1 + clip_high))


def plain_reinforce(inputs: LossInputs) -> Loss:
    """-A * logprob: no ratio, and so nothing that keeps the policy near the old one."""
    return Loss(-inputs.advantages * inside(inputs, inputs.policy_logprobs))


def _log_ratio(inputs: LossInputs) -> PerLabel:
    return inside(inputs, inputs.policy_logprobs - inputs.old_logprobs)


def _of_ratio(
    ratio: PerLabel, low: Bool[Array, "B T"], high: Bool[Array, "B T"]
) -> dict[str, PerLabel]:
    """Ratios, and the labels that are clipped on either side."""
    ratio = lax.stop_gradient(ratio)
    return {
        "ratio/mean": ratio,
        "ratio/clipped_low": low.astype(ratio.dtype),
        "ratio/clipped_high": high.astype(ratio.dtype),
    }


# ---- how labels are weighed in a batch

Aggregation = Callable[[Float[Array, "B T"], Float[Array, ""], Float[Array, ""]], PerLabel]
"""(labels to learn of each label's text; of the whole batch, labels to learn and texts that have
some) -> its weight in the loss of the batch."""


def by_token(
    labels: Float[Array, "B T"], tokens: Float[Array, ""], texts: Float[Array, ""]
) -> PerLabel:
    """The mean over all labels (DAPO, arXiv 2503.14476): long responses count more."""
    del texts
    return jnp.ones_like(labels) / tokens


def by_sequence(
    labels: Float[Array, "B T"], tokens: Float[Array, ""], texts: Float[Array, ""]
) -> PerLabel:
    """The mean over responses of their means (GRPO, arXiv 2402.03300): a token of a long response
    counts less."""
    del tokens
    return 1 / (jnp.maximum(labels, 1) * texts)


class ByConstant(NamedTuple):
    """Sums of responses over the longest response there may be and all rows that were asked.

    So no token's weight depends on what else was sampled, or failed (Dr. GRPO, arXiv 2503.20783).
    """

    longest: int
    rows: int
    """Rows of a mini-batch, whether or not they are learned from."""

    def __call__(
        self, labels: Float[Array, "B T"], tokens: Float[Array, ""], texts: Float[Array, ""]
    ) -> PerLabel:
        """1 / (longest * rows)."""
        del tokens, texts
        return jnp.ones_like(labels) / (self.longest * self.rows)
