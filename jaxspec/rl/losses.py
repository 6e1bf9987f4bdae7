"""Losses of the policy, token by token; the learner sums them over the tokens to learn from and
divides by their number in the batch."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class LossInputs(NamedTuple):
    """What a loss may depend on: log-probabilities of the labels of packed texts, under the
    distribution they were sampled from."""

    policy_logprobs: Float[Array, "B T"]
    """With gradient."""
    old_logprobs: Float[Array, "B T"]
    """Of the policy before the updates on this batch."""
    sampled_logprobs: Float[Array, "B T"]
    """As the rollout recorded them."""
    advantages: Float[Array, "B T"]
    chosen: Bool[Array, "B T"]
    """The labels to learn from; the loss of others is not looked at."""


PolicyLoss = Callable[[LossInputs], Float[Array, "B T"]]


def clipped_ratio(
    inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28
) -> Float[Array, "B T"]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), the ratio being that of policy
    to old policy.

    The first update on a batch has ratio 1 everywhere, so the clip binds only where a batch is used
    more than once.

    Source: arXiv 2402.03300, equation 3 without the KL term; asymmetric clip as in DAPO, arXiv
    2503.14476.
    """
    ratio = jnp.exp(jnp.where(inputs.chosen, inputs.policy_logprobs - inputs.old_logprobs, 0))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return -jnp.minimum(ratio * inputs.advantages, clipped * inputs.advantages)


def negative_log_likelihood(inputs: LossInputs) -> Float[Array, "B T"]:
    """In nats, of supervised training."""
    return -inputs.policy_logprobs
