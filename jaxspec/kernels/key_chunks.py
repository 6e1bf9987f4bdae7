"""How the keys of a contiguous row lie: on a CPU in chunks of positions, since XLA's products there
take chunks of 64 positions 1.7 to 2.6 times as fast as rows of 192 or 240.

The plain twin is one chunk, `chunk = 0`: the same entries, and the same attention to them. Keys are
[... M*C H w], C chunks of w positions for each of M heads: heads and chunks share an axis, so that
keys and values have as many.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

CHUNK_POSITIONS, MIN_CHUNKED_BYTES = 64, 2**18
"""Positions of a chunk, where a layer's keys are more bytes than that: fewer come from a core's own
cache, and a tenth faster as they are."""
ROW_MULTIPLE = 8
"""Rows that are one chunk have a multiple of so many positions: odd numbers make attention slower
(36 to 41: by 15 % of a round)."""


class ChunkShape(NamedTuple):
    """Of a row."""

    chunk_count: int
    width: int


def choose_chunks(positions: int, layer_bytes: int, chunk: int) -> ChunkShape:
    """What a row with at least so many positions is made of.

    Args:
      positions: of a row.
      layer_bytes: that the keys of a layer take, of all rows.
      chunk: positions of a chunk where that is faster; 0: the row is one chunk.
    """
    # values gain nothing by chunks, and a third more of them costs what keys gain
    padding = -positions % chunk if chunk else 0
    if 0 < chunk < positions and 3 * padding <= positions and layer_bytes > MIN_CHUNKED_BYTES:
        return ChunkShape(-(-positions // chunk), chunk)
    return ChunkShape(1, -(-positions // ROW_MULTIPLE) * ROW_MULTIPLE)


def split_heads(keys: Float[Array, "... MC H w"], heads: int) -> Float[Array, "... M C H w"]:
    """Heads and chunks apart."""
    return keys.reshape(*keys.shape[:-3], heads, -1, *keys.shape[-2:])


def rechunk_keys(keys: Float[Array, "... M H s"], width: int) -> Float[Array, "... M C H w"]:
    """Keys in one chunk as chunks of at most `width` positions; the last one is filled up with
    zeros."""
    positions = keys.shape[-1]
    width = min(positions, width)
    padded = jnp.pad(keys, [(0, 0)] * (keys.ndim - 1) + [(0, -positions % width)])
    return jnp.moveaxis(padded.reshape(*keys.shape[:-1], -1, width), -2, -3)


def key_scores(
    query: Float[Array, "B T M R H"], keys: Float[Array, "B M n H s"], accum_dtype: jnp.dtype
) -> Float[Array, "B M T R C"]:
    """Products of queries and keys, by position."""
    # Chunks are a batch dimension, and the queries the same for all: with free chunks XLA would
    # transpose the keys.
    queries = jnp.broadcast_to(query[:, None], (len(query), keys.shape[2], *query.shape[1:]))
    scores = jnp.einsum("BnTMRH,BMnHs->BMnTRs", queries, keys, preferred_element_type=accum_dtype)
    scores = jnp.moveaxis(scores, 2, 4)
    return scores.reshape(*scores.shape[:4], -1)
