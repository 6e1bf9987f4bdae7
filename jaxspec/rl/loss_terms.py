"""What a loss of the policy is put together from: its inputs, importance weights for data that
another policy or another program sampled, how far logprobs are from the recorded ones, and a
penalty for leaving a reference policy."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.state import PyTree

PerLabel = Float[Array, "B T"]
"""Numbers of the labels of packed texts."""


class LossInputs(NamedTuple):
    """What a loss may depend on: log-probabilities of the labels of packed texts, under the
    distribution they were sampled from."""

    policy_logprobs: PerLabel
    """With gradient."""
    old_logprobs: PerLabel
    """Of the policy before the updates on this batch."""
    sampled_logprobs: PerLabel
    """As the rollout recorded them."""
    reference_logprobs: PerLabel
    """Of the policy that is not to be left too far; zeros where no loss asks for it."""
    entropy: PerLabel
    """Of the policy's distribution, with gradient."""
    advantages: PerLabel
    loss_mask: Bool[Array, "B T"]
    """The labels to learn from; the loss of others is not looked at."""
    text_start: Int[Array, "B T"]
    """Where in its sequence the text of each label starts."""


class Loss(NamedTuple):
    """A loss, and what is measured beside it, label by label."""

    by_label: PerLabel
    metrics: dict[str, PerLabel] = {}  # noqa: RUF012 - never changed


def mask_labels(inputs: LossInputs, values: PerLabel) -> PerLabel:
    """0 in place of what is not learnt, whatever stands there."""
    return jnp.where(inputs.loss_mask, values, 0)


def text_means(values: PerLabel, inputs: LossInputs) -> PerLabel:
    """Means over the labels to learn of each text, at all its positions."""
    return text_sums(values, inputs) / jnp.maximum(text_sums(jnp.ones_like(values), inputs), 1)


def text_sums(values: PerLabel, inputs: LossInputs) -> PerLabel:
    """Sums over the labels to learn of each text, at all its positions."""
    rows = jnp.arange(len(values), dtype=jnp.int32)[:, None]
    sums = jnp.zeros_like(values).at[rows, inputs.text_start].add(mask_labels(inputs, values))
    return jnp.take_along_axis(sums, inputs.text_start, axis=1)


# ---- ratios of probabilities

MAX_LOG_RATIO = 20.0
"""Bound on every log ratio, on both sides.

Float32 overflows beyond exp(88), and infinity times an advantage of 0 is NaN. A log ratio beyond
the bound has slope 0.
"""


def clamp_log_ratio(log_ratio: PerLabel) -> PerLabel:
    """Clamps log ratios at `MAX_LOG_RATIO`."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_of(log_ratio: PerLabel) -> PerLabel:
    """Ratios of probabilities, always finite unless the log ratio is NaN."""
    return jnp.exp(clamp_log_ratio(log_ratio))


# ---- importance weights

Correction = Callable[[LossInputs], Loss]
"""Weights exp(old - sampled) without gradient, and what is measured of them."""


class ImportanceWeights(NamedTuple):
    """Importance weights of old policy over sampler: of each token, or one for a whole response."""

    min_weight: float = 0.0
    max_weight: float = float("inf")
    truncate: bool = True
    """Whether a weight above `most` is `most`; else what is outside is 0."""
    by_sequence: bool = False
    """Whether a response has one weight, the product of those of its tokens."""

    def __call__(self, inputs: LossInputs) -> Loss:
        """Truncated (tis) or masked (icepop) weights; what is not finite counts 0.

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
    """Importance weights of tokens, and 0 for all of a response whose geometric mean is outside."""

    min_mean: float
    max_mean: float

    def __call__(self, inputs: LossInputs) -> Loss:
        """Weights of tokens or 0."""
        log_weights = mask_labels(inputs, inputs.old_logprobs - inputs.sampled_logprobs)
        mean_weight = _finite_weights(text_means(log_weights, inputs))
        is_outside = (mean_weight < self.min_mean) | (mean_weight > self.max_mean)
        return _detach_weights(jnp.where(is_outside, 0, _finite_weights(log_weights)), is_outside)


def _finite_weights(log_weights: PerLabel) -> PerLabel:
    """Weights of log weights; 0 for log weights that are not finite."""
    return jnp.where(jnp.isfinite(log_weights), ratio_of(log_weights), 0)


def _detach_weights(weights: PerLabel, is_outside: Bool[Array, "B T"]) -> Loss:
    weights = lax.stop_gradient(weights)
    metrics = {"importance/mean": weights, "importance/outside": is_outside.astype(weights.dtype)}
    return Loss(weights, metrics)


# ---- KL divergence from a reference policy, estimated by the labels

Estimator = Callable[[PerLabel], PerLabel]
"""Of x = reference - policy logprob; see http://joschu.net/blog/kl-approx.html."""


def k1(log_ratio: PerLabel) -> PerLabel:
    """Estimates KL(policy, reference) by -x: unbiased, of either sign.

    A reward less k1 has the gradient of the divergence. Its own slope is 0 on average.
    """
    return -log_ratio


def k2(log_ratio: PerLabel) -> PerLabel:
    """Estimates KL(policy, reference) by x^2 / 2, whose slope is that of the divergence."""
    return log_ratio * log_ratio / 2


def k3(log_ratio: PerLabel) -> PerLabel:
    """Estimates KL(policy, reference) by exp(x) - 1 - x: unbiased, never negative.

    Its slope is that of KL(reference, policy) (GRPO, arXiv 2402.03300, equation 4).
    """
    return jnp.exp(log_ratio) - 1 - log_ratio


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}


class KlPenalty(NamedTuple):
    """A penalty for leaving a reference policy."""

    beta: float
    estimator: Estimator
    importance: bool = False
    """Whether a label in the loss is weighted by policy over sampler."""
    reward_to_go: bool = False
    """Whether, in the reward, a token answers for the divergence from there on alone."""

    def estimate_at_labels(self, inputs: LossInputs) -> PerLabel:
        """Estimates the divergence at each label."""
        estimate = self.estimate_kl(
            inputs.policy_logprobs, inputs.reference_logprobs, inputs.loss_mask
        )
        if self.importance:
            log_ratio = mask_labels(inputs, inputs.policy_logprobs - inputs.sampled_logprobs)
            estimate = estimate * lax.stop_gradient(_finite_weights(log_ratio))
        return estimate

    def estimate_kl(
        self, logprobs: PerLabel, reference: PerLabel, loss_mask: Bool[Array, "B T"]
    ) -> PerLabel:
        """Estimates the divergence at chosen labels from bounded log ratios; 0 at others."""
        return self.estimator(clamp_log_ratio(jnp.where(loss_mask, reference - logprobs, 0)))


# ---- the gap between recorded and own logprobs


class LogprobGap(NamedTuple):
    """How far the logprobs of the policy that is read are from those that the rollout recorded:
    sums over the labels to learn."""

    absolute: Float[Array, ""]
    """Of |policy - sampled|."""
    probability_factor: Float[Array, ""]
    """Of exp |policy - sampled|: by how much a probability differs (NeMo RL's
    token_mult_prob_error)."""
    kl: Float[Array, ""]
    """Of exp(x) - 1 - x for x = policy - sampled: the divergence of what sampled from the
    policy."""
    max_absolute: Float[Array, ""]
    """The largest |policy - sampled|."""
    label_count: Float[Array, ""]
    """How many."""

    @classmethod
    def from_logprobs(cls, policy: PyTree, sampled: PyTree, loss_mask: PyTree) -> "LogprobGap":
        """The sums of a pack."""
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
        """Both together."""
        max_absolute = jnp.maximum(self.max_absolute, other.max_absolute)
        return jax.tree.map(jnp.add, self, other)._replace(max_absolute=max_absolute)

    @property
    def metrics(self) -> dict[str, Float[Array, ""]]:
        """Means over the labels, and the largest; NaN if there is none."""
        divisor = jnp.maximum(self.label_count, 1)
        means = {
            "rollout/logprob_gap_mean": self.absolute / divisor,
            "rollout/logprob_gap_max": self.max_absolute,
            "rollout/probability_factor": self.probability_factor / divisor,
            "rollout/kl": self.kl / divisor,
        }
        return {
            name: jnp.where(self.label_count > 0, value, jnp.nan) for name, value in means.items()
        }


def zero_gap(dtype: np.dtype) -> LogprobGap:
    """The sums of no label."""
    return LogprobGap(*[jnp.zeros((), dtype)] * len(LogprobGap._fields))
