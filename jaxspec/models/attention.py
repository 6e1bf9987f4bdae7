"""Grouped-query attention to a KV cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.kernels.key_chunks import key_scores
from jaxspec.kernels.visible import AttentionMask
from jaxspec.models.cache import KVCache, LayerIndex

BLOCK = 512
"""Largest number of cache positions attended to at once, unless a page or chunk is larger."""

# Tiles bound the memory of scores, which for a long prompt would take more than its cache.
# Time and temporaries of prefill in one tile / in several (one CPU core, 4 layers, 8 heads of 16,
# float32):
#
#   prompts              ms             MB
#   32 of 192         201 / 148       84 / 52
#   16 of 512         585 / 535      272 / 86
#   2 of 4,096      4,182 / 1,971    275 / 88
TILE_QUERIES, MIN_ROW_QUERIES = 2048, 128
"""Limit of queries of a tile over all rows, and the smallest limit for a single row."""


class PartialAttention(NamedTuple):
    """Unnormalized attention over a subset of positions."""

    max_score: Float[Array, "B M T R"]
    weight_sum: Float[Array, "B M T R"]
    weighted_values: Float[Array, "B M T R H"]


def attend_cache(
    query: Float[Array, "B T N H"], cache: KVCache, layer: LayerIndex, mask: AttentionMask
) -> Float[Array, "B T N H"]:
    """Computes attention of a block to the cache.

    The softmax is in at least float32. Memory is linear in the length of the block.
    """
    # A long block, such as a prompt, is split into tiles. Each tile reads the cache only as far as
    # its own queries see.
    rows, length, *heads = query.shape
    tile_count = -(-length // max(MIN_ROW_QUERIES, TILE_QUERIES // rows))
    if tile_count == 1:
        return _attend_tile(query, cache, layer, mask)

    def to_tiles(leaf: Array, pad_mode: str) -> Array:
        """Splits positions into tiles.

        Tiles are a new first axis. Results at padded positions are dropped.
        """
        padded = jnp.pad(
            leaf, [(0, 0), (0, -length % tile_count), *[(0, 0)] * (leaf.ndim - 2)], mode=pad_mode
        )
        return jnp.moveaxis(padded.reshape(rows, tile_count, -1, *leaf.shape[2:]), 1, 0)

    def attend_tile(tile: tuple[Array, Array, Array]) -> Array:
        return _attend_tile(
            tile[0], cache, layer, mask._replace(last=tile[1], query_positions=tile[2])
        )

    attended = lax.map(
        attend_tile,
        (
            to_tiles(query, "constant"),
            to_tiles(mask.last, "edge"),
            to_tiles(mask.query_positions, "edge"),
        ),
    )
    return jnp.moveaxis(attended, 0, 1).reshape(rows, -1, *heads)[:, :length]


def _attend_tile(
    query: Float[Array, "B T N H"], cache: KVCache, layer: LayerIndex, mask: AttentionMask
) -> Float[Array, "B T N H"]:
    """Computes attention of a single tile."""
    rows, length, heads, size = query.shape
    # Scales the queries, of which there are fewer than scores.
    grouped = (query * size**-0.5).reshape(rows, length, cache.kv_heads, -1, size)
    partial = cache.layout.attend(grouped, cache, layer, mask)
    attended = (partial.weighted_values / partial.weight_sum[..., None]).astype(query.dtype)
    return attended.transpose(0, 2, 1, 3, 4).reshape(rows, length, heads, size)


def attend_in_blocks(
    grouped: Float[Array, "B T M R H"],
    read_positions: Callable[..., tuple[Array, Array, Int[Array, " C"]]],
    mask: AttentionMask,
    row_length: int,
    alignment: int,
) -> PartialAttention:
    """Computes attention block by block.

    Blocks beyond the longest row are skipped. Blocks are merged by an online softmax (Milakov &
    Gimelshein, arXiv 1805.02867).

    Args:
      grouped: Scaled queries, grouped by the KV head that they share.
      read_positions: (first, count) -> keys, values and their positions, as in
        `CacheLayout.read_positions`.
      mask: Positions that each query sees.
      row_length: Number of positions of a row.
      alignment: Positions of a page or chunk. Blocks are multiples of it.
    """
    block_length = row_length if row_length <= BLOCK else alignment * max(1, BLOCK // alignment)
    accum_dtype = np.promote_types(grouped.dtype, np.float32)

    def attend_block(first: Int[Array, ""] | int) -> PartialAttention:
        keys, values, positions = read_positions(first, block_length)
        scores = key_scores(grouped, keys, accum_dtype)
        allowed = mask.is_visible(positions)
        # The last block of a row may also read positions before `first`, which other blocks cover.
        if block_length < row_length:
            allowed &= positions >= first
        scores = jnp.where(allowed[:, None, :, None], scores, -jnp.inf)
        max_score = jnp.max(scores, axis=-1)
        # A query may see none of the block. Its maximum is then -inf, and -inf - -inf is NaN.
        weights = jnp.exp(scores - jnp.where(max_score == -jnp.inf, 0, max_score)[..., None])
        chunked_weights = weights.astype(values.dtype).reshape(
            *weights.shape[:-1], values.shape[1], -1
        )
        weighted_values = jnp.einsum(
            "BMTRns,BnMsH->BMTRH", chunked_weights, values, preferred_element_type=accum_dtype
        )
        return PartialAttention(max_score, jnp.sum(weights, axis=-1), weighted_values)

    def merge_block(index: Int[Array, ""], merged: PartialAttention) -> PartialAttention:
        return _merge_partial(merged, attend_block(index * block_length))

    if block_length == row_length:
        return attend_block(0)
    # Merges the first block into an empty result too, so that `attend_block` is compiled once only.
    empty = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(attend_block, jnp.int32(0))
    )
    empty = empty._replace(max_score=jnp.full_like(empty.max_score, -jnp.inf))
    block_count = jnp.minimum(
        jnp.max(mask.query_positions) // block_length + 1, -(-row_length // block_length)
    )
    return lax.fori_loop(0, block_count, merge_block, empty)


def _merge_partial(merged: PartialAttention, block: PartialAttention) -> PartialAttention:
    """Merges attention over two sets of positions."""
    max_score = jnp.maximum(merged.max_score, block.max_score)
    base = jnp.where(max_score == -jnp.inf, 0, max_score)
    merged_scale, block_scale = (
        jnp.exp(merged.max_score - base),
        jnp.exp(block.max_score - base),
    )
    weighted_values = (
        merged.weighted_values * merged_scale[..., None]
        + block.weighted_values * block_scale[..., None]
    )
    return PartialAttention(
        max_score,
        merged.weight_sum * merged_scale + block.weight_sum * block_scale,
        weighted_values,
    )
