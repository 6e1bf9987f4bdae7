"""Keys and values of earlier positions: slot = position, so a rejected token is simply overwritten by the next block."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.state import Tree, pytree


@pytree
class KVCache(Tree):
    """Keys and values of all layers."""

    keys: Float[Array, "L B S M H"]
    values: Float[Array, "L B S M H"]


def empty_cache(layers: int, rows: int, slots: int, kv_heads: int, head_size: int, dtype: jnp.dtype) -> KVCache:
    """A cache of zeros."""
    zeros = jnp.zeros((layers, rows, slots, kv_heads, head_size), dtype)
    return KVCache(keys=zeros, values=zeros)


def append(
    cache: Float[Array, "L B S M H"], layer: Int[Array, ""], positions: Int[Array, "B T"], fresh: Float[Array, "B T M H"]
) -> Float[Array, "L B S M H"]:
    """Writes each row's block at its own positions, in place inside a loop; positions beyond the cache are dropped.

    A scatter with batching dimensions stays in place and needs no collective when rows are sharded.
    """
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    where = jnp.stack([jnp.zeros_like(positions) + layer, positions], axis=-1)
    return lax.scatter(cache, where, fresh, numbers, unique_indices=True, indices_are_sorted=True, mode=lax.GatherScatterMode.FILL_OR_DROP)


def extend(
    cache: KVCache, layer: Int[Array, ""], positions: Int[Array, "B T"], keys: Float[Array, "B T M H"], values: Float[Array, "B T M H"]
) -> KVCache:
    """Appends keys and values of a block.

    What is not finite becomes a NaN key with a value of 0: who may see it gets NaN, and to who may not it is nothing (0 x NaN is not), so
    that a token which is drafted and rejected cannot harm those before it.
    """
    broken = ~(jnp.isfinite(keys) & jnp.isfinite(values)).all(axis=-1, keepdims=True)
    keys, values = jnp.where(broken, jnp.nan, keys), jnp.where(broken, 0, values)
    return KVCache(keys=append(cache.keys, layer, positions, keys), values=append(cache.values, layer, positions, values))


def repeat_rows(cache: KVCache, times: int) -> KVCache:
    """Gives each of `times` rows of a group a copy of its prompt's entries."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=1), cache)
