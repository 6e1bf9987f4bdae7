"""Plain twins: attention with all scores at once, and the positions of padded rows."""

import jax
import jax.numpy as jnp


def attend(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention [B T N H] of each query over the slots that the mask [B T S] leaves it,
    with all scores at once."""
    rows, length, heads, size = query.shape
    grouped = query.reshape(rows, length, keys.shape[2], -1, size)
    scores = jnp.einsum("BTMRH,BSMH->BMRTS", grouped, keys) * size**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("BMRTS,BSMH->BTMRH", weights, values).reshape(rows, length, heads, size)


def up_to_position(positions: jax.Array, slots: int) -> jax.Array:
    """True where slot <= position: causal inside a block, and blind to stale slots above it; [B T
    S]."""
    return jnp.arange(slots, dtype=jnp.int32) <= positions[:, :, None]


def positions_of(tokens: jax.Array) -> jax.Array:
    """0, 1, 2, ... for every row."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
