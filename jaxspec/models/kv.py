"""Keys and values of earlier positions, in pages: slot = position, so a rejected token is simply
overwritten by the next block."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.state import Tree, pytree

Page = int | Int[Array, ""]
"""Place of a layer: static where the layers' arrays are apart, traced where they are stacked and
scanned."""
CHUNK, CHUNKED = 64, 2**18
"""On a CPU, slots of a row whose keys lie together, where a layer's keys are more bytes than that:
it multiplies with such blocks 1.7 to 2.6 times as fast as with rows of 192 or 240. Fewer come from
a core's own cache, and a tenth faster as they are."""
EVEN = 8
"""Rows that are one chunk have a multiple of so many slots: odd numbers make attention slower (36
to 41: by 15 % of a round)."""


@pytree
class KVCache(Tree):
    """Keys and values of all layers. Both products of attention read them as they lie: keys by
    slot, values by feature."""

    keys: Any
    """A tuple of arrays [P M*C H w], one a layer, or one array [L P M*C H w] of all: P pages of C
    chunks of w slots each. One axis has heads and chunks, so that keys and values have as many."""
    values: Any
    """The same as [P M s H], of the s = C*w slots of a page."""
    table: Int[Array, "B N"] | None
    """The pages of each row, in order of its slots, of one chunk each; None: row b has page b
    alone, which is as long as a row."""

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.values[0].shape[-2]

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.values[0].shape[-3]

    @property
    def unit(self) -> int:
        """Slots that only come together: of a page, or of one of several chunks."""
        width = self.keys[0].shape[-1]
        return width if self.table is not None or width < self.page_size else 1


def empty_cache(
    layers: int,
    rows: int,
    positions: int,
    kv_heads: int,
    head_size: int,
    dtype: jnp.dtype,
    stacked: bool = False,
) -> KVCache:
    """A cache of zeros without a table, of rows in one chunk."""

    def zeros(*page: int) -> Any:
        shape = (rows, kv_heads, *page)
        return (
            jnp.zeros((layers, *shape), dtype)
            if stacked
            else tuple(jnp.zeros(shape, dtype) for _ in range(layers))
        )

    return KVCache(keys=zeros(head_size, positions), values=zeros(positions, head_size), table=None)


def extend(
    cache: KVCache,
    layer: Page,
    positions: Int[Array, "B T"],
    keys: Float[Array, "B T M H"],
    values: Float[Array, "B T M H"],
) -> KVCache:
    """Writes keys and values of a block at each row's own slots, in place inside a loop; slots
    beyond the row's pages are dropped.

    Where a key or a value is not finite, the key becomes NaN and the value 0: who may see it gets
    NaN, and to who may not it is nothing (0 x NaN is not), so that a token which is drafted and
    rejected cannot harm those before it.
    """
    # XLA makes a slice update of a single write, repeats it for who reads the cache, and copies it
    # in between
    if positions.size == 1:
        positions = jnp.concatenate(
            [positions, jnp.full_like(positions, jnp.iinfo(positions.dtype).max)], axis=1
        )
        keys, values = (
            jnp.concatenate([keys, keys], axis=1),
            jnp.concatenate([values, values], axis=1),
        )
    pages, inside = None, positions
    if cache.table is not None:
        pages = jnp.take_along_axis(
            cache.table,
            positions // cache.page_size,
            axis=1,
            mode="fill",
            fill_value=cache.values[0].shape[-4],
        )
        inside = positions % cache.page_size
    width = cache.keys[0].shape[-1]
    finite = jnp.isfinite(values)
    keys = jnp.where(finite & jnp.isfinite(keys), keys, jnp.nan)

    def write_keys(pool: Array, layer: Page) -> Array:
        written = _write(
            _split(pool, cache.kv_heads),
            layer,
            pages,
            {3: inside // width, 5: inside % width},
            keys,
        )
        return written.reshape(pool.shape)

    def write_values(pool: Array, layer: Page) -> Array:
        return _write(pool, layer, pages, {3: inside}, jnp.where(finite, values, 0))

    return cache.replace(
        keys=_of_layer(cache.keys, layer, write_keys),
        values=_of_layer(cache.values, layer, write_values),
    )


def _of_layer(arrays: Any, layer: Page, change: Callable[[Array, Page], Array]) -> Any:
    """All layers' arrays with one of them changed."""
    if not isinstance(arrays, tuple):
        return change(arrays, layer)
    assert isinstance(layer, int), "layers that are apart are not scanned"
    return (*arrays[:layer], change(arrays[layer][None], 0)[0], *arrays[layer + 1 :])


def _split(keys: Array, heads: int) -> Array:
    """[... M*C H w] as [... M C H w]."""
    return keys.reshape(*keys.shape[:-3], heads, -1, *keys.shape[-2:])


def _write(
    pool: Array,
    layer: Page,
    pages: Int[Array, "B T"] | None,
    places: dict[int, Int[Array, "B T"]],
    fresh: Float[Array, "B T M H"],
) -> Array:
    """Scatters a block [L P ...] to places given by axis. A scatter with batching dimensions needs
    no collective when rows are sharded."""
    by_axis = {
        0: jnp.zeros_like(places[max(places)]) + layer,
        **({} if pages is None else {1: pages}),
        **places,
    }
    axes = tuple(by_axis)
    batched: dict[str, Any] = (
        {"operand_batching_dims": (1,), "scatter_indices_batching_dims": (0,)}
        if pages is None
        else {}
    )
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=axes,
        scatter_dims_to_operand_dims=axes,
        **batched,
    )
    where, mode = jnp.stack(list(by_axis.values()), axis=-1), lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(
        pool,
        where,
        fresh,
        numbers,
        unique_indices=True,
        indices_are_sorted=pages is None,
        mode=mode,
    )


def block(
    cache: KVCache, layer: Page, first: Int[Array, ""] | int, count: int
) -> tuple[Array, Array, Int[Array, " C"]]:
    """Keys [B M n H s] and values [B m M t H] of some n x s = m x t of each row's slots, and the
    numbers of these.

    Args:
      cache: see `KVCache`.
      layer: which one.
      first: the first slot, a multiple of `count`.
      count: slots, a multiple of the cache's `unit`; where fewer are left at the end of a row,
        slots before `first` come along.
    """
    size = cache.page_size
    if cache.table is None:
        keys, values, start = _split(cache.keys[layer], cache.kv_heads), cache.values[layer], 0
        if count < size:
            start = jnp.minimum(first, size - count)
            keys = lax.dynamic_slice_in_dim(
                keys, start // cache.unit, count // cache.unit, 4 if keys.shape[2] == 1 else 2
            )
            values = lax.dynamic_slice_in_dim(values, start, count, 2)
        return keys, values[:, None], _numbers(start, count)
    pages = min(count // size, cache.table.shape[1])
    column = jnp.minimum(first // size, cache.table.shape[1] - pages)
    chosen = lax.dynamic_slice_in_dim(cache.table, column, pages, axis=1)

    def gather(pool: Any) -> Array:
        found = pool[layer].at[chosen] if isinstance(pool, tuple) else pool.at[layer, chosen]
        return found.get(mode="clip")

    return (
        gather(cache.keys).swapaxes(1, 2),
        gather(cache.values),
        _numbers(column * size, pages * size),
    )


def _numbers(first: Int[Array, ""] | int, count: int) -> Int[Array, " C"]:
    return first + jnp.arange(count, dtype=jnp.int32)


# ---- layers that are apart


def apart(cache: KVCache) -> list[KVCache]:
    """A cache for each layer, whose place in it is 0."""
    return [
        cache.replace(keys=(keys,), values=(values,))
        for keys, values in zip(cache.keys, cache.values, strict=True)
    ]


def together(caches: list[KVCache]) -> KVCache:
    """The cache that they are parts of."""
    return caches[0].replace(
        keys=sum((cache.keys for cache in caches), ()),
        values=sum((cache.values for cache in caches), ()),
    )


# ---- rows and pages as wholes


def _layers(function: Any, *pools: Any) -> Any:
    """Maps the arrays of all layers; `function` gets, before them, how many axes stand before the
    pages."""
    if isinstance(pools[0], tuple):
        return tuple(function(0, *layer) for layer in zip(*pools, strict=True))
    return function(1, *pools)


def _each(function: Any, *caches: KVCache) -> KVCache:
    """Maps keys, and values."""
    keys, values = (
        _layers(function, *(cache.keys for cache in caches)),
        _layers(function, *(cache.values for cache in caches)),
    )
    return KVCache(keys=keys, values=values, table=None)


def _empty_like(cache: KVCache, pages: int, chunks: int, width: int) -> KVCache:
    heads, size = cache.kv_heads, cache.values[0].shape[-1]
    keys, values = (pages, heads * chunks, size, width), (pages, heads, chunks * width, size)

    def zeros(shape: tuple[int, ...]) -> Any:
        return lambda _, pool: jnp.zeros((*pool.shape[:-4], *shape), pool.dtype)

    return KVCache(
        keys=_layers(zeros(keys), cache.keys),
        values=_layers(zeros(values), cache.values),
        table=None,
    )


def empty_pages(cache: KVCache, pages: int, page_size: int) -> KVCache:
    """A pool of zeros like another cache, which a table makes rows of."""
    return _empty_like(cache, pages, 1, page_size)


def empty_rows(cache: KVCache, rows: int, positions: int, chunk: int = 0) -> KVCache:
    """A cache of zeros like another, of rows with at least so many slots, in chunks where that is
    faster; 0: in one."""
    heads, size, pool = cache.kv_heads, cache.values[0].shape[-1], cache.values[0]
    # values gain nothing by chunks, and a third more of them costs what keys gain
    padded = -positions % chunk if chunk else 0
    if (
        0 < chunk < positions
        and 3 * padded <= positions
        and rows * heads * positions * size * pool.dtype.itemsize > CHUNKED
    ):
        return _empty_like(cache, rows, -(-positions // chunk), chunk)
    return _empty_like(cache, rows, 1, -(-positions // EVEN) * EVEN)


def rows_of(prompts: KVCache, times: int, positions: int, chunk: int = 0) -> KVCache:
    """A row as of `empty_rows` for each of the `times` rows of a group, with a copy of its prompt's
    entries."""
    rows, heads = (
        empty_rows(prompts, times * prompts.values[0].shape[-4], positions, chunk),
        prompts.kv_heads,
    )

    def widened(lead: int, pool: Array, wide: Array) -> Array:
        narrow = jnp.repeat(pool, times, axis=lead)
        return jnp.pad(
            narrow,
            [(0, most - least) for least, most in zip(narrow.shape, wide.shape, strict=True)],
        )

    def keys(lead: int, pool: Array, wide: Array) -> Array:
        return widened(lead, _chunks(pool, wide.shape[-1]), _split(wide, heads)).reshape(wide.shape)

    return KVCache(
        keys=_layers(keys, prompts.keys, rows.keys),
        values=_layers(widened, prompts.values, rows.values),
        table=None,
    )


def _chunks(keys: Array, width: int) -> Array:
    """Of a prompt, which are one chunk [... M H s], as [... M C H w] of chunks of at most
    `width`."""
    positions = keys.shape[-1]
    width = min(positions, width)
    wide = jnp.pad(keys, [(0, 0)] * (keys.ndim - 1) + [(0, -positions % width)])
    return jnp.moveaxis(wide.reshape(*keys.shape[:-1], -1, width), -2, -3)


def put_row(
    cache: KVCache, row: Int[Array, ""], prompts: KVCache, prompt: Int[Array, ""]
) -> KVCache:
    """Copies a prompt's entries to the beginning of a row; the keys of the rest of its last chunk
    become zeros, which nobody sees."""

    def put(pool: Array, lead: int, source: Array) -> Array:
        start = [jnp.zeros_like(row)] * pool.ndim
        start[lead] = row
        return lax.dynamic_update_slice(pool, source, start)

    def keys(lead: int, pool: Array, source: Array) -> Array:
        found = _chunks(lax.dynamic_index_in_dim(source, prompt, lead), pool.shape[-1])
        return put(_split(pool, cache.kv_heads), lead, found).reshape(pool.shape)

    def values(lead: int, pool: Array, source: Array) -> Array:
        return put(pool, lead, lax.dynamic_index_in_dim(source, prompt, lead))

    return KVCache(
        keys=_layers(keys, cache.keys, prompts.keys),
        values=_layers(values, cache.values, prompts.values),
        table=None,
    )


def take_rows(cache: KVCache, rows: Int[Array, " b"]) -> KVCache:
    """Some of the rows."""
    return _each(lambda lead, pool: jnp.take(pool, rows, axis=lead), cache)


def put_rows(cache: KVCache, rows: Int[Array, " b"], some: KVCache) -> KVCache:
    """Puts them back."""
    return _each(
        lambda lead, pool, part: pool.at[(slice(None),) * lead + (rows,)].set(
            part, unique_indices=True
        ),
        cache,
        some,
    )


def put_prompts(cache: KVCache, pages: Int[Array, "n N"], prompts: KVCache) -> KVCache:
    """Writes whole prompts into the pages of each; entries beyond the last page are dropped."""
    count = pages.shape[1]

    def one(lead: int, pool: Array, source: Array, axis: int) -> Array:
        size = pool.shape[axis]
        widths = [(0, 0)] * source.ndim
        widths[axis] = (0, count * size - source.shape[axis])
        wide = jnp.pad(source, widths)
        split = wide.reshape(*wide.shape[:axis], count, size, *wide.shape[axis + 1 :])
        return pool.at[(slice(None),) * lead + (pages,)].set(
            jnp.moveaxis(split, axis, lead + 1), mode="drop"
        )

    keys = _layers(
        lambda lead, pool, source: one(lead, pool, source, lead + 3), cache.keys, prompts.keys
    )
    values = _layers(
        lambda lead, pool, source: one(lead, pool, source, lead + 2), cache.values, prompts.values
    )
    return KVCache(keys=keys, values=values, table=None)


def copy_pages(cache: KVCache, to: Int[Array, " n"], source: Int[Array, " n"]) -> KVCache:
    """Copies some pages to others; where `to` is no page, nothing."""

    def one(lead: int, pool: Array) -> Array:
        where = (slice(None),) * lead
        return pool.at[(*where, to)].set(pool[(*where, source)], mode="drop")

    return _each(one, cache)
