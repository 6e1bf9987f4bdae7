"""The paged layout: a pool of pages of which each row has those that its table names, so that rows
of a group share the pages of their prompt and no row has more than it needs (Kwon et al., arXiv
2309.06180)."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.kernels import paged_attention
from jaxspec.kernels.visible import Visible
from jaxspec.models.attention import Part, in_blocks
from jaxspec.models.cache import (
    KVCache,
    LayerIndex,
    Layout,
    Places,
    Seat,
    consecutive,
    map_both,
    zeros_like,
)


def empty_pages(cache: KVCache, pages: int, page_size: int) -> KVCache:
    """A pool of zeros like another cache, which a table makes rows of."""
    return zeros_like(cache, pages, 1, page_size, PAGED)


def locate(cache: KVCache, positions: Int[Array, "B T"]) -> Places:
    """See `Layout`."""
    size = cache.page_size
    pages = jnp.take_along_axis(
        cache.table, positions // size, axis=1, mode="fill", fill_value=cache.pages
    )
    # a negative index would count from the end of the table
    pages = jnp.where(positions < 0, cache.pages, pages)
    return Places(pages, positions % size)


def read(
    cache: KVCache, layer: LayerIndex, first: Int[Array, ""] | int, count: int
) -> tuple[Array, Array, Int[Array, " C"]]:
    """See `Layout`."""
    size, of_row = cache.page_size, cache.table.shape[1]
    pages = min(count // size, of_row)
    column = jnp.minimum(first // size, of_row - pages)
    chosen = lax.dynamic_slice_in_dim(cache.table, column, pages, axis=1)

    def gather(pool: Any) -> Array:
        found = pool[layer].at[chosen] if isinstance(pool, tuple) else pool.at[layer, chosen]
        return found.get(mode="clip")

    keys, values = gather(cache.keys).swapaxes(1, 2), gather(cache.values)
    return keys, values, consecutive(column * size, pages * size)


def attend(
    grouped: Float[Array, "B T M R H"], cache: KVCache, layer: LayerIndex, visible: Visible
) -> Part:
    """See `Layout`; by an accelerator kernel where there is one for these shapes."""
    if paged_attention.runs_here() and paged_attention.fits(grouped, cache.keys[0]):
        keys, values = cache.keys, cache.values
        if isinstance(keys, tuple):
            keys, values, layer = keys[layer][None], values[layer][None], 0
        place = jnp.asarray(layer, jnp.int32)
        return Part(
            *paged_attention.paged_parts(grouped, keys, values, place, cache.table, visible)
        )
    size = cache.page_size
    whole = size * cache.table.shape[1]
    return in_blocks(grouped, partial(read, cache, layer), visible, whole, size)


def seat(cache: KVCache, where: Seat, prompts: KVCache) -> KVCache:
    """Copies the pages of a prompt that a row of its group writes to; the others are shared."""

    def one(lead: int, pool: Array) -> Array:
        before = (slice(None),) * lead
        found = pool[(*before, where.source)]
        return pool.at[(*before, where.to)].set(found, mode="drop")

    return map_both(one, cache)


def take(cache: KVCache, rows: Int[Array, " b"]) -> KVCache:
    """Pages stay where they are: only tables move."""
    return cache


def put(cache: KVCache, rows: Int[Array, " b"], some: KVCache) -> KVCache:
    """What stands in the pages by then."""
    return some


PAGED = Layout(locate, read, attend, seat, take, put)
