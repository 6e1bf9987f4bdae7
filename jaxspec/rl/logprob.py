"""Token log-probabilities of given sequences, without ever holding the logits of all positions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.decoder import Decoder
from jaxspec.sampling import Processing, entropy, processed_logprobs
from jaxspec.state import Rollout

CHUNK_ELEMENTS = 2**25
"""Logits alive at once: positions are taken in chunks so that rows x chunk x vocabulary stays below this."""


def in_chunks(function: Callable[..., Any], elements_per_position: int, *arrays: Array) -> Any:
    """Maps `function` over chunks of the position axis (the second) and joins the results; the backward pass recomputes each chunk.

    One chunk, without a loop, when everything fits.
    """
    length = arrays[0].shape[1]
    chunk = max(1, min(length, CHUNK_ELEMENTS // max(elements_per_position, 1)))
    if chunk == length:
        return function(*arrays)
    count = -(-length // chunk)

    def split(array: Array) -> Array:
        padded = jnp.pad(array, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(array.shape[0], count, chunk, *array.shape[2:]), 1, 0)

    def join(array: Array) -> Array:
        moved = jnp.moveaxis(array, 0, 1)
        return moved.reshape(moved.shape[0], count * chunk, *moved.shape[3:])[:, :length]

    mapped = jax.lax.map(lambda parts: jax.checkpoint(function)(*parts), tuple(split(array) for array in arrays))
    return jax.tree.map(join, mapped)


def positions_of(tokens: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """0, 1, 2, ... for every row."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def learnt_texts(tokens: Int[Array, "B S"], mask: Bool[Array, "B S"]) -> Int[Array, "B S"]:
    """The texts that a learner's pass reads, of which only what precedes a token of `mask` matters.

    A row without such a token is replaced by the first row that has one (by token 0 where none has). From a row's last such token on stands
    the row's first token, since a rollout may end with a token that nothing has read.
    The mask alone is not enough for a text that makes activations overflow: behind it, zero cotangents times NaN are NaN.
    The row that stands in is in the pass anyway, and where rows are sharded it takes the sum of one row's tokens over the shards, not a
    gather of all.
    """
    positions, learnt = positions_of(tokens), jnp.any(mask, axis=1)
    last = jnp.max(jnp.where(mask, positions, 0), axis=1, keepdims=True)
    read = jnp.where(positions < last, tokens, tokens[:, :1])
    rows = jnp.arange(len(tokens), dtype=jnp.int32)
    first = jnp.min(jnp.where(learnt, rows, len(tokens)))
    stands_in = jnp.sum(jnp.where((rows == first)[:, None], read, 0), axis=0, dtype=tokens.dtype)
    return jnp.where(learnt[:, None], read, stands_in)


def response_mask(rollout: Rollout) -> Array:
    """True at response tokens, [B S]."""
    positions = jnp.arange(rollout.tokens.shape[1], dtype=jnp.int32)
    return (positions >= rollout.prompt_lengths[:, None]) & (positions < rollout.lengths[:, None])


def token_logprobs(
    policy: Decoder, hidden: Float[Array, "B S D"], tokens: Int[Array, "B S"], prompt_lengths: Int[Array, " B"], processing: Processing
) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
    """Log-probability of each token given those before it, and the entropy it was drawn with, under the sampling distribution.

    A token that rounding puts just outside top-k or top-p here, though it was sampled, counts as inside. Position 0, which nothing
    precedes, gets zeros.
    """
    produced = positions_of(tokens) - prompt_lengths[:, None]

    def chunk(
        hidden: Float[Array, "B C D"], tokens: Int[Array, "B C"], produced: Int[Array, "B C"]
    ) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
        logprobs = processed_logprobs(policy.logits(hidden), processing, produced, keep=tokens)
        return jnp.take_along_axis(logprobs, tokens[:, :, None], axis=2)[:, :, 0], entropy(logprobs)

    picked, entropies = in_chunks(chunk, tokens.shape[0] * policy.config.vocab, hidden[:, :-1], tokens[:, 1:], produced[:, 1:])
    shift = ((0, 0), (1, 0))
    return jnp.pad(picked, shift), jnp.pad(entropies, shift)
