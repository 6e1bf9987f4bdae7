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


# ---- ratios of probabilities

LARGEST_LOG_RATIO = 20.0
"""Bound on every log ratio, on both sides.

Float32 overflows beyond exp(88), and infinity times an advantage of 0 is NaN. A log ratio beyond
the bound has slope 0.
"""


def bounded(log_ratio: PerLabel) -> PerLabel:
    """Clamps log ratios at `LARGEST_LOG_RATIO`."""
    return jnp.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def ratio_of(log_ratio: PerLabel) -> PerLabel:
    """Ratios of probabilities, always finite unless the log ratio is NaN."""
    return jnp.exp(bounded(log_ratio))


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
        weights = _weights(log_weights)
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
        mean = _weights(over_text(log_weights, inputs))
        outside = (mean < self.least) | (mean > self.most)
        return _weighted(jnp.where(outside, 0, _weights(log_weights)), outside)


def _weights(log_weights: PerLabel) -> PerLabel:
    """Weights of log weights; 0 for log weights that are not finite."""
    return jnp.where(jnp.isfinite(log_weights), ratio_of(log_weights), 0)


def _weighted(weights: PerLabel, outside: Bool[Array, "B T"]) -> Loss:
    weights = lax.stop_gradient(weights)
    measured = {"importance/mean": weights, "importance/outside": outside.astype(weights.dtype)}
    return Loss(weights, measured)


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
    to_go: bool = False
    """Whether, in the reward, a token answers for the divergence from there on alone."""

    def by_label(self, inputs: LossInputs) -> PerLabel:
        """Estimates the divergence at each label."""
        estimate = self.estimated(inputs.policy_logprobs, inputs.reference_logprobs, inputs.chosen)
        if self.importance:
            log_ratio = inside(inputs, inputs.policy_logprobs - inputs.sampled_logprobs)
            estimate = estimate * lax.stop_gradient(_weights(log_ratio))
        return estimate

    def estimated(
        self, logprobs: PerLabel, reference: PerLabel, chosen: Bool[Array, "B T"]
    ) -> PerLabel:
        """Estimates the divergence at chosen labels from bounded log ratios; 0 at others."""
        return self.estimator(bounded(jnp.where(chosen, reference - logprobs, 0)))


# ---- the gap between recorded and own logprobs


class Gap(NamedTuple):
    """How far the logprobs of the policy that is read are from those that the rollout recorded:
    sums over the labels to learn."""

    absolute: Float[Array, ""]
    """Of |policy - sampled|."""
    factor: Float[Array, ""]
    """Of exp |policy - sampled|: by how much a probability differs (NeMo RL's
    token_mult_prob_error)."""
    kl: Float[Array, ""]
    """Of exp(x) - 1 - x for x = policy - sampled: the divergence of what sampled from the
    policy."""
    largest: Float[Array, ""]
    """The largest |policy - sampled|."""
    labels: Float[Array, ""]
    """How many."""

    @classmethod
    def of(cls, policy: PyTree, sampled: PyTree, chosen: PyTree) -> "Gap":
        """The sums of a pack."""
        log_ratio = jnp.where(chosen, policy - sampled, 0)
        size = jnp.abs(log_ratio)
        factor = jnp.where(chosen, jnp.exp(size), 0)
        return cls(
            absolute=jnp.sum(size),
            factor=jnp.sum(factor),
            kl=jnp.sum(k3(log_ratio)),
            largest=jnp.max(size, initial=0),
            labels=jnp.sum(chosen, dtype=size.dtype),
        )

    def plus(self, other: "Gap") -> "Gap":
        """Both together."""
        largest = jnp.maximum(self.largest, other.largest)
        return jax.tree.map(jnp.add, self, other)._replace(largest=largest)

    @property
    def metrics(self) -> dict[str, Float[Array, ""]]:
        """Means over the labels, and the largest; NaN if there is none."""
        least = jnp.maximum(self.labels, 1)
        means = {
            "rollout/logprob_gap_mean": self.absolute / least,
            "rollout/logprob_gap_max": self.largest,
            "rollout/probability_factor": self.factor / least,
            "rollout/kl": self.kl / least,
        }
        return {name: jnp.where(self.labels > 0, value, jnp.nan) for name, value in means.items()}


def no_gap(dtype: np.dtype) -> Gap:
    """The sums of no label."""
    return Gap(*[jnp.zeros((), dtype)] * len(Gap._fields))
