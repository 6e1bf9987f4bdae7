"""Keys and values of earlier positions, numbered by position in the text, so that a rejected token
is simply overwritten by the next block.

A `CacheLayout` says where the positions of a row lie. There are two: `contiguous.py` and
`paged.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.kernels.key_chunks import split_heads
from jaxspec.state import Tree, pytree

LayerIndex = int | Int[Array, ""]
"""Place of a layer: static where each layer has an array of its own, traced where layers are
stacked and scanned."""


class PromptCopy(NamedTuple):
    """Where the entries of a prompt go when a row of its group gets a slot."""

    slot: Int[Array, ""]
    prompt: Int[Array, ""]
    destination_pages: Int[Array, " n"]
    """Pages that the row writes to, and which begin as copies; beyond the pool: no page."""
    source_pages: Int[Array, " n"]
    """The prompt's pages that they are copies of."""


class CacheAddresses(NamedTuple):
    """Where the positions of a block lie, in every layer alike."""

    pages: Int[Array, "B T"] | None
    """None: row b has page b."""
    offsets: Int[Array, "B T"]
    """Positions in these pages."""


class CacheLayout(NamedTuple):
    """A cache as pure functions over its arrays.

    locate_positions(cache, positions) -> the places of each row's own positions; what lies
      beyond a row has none
    read_positions(cache, layer, first, count) -> keys [B M n H s] and values [B m M t H] of some
      n x s = m x t of each row's positions, and the numbers of these. `first` is a multiple of
      `count`, and that one of the positions that only come together; where fewer are left at the
      end of a row, positions before `first` come along
    attend(grouped queries, cache, layer, mask) -> attention that is not yet normalised
    copy_prompt(cache, copy, prompts) -> cache with a prompt's entries where a row of its
      group begins
    take_rows(cache, rows) -> the cache of some of the rows
    write_rows(cache, rows, row_cache) -> the cache with these rows put back
    """

    locate_positions: Callable[["KVCache", Int[Array, "B T"]], CacheAddresses]
    read_positions: Callable[..., tuple[Array, Array, Int[Array, " C"]]]
    attend: Callable[..., Any]
    copy_prompt: Callable[["KVCache", PromptCopy, "KVCache"], "KVCache"]
    take_rows: Callable[["KVCache", Int[Array, " b"]], "KVCache"]
    write_rows: Callable[["KVCache", Int[Array, " b"], "KVCache"], "KVCache"]


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
    layout: CacheLayout = dataclasses.field(metadata={"static": True})

    @property
    def _values_shape(self) -> tuple[int, ...]:
        """Of values, also where the tree holds shapes instead of arrays."""
        return jax.tree.leaves(self.values)[0].shape

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self._values_shape[-2]

    @property
    def page_count(self) -> int:
        """How many there are."""
        return self._values_shape[-4]

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self._values_shape[-3]


def no_table() -> Int[Array, "B N"]:
    """The table of a cache whose pages are not in use."""
    return jnp.zeros((0, 0), jnp.int32)


def locate_block(cache: KVCache, positions: Int[Array, "B T"]) -> CacheAddresses:
    """Returns where a block is written, for all layers of a pass; positions beyond a row are
    dropped."""
    # XLA makes a slice update of a single write, repeats it for who reads the cache, and copies it
    # in between
    if positions.size == 1:
        dropped = jnp.full_like(positions, jnp.iinfo(positions.dtype).max)
        positions = jnp.concatenate([positions, dropped], axis=1)
    return cache.layout.locate_positions(cache, positions)


def write_block(
    cache: KVCache,
    layer: LayerIndex,
    addresses: CacheAddresses,
    keys: Float[Array, "B T M H"],
    values: Float[Array, "B T M H"],
) -> KVCache:
    """Writes keys and values of a block where `locate_block` says, in place inside a loop.

    A key is stored as NaN where it or its value is not finite, so that every query that may attend
    to it fails; such a value is stored as 0, because masked weights are 0 and 0 x NaN is NaN: a
    token that is drafted and rejected cannot harm those before it.
    """
    pages, offsets = addresses
    if keys.shape[1] < offsets.shape[1]:
        keys, values = (jnp.concatenate([leaf, leaf], axis=1) for leaf in (keys, values))
    finite = jnp.isfinite(values)
    keys = jnp.where(finite & jnp.isfinite(keys), keys, jnp.nan)
    values = jnp.where(finite, values, 0)
    width = cache.keys[0].shape[-1]

    def write_keys(pool: Array, layer: LayerIndex) -> Array:
        # a position before the text lies in no lane
        axis_indices = {
            3: lax.div(offsets, jnp.int32(width)),
            5: lax.rem(offsets, jnp.int32(width)),
        }
        by_head = split_heads(pool, cache.kv_heads)
        return scatter_block(by_head, layer, pages, axis_indices, keys).reshape(pool.shape)

    def write_values(pool: Array, layer: LayerIndex) -> Array:
        return scatter_block(pool, layer, pages, {3: offsets}, values)

    return cache.replace(
        keys=update_layer(cache.keys, layer, write_keys),
        values=update_layer(cache.values, layer, write_values),
    )


def scatter_block(
    pool: Array,
    layer: LayerIndex,
    pages: Int[Array, "B T"] | None,
    axis_indices: dict[int, Int[Array, "B T"]],
    block: Float[Array, "B T M H"],
) -> Array:
    """Writes a block to places of [L P ...] that are given by axis; `pages` None: row b has page b.
    A scatter with batching dimensions needs no collective when rows are sharded."""
    by_axis = {
        0: jnp.zeros_like(axis_indices[max(axis_indices)]) + layer,
        **({} if pages is None else {1: pages}),
        **axis_indices,
    }
    axes = tuple(by_axis)
    batch_dims: dict[str, Any] = (
        {"operand_batching_dims": (1,), "scatter_indices_batching_dims": (0,)}
        if pages is None
        else {}
    )
    dimension_numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=axes,
        scatter_dims_to_operand_dims=axes,
        **batch_dims,
    )
    indices, mode = jnp.stack(list(by_axis.values()), axis=-1), lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(
        pool,
        indices,
        block,
        dimension_numbers,
        unique_indices=True,
        indices_are_sorted=pages is None,
        mode=mode,
    )


def position_range(first: Int[Array, ""] | int, count: int) -> Int[Array, " C"]:
    """`count` positions from the first on."""
    return first + jnp.arange(count, dtype=jnp.int32)


# ---- layers


def update_layer(
    arrays: Any, layer: LayerIndex, update: Callable[[Array, LayerIndex], Array]
) -> Any:
    """All layers' arrays with one of them changed."""
    if not isinstance(arrays, tuple):
        return update(arrays, layer)
    assert isinstance(layer, int), "layers that have arrays of their own are not scanned"
    return (*arrays[:layer], update(arrays[layer][None], 0)[0], *arrays[layer + 1 :])


def split_layers(cache: KVCache) -> list[KVCache]:
    """A cache for each layer, whose place in it is 0."""
    return [
        cache.replace(keys=(keys,), values=(values,))
        for keys, values in zip(cache.keys, cache.values, strict=True)
    ]


def join_layers(caches: list[KVCache]) -> KVCache:
    """The cache that they are parts of."""
    return caches[0].replace(
        keys=sum((cache.keys for cache in caches), ()),
        values=sum((cache.values for cache in caches), ()),
    )


def map_layers(function: Any, *pools: Any) -> Any:
    """Maps the arrays of all layers; `function` gets, before them, how many axes stand before the
    pages."""
    if isinstance(pools[0], tuple):
        return tuple(function(0, *layer_pools) for layer_pools in zip(*pools, strict=True))
    return function(1, *pools)


def map_keys_values(function: Any, *caches: KVCache) -> KVCache:
    """Maps keys, and values, of all layers; the rest is that of the first cache."""
    return caches[0].replace(
        keys=map_layers(function, *(cache.keys for cache in caches)),
        values=map_layers(function, *(cache.values for cache in caches)),
    )


def empty_cache_like(
    cache: KVCache, pages: int, chunks: int, width: int, layout: CacheLayout
) -> KVCache:
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
