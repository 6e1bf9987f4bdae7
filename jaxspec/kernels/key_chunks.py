"""Chunked layout of keys in a contiguous cache.

Keys are [... M*C H w]: C chunks of w positions for each of M heads. The plain layout is a single
chunk (`chunk = 0`), with the same entries and the same attention.
"""

# Chunks are for CPUs: XLA multiplies chunks of 64 positions 1.7 to 2.6 times as fast as rows of 192
# or 240. Heads and chunks share an axis, so that keys have as many axes as values.

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

# Smaller keys fit the cache of a core, and are a tenth faster without chunks.
CHUNK_POSITIONS, MIN_CHUNKED_BYTES = 64, 2**18
"""Positions of a chunk, and the bytes that a layer's keys must exceed to be chunked."""
# Other lengths make attention slower (36 to 41 positions: by 15 % of a round).
ROW_MULTIPLE = 8
"""Divisor of the number of positions of rows with a single chunk."""


class ChunkShape(NamedTuple):
    """Number of chunks and their positions."""

    chunk_count: int
    width: int


def choose_chunks(positions: int, layer_bytes: int, chunk: int) -> ChunkShape:
    """Chooses the chunks of a row.

    Args:
      positions: Smallest number of positions of the row.
      layer_bytes: Size of the keys of one layer, for all rows.
      chunk: Positions of a chunk, if chunks are faster. 0 = always a single chunk.
    """
    # Padding also lengthens the values, which gain nothing from chunks. Values longer by a third
    # cost as much as the keys gain.
    padding = -positions % chunk if chunk else 0
    if 0 < chunk < positions and 3 * padding <= positions and layer_bytes > MIN_CHUNKED_BYTES:
        return ChunkShape(-(-positions // chunk), chunk)
    return ChunkShape(1, -(-positions // ROW_MULTIPLE) * ROW_MULTIPLE)


def split_heads(keys: Float[Array, "... MC H w"], heads: int) -> Float[Array, "... M C H w"]:
    """Separates the axes of heads and chunks."""
    return keys.reshape(*keys.shape[:-3], heads, -1, *keys.shape[-2:])


def rechunk_keys(keys: Float[Array, "... M H s"], width: int) -> Float[Array, "... M C H w"]:
    """Splits keys into chunks.

    Chunks have at most `width` positions. The last chunk is padded with zeros.
    """
    positions = keys.shape[-1]
    width = min(positions, width)
    padded = jnp.pad(keys, [(0, 0)] * (keys.ndim - 1) + [(0, -positions % width)])
    return jnp.moveaxis(padded.reshape(*keys.shape[:-1], -1, width), -2, -3)


def key_scores(
    query: Float[Array, "B T M R H"], keys: Float[Array, "B M n H s"], accum_dtype: jnp.dtype
) -> Float[Array, "B M T R C"]:
    """Multiplies queries by keys, ordered by position."""
    # Broadcasts the queries to make chunks a batch dimension. If chunks were a free dimension, XLA
    # would transpose the keys.
    queries = jnp.broadcast_to(query[:, None], (len(query), keys.shape[2], *query.shape[1:]))
    scores = jnp.einsum("BnTMRH,BMnHs->BMnTRs", queries, keys, preferred_element_type=accum_dtype)
    scores = jnp.moveaxis(scores, 2, 4)
    return scores.reshape(*scores.shape[:4], -1)
