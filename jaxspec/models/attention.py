"""Grouped-query attention, masked by position."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def attend(
    query: Float[Array, "B T N H"], keys: Float[Array, "B S M H"], values: Float[Array, "B S M H"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T N H"]:
    """Softmax attention of each query over the unmasked slots; scores are normalised in at least float32."""
    rows, length, heads, size = query.shape
    kv_heads = keys.shape[2]
    grouped = query.reshape(rows, length, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("BTMRH,BSMH->BMRTS", grouped, keys) * size**-0.5
    wide = scores.astype(np.promote_types(scores.dtype, np.float32))
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], wide, -jnp.inf), axis=-1).astype(values.dtype)
    return jnp.einsum("BMRTS,BSMH->BTMRH", weights, values).reshape(rows, length, heads, size)


def up_to_position(positions: Int[Array, "B T"], slots: int) -> Bool[Array, "B T S"]:
    """True where slot <= position: causal inside a block, and blind to stale slots above it."""
    return jnp.arange(slots, dtype=jnp.int32) <= positions[:, :, None]
