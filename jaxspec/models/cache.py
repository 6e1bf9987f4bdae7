"""KV cache, indexed by position in the text.

A `CacheLayout` maps the positions of a row to memory. There are two layouts: `contiguous.py` and
`paged.py`.
"""

# Entries of rejected tokens need no cleanup. A query sees no position after its own, and every
# position is written again before a query reaches it.

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxspec.kernels.key_chunks import split_heads
from jaxspec.mesh import ROWS
from jaxspec.state import Tree, pytree

LayerIndex = int | Int[Array, ""]
"""Index of a layer: static if each layer has its own array, traced if layers are stacked."""


class PromptCopy(NamedTuple):
    """Arguments of copying a prompt to a slot."""

    slot: Int[Array, ""]
    prompt: Int[Array, ""]
    destination_pages: Int[Array, " n"]
    """Pages that the row will write to. A number beyond the pool stands for no page."""
    source_pages: Int[Array, " n"]
    """Pages of the prompt that are copied to `destination_pages`."""


class CacheAddresses(NamedTuple):
    """Addresses of a block, for all layers."""

    pages: Int[Array, "B T"] | None
    """Page of each position; None if row b has page b."""
    offsets: Int[Array, "B T"]
    """Offset of each position in its page."""


class CacheLayout(NamedTuple):
    """A cache as pure functions over its arrays.

    locate_positions(cache, positions) -> addresses of the positions of each row. Positions
      beyond the row are out of bounds.
    read_positions(cache, layer, first, count) -> keys [B M n H s], values [B m M t H] and position
      numbers. They have n x s = m x t positions. `first` is a multiple of `count`, and `count` of
      the size of a page or chunk. If fewer positions are left in the row, positions before `first`
      are also read.
    attend(grouped queries, cache, layer, mask) -> attention, not yet normalized.
    copy_prompt(cache, copy, prompts) -> the cache, with a prompt copied to the start of a row.
    take_rows(cache, rows) -> the cache of the selected rows.
    write_rows(cache, rows, row_cache) -> the cache, with the selected rows written back.
    """

    locate_positions: Callable[["KVCache", Int[Array, "B T"]], CacheAddresses]
    read_positions: Callable[..., tuple[Array, Array, Int[Array, " C"]]]
    attend: Callable[..., Any]
    copy_prompt: Callable[["KVCache", PromptCopy, "KVCache"], "KVCache"]
    take_rows: Callable[["KVCache", Int[Array, " b"]], "KVCache"]
    write_rows: Callable[["KVCache", Int[Array, " b"], "KVCache"], "KVCache"]


@pytree
class KVCache(Tree):
    """Keys and values of all layers."""

    # Positions are the last axis of keys and features that of values. Both products of attention
    # can then read them without a transpose.
    keys: Any
    """Tuple of arrays [P M*C H w], one per layer, or one array [L P M*C H w].

    There are P pages of C chunks of w positions each. A page of a contiguous cache is a whole row.
    """
    values: Any
    """Like `keys`, but [P M s H], with the s = C*w positions of a page."""
    table: Int[Array, "B N"]
    """Pages of each row, in order of its positions; empty if no table is used."""
    layout: CacheLayout = dataclasses.field(metadata={"static": True})

    def page_specs(self) -> "KVCache":
        """Returns partition specs that split pages over the row axes."""
        # Stacked layers come before the pages.
        specs = map_keys_values(lambda page_axis, _: P(*(None,) * page_axis, ROWS), self)
        return specs.replace(table=P(ROWS))

    @property
    def _values_shape(self) -> tuple[int, ...]:
        """Shape of values, of one layer or stacked."""
        # `leaves` also works if the tree holds shapes instead of arrays.
        return jax.tree.leaves(self.values)[0].shape

    @property
    def page_size(self) -> int:
        """Number of positions of a page."""
        return self._values_shape[-2]

    @property
    def page_count(self) -> int:
        """Number of pages."""
        return self._values_shape[-4]

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self._values_shape[-3]


def no_table() -> Int[Array, "B N"]:
    """Returns an empty page table."""
    return jnp.zeros((0, 0), jnp.int32)


def locate_block(cache: KVCache, positions: Int[Array, "B T"]) -> CacheAddresses:
    """Returns the addresses of a block.

    Positions beyond a row get addresses to which nothing is written.
    """
    # XLA would turn a single write into a slice update. It would then repeat the update for each
    # reader of the cache, with a copy in between. A second write that is dropped prevents this.
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
    """Writes keys and values of a block.

    `addresses` are those of `locate_block`. Element by element, a value that is not finite is
    stored as 0. A key is stored as NaN if it or its value is not finite.
    """
    pages, offsets = addresses
    # `locate_block` added a dropped write to a single position.
    if keys.shape[1] < offsets.shape[1]:
        keys, values = (jnp.concatenate([leaf, leaf], axis=1) for leaf in (keys, values))
    # With a NaN key, every query that may attend to it fails, so that the error is noticed. A NaN
    # value would also reach queries that do not see it, as their weight is 0 and 0 x NaN is NaN. A
    # draft token that is rejected must not affect the tokens before it.
    finite = jnp.isfinite(values)
    keys = jnp.where(finite & jnp.isfinite(keys), keys, jnp.nan)
    values = jnp.where(finite, values, 0)
    width = cache.keys[0].shape[-1]

    def write_keys(pool: Array, layer: LayerIndex) -> Array:
        # `lax.rem` of a negative position is negative, so that writes before the text are dropped.
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
    """Writes a block to an array [L P ...].

    Args:
      pool: Array of all layers and pages.
      layer: Index of the layer.
      pages: Page of each position; None if row b has page b.
      axis_indices: Indices of each position, by axis of `pool`.
      block: Keys or values to write.
    """
    by_axis = {
        0: jnp.zeros_like(axis_indices[max(axis_indices)]) + layer,
        **({} if pages is None else {1: pages}),
        **axis_indices,
    }
    axes = tuple(by_axis)
    # Rows as a batching dimension need no collective if they are sharded.
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
    """Returns `count` consecutive positions, starting at `first`."""
    return first + jnp.arange(count, dtype=jnp.int32)


# ---- layers


def update_layer(
    arrays: Any, layer: LayerIndex, update: Callable[[Array, LayerIndex], Array]
) -> Any:
    """Updates one layer of `arrays`.

    `update` gets an array with a layer axis, and the layer's index on it.
    """
    if not isinstance(arrays, tuple):
        return update(arrays, layer)
    assert isinstance(layer, int), "a layer's index must be static if layers are not stacked"
    return (*arrays[:layer], update(arrays[layer][None], 0)[0], *arrays[layer + 1 :])


def split_layers(cache: KVCache) -> list[KVCache]:
    """Splits a cache into one per layer.

    Each layer has index 0 in its own cache.
    """
    return [
        cache.replace(keys=(keys,), values=(values,))
        for keys, values in zip(cache.keys, cache.values, strict=True)
    ]


def join_layers(caches: list[KVCache]) -> KVCache:
    """Joins the caches of `split_layers`."""
    return caches[0].replace(
        keys=sum((cache.keys for cache in caches), ()),
        values=sum((cache.values for cache in caches), ()),
    )


def map_layers(function: Any, *pools: Any) -> Any:
    """Maps a function over all layers.

    The function's first argument is the axis of the pages: 0, or 1 if layers are stacked.
    """
    if isinstance(pools[0], tuple):
        return tuple(function(0, *layer_pools) for layer_pools in zip(*pools, strict=True))
    return function(1, *pools)


def map_keys_values(function: Any, *caches: KVCache) -> KVCache:
    """Maps a function over keys and values.

    Table and layout of the result are those of the first cache.
    """
    return caches[0].replace(
        keys=map_layers(function, *(cache.keys for cache in caches)),
        values=map_layers(function, *(cache.values for cache in caches)),
    )


def empty_cache_like(
    cache: KVCache, pages: int, chunks: int, width: int, layout: CacheLayout
) -> KVCache:
    """Returns a cache of zeros with other pages.

    Layers and heads are those of `cache`. The result has no table.
    """
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
