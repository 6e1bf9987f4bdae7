"""From logits to tokens: processed log-probabilities and noise that depends on nothing but its keys."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

# Streams of noise of one row; two draws never share a key.
TARGET, DRAFT, COIN, NEXT = range(4)


class Processing(NamedTuple):
    """What turns the target's logits into the distribution it is sampled from, `known` first, then in this order; static in a program."""

    banned: tuple[int, ...] = ()
    """Ids that are never sampled."""
    min_new_tokens: int = 0
    """Tokens a response has before one of `stop_ids` may end it."""
    stop_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    """0: the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach this sum."""
    known: int = 0
    """Ids from here on have no token (a published embedding may have more rows than its tokenizer) and are never sampled; 0: all have."""


def processed_logits(
    logits: Float[Array, "*B V"],
    processing: Processing,
    produced: Int[Array, "*B"],
    factor: Float[Array, "*#B"] | float = 1.0,
    keep: Int[Array, "*B"] | None = None,
) -> Float[Array, "*B V"]:
    """Logits of the sampling distribution, up to a constant; excluded tokens are at -inf. The plain case costs nothing.

    Args:
      logits: of a network, over the real vocabulary.
      processing: see `Processing`.
      produced: response tokens before the one sampled here, for the minimum length.
      factor: the temperature is multiplied by it (a draft may be sharper or flatter than its target); an array is one for all positions
        or broadcasts over them, and may be traced.
      keep: ids that top-k and top-p never drop: those known to have been sampled, where rounding must not exclude them afterwards.
    """
    if 0 < processing.known < logits.shape[-1]:
        logits = jnp.where(jnp.arange(logits.shape[-1], dtype=jnp.int32) < processing.known, logits, -jnp.inf)
    if processing.banned:
        logits = jnp.where(_among(processing.banned, logits.shape[-1]), -jnp.inf, logits)
    if processing.min_new_tokens and processing.stop_ids:
        ends = _among(processing.stop_ids, logits.shape[-1])
        logits = jnp.where(ends & (produced < processing.min_new_tokens)[..., None], -jnp.inf, logits)
    logits = _tempered(logits, processing.temperature, factor)
    if 0 < processing.top_k < logits.shape[-1]:
        logits = _at_least(logits, jax.lax.top_k(logits, processing.top_k)[0][..., -1:], keep)
    if processing.top_p < 1:
        descending = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(descending, axis=-1)
        inside = jnp.cumsum(probs, axis=-1) - probs < processing.top_p  # what stands before a token has not reached the sum
        logits = _at_least(logits, jnp.min(jnp.where(inside, descending, descending[..., :1]), axis=-1, keepdims=True), keep)
    return logits


def _among(chosen: tuple[int, ...], vocab: int) -> Bool[Array, " V"]:
    """Which ids are among the chosen."""
    return jnp.isin(jnp.arange(vocab, dtype=jnp.int32), jnp.asarray(chosen, jnp.int32))


def _at_least(logits: Float[Array, "*B V"], least: Float[Array, "*B 1"], keep: Int[Array, "*B"] | None) -> Float[Array, "*B V"]:
    """Drops what is below `least`; tokens tied with it stay, and so do NaNs, which must be seen."""
    drop = logits < least
    if keep is not None:
        drop &= jnp.arange(logits.shape[-1], dtype=jnp.int32) != keep[..., None]
    return jnp.where(drop, -jnp.inf, logits)


def _tempered(logits: Float[Array, "*B V"], temperature: float, factor: Float[Array, "*#B"] | float) -> Float[Array, "*B V"]:
    """Logits over temperature x factor; at 0, all mass on the largest."""
    if not isinstance(factor, jax.Array):
        product = temperature * factor
        if product == 1:
            return logits
        return logits / product if product > 0 else _greedy(logits)
    products = jnp.asarray(temperature * factor, logits.dtype)[..., None]
    return jnp.where(products > 0, logits / jnp.where(products > 0, products, 1), _greedy(logits))


def _greedy(logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """0 at the (first) largest logit; -inf, and NaN for NaN, elsewhere."""
    largest = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32) == jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return jnp.where(jnp.isnan(logits), logits, jnp.where(largest, jnp.zeros_like(logits), -jnp.inf))


def processed_logprobs(
    logits: Float[Array, "*B V"],
    processing: Processing,
    produced: Int[Array, "*B"],
    factor: Float[Array, "*#B"] | float = 1.0,
    keep: Int[Array, "*B"] | None = None,
) -> Float[Array, "*B V"]:
    """Log-probabilities of the sampling distribution; see `processed_logits`."""
    return jax.nn.log_softmax(processed_logits(logits, processing, produced, factor, keep), axis=-1)


def entropy(logprobs: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """Entropy in nats; tokens of probability 0 count nothing."""
    possible = logprobs != -jnp.inf
    return -jnp.sum(jnp.where(possible, jnp.exp(logprobs) * jnp.where(possible, logprobs, 0), 0), axis=-1)


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
