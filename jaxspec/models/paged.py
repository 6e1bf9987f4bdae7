"""Paged cache layout (Kwon et al., arXiv 2309.06180).

A table lists the pages of each row in a common pool. Rows of a group share the pages of their
prompt.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.kernels import paged_attention
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
    position_range,
)


def empty_pages(cache: KVCache, pages: int, page_size: int) -> KVCache:
    """Returns a pool of zeros.

    Layers and heads are those of `cache`. The caller sets its table.
    """
    return empty_cache_like(cache, pages, 1, page_size, PAGED)


def locate_positions(cache: KVCache, positions: Int[Array, "B T"]) -> CacheAddresses:
    """Locates positions by the table, as `CacheLayout` defines."""
    size = cache.page_size
    # Positions without a page get a page beyond the pool, where writes are dropped.
    pages = jnp.take_along_axis(
        cache.table, positions // size, axis=1, mode="fill", fill_value=cache.page_count
    )
    # A negative index would count from the end of the table.
    pages = jnp.where(positions < 0, cache.page_count, pages)
    return CacheAddresses(pages, positions % size)


def read_positions(
    cache: KVCache, layer: LayerIndex, first: Int[Array, ""] | int, count: int
) -> tuple[Array, Array, Int[Array, " C"]]:
    """Reads `count` positions of all rows, or whole rows if these are shorter."""
    size, row_pages = cache.page_size, cache.table.shape[1]
    pages = min(count // size, row_pages)
    column = jnp.minimum(first // size, row_pages - pages)
    page_ids = lax.dynamic_slice_in_dim(cache.table, column, pages, axis=1)

    # Clips entries beyond the pool. The mask hides the positions of such pages.
    def gather(pool: Any) -> Array:
        indexed = pool[layer].at[page_ids] if isinstance(pool, tuple) else pool.at[layer, page_ids]
        return indexed.get(mode="clip")

    keys, values = gather(cache.keys).swapaxes(1, 2), gather(cache.values)
    return keys, values, position_range(column * size, pages * size)


def attend(
    grouped: Float[Array, "B T M R H"], cache: KVCache, layer: LayerIndex, mask: AttentionMask
) -> PartialAttention:
    """Attends to the cache, by a GPU kernel if it supports devices and shapes."""
    if paged_attention.has_hopper_gpus() and paged_attention.supports_shapes(
        grouped, cache.keys[0]
    ):
        keys, values = cache.keys, cache.values
        # The kernel expects a stack of layers.
        if isinstance(keys, tuple):
            keys, values, layer = keys[layer][None], values[layer][None], 0
        layer_index = jnp.asarray(layer, jnp.int32)
        return PartialAttention(
            *paged_attention.attend_pages(grouped, keys, values, layer_index, cache.table, mask)
        )
    size = cache.page_size
    row_length = size * cache.table.shape[1]
    return attend_in_blocks(grouped, partial(read_positions, cache, layer), mask, row_length, size)


def copy_prompt(cache: KVCache, copy: PromptCopy, prompts: KVCache) -> KVCache:
    """Copies those pages that the row will write to.

    The prompt's other pages are shared.
    """

    def copy_pages(lead: int, pool: Array) -> Array:
        lead_index = (slice(None),) * lead
        copied_pages = pool[(*lead_index, copy.source_pages)]
        return pool.at[(*lead_index, copy.destination_pages)].set(copied_pages, mode="drop")

    return map_keys_values(copy_pages, cache)


def take_rows(cache: KVCache, rows: Int[Array, " b"]) -> KVCache:
    """Returns the whole cache."""
    # Rows share one pool of pages. The caller selects their rows of the table.
    return cache


def write_rows(cache: KVCache, rows: Int[Array, " b"], row_cache: KVCache) -> KVCache:
    """Returns `row_cache`."""
    # `take_rows` returned the whole pool, so `row_cache` has all pages.
    return row_cache


PAGED = CacheLayout(locate_positions, read_positions, attend, copy_prompt, take_rows, write_rows)
