"""What a loss of the policy is put together from: its inputs, importance weights for data that
another policy or another program sampled, and a penalty for leaving a reference policy."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

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
    chosen: Bool[Array, "B T"]
    """The labels to learn from; the loss of others is not looked at."""
    first: Int[Array, "B T"]
    """Where in its sequence the text of each label starts."""


class Loss(NamedTuple):
    """A loss, and what is measured beside it, label by label."""

    by_label: PerLabel
    measured: dict[str, PerLabel] = {}  # noqa: RUF012 - never changed


def inside(inputs: LossInputs, values: PerLabel) -> PerLabel:
    """0 in place of what is not learnt, whatever stands there."""
    return jnp.where(inputs.chosen, values, 0)


def over_text(values: PerLabel, inputs: LossInputs) -> PerLabel:
    """Means over the labels to learn of each text, at all its positions."""
    return text_sums(values, inputs) / jnp.maximum(text_sums(jnp.ones_like(values), inputs), 1)


def text_sums(values: PerLabel, inputs: LossInputs) -> PerLabel:
    """Sums over the labels to learn of each text, at all its positions."""
    rows = jnp.arange(len(values), dtype=jnp.int32)[:, None]
    sums = jnp.zeros_like(values).at[rows, inputs.first].add(inside(inputs, values))
    return jnp.take_along_axis(sums, inputs.first, axis=1)


# ---- importance weights

Correction = Callable[[LossInputs], Loss]
"""Weights exp(old - sampled) without gradient, and what is measured of them."""


class ImportanceWeights(NamedTuple):
    """Importance weights of old policy over sampler: of each token, or one for a whole response."""

    least: float = 0.0
    most: float = float("inf")
    truncate: bool = True
    """Whether a weight above `most` is `most`; else what is outside is 0."""
    by_sequence: bool = False
    """Whether a response has one weight, the product of those of its tokens."""

    def __call__(self, inputs: LossInputs) -> Loss:
        """Truncated (tis) or masked (icepop) weights; what is not finite counts 0.

        Source: tis, Yao et al., "Your efficient RL framework secretly brings you off-policy RL
        training" (2025); icepop, arXiv 2510.18855.
        """
        log_weights = inside(inputs, inputs.old_logprobs - inputs.sampled_logprobs)
        if self.by_sequence:
            log_weights = text_sums(log_weights, inputs)
        weights = _finite(jnp.exp(log_weights))
        outside = (weights < self.least) | (weights > self.most)
        kept = jnp.minimum(weights, self.most) if self.truncate else jnp.where(outside, 0, weights)
        return _weighted(kept, outside)


class SequenceMask(NamedTuple):
    """Importance weights of tokens, and 0 for all of a response whose geometric mean is outside."""

    least: float
    most: float

    def __call__(self, inputs: LossInputs) -> Loss:
        """Weights of tokens or 0."""
        log_weights = inside(inputs, inputs.old_logprobs - inputs.sampled_logprobs)
        mean = _finite(jnp.exp(over_text(log_weights, inputs)))
        outside = (mean < self.least) | (mean > self.most)
        return _weighted(jnp.where(outside, 0, _finite(jnp.exp(log_weights))), outside)


def _finite(weights: PerLabel) -> PerLabel:
    return jnp.where(jnp.isfinite(weights), weights, 0)


def _weighted(weights: PerLabel, outside: Bool[Array, "B T"]) -> Loss:
    weights = lax.stop_gradient(weights)
    measured = {"importance/mean": weights, "importance/outside": outside.astype(weights.dtype)}
    return Loss(weights, measured)


# ---- KL divergence from a reference policy, estimated by the labels

Estimator = Callable[[PerLabel], PerLabel]
"""Of x = reference - policy logprob; see http://joschu.net/blog/kl-approx.html."""

LARGEST_LOG_RATIO, LARGEST_KL = 20.0, 10.0
"""Bounds on what goes into an estimator and what comes out of it: one label is not to be the
whole gradient."""


def k1(log_ratio: PerLabel) -> PerLabel:
    """-x: unbiased, and of either sign."""
    return -log_ratio


def k2(log_ratio: PerLabel) -> PerLabel:
    """x^2 / 2: its gradient is that of the divergence."""
    return log_ratio * log_ratio / 2


def k3(log_ratio: PerLabel) -> PerLabel:
    """exp(x) - 1 - x: unbiased and never negative (GRPO, arXiv 2402.03300, equation 4)."""
    return jnp.exp(log_ratio) - 1 - log_ratio


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}


class KlPenalty(NamedTuple):
    """A penalty for leaving a reference policy."""

    beta: float
    estimator: Estimator
    importance: bool = False
    """Whether a label weighs what the policy makes of it over what its sampler made."""

    def by_label(self, inputs: LossInputs) -> PerLabel:
        """The estimated divergence at each label."""
        estimate = self.estimated(inputs.policy_logprobs, inputs.reference_logprobs, inputs.chosen)
        if self.importance:
            ratio = inside(inputs, inputs.policy_logprobs - inputs.sampled_logprobs)
            estimate = estimate * lax.stop_gradient(_finite(jnp.exp(ratio)))
        return estimate

    def estimated(
        self, logprobs: PerLabel, reference: PerLabel, chosen: Bool[Array, "B T"]
    ) -> PerLabel:
        """The estimate at chosen labels, within bounds; 0 at others."""
        log_ratio = jnp.where(chosen, reference - logprobs, 0)
        bounded = jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        return jnp.clip(self.estimator(bounded), -LARGEST_KL, LARGEST_KL)
