"""Group advantages (GRPO, arXiv 2402.03300, section 4.1.2)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def group_advantages(
    rewards: Float[Array, " B"], valid: Bool[Array, " B"], group_size: int, eps: float = 1e-6
) -> Float[Array, " B"]:
    """Reward minus the mean of its group, over the group's standard deviation; rows without a
    reward count nowhere and get 0.

    Rows of a group are adjacent. A group whose rewards are all equal gets exactly 0.
    """
    grouped, mask = rewards.reshape(-1, group_size), valid.reshape(-1, group_size)
    highest = jnp.max(jnp.where(mask, grouped, -jnp.inf), axis=1, keepdims=True)
    lowest = jnp.min(jnp.where(mask, grouped, jnp.inf), axis=1, keepdims=True)
    count = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True, dtype=rewards.dtype), 1)
    mean = jnp.sum(jnp.where(mask, grouped, 0), axis=1, keepdims=True) / count
    # The mean of equal rewards may be rounded, and a deviation that is all rounding is as small as
    # `eps`.
    centred = jnp.where(mask & (highest != lowest), grouped - mean, 0)
    deviation = jnp.sqrt(jnp.sum(centred * centred, axis=1, keepdims=True) / count)
    return (centred / (deviation + eps)).reshape(-1)
