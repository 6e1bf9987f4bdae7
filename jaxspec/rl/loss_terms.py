"""Parts of a policy loss.

They are its inputs, logprobs of labels, importance weights, the KL penalty and the entropy bonus.
The gap between recorded and recomputed logprobs is a metric only.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.metrics.mean import Mean, as_means
from jaxspec.sampling import Processing, compute_logprobs, entropy
from jaxspec.state import PyTree

PerLabel = Float[Array, "B T"]
"""One value per label of packed texts."""


class LossInputs(NamedTuple):
    """Inputs of a policy loss, per label of packed texts.

    Log-probabilities are those of the sampling distribution.
    """

    policy_logprobs: PerLabel
    """Log-probabilities under the policy, with gradient."""
    old_logprobs: PerLabel
    """Log-probabilities under the policy before the updates on this batch."""
    sampled_logprobs: PerLabel
    """Log-probabilities recorded by the rollout."""
    reference_logprobs: PerLabel
    """Log-probabilities under the reference policy; zeros if the loss has no KL term."""
    entropy: PerLabel
    """Entropy of the policy's distribution, with gradient."""
    advantages: PerLabel
    loss_mask: Bool[Array, "B T"]
    """Labels to learn from. The loss of all others is ignored."""
    text_start: Int[Array, "B T"]
    """Index in the sequence at which each label's text starts."""


class Loss(NamedTuple):
    """A loss and its metrics, per label."""

    by_label: PerLabel
    metrics: dict[str, PerLabel] = {}  # noqa: RUF012 - never changed


LossTerm = Callable[[LossInputs], Loss]
"""Computes a term that is added to the loss."""


# ---- logprobs of labels


def label_logprobs(
    logits: Float[Array, "B T V"],
    labels: Int[Array, "B T"],
    response_positions: Int[Array, "B T"],
    processing: Processing,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes logprobs and entropies at labels.

    Both use the sampling distribution. `response_positions` counts the response tokens before each
    label. A sampled label counts as inside top-k and top-p, even if rounding puts it just outside.
    """
    logprobs = compute_logprobs(logits, processing, response_positions, sampled_ids=labels)
    return _take_label_logprobs(logprobs, labels), entropy(logprobs)


@jax.custom_vjp
def _take_label_logprobs(
    logprobs: Float[Array, "B T V"], labels: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    return jnp.take_along_axis(logprobs, labels[:, :, None], axis=2)[:, :, 0]


def _label_gradient(
    labels_and_vocab: tuple[Int[Array, "B T"], Int[Array, " V"]], gradient: Float[Array, "B T"]
) -> tuple[Float[Array, "B T V"], None]:
    """Computes the gradient by comparison with labels."""
    # XLA fuses a comparison into its neighbors. A scatter would write zeros for the full
    # vocabulary and read them again.
    labels, ids = labels_and_vocab
    zero = jnp.zeros((), gradient.dtype)
    return jnp.where(ids == labels[:, :, None], gradient[:, :, None], zero), None


_take_label_logprobs.defvjp(
    lambda logprobs, labels: (
        _take_label_logprobs(logprobs, labels),
        (labels, jnp.arange(logprobs.shape[-1], dtype=labels.dtype)),
    ),
    _label_gradient,
)


# ---- masks and means of texts


def mask_labels(inputs: LossInputs, values: PerLabel) -> PerLabel:
    """Zeros values outside the loss mask, even NaN."""
    return jnp.where(inputs.loss_mask, values, 0)


def text_means(values: PerLabel, inputs: LossInputs) -> PerLabel:
    """Computes each text's mean over the loss mask.

    The mean is stored at all positions of the text.
    """
    return text_sums(values, inputs) / jnp.maximum(text_sums(jnp.ones_like(values), inputs), 1)


def text_sums(values: PerLabel, inputs: LossInputs) -> PerLabel:
    """Computes each text's sum over the loss mask.

    The sum is stored at all positions of the text.
    """
    # The start of a text identifies it, so sums are collected there.
    rows = jnp.arange(len(values), dtype=jnp.int32)[:, None]
    sums = jnp.zeros_like(values).at[rows, inputs.text_start].add(mask_labels(inputs, values))
    return jnp.take_along_axis(sums, inputs.text_start, axis=1)


# ---- ratios of probabilities

# Float32 overflows beyond exp(88), and infinity times an advantage of 0 is NaN.
MAX_LOG_RATIO = 20.0
"""Bound on the absolute value of every log ratio. The gradient is 0 beyond it."""


def clamp_log_ratio(log_ratio: PerLabel) -> PerLabel:
    """Clamps log ratios at `MAX_LOG_RATIO`."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_of(log_ratio: PerLabel) -> PerLabel:
    """Computes ratios, finite unless NaN."""
    return jnp.exp(clamp_log_ratio(log_ratio))


# ---- importance weights

Correction = Callable[[LossInputs], Loss]
"""Computes weights exp(old - sampled) without gradient, and their metrics."""


def keep_weights(inputs: LossInputs) -> Loss:
    """Returns weights of 1, which correct nothing."""
    return Loss(jnp.ones_like(inputs.policy_logprobs))


class ImportanceWeights(NamedTuple):
    """Importance weights of old policy over sampler.

    There is one weight per token, or one per response.
    """

    min_weight: float = 0.0
    max_weight: float = float("inf")
    truncate: bool = True
    """Whether to truncate at `max_weight`. Else weights out of bounds become 0."""
    by_sequence: bool = False
    """Whether a response has a single weight, the product of its tokens' weights."""

    def __call__(self, inputs: LossInputs) -> Loss:
        """Computes truncated (tis) or masked (icepop) weights.

        Weights that are not finite become 0.

        Source: tis, Yao et al., "Your efficient RL framework secretly brings you off-policy RL
        training" (2025); icepop, arXiv 2510.18855.
        """
        log_weights = mask_labels(inputs, inputs.old_logprobs - inputs.sampled_logprobs)
        if self.by_sequence:
            log_weights = text_sums(log_weights, inputs)
        weights = _finite_weights(log_weights)
        is_outside = (weights < self.min_weight) | (weights > self.max_weight)
        bounded_weights = (
            jnp.minimum(weights, self.max_weight)
            if self.truncate
            else jnp.where(is_outside, 0, weights)
        )
        return _detach_weights(bounded_weights, is_outside)


class SequenceMask(NamedTuple):
    """Token importance weights, masked by response.

    A response whose geometric mean is out of bounds has weight 0.
    """

    min_mean: float
    max_mean: float

    def __call__(self, inputs: LossInputs) -> Loss:
        """Computes the weight of each token, or 0."""
        log_weights = mask_labels(inputs, inputs.old_logprobs - inputs.sampled_logprobs)
        mean_weight = _finite_weights(text_means(log_weights, inputs))
        is_outside = (mean_weight < self.min_mean) | (mean_weight > self.max_mean)
        return _detach_weights(jnp.where(is_outside, 0, _finite_weights(log_weights)), is_outside)


def _finite_weights(log_weights: PerLabel) -> PerLabel:
    """Exponentiates log weights. Those that are not finite become 0."""
    return jnp.where(jnp.isfinite(log_weights), ratio_of(log_weights), 0)


def _detach_weights(weights: PerLabel, is_outside: Bool[Array, "B T"]) -> Loss:
    # The weights correct the data. With a gradient they would become part of the objective.
    weights = lax.stop_gradient(weights)
    metrics = {
        "importance/mean": weights,
        "importance/mean_square": weights * weights,
        "importance/outside": is_outside.astype(weights.dtype),
    }
    return Loss(weights, metrics)


# ---- KL divergence from a reference policy, estimated by the labels

Estimator = Callable[[PerLabel], PerLabel]
"""Maps x = reference - policy logprob to an estimate; see http://joschu.net/blog/kl-approx.html."""


def k1(log_ratio: PerLabel) -> PerLabel:
    """Estimates KL(policy, reference) by -x.

    The estimate is unbiased and may be negative. Use it in the reward, where it has the gradient of
    the divergence. As a loss its gradient is 0 on average.
    """
    return -log_ratio


def k2(log_ratio: PerLabel) -> PerLabel:
    """Estimates KL(policy, reference) by x^2 / 2.

    Its gradient is that of the divergence.
    """
    return log_ratio * log_ratio / 2


def k3(log_ratio: PerLabel) -> PerLabel:
    """Estimates KL(policy, reference) by exp(x) - 1 - x.

    The estimate is unbiased and never negative. Its gradient is that of KL(reference, policy).
    Source: GRPO, arXiv 2402.03300, equation 4.
    """
    return jnp.exp(log_ratio) - 1 - log_ratio


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}


class KlPenalty(NamedTuple):
    """Penalty for divergence from a reference policy."""

    beta: float
    estimator: Estimator
    importance: bool = False
    """Whether labels in the loss are weighted by policy over sampler."""
    reward_to_go: bool = False
    """Whether a token's reward is charged only for the divergence from that token on."""

    def __call__(self, inputs: LossInputs) -> Loss:
        """Computes the penalty as a term of the loss."""
        estimate = self.estimate_kl(
            inputs.policy_logprobs, inputs.reference_logprobs, inputs.loss_mask
        )
        if self.importance:
            # The estimate is an expectation under the policy, but another policy sampled.
            log_ratio = mask_labels(inputs, inputs.policy_logprobs - inputs.sampled_logprobs)
            estimate = estimate * lax.stop_gradient(_finite_weights(log_ratio))
        return Loss(self.beta * estimate, {"kl": lax.stop_gradient(estimate)})

    def estimate_kl(
        self, logprobs: PerLabel, reference: PerLabel, loss_mask: Bool[Array, "B T"]
    ) -> PerLabel:
        """Estimates the divergence, which is 0 outside the loss mask."""
        return self.estimator(clamp_log_ratio(jnp.where(loss_mask, reference - logprobs, 0)))


# ---- entropy


class EntropyBonus(NamedTuple):
    """Reward for the entropy of the policy."""

    weight: float

    def __call__(self, inputs: LossInputs) -> Loss:
        """Computes the bonus as a term of the loss."""
        return Loss(-self.weight * inputs.entropy)


# ---- the gap between recorded and own logprobs


class LogprobGap(NamedTuple):
    """Gap between recomputed and recorded logprobs.

    Fields are sums over the loss mask, except the maximum.
    """

    absolute: Float[Array, ""]
    """Sum of |policy - sampled|."""
    probability_factor: Float[Array, ""]
    """Sum of exp |policy - sampled|, the factor between the probabilities.

    NeMo RL calls it token_mult_prob_error.
    """
    kl: Float[Array, ""]
    """Sum of exp(x) - 1 - x for x = policy - sampled, which estimates KL(sampler, policy)."""
    max_absolute: Float[Array, ""]
    """Maximum of |policy - sampled|."""
    label_count: Float[Array, ""]
    """Number of labels."""

    @classmethod
    def from_logprobs(cls, policy: PyTree, sampled: PyTree, loss_mask: PyTree) -> "LogprobGap":
        """Computes the sums of a pack."""
        # Masked before `exp`, which could overflow outside the loss mask.
        log_ratio = jnp.where(loss_mask, policy - sampled, 0)
        absolute = jnp.abs(log_ratio)
        factor = jnp.where(loss_mask, jnp.exp(absolute), 0)
        return cls(
            absolute=jnp.sum(absolute),
            probability_factor=jnp.sum(factor),
            kl=jnp.sum(k3(log_ratio)),
            max_absolute=jnp.max(absolute, initial=0),
            label_count=jnp.sum(loss_mask, dtype=absolute.dtype),
        )

    def merge_with(self, other: "LogprobGap") -> "LogprobGap":
        """Merges two sets of sums."""
        # The maximum is no sum, so it is merged apart.
        max_absolute = jnp.maximum(self.max_absolute, other.max_absolute)
        return jax.tree.map(jnp.add, self, other)._replace(max_absolute=max_absolute)

    @property
    def metrics(self) -> dict[str, Mean]:
        """Returns means and the maximum. They are absent without labels."""
        divisor = jnp.maximum(self.label_count, 1)
        values = {
            "rollout/logprob_gap_mean": self.absolute / divisor,
            "rollout/logprob_gap_max": self.max_absolute,
            "rollout/probability_factor": self.probability_factor / divisor,
            "rollout/kl": self.kl / divisor,
        }
        return as_means(values, self.label_count > 0)


def zero_gap(dtype: np.dtype) -> LogprobGap:
    """Returns the sums over no labels."""
    return LogprobGap(*[jnp.zeros((), dtype)] * len(LogprobGap._fields))
