"""Keys and values of earlier positions, in pages: slot = position, so a rejected token is simply overwritten by the next block."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.state import Tree, pytree

Page = int | Int[Array, ""]
"""Place of a layer: static where the layers' arrays are apart, traced where they are stacked and scanned."""


@pytree
class KVCache(Tree):
    """Keys and values of all layers. Both products of attention read them as they lie: keys by slot, values by feature."""

    keys: Any
    """A tuple of arrays [P M H s], one a layer, or one array [L P M H s] of all; a page holds s slots of P pages."""
    values: Any
    """The same as [P M s H]."""
    table: Int[Array, "B N"] | None
    """The pages of each row, in order of its slots; None: row b has page b alone, which is as long as a row."""


def empty_cache(layers: int, pages: int, page_size: int, kv_heads: int, head_size: int, dtype: jnp.dtype, stacked: bool = False) -> KVCache:
    """A cache of zeros; without a table, of `pages` rows."""

    def zeros(*page: int) -> Any:
        shape = (pages, kv_heads, *page)
        return jnp.zeros((layers, *shape), dtype) if stacked else tuple(jnp.zeros(shape, dtype) for _ in range(layers))

    return KVCache(keys=zeros(head_size, page_size), values=zeros(page_size, head_size), table=None)


def extend(
    cache: KVCache, layer: Page, slots: Int[Array, "B T"], keys: Float[Array, "B T M H"], values: Float[Array, "B T M H"]
) -> KVCache:
    """Writes keys and values of a block at each row's own slots, in place inside a loop; slots beyond the row's pages are dropped.

    Where a key or a value is not finite, the key becomes NaN and the value 0: who may see it gets NaN, and to who may not it is nothing
    (0 x NaN is not), so that a token which is drafted and rejected cannot harm those before it.
    """
    finite = jnp.isfinite(values)
    keys = jnp.where(finite & jnp.isfinite(keys), keys, jnp.nan)
    return cache.replace(
        keys=_of_layer(cache.keys, layer, _write, cache.table, slots, keys, 4),
        values=_of_layer(cache.values, layer, _write, cache.table, slots, jnp.where(finite, values, 0), 3),
    )


def _of_layer(arrays: Any, layer: Page, change: Any, *arguments: Any) -> Any:
    """All layers' arrays with one of them changed."""
    if not isinstance(arrays, tuple):
        return change(arrays, layer, *arguments)
    assert isinstance(layer, int), "layers that are apart are not scanned"
    return (*arrays[:layer], change(arrays[layer][None], 0, *arguments)[0], *arrays[layer + 1 :])


def _write(
    pool: Float[Array, "L P M _ _"], layer: Page, table: Int[Array, "B N"] | None, slots: Int[Array, "B T"], fresh: Array, axis: int
) -> Float[Array, "L P M _ _"]:
    """Scatters a block along the slot axis. A scatter with batching dimensions needs no collective when rows are sharded."""
    if slots.size == 1:  # XLA makes a slice update of a single write, repeats it for who reads the cache, and copies it in between
        slots = jnp.concatenate([slots, jnp.full_like(slots, jnp.iinfo(slots.dtype).max)], axis=1)
        fresh = jnp.concatenate([fresh, fresh], axis=1)
    place = jnp.zeros_like(slots) + layer
    if table is None:
        batched: dict[str, Any] = {"inserted_window_dims": (0, axis), "scatter_dims_to_operand_dims": (0, axis)}
        batched |= {"operand_batching_dims": (1,), "scatter_indices_batching_dims": (0,)}
        where = jnp.stack([place, slots], axis=-1)
    else:
        size = pool.shape[axis]
        batched = {"inserted_window_dims": (0, 1, axis), "scatter_dims_to_operand_dims": (0, 1, axis)}
        pages = jnp.take_along_axis(table, slots // size, axis=1, mode="fill", fill_value=pool.shape[1])
        where = jnp.stack([place, pages, slots % size], axis=-1)
    numbers = lax.ScatterDimensionNumbers(update_window_dims=(2, 3), **batched)
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(pool, where, fresh, numbers, unique_indices=True, indices_are_sorted=table is None, mode=mode)


def stretch(cache: KVCache, layer: Page, first: Int[Array, ""] | int, count: int) -> tuple[Array, Array, Int[Array, " C"]]:
    """Keys [B n M H s] and values [B n M s H] of some n x s of each row's slots, and the numbers of these.

    Args:
      cache: see `KVCache`.
      layer: which one.
      first: the first slot, a multiple of `count`.
      count: slots, which n pages hold; where fewer are left at the end of a row, slots before `first` come along.
    """
    size = cache.keys[0].shape[-1]
    if cache.table is None:
        start = jnp.minimum(first, size - count) if count < size else 0

        def cut(pool: Any, axis: int) -> Array:
            row = pool[layer]
            return (row if count == size else lax.dynamic_slice_in_dim(row, start, count, axis))[:, None]

        return cut(cache.keys, 3), cut(cache.values, 2), _numbers(start, count)
    pages = min(count // size, cache.table.shape[1])
    column = jnp.minimum(first // size, cache.table.shape[1] - pages)
    chosen = lax.dynamic_slice_in_dim(cache.table, column, pages, axis=1)

    def gather(pool: Any) -> Array:
        found = pool[layer].at[chosen] if isinstance(pool, tuple) else pool.at[layer, chosen]
        return found.get(mode="clip")

    return gather(cache.keys), gather(cache.values), _numbers(column * size, pages * size)


def _numbers(first: Int[Array, ""] | int, count: int) -> Int[Array, " C"]:
    return first + jnp.arange(count, dtype=jnp.int32)


# ---- layers that are apart


def apart(cache: KVCache) -> list[KVCache]:
    """A cache for each layer, whose place in it is 0."""
    return [cache.replace(keys=(keys,), values=(values,)) for keys, values in zip(cache.keys, cache.values, strict=True)]


def together(caches: list[KVCache]) -> KVCache:
    """The cache that they are parts of."""
    return caches[0].replace(keys=sum((cache.keys for cache in caches), ()), values=sum((cache.values for cache in caches), ()))


# ---- rows and pages as wholes


def _layers(function: Any, *pools: Any) -> Any:
    """Maps the arrays of all layers; `function` gets, before them, how many axes stand before the pages."""
    if isinstance(pools[0], tuple):
        return tuple(function(0, *layer) for layer in zip(*pools, strict=True))
    return function(1, *pools)


def _each(function: Any, *caches: KVCache) -> KVCache:
    """Maps keys, and values."""
    keys, values = _layers(function, *(cache.keys for cache in caches)), _layers(function, *(cache.values for cache in caches))
    return KVCache(keys=keys, values=values, table=None)


def _by_slots(function: Any, *caches: KVCache) -> KVCache:
    """The same with the axis of the slots as a last argument."""
    keys = _layers(lambda lead, *pools: function(lead, *pools, lead + 3), *(cache.keys for cache in caches))
    values = _layers(lambda lead, *pools: function(lead, *pools, lead + 2), *(cache.values for cache in caches))
    return KVCache(keys=keys, values=values, table=None)


def empty_like(cache: KVCache, pages: int, page_size: int) -> KVCache:
    """A cache of zeros with other pages."""

    def one(lead: int, pool: Array, axis: int) -> Array:
        shape = list(pool.shape)
        shape[lead], shape[axis] = pages, page_size
        return jnp.zeros(shape, pool.dtype)

    return _by_slots(one, cache)


def rows_of(prompts: KVCache, times: int, page_size: int) -> KVCache:
    """A row of `page_size` slots for each of the `times` rows of a group, with a copy of its prompt's entries."""

    def one(lead: int, pool: Array, slot_axis: int) -> Array:
        widths = [(0, 0)] * pool.ndim
        widths[slot_axis] = (0, page_size - pool.shape[slot_axis])
        return jnp.pad(jnp.repeat(pool, times, axis=lead), widths)

    return _by_slots(one, prompts)


def put_row(cache: KVCache, row: Int[Array, ""], prompts: KVCache, prompt: Int[Array, ""]) -> KVCache:
    """Copies a prompt's entries to the beginning of a row."""

    def one(lead: int, pool: Array, source: Array) -> Array:
        found = lax.dynamic_index_in_dim(source, prompt, lead)
        start = [jnp.zeros_like(row)] * pool.ndim
        start[lead] = row
        return lax.dynamic_update_slice(pool, found, start)

    return _each(one, cache, prompts)


def take_rows(cache: KVCache, rows: Int[Array, " b"]) -> KVCache:
    """Some of the rows."""
    return _each(lambda lead, pool: jnp.take(pool, rows, axis=lead), cache)


def put_rows(cache: KVCache, rows: Int[Array, " b"], some: KVCache) -> KVCache:
    """Puts them back."""
    return _each(lambda lead, pool, part: pool.at[(slice(None),) * lead + (rows,)].set(part, unique_indices=True), cache, some)


def put_prompts(cache: KVCache, pages: Int[Array, "n N"], prompts: KVCache) -> KVCache:
    """Writes whole prompts into the pages of each; entries beyond the last page are dropped."""
    count = pages.shape[1]

    def one(lead: int, pool: Array, source: Array, axis: int) -> Array:
        size = pool.shape[axis]
        widths = [(0, 0)] * source.ndim
        widths[axis] = (0, count * size - source.shape[axis])
        wide = jnp.pad(source, widths)
        split = wide.reshape(*wide.shape[:axis], count, size, *wide.shape[axis + 1 :])
        return pool.at[(slice(None),) * lead + (pages,)].set(jnp.moveaxis(split, axis, lead + 1), mode="drop")

    return _by_slots(one, cache, prompts)


def copy_pages(cache: KVCache, to: Int[Array, " n"], source: Int[Array, " n"]) -> KVCache:
    """Copies some pages to others; where `to` is no page, nothing."""

    def one(lead: int, pool: Array) -> Array:
        where = (slice(None),) * lead
        return pool.at[(*where, to)].set(pool[(*where, source)], mode="drop")

    return _each(one, cache)
