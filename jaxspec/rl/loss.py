"""The policy loss: PPO's clipped ratio with group advantages, averaged over response tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_mean(values: Float[Array, "*B"], mask: Bool[Array, "*B"]) -> Float[Array, ""]:
    """Mean over True entries; 0 when there are none."""
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask, dtype=values.dtype), 1)


def grpo_loss(
    policy_logprobs: Float[Array, "B S"],
    old_logprobs: Float[Array, "B S"],
    advantages: Float[Array, " B"],
    mask: Bool[Array, "B S"],
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Float[Array, ""]:
    """Token mean of -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    The first update of a batch has ratio 1 everywhere, so the clip binds only where a batch is used more than once.

    Source: arXiv 2402.03300, equation 3 without the KL term; token mean and asymmetric clip as in DAPO, arXiv 2503.14476.
    """
    ratio = jnp.exp(jnp.where(mask, policy_logprobs - old_logprobs, 0))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    gain = jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return -masked_mean(gain, mask)
