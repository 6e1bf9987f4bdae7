"""Maps functions over chunks of positions.

Chunks bound the memory of a function, such as that of logits. On a CPU, expensive functions are
computed at masked positions only.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from jaxspec.mesh import has_gpus_in_scope
from jaxspec.state import PyTree

CHUNK_ELEMENTS = 2**25
"""Largest number of elements (such as logits) of a chunk on a CPU."""
# In the backward pass a chunk of n positions moves 12 bytes for each weight of the head, 8 of them
# for the gradient, and makes 6n operations. An H100 makes 295 operations per byte moved. From 600
# positions on, the products therefore take longer than the memory traffic. From 1,200 on, so does
# the product that adds up the gradient (2n operations on 8 bytes). Chunks of more than 2,048
# positions would only take more memory.
CHUNK_POSITIONS_GPU, CHUNK_ELEMENTS_GPU = 2048, 2**29
"""Largest number of positions of a chunk on GPUs, and of its elements (2 GiB in float32)."""
WIDE_ELEMENTS = 4096
"""Elements per position from which a CPU computes masked positions only."""
# Enough positions for fast products, and few enough that little of a chunk is padding.
CHUNK_POSITIONS_CPU = 128
"""Largest number of positions of a compacted chunk on a CPU."""
# XLA pads products of other sizes, by copying their operands.
TILE_POSITIONS = 16
"""Divisor of the number of positions of a chunk on GPUs."""


def map_in_chunks(
    function: Callable[..., Any],
    networks: PyTree,
    elements_per_position: int,
    *arrays: Array,
    mask: Bool[Array, "B T"] | None = None,
) -> Any:
    """Maps `function` over chunks of positions.

    Positions are the second axis of all arrays. The backward pass recomputes each chunk. If all
    positions fit into one chunk, there is no loop and nothing is recomputed.

    Args:
      function: Takes `networks` and arrays [B chunk ...]. Returns a tree of floating-point arrays
        [B chunk ...].
      networks: All parameters that `function` reads.
      elements_per_position: Number of elements that `function` holds at each position, for all
        rows together.
      *arrays: Inputs [B T ...].
      mask: Positions whose results matter, or None for all. A CPU may skip the other positions,
        whose results are then zero.
    """
    length = arrays[0].shape[1]
    chunk = _chunk_length(length, max(elements_per_position, 1))
    if mask is not None and _should_compact(elements_per_position):
        return _map_compacted(function, networks, min(chunk, CHUNK_POSITIONS_CPU), mask, arrays)
    if chunk == length:
        return function(networks, *arrays)
    results = jax.lax.map(
        lambda chunks: jax.checkpoint(function)(networks, *chunks),
        tuple(_split_chunks(array, chunk) for array in arrays),
    )
    return jax.tree.map(lambda array: _join_chunks(array, length), results)


def map_masked_positions(
    function: Callable[..., Any],
    networks: PyTree,
    elements_per_position: int,
    *arrays: Array,
    mask: Bool[Array, "B T"],
) -> Any:
    """Computes `function` at once, or on a CPU at masked positions.

    Only expensive functions are compacted, as in `map_in_chunks`. The function must not communicate
    between data shards.
    """
    # Each data shard has its own number of chunks, so a collective would wait forever.
    if not _should_compact(elements_per_position):
        return function(networks, *arrays)
    chunk = min(arrays[0].shape[1], CHUNK_POSITIONS_CPU)
    return _map_compacted(function, networks, chunk, mask, arrays)


def _should_compact(elements_per_position: int) -> bool:
    """Returns whether to skip positions outside the mask, as for wide functions on a CPU."""
    # For cheap functions, moving positions would cost more than it saves.
    return elements_per_position >= WIDE_ELEMENTS and not has_gpus_in_scope()


def _split_chunks(array: Shaped[Array, "B T ..."], chunk: int) -> Shaped[Array, "c B chunk ..."]:
    """Splits positions into chunks, padded with zeros."""
    rows, length, *trailing_shape = array.shape
    count = -(-length // chunk)
    padded = jnp.pad(array, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * len(trailing_shape))
    return jnp.moveaxis(padded.reshape(rows, count, chunk, *trailing_shape), 1, 0)


def _join_chunks(array: Shaped[Array, "c B chunk ..."], length: int) -> Shaped[Array, "B T ..."]:
    """Joins chunks and drops positions from `length` on."""
    row_chunks = jnp.moveaxis(array, 0, 1)
    rows, count, chunk, *trailing_shape = row_chunks.shape
    return row_chunks.reshape(rows, count * chunk, *trailing_shape)[:, :length]


def _map_compacted(
    function: Callable[..., Any],
    networks: PyTree,
    chunk: int,
    mask: Bool[Array, "B T"],
    arrays: tuple[Array, ...],
) -> Any:
    """Maps a function over masked positions only."""
    length = mask.shape[1]
    # Masked positions first, so that they fill the leading chunks.
    order = jnp.argsort(~mask, axis=1, stable=True)
    inverse = jnp.argsort(order, axis=1)
    # The longest row decides, as a chunk has the same positions of all rows.
    max_count = jnp.max(jnp.sum(mask, axis=1, dtype=jnp.int32))
    chunks = tuple(
        _split_chunks(_reorder_positions(array, order, inverse), chunk) for array in arrays
    )
    results = _map_leading_chunks(function, networks, -(-max_count // chunk), chunks)
    return jax.tree.map(
        lambda array: _reorder_positions(_join_chunks(array, length), inverse, order), results
    )


def _map_leading_chunks(
    function: Callable[..., Any], networks: PyTree, used_count: Int[Array, ""], chunks: PyTree
) -> PyTree:
    """Maps a function over the first `used_count` chunks.

    Results of the other chunks are zeros. The backward pass recomputes each chunk.
    """
    # `used_count` is known at run time only. JAX cannot differentiate a loop with such a count, so
    # the backward pass is written by hand.

    @jax.custom_vjp
    def map_chunks(networks: PyTree, chunks: PyTree, used_count: Int[Array, ""]) -> PyTree:
        def fill_chunk(index: Int[Array, ""], results: PyTree) -> PyTree:
            return _set_chunk(results, index, function(networks, *_take_chunk(chunks, index)))

        zeros = _zero_results(function, networks, chunks)
        return jax.lax.fori_loop(0, used_count, fill_chunk, zeros)

    def forward(*inputs: PyTree) -> tuple[PyTree, PyTree]:
        values = jax.tree.map(lambda leaf: leaf.value, inputs)
        flags = [_GradientFlags(map(_has_gradient, jax.tree.leaves(tree))) for tree in inputs[:2]]
        return map_chunks(*values), (values, flags)

    def backward(residuals: PyTree, gradients: PyTree) -> tuple[PyTree, PyTree, None]:
        (networks, chunks, used_count), (network_flags, chunk_flags) = residuals
        gradients = jax.tree.map(_materialize_gradient, gradients)

        def add_gradients(
            index: Int[Array, ""], accumulated: tuple[PyTree, PyTree]
        ) -> tuple[PyTree, PyTree]:
            pullback = _chunk_pullback(
                function, networks, _take_chunk(chunks, index), network_flags, chunk_flags
            )
            network_gradients, chunk_gradients = pullback(_take_chunk(gradients, index))
            totals = jax.tree.map(
                lambda total, gradient: total + gradient.astype(total.dtype),
                accumulated[0],
                network_gradients,
            )
            return totals, _set_chunk(accumulated[1], index, chunk_gradients)

        learned_leaves = network_flags.select_leaves(networks), chunk_flags.select_leaves(chunks)
        zeros = (
            [_zero_accumulator(leaf) for leaf in learned_leaves[0]],
            jax.tree.map(jnp.zeros_like, learned_leaves[1]),
        )
        accumulated = jax.lax.fori_loop(0, used_count, add_gradients, zeros)
        totals = [
            total.astype(leaf.dtype)
            for total, leaf in zip(accumulated[0], learned_leaves[0], strict=True)
        ]
        network_gradients = network_flags.replace_leaves(networks, totals, zero=True)
        return (
            network_gradients,
            chunk_flags.replace_leaves(chunks, accumulated[1], zero=True),
            None,
        )

    map_chunks.defvjp(forward, backward, symbolic_zeros=True)
    return map_chunks(networks, chunks, used_count)


@jax.tree_util.register_static
class _GradientFlags(tuple[bool, ...]):
    """Static flags of leaves with a gradient."""

    __slots__ = ()

    def select_leaves(self, tree: PyTree) -> list[Array]:
        """Returns the leaves that have a gradient."""
        return list(itertools.compress(jax.tree.leaves(tree), self))

    def replace_leaves(self, tree: PyTree, leaves: Iterable[Array], zero: bool = False) -> PyTree:
        """Replaces the leaves that have a gradient.

        The other leaves are kept, or become None (a zero gradient) with `zero`.
        """
        old_leaves, treedef = jax.tree.flatten(tree)
        replacements = iter(leaves)
        pairs = zip(self, old_leaves, strict=True)
        merged = [next(replacements) if flag else None if zero else leaf for flag, leaf in pairs]
        return jax.tree.unflatten(treedef, merged)


def _zero_results(function: Callable[..., Any], networks: PyTree, chunks: PyTree) -> PyTree:
    """Returns zeros in place of the results of all chunks."""
    shapes: PyTree = jax.eval_shape(function, networks, *_take_chunk(chunks, 0))
    chunk_count = len(chunks[0])
    return jax.tree.map(lambda leaf: jnp.zeros((chunk_count, *leaf.shape), leaf.dtype), shapes)


def _chunk_pullback(
    function: Callable[..., Any],
    networks: PyTree,
    chunk: PyTree,
    network_flags: _GradientFlags,
    chunk_flags: _GradientFlags,
) -> Callable[[PyTree], tuple[list[Array], list[Array]]]:
    """Returns the function from a result's gradient to those of the leaves."""

    # Only leaves that need a gradient are arguments, so that no others are computed.
    def apply_learned(network_leaves: list[Array], chunk_leaves: list[Array]) -> PyTree:
        return function(
            network_flags.replace_leaves(networks, network_leaves),
            *chunk_flags.replace_leaves(chunk, chunk_leaves),
        )

    _, pullback = jax.vjp(
        apply_learned,
        network_flags.select_leaves(networks),
        chunk_flags.select_leaves(chunk),
    )
    return pullback


def _has_gradient(leaf: Any) -> bool:
    """Returns whether an input of a `custom_vjp` needs a gradient."""
    # Integers are excluded: their cotangents have another type (float0).
    return bool(leaf.perturbed) and jnp.issubdtype(leaf.value.dtype, jnp.floating)


def _zero_accumulator(leaf: Array) -> Array:
    """Returns zeros like `leaf`, in at least float32."""
    # bfloat16 would lose the small terms of a sum over many chunks.
    return jnp.zeros(leaf.shape, np.promote_types(leaf.dtype, np.float32))


_SYMBOLIC_ZERO: Any = jax.custom_derivatives.SymbolicZero


def _materialize_gradient(gradient: Any) -> Array:
    """Replaces a symbolic zero by an array."""
    is_zero = isinstance(gradient, _SYMBOLIC_ZERO)
    return jnp.zeros(gradient.shape, gradient.dtype) if is_zero else gradient


def _take_chunk(stacked: PyTree, index: Int[Array, ""] | int) -> PyTree:
    """Selects chunk `index` of every array."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacked
    )


def _set_chunk(stacked: PyTree, index: Int[Array, ""], chunk: PyTree) -> PyTree:
    """Replaces chunk `index` of every array."""
    return jax.tree.map(
        lambda leaf, update: jax.lax.dynamic_update_index_in_dim(leaf, update, index, 0),
        stacked,
        chunk,
    )


@jax.custom_vjp
def _reorder_positions(
    array: Shaped[Array, "B T ..."], order: Int[Array, "B T"], inverse: Int[Array, "B T"]
) -> Shaped[Array, "B T ..."]:
    """Moves position `order[b, t]` of row b to position t.

    `inverse` is the inverse permutation of `order`.
    """
    # The custom gradient is the inverse gather. JAX's own would be a scatter, which XLA runs row by
    # row on a CPU.
    return jax.vmap(lambda row, row_order: jnp.take(row, row_order, axis=0))(array, order)


_reorder_positions.defvjp(
    lambda array, order, inverse: (_reorder_positions(array, order, inverse), (order, inverse)),
    lambda orders, gradient: (_reorder_positions(gradient, *reversed(orders)), None, None),
)


def _chunk_length(length: int, elements_per_position: int) -> int:
    """Returns the number of positions of a chunk."""
    if not has_gpus_in_scope():
        return max(1, min(length, CHUNK_ELEMENTS // elements_per_position))
    max_positions = max(1, min(CHUNK_POSITIONS_GPU, CHUNK_ELEMENTS_GPU // elements_per_position))
    # Chunks of about equal size leave little padding in the last one.
    even_positions = -(-length // -(-length // max_positions))
    return min(length, -(-even_positions // TILE_POSITIONS) * TILE_POSITIONS)
