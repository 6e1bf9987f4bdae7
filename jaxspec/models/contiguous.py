"""The contiguous layout: row b of a cache is page b, as long as a row can be."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.kernels.key_chunks import chunks_of, rechunked, split
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
    map_layers,
    no_table,
    zeros_like,
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
    """A cache of zeros, of rows in one chunk."""

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
    """A cache of zeros like another, of rows with at least so many positions, in chunks where that
    is faster; 0: in one."""
    pool = cache.values[0]
    layer_bytes = rows * cache.kv_heads * positions * pool.shape[-1] * pool.dtype.itemsize
    chunks = chunks_of(positions, layer_bytes, chunk)
    return zeros_like(cache, rows, chunks.number, chunks.width, CONTIGUOUS)


def rows_of(prompts: KVCache, times: int, positions: int, chunk: int = 0) -> KVCache:
    """A row as of `empty_rows` for each of the `times` rows of a group, with a copy of its prompt's
    entries."""
    heads = prompts.kv_heads
    rows = empty_rows(prompts, times * prompts.pages, positions, chunk)

    def widened(lead: int, pool: Array, wide: Array) -> Array:
        narrow = jnp.repeat(pool, times, axis=lead)
        return jnp.pad(
            narrow,
            [(0, most - least) for least, most in zip(narrow.shape, wide.shape, strict=True)],
        )

    def keys(lead: int, pool: Array, wide: Array) -> Array:
        chunks = rechunked(pool, wide.shape[-1])
        return widened(lead, chunks, split(wide, heads)).reshape(wide.shape)

    return rows.replace(
        keys=map_layers(keys, prompts.keys, rows.keys),
        values=map_layers(widened, prompts.values, rows.values),
    )


def unit(cache: KVCache) -> int:
    """Positions that only come together: those of one of several chunks."""
    width = cache.keys[0].shape[-1]
    return width if width < cache.page_size else 1


def locate(cache: KVCache, positions: Int[Array, "B T"]) -> Places:
    """See `Layout`; a table of one column names the row of each text."""
    rows = jnp.broadcast_to(cache.table, positions.shape) if cache.table.size else None
    return Places(rows, positions)


def read(
    cache: KVCache, layer: LayerIndex, first: Int[Array, ""] | int, count: int
) -> tuple[Array, Array, Int[Array, " C"]]:
    """See `Layout`."""
    size, own = cache.page_size, unit(cache)
    keys, values, start = split(cache.keys[layer], cache.kv_heads), cache.values[layer], 0
    if count < size:
        start = jnp.minimum(first, size - count)
        axis = 4 if keys.shape[2] == 1 else 2
        keys = lax.dynamic_slice_in_dim(keys, start // own, count // own, axis)
        values = lax.dynamic_slice_in_dim(values, start, count, 2)
    if cache.table.size:
        rows = cache.table[:, 0]
        keys, values = (jnp.take(leaf, rows, axis=0, mode="clip") for leaf in (keys, values))
    return keys, values[:, None], consecutive(start, count)


def attend(
    grouped: Float[Array, "B T M R H"], cache: KVCache, layer: LayerIndex, visible: Visible
) -> Part:
    """See `Layout`."""
    return in_blocks(grouped, partial(read, cache, layer), visible, cache.page_size, unit(cache))


def seat(cache: KVCache, where: Seat, prompts: KVCache) -> KVCache:
    """Copies a prompt's entries to the beginning of a row; the keys of the rest of its last chunk
    become zeros, which nobody sees."""
    row, prompt = where.slot, where.prompt

    def put_in(pool: Array, lead: int, source: Array) -> Array:
        start = [jnp.zeros_like(row)] * pool.ndim
        start[lead] = row
        return lax.dynamic_update_slice(pool, source, start)

    def keys(lead: int, pool: Array, source: Array) -> Array:
        found = rechunked(lax.dynamic_index_in_dim(source, prompt, lead), pool.shape[-1])
        return put_in(split(pool, cache.kv_heads), lead, found).reshape(pool.shape)

    def values(lead: int, pool: Array, source: Array) -> Array:
        return put_in(pool, lead, lax.dynamic_index_in_dim(source, prompt, lead))

    return cache.replace(
        keys=map_layers(keys, cache.keys, prompts.keys),
        values=map_layers(values, cache.values, prompts.values),
    )


def take(cache: KVCache, rows: Int[Array, " b"]) -> KVCache:
    """See `Layout`."""
    return map_both(lambda lead, pool: jnp.take(pool, rows, axis=lead), cache)


def put(cache: KVCache, rows: Int[Array, " b"], some: KVCache) -> KVCache:
    """See `Layout`."""
    return map_both(
        lambda lead, pool, part: pool.at[(slice(None),) * lead + (rows,)].set(
            part, unique_indices=True
        ),
        cache,
        some,
    )


CONTIGUOUS = Layout(locate, read, attend, seat, take, put)
