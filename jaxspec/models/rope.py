"""Rotary position embedding in the rotate-half form of Llama and Qwen (Su et al., arXiv 2104.09864)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rotary_table(
    positions: Int[Array, "B T"], size: int, theta: float, dtype: jnp.dtype
) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]:
    """Cosines and sines for heads of `size`, computed in float32 (float64 for float64 models)."""
    wide = np.promote_types(dtype, np.float32)
    frequency = theta ** (-jnp.arange(0, size, 2, dtype=wide) / size)
    angle = positions[:, :, None, None].astype(wide) * frequency
    return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def rotate(heads: Float[Array, "B T N H"], table: tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]) -> Float[Array, "B T N H"]:
    """Turns each pair (i, i + H/2) of every head by its position's angle."""
    cosine, sine = table
    low, high = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
