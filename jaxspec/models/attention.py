"""Grouped-query attention of a block to the live part of a cache."""

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
"""Positions of a cache that are looked at together; of longer caches, only as many blocks as the
longest row needs."""


TILE_QUERIES, MIN_ROW_QUERIES = 2048, 128
"""Queries of all rows, and of one row at least, whose scores are there at once: those of a long
prompt would take more than its cache.

Milliseconds in which a CPU's core reads prompts in one piece / in several, and MB of temporaries (4
layers, 8 heads of 16, float32): 32 of 64 the same program; 32 of 192 201 / 148, 84 / 52; 16 of 512
585 / 535, 272 / 86; 2 of 4,096 4,182 / 1,971, 275 / 88.
"""


class PartialAttention(NamedTuple):
    """Attention over some positions, not yet normalised."""

    max_score: Float[Array, "B M T R"]
    weight_sum: Float[Array, "B M T R"]
    weighted_values: Float[Array, "B M T R H"]


def attend_cache(
    query: Float[Array, "B T N H"], cache: KVCache, layer: LayerIndex, mask: AttentionMask
) -> Float[Array, "B T N H"]:
    """Softmax attention of a block to what its rows have in the cache; scores are normalised in at
    least float32.

    A long block, that of a prompt, is gone through in pieces, so that its memory is linear in its
    length; each piece reads the cache as far as its own queries see.
    """
    rows, length, *heads = query.shape
    tile_count = -(-length // max(MIN_ROW_QUERIES, TILE_QUERIES // rows))
    if tile_count == 1:
        return _attend_tile(query, cache, layer, mask)

    def to_tiles(leaf: Array, pad_mode: str) -> Array:
        """Pieces as a first axis; the last one is filled up with what nobody reads."""
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
    """Attention of a block that is short enough to be one piece."""
    rows, length, heads, size = query.shape
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
    """Attention at a cost that follows the longest row: longer caches are gone through in blocks,
    with an online softmax (Milakov & Gimelshein, arXiv 1805.02867).

    Args:
      grouped: scaled queries, by the head of keys that they share.
      read_positions: (first, count) -> keys, values and their positions, as in
        `CacheLayout.read_positions`.
      mask: what each query sees.
      row_length: positions of a row.
      alignment: positions that only come together.
    """
    block_length = row_length if row_length <= BLOCK else alignment * max(1, BLOCK // alignment)
    accum_dtype = np.promote_types(grouped.dtype, np.float32)

    def attend_block(first: Int[Array, ""] | int) -> PartialAttention:
        keys, values, positions = read_positions(first, block_length)
        scores = key_scores(grouped, keys, accum_dtype)
        allowed = mask.is_visible(positions)
        if block_length < row_length:
            allowed &= positions >= first
        scores = jnp.where(allowed[:, None, :, None], scores, -jnp.inf)
        max_score = jnp.max(scores, axis=-1)
        weights = jnp.exp(scores - jnp.where(max_score == -jnp.inf, 0, max_score)[..., None])
        chunked_weights = weights.astype(values.dtype).reshape(
            *weights.shape[:-1], values.shape[1], -1
        )
        weighted_values = jnp.einsum(
            "BMTRns,BnMsH->BMTRH", chunked_weights, values, preferred_element_type=accum_dtype
        )
        return PartialAttention(max_score, jnp.sum(weights, axis=-1), weighted_values)

    def merge_block(index: Int[Array, ""], merged: PartialAttention) -> PartialAttention:
        block = attend_block(index * block_length)
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

    if block_length == row_length:
        return attend_block(0)
    # The first block joins an empty part: its own code would be compiled once more.
    empty = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(attend_block, jnp.int32(0))
    )
    empty = empty._replace(max_score=jnp.full_like(empty.max_score, -jnp.inf))
    block_count = jnp.minimum(
        jnp.max(mask.query_positions) // block_length + 1, -(-row_length // block_length)
    )
    return lax.fori_loop(0, block_count, merge_block, empty)
