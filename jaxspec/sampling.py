"""From logits to tokens: processed log-probabilities and noise that depends on nothing but its keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

# Streams of noise of one row; two draws never share a key.
TARGET, DRAFT, COIN, NEXT = range(4)


def processed_logprobs(logits: Float[Array, "*B V"], temperature: float) -> Float[Array, "*B V"]:
    """Log-probabilities of the sampling distribution: logits over temperature, normalised."""
    return jax.nn.log_softmax(logits / temperature if temperature != 1.0 else logits, axis=-1)


def row_keys(key: Key[Array, ""], rows: Int[Array, " B"]) -> Key[Array, " B"]:
    """One key for each global row number, the same on every mesh."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def offset_keys(keys: Key[Array, " B"], positions: Int[Array, " B"], stream: int, count: int) -> Key[Array, "B count"]:
    """Keys by (row, position, stream, offset): those of draws that must be fresh in every round."""

    def one(key, position):
        key = jax.random.fold_in(jax.random.fold_in(key, stream), position)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count, dtype=jnp.int32))

    return jax.vmap(one)(keys, positions)


def position_keys(keys: Key[Array, " B"], positions: Int[Array, " B"], count: int) -> Key[Array, "B count"]:
    """Keys by (row, absolute position), for `count` positions from each row's own: the coupled rule's noise."""

    def one(key, position):
        key = jax.random.fold_in(key, TARGET)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, position + jnp.arange(count, dtype=jnp.int32))

    return jax.vmap(one)(keys, positions)


def gumbel(keys: Key[Array, "B T"], vocab: int, dtype: jnp.dtype) -> Float[Array, "B T V"]:
    """Standard Gumbel noise, one vector over the vocabulary for each key."""
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), dtype)))(keys)


def uniform(keys: Key[Array, "B T"], dtype: jnp.dtype) -> Float[Array, "B T"]:
    """Uniform numbers in [0, 1), one for each key."""
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (), dtype)))(keys)


def categorical(logprobs: Float[Array, "*B V"], noise: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """Samples by the Gumbel-max trick; a token of probability 0 is never drawn."""
    return jnp.argmax(logprobs + noise, axis=-1).astype(jnp.int32)
