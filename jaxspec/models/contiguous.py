"""Contiguous cache layout: row b is page b.

A page has as many positions as a row can have.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.kernels.key_chunks import choose_chunks, rechunk_keys, split_heads
from jaxspec.kernels.visible import AttentionMask
from jaxspec.models.attention import PartialAttention, attend_in_blocks
from jaxspec.models.cache import (
    CacheAddresses,
    CacheLayout,
    KVCache,
    LayerIndex,
    PromptCopy,
    empty_cache_like,
    map_keys_values,
    map_layers,
    no_table,
    position_range,
)


def empty_cache(
    layers: int,
    rows: int,
    positions: int,
    kv_heads: int,
    head_size: int,
    dtype: jnp.dtype,
    stacked: bool = False,
) -> KVCache:
    """Returns a cache of zeros without chunks."""

    def zeros(*page: int) -> Any:
        shape = (rows, kv_heads, *page)
        return (
            jnp.zeros((layers, *shape), dtype)
            if stacked
            else tuple(jnp.zeros(shape, dtype) for _ in range(layers))
        )

    return KVCache(
        keys=zeros(head_size, positions),
        values=zeros(positions, head_size),
        table=no_table(),
        layout=CONTIGUOUS,
    )


def empty_rows(cache: KVCache, rows: int, positions: int, chunk: int = 0) -> KVCache:
    """Returns a cache of zeros with new rows.

    Layers and heads are those of `cache`. Rows have at least `positions` positions, in chunks of
    `chunk` if that is faster. With `chunk` 0 they have a single chunk.
    """
    pool = cache.values[0]
    layer_bytes = rows * cache.kv_heads * positions * pool.shape[-1] * pool.dtype.itemsize
    chunks = choose_chunks(positions, layer_bytes, chunk)
    return empty_cache_like(cache, rows, chunks.chunk_count, chunks.width, CONTIGUOUS)


def expand_prompts(prompts: KVCache, group_size: int, positions: int, chunk: int = 0) -> KVCache:
    """Repeats each prompt for the rows of its group.

    The result has the layout of `empty_rows`.
    """
    kv_heads = prompts.kv_heads
    rows = empty_rows(prompts, group_size * prompts.page_count, positions, chunk)

    def pad_rows(lead: int, pool: Array, target: Array) -> Array:
        repeated = jnp.repeat(pool, group_size, axis=lead)
        return jnp.pad(
            repeated,
            [
                (0, target_size - source_size)
                for source_size, target_size in zip(repeated.shape, target.shape, strict=True)
            ],
        )

    def pad_keys(lead: int, pool: Array, target: Array) -> Array:
        chunks = rechunk_keys(pool, target.shape[-1])
        return pad_rows(lead, chunks, split_heads(target, kv_heads)).reshape(target.shape)

    return rows.replace(
        keys=map_layers(pad_keys, prompts.keys, rows.keys),
        values=map_layers(pad_rows, prompts.values, rows.values),
    )


def block_alignment(cache: KVCache) -> int:
    """Returns the number of positions of which blocks to read are multiples.

    It is the width of a chunk, or 1 if rows have a single chunk.
    """
    width = cache.keys[0].shape[-1]
    return width if width < cache.page_size else 1


def locate_positions(cache: KVCache, positions: Int[Array, "B T"]) -> CacheAddresses:
    """Locates positions, as `CacheLayout` defines.

    A table, if any, has one column: the page of each text.
    """
    rows = jnp.broadcast_to(cache.table, positions.shape) if cache.table.size else None
    return CacheAddresses(rows, positions)


def read_positions(
    cache: KVCache, layer: LayerIndex, first: Int[Array, ""] | int, count: int
) -> tuple[Array, Array, Int[Array, " C"]]:
    """Reads `count` positions of all rows, as `CacheLayout` defines."""
    size, alignment = cache.page_size, block_alignment(cache)
    keys, values, first_position = (
        split_heads(cache.keys[layer], cache.kv_heads),
        cache.values[layer],
        0,
    )
    if count < size:
        # Near the end of a row, the slice also covers positions before `first`.
        first_position = jnp.minimum(first, size - count)
        # A single chunk is sliced by position, several by chunk.
        axis = 4 if keys.shape[2] == 1 else 2
        keys = lax.dynamic_slice_in_dim(keys, first_position // alignment, count // alignment, axis)
        values = lax.dynamic_slice_in_dim(values, first_position, count, 2)
    if cache.table.size:
        rows = cache.table[:, 0]
        keys, values = (jnp.take(leaf, rows, axis=0, mode="clip") for leaf in (keys, values))
    return keys, values[:, None], position_range(first_position, count)


def attend(
    grouped: Float[Array, "B T M R H"], cache: KVCache, layer: LayerIndex, mask: AttentionMask
) -> PartialAttention:
    """Attends to the cache block by block, as `CacheLayout` defines."""
    return attend_in_blocks(
        grouped,
        partial(read_positions, cache, layer),
        mask,
        cache.page_size,
        block_alignment(cache),
    )


def copy_prompt(cache: KVCache, copy: PromptCopy, prompts: KVCache) -> KVCache:
    """Copies a prompt to the beginning of a row."""
    # This also sets the rest of the prompt's last chunk to zeros. No query sees those positions
    # before they are written.
    row, prompt = copy.slot, copy.prompt

    def write_row(pool: Array, lead: int, source: Array) -> Array:
        indices = [jnp.zeros_like(row)] * pool.ndim
        indices[lead] = row
        return lax.dynamic_update_slice(pool, source, indices)

    def copy_keys(lead: int, pool: Array, source: Array) -> Array:
        chunks = rechunk_keys(lax.dynamic_index_in_dim(source, prompt, lead), pool.shape[-1])
        return write_row(split_heads(pool, cache.kv_heads), lead, chunks).reshape(pool.shape)

    def copy_values(lead: int, pool: Array, source: Array) -> Array:
        return write_row(pool, lead, lax.dynamic_index_in_dim(source, prompt, lead))

    return cache.replace(
        keys=map_layers(copy_keys, cache.keys, prompts.keys),
        values=map_layers(copy_values, cache.values, prompts.values),
    )


def take_rows(cache: KVCache, rows: Int[Array, " b"]) -> KVCache:
    """Copies the selected rows to a cache of their own."""
    return map_keys_values(lambda lead, pool: jnp.take(pool, rows, axis=lead), cache)


def write_rows(cache: KVCache, rows: Int[Array, " b"], row_cache: KVCache) -> KVCache:
    """Writes the rows of `row_cache` back to the selected rows."""
    return map_keys_values(
        lambda lead, pool, row_pool: pool.at[(slice(None),) * lead + (rows,)].set(
            row_pool, unique_indices=True
        ),
        cache,
        row_cache,
    )


CONTIGUOUS = CacheLayout(
    locate_positions, read_positions, attend, copy_prompt, take_rows, write_rows
)
