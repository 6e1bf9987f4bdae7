"""Keys and values of earlier positions, numbered by position in the text, so that a rejected token
is simply overwritten by the next block.

A `Layout` says where the positions of a row lie. There are two: `contiguous.py` and `paged.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.kernels.key_chunks import split
from jaxspec.state import Tree, pytree

LayerIndex = int | Int[Array, ""]
"""Place of a layer: static where each layer has an array of its own, traced where layers are
stacked and scanned."""


class Seat(NamedTuple):
    """Where the entries of a prompt go when a row of its group gets a slot."""

    slot: Int[Array, ""]
    prompt: Int[Array, ""]
    to: Int[Array, " n"]
    """Pages that the row writes to, and which begin as copies; beyond the pool: no page."""
    source: Int[Array, " n"]
    """The prompt's pages that they are copies of."""


class Places(NamedTuple):
    """Where the positions of a block lie, in every layer alike."""

    pages: Int[Array, "B T"] | None
    """None: row b has page b."""
    inside: Int[Array, "B T"]
    """Positions in these pages."""


class Layout(NamedTuple):
    """A cache as pure functions over its arrays.

    locate(cache, positions) -> the places of each row's own positions; what lies beyond a row has
      none
    read(cache, layer, first, count) -> keys [B M n H s] and values [B m M t H] of some
      n x s = m x t of each row's positions, and the numbers of these. `first` is a multiple of
      `count`, and that one of the positions that only come together; where fewer are left at the
      end of a row, positions before `first` come along
    attend(grouped queries, cache, layer, visible) -> attention that is not yet normalised
    seat(cache, seat, prompts) -> cache with a prompt's entries where a row of its group begins
    take(cache, rows) -> the cache of some of the rows
    put(cache, rows, some) -> the cache with these rows put back
    """

    locate: Callable[["KVCache", Int[Array, "B T"]], Places]
    read: Callable[..., tuple[Array, Array, Int[Array, " C"]]]
    attend: Callable[..., Any]
    seat: Callable[["KVCache", Seat, "KVCache"], "KVCache"]
    take: Callable[["KVCache", Int[Array, " b"]], "KVCache"]
    put: Callable[["KVCache", Int[Array, " b"], "KVCache"], "KVCache"]


@pytree
class KVCache(Tree):
    """Keys and values of all layers. Both products of attention read them as they lie: keys by
    position, values by feature."""

    keys: Any
    """A tuple of arrays [P M*C H w], one a layer, or one array [L P M*C H w] of all: P pages of C
    chunks of w positions each. A page of a contiguous cache is a whole row."""
    values: Any
    """The same as [P M s H], of the s = C*w positions of a page."""
    table: Int[Array, "B N"]
    """The pages of each row, in order of its positions; of no row where pages are not in use."""
    layout: Layout = dataclasses.field(metadata={"static": True})

    @property
    def _shape(self) -> tuple[int, ...]:
        """Of values, also where the tree holds shapes instead of arrays."""
        return jax.tree.leaves(self.values)[0].shape

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self._shape[-2]

    @property
    def pages(self) -> int:
        """How many there are."""
        return self._shape[-4]

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self._shape[-3]


def no_table() -> Int[Array, "B N"]:
    """The table of a cache whose pages are not in use."""
    return jnp.zeros((0, 0), jnp.int32)


def locate(cache: KVCache, positions: Int[Array, "B T"]) -> Places:
    """Returns where a block is written, for all layers of a pass; positions beyond a row are
    dropped."""
    # XLA makes a slice update of a single write, repeats it for who reads the cache, and copies it
    # in between
    if positions.size == 1:
        beyond = jnp.full_like(positions, jnp.iinfo(positions.dtype).max)
        positions = jnp.concatenate([positions, beyond], axis=1)
    return cache.layout.locate(cache, positions)


def extend(
    cache: KVCache,
    layer: LayerIndex,
    places: Places,
    keys: Float[Array, "B T M H"],
    values: Float[Array, "B T M H"],
) -> KVCache:
    """Writes keys and values of a block where `locate` says, in place inside a loop.

    A key is stored as NaN where it or its value is not finite, so that every query that may attend
    to it fails; such a value is stored as 0, because masked weights are 0 and 0 x NaN is NaN: a
    token that is drafted and rejected cannot harm those before it.
    """
    pages, inside = places
    if keys.shape[1] < inside.shape[1]:
        keys, values = (jnp.concatenate([leaf, leaf], axis=1) for leaf in (keys, values))
    finite = jnp.isfinite(values)
    keys = jnp.where(finite & jnp.isfinite(keys), keys, jnp.nan)
    values = jnp.where(finite, values, 0)
    width = cache.keys[0].shape[-1]

    def write_keys(pool: Array, layer: LayerIndex) -> Array:
        # a position before the text lies in no lane
        places = {3: lax.div(inside, jnp.int32(width)), 5: lax.rem(inside, jnp.int32(width))}
        by_head = split(pool, cache.kv_heads)
        return scattered(by_head, layer, pages, places, keys).reshape(pool.shape)

    def write_values(pool: Array, layer: LayerIndex) -> Array:
        return scattered(pool, layer, pages, {3: inside}, values)

    return cache.replace(
        keys=of_layer(cache.keys, layer, write_keys),
        values=of_layer(cache.values, layer, write_values),
    )


def scattered(
    pool: Array,
    layer: LayerIndex,
    pages: Int[Array, "B T"] | None,
    places: dict[int, Int[Array, "B T"]],
    fresh: Float[Array, "B T M H"],
) -> Array:
    """Writes a block to places of [L P ...] that are given by axis; `pages` None: row b has page b.
    A scatter with batching dimensions needs no collective when rows are sharded."""
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


def consecutive(first: Int[Array, ""] | int, count: int) -> Int[Array, " C"]:
    """`count` positions from the first on."""
    return first + jnp.arange(count, dtype=jnp.int32)


# ---- layers


def of_layer(arrays: Any, layer: LayerIndex, change: Callable[[Array, LayerIndex], Array]) -> Any:
    """All layers' arrays with one of them changed."""
    if not isinstance(arrays, tuple):
        return change(arrays, layer)
    assert isinstance(layer, int), "layers that have arrays of their own are not scanned"
    return (*arrays[:layer], change(arrays[layer][None], 0)[0], *arrays[layer + 1 :])


def by_layer(cache: KVCache) -> list[KVCache]:
    """A cache for each layer, whose place in it is 0."""
    return [
        cache.replace(keys=(keys,), values=(values,))
        for keys, values in zip(cache.keys, cache.values, strict=True)
    ]


def of_layers(caches: list[KVCache]) -> KVCache:
    """The cache that they are parts of."""
    return caches[0].replace(
        keys=sum((cache.keys for cache in caches), ()),
        values=sum((cache.values for cache in caches), ()),
    )


def map_layers(function: Any, *pools: Any) -> Any:
    """Maps the arrays of all layers; `function` gets, before them, how many axes stand before the
    pages."""
    if isinstance(pools[0], tuple):
        return tuple(function(0, *layer) for layer in zip(*pools, strict=True))
    return function(1, *pools)


def map_both(function: Any, *caches: KVCache) -> KVCache:
    """Maps keys, and values, of all layers; the rest is that of the first cache."""
    return caches[0].replace(
        keys=map_layers(function, *(cache.keys for cache in caches)),
        values=map_layers(function, *(cache.values for cache in caches)),
    )


def zeros_like(cache: KVCache, pages: int, chunks: int, width: int, layout: Layout) -> KVCache:
    """Zeros for the same layers and heads in other pages, which are not in use."""
    heads, size = cache.kv_heads, cache.values[0].shape[-1]
    keys, values = (pages, heads * chunks, size, width), (pages, heads, chunks * width, size)

    def zeros(shape: tuple[int, ...]) -> Any:
        return lambda _, pool: jnp.zeros((*pool.shape[:-4], *shape), pool.dtype)

    return KVCache(
        keys=map_layers(zeros(keys), cache.keys),
        values=map_layers(zeros(values), cache.values),
        table=no_table(),
        layout=layout,
    )
