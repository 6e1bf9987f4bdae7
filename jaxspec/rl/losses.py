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
    mask_labels,
    ratio_of,
    text_means,
)

PolicyLoss = Callable[[LossInputs], Loss]


def policy_gradient_loss(
    inputs: LossInputs,
    surrogate: "Surrogate",
    correction: Correction | None = None,
    kl: KlPenalty | None = None,
    entropy_weight: float = 0.0,
) -> Loss:
    """correction * surrogate + beta * KL - entropy_weight * entropy, and the measures of each."""
    loss, metrics = surrogate(inputs)
    if correction is not None:
        weights, weight_metrics = correction(inputs)
        loss, metrics = loss * weights, metrics | weight_metrics
    if kl is not None:
        penalty = kl.estimate_at_labels(inputs)
        loss, metrics = loss + kl.beta * penalty, metrics | {"kl": lax.stop_gradient(penalty)}
    if entropy_weight:
        loss = loss - entropy_weight * inputs.entropy
    return Loss(loss, metrics)


def negative_log_likelihood(inputs: LossInputs) -> Loss:
    """In nats, of supervised training."""
    return Loss(-inputs.policy_logprobs)


# ---- surrogates: what the policy gradient is taken of

Surrogate = Callable[[LossInputs], Loss]


def ppo_surrogate(
    inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 0.0
) -> Loss:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), the ratio being that of policy
    to old policy; where A < 0 at most `dual_clip` times -A, unless that is 0.

    The first update on a batch has ratio 1 everywhere, so the clip binds only where a batch is used
    more than once, or was sampled by an older policy.

    Source: arXiv 2402.03300, equation 3 without the KL term; asymmetric clip as in DAPO, arXiv
    2503.14476; dual clip, arXiv 1912.09729, equation 5.
    """
    ratio = ratio_of(_old_log_ratio(inputs))
    return _clip_ratio_loss(inputs, ratio, clip_low, clip_high, dual_clip)


def gspo_surrogate(
    inputs: LossInputs, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float = 0.0
) -> Loss:
    """The same with one ratio for a whole response: the geometric mean of those of its tokens.

    Source: GSPO, arXiv 2507.18071, equations 5 to 7.
    """
    ratio = ratio_of(text_means(_old_log_ratio(inputs), inputs))
    return _clip_ratio_loss(inputs, ratio, clip_low, clip_high, dual_clip)


def _clip_ratio_loss(
    inputs: LossInputs, ratio: PerLabel, clip_low: float, clip_high: float, dual_clip: float
) -> Loss:
    advantages = inputs.advantages
    clipped_ratio = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    is_clipped_low = (advantages < 0) & (ratio < 1 - clip_low)
    is_clipped_high = (advantages > 0) & (ratio > 1 + clip_high)
    if dual_clip:
        is_clipped_high |= (advantages < 0) & (ratio > dual_clip)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)
    return Loss(loss, _ratio_metrics(ratio, is_clipped_low, is_clipped_high))


def cispo_surrogate(inputs: LossInputs, clip_low: float = 1.0, clip_high: float = 4.0) -> Loss:
    """-stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob: a ratio that is
    clipped still has a gradient.

    Source: CISPO (MiniMax-M1), arXiv 2506.13585, equations 4 and 5.
    """
    ratio = lax.stop_gradient(ratio_of(_old_log_ratio(inputs)))
    clipped_ratio = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -clipped_ratio * inputs.advantages * mask_labels(inputs, inputs.policy_logprobs)
    return Loss(loss, _ratio_metrics(ratio, ratio < 1 - clip_low, ratio > 1 + clip_high))


def reinforce_surrogate(inputs: LossInputs) -> Loss:
    """-A * logprob: no ratio, and so nothing that keeps the policy near the old one."""
    return Loss(-inputs.advantages * mask_labels(inputs, inputs.policy_logprobs))


def _old_log_ratio(inputs: LossInputs) -> PerLabel:
    return mask_labels(inputs, inputs.policy_logprobs - inputs.old_logprobs)


def _ratio_metrics(
    ratio: PerLabel, is_clipped_low: Bool[Array, "B T"], is_clipped_high: Bool[Array, "B T"]
) -> dict[str, PerLabel]:
    """Ratios, and the labels that are clipped on either side."""
    ratio = lax.stop_gradient(ratio)
    return {
        "ratio/mean": ratio,
        "ratio/clipped_low": is_clipped_low.astype(ratio.dtype),
        "ratio/clipped_high": is_clipped_high.astype(ratio.dtype),
    }


# ---- how labels are weighed in a batch

Aggregation = Callable[[Float[Array, "B T"], Float[Array, ""], Float[Array, ""]], PerLabel]
"""(labels to learn of each label's text; of the whole batch, labels to learn and texts that have
some) -> its weight in the loss of the batch."""


def token_mean(
    label_counts: Float[Array, "B T"], token_count: Float[Array, ""], text_count: Float[Array, ""]
) -> PerLabel:
    """The mean over all labels (DAPO, arXiv 2503.14476): long responses count more."""
    del text_count
    return jnp.ones_like(label_counts) / token_count


def sequence_mean(
    label_counts: Float[Array, "B T"], token_count: Float[Array, ""], text_count: Float[Array, ""]
) -> PerLabel:
    """The mean over responses of their means (GRPO, arXiv 2402.03300): a token of a long response
    counts less."""
    del token_count
    return 1 / (jnp.maximum(label_counts, 1) * text_count)


class ConstantDivisor(NamedTuple):
    """Sums of responses over the longest response there may be and all rows that were asked.

    So no token's weight depends on what else was sampled, or failed (Dr. GRPO, arXiv 2503.20783).
    """

    max_length: int
    row_count: int
    """Rows of a mini-batch, whether or not they are learned from."""

    def __call__(
        self,
        label_counts: Float[Array, "B T"],
        token_count: Float[Array, ""],
        text_count: Float[Array, ""],
    ) -> PerLabel:
        """1 / (longest * rows)."""
        del token_count, text_count
        return jnp.ones_like(label_counts) / (self.max_length * self.row_count)
