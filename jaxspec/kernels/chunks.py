"""Functions of positions computed a chunk of positions at a time, and on a CPU only where their
results are wanted."""

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
"""Logits alive at once: positions are taken in chunks so that rows x chunk x vocabulary stays below
this."""
CHUNK_POSITIONS_GPU, CHUNK_ELEMENTS_GPU = 2048, 2**29
"""Positions of a chunk on GPUs, and logits alive at once: 2 GiB in float32.

For each weight of the head a chunk of n positions moves 12 bytes in the backward pass, 8 of them
for the gradient, and makes 6n operations. An H100 makes 295 operations a byte: from 600
positions on the products take longer, and from 1,200 on also the one that adds up the gradient (2n
operations on 8 bytes). Beyond 2,048 positions a chunk would only take more memory."""
WIDE_ELEMENTS = 4096
"""Numbers of a position from which on a CPU computes only those that are wanted."""
CHUNK_POSITIONS_CPU = 128
"""Positions of a chunk of wanted ones on a CPU: enough for fast products, and few are padding."""
TILE_POSITIONS = 16
"""Chunks on GPUs are a multiple of so many positions: XLA pads other products by copies."""


def map_in_chunks(
    function: Callable[..., Any],
    networks: PyTree,
    elements_per_position: int,
    *arrays: Array,
    mask: Bool[Array, "B T"] | None = None,
) -> Any:
    """Maps `function` over chunks of the position axis (the second) and joins the results.

    The backward pass recomputes each chunk. If everything fits, there is one chunk and no loop.

    Args:
      function: of `networks` and arrays [B chunk ...]; returns a tree of floating arrays of that
        form.
      networks: all that it reads beside the arrays.
      elements_per_position: numbers that it holds for each position.
      *arrays: [B T ...].
      mask: positions whose results matter; None: all. On a CPU a wide function is computed for
        these alone, a few others that fill up a chunk, and the rest is zero.
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


def map_masked(
    function: Callable[..., Any],
    networks: PyTree,
    elements_per_position: int,
    *arrays: Array,
    mask: Bool[Array, "B T"],
) -> Any:
    """Computes `function` of all positions at once; on a CPU a wide one as `map_in_chunks` does.

    It must not communicate between data shards, which have different numbers of chunks.
    """
    if not _should_compact(elements_per_position):
        return function(networks, *arrays)
    chunk = min(arrays[0].shape[1], CHUNK_POSITIONS_CPU)
    return _map_compacted(function, networks, chunk, mask, arrays)


def _should_compact(elements_per_position: int) -> bool:
    """Whether computing a function at wanted positions alone pays for moving them."""
    return elements_per_position >= WIDE_ELEMENTS and not has_gpus_in_scope()


def _split_chunks(array: Shaped[Array, "B T ..."], chunk: int) -> Shaped[Array, "c B chunk ..."]:
    """Splits positions into chunks; the last one is padded with zeros."""
    rows, length, *trailing_shape = array.shape
    count = -(-length // chunk)
    padded = jnp.pad(array, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * len(trailing_shape))
    return jnp.moveaxis(padded.reshape(rows, count, chunk, *trailing_shape), 1, 0)


def _join_chunks(array: Shaped[Array, "c B chunk ..."], length: int) -> Shaped[Array, "B T ..."]:
    """Joins chunks to `length` positions."""
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
    """Runs `function` on chunks of the wanted positions, which are moved to the front."""
    length = mask.shape[1]
    order = jnp.argsort(~mask, axis=1, stable=True)
    inverse = jnp.argsort(order, axis=1)
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
    """Maps a function over the first `used_count` of stacked chunks; other results are zeros.

    The number of chunks is known at run time only, so the backward pass is written out: a loop of
    as many chunks, each computed again.
    """

    @jax.custom_vjp
    def map_chunks(networks: PyTree, chunks: PyTree, used_count: Int[Array, ""]) -> PyTree:
        shapes: PyTree = jax.eval_shape(function, networks, *_take_chunk(chunks, 0))
        chunk_count = len(chunks[0])
        zeros = jax.tree.map(lambda leaf: jnp.zeros((chunk_count, *leaf.shape), leaf.dtype), shapes)

        def fill_chunk(index: Int[Array, ""], results: PyTree) -> PyTree:
            return _set_chunk(results, index, function(networks, *_take_chunk(chunks, index)))

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
            chunk = _take_chunk(chunks, index)

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
    """Which leaves of a tree have a gradient."""

    __slots__ = ()

    def select_leaves(self, tree: PyTree) -> list[Array]:
        """The leaves that have one."""
        return list(itertools.compress(jax.tree.leaves(tree), self))

    def replace_leaves(self, tree: PyTree, leaves: Iterable[Array], zero: bool = False) -> PyTree:
        """The tree with other leaves where there is a gradient, and its own elsewhere.

        With `zero`, None elsewhere, which is the gradient there.
        """
        old_leaves, treedef = jax.tree.flatten(tree)
        replacements = iter(leaves)
        pairs = zip(self, old_leaves, strict=True)
        merged = [next(replacements) if flag else None if zero else leaf for flag, leaf in pairs]
        return jax.tree.unflatten(treedef, merged)


def _has_gradient(leaf: Any) -> bool:
    """Whether an input of a rule with symbolic zeros may have a gradient; an integer never has."""
    return bool(leaf.perturbed) and jnp.issubdtype(leaf.value.dtype, jnp.floating)


def _zero_accumulator(leaf: Array) -> Array:
    """Zeros to add up gradients of many chunks on."""
    return jnp.zeros(leaf.shape, np.promote_types(leaf.dtype, np.float32))


_SYMBOLIC_ZERO: Any = jax.custom_derivatives.SymbolicZero


def _materialize_gradient(gradient: Any) -> Array:
    """A gradient as an array, also where it is known to be zero."""
    is_zero = isinstance(gradient, _SYMBOLIC_ZERO)
    return jnp.zeros(gradient.shape, gradient.dtype) if is_zero else gradient


def _take_chunk(stacked: PyTree, index: Int[Array, ""] | int) -> PyTree:
    """Chunk `index` of every array."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacked
    )


def _set_chunk(stacked: PyTree, index: Int[Array, ""], chunk: PyTree) -> PyTree:
    """The stacked chunks with another one in place of `index`."""
    return jax.tree.map(
        lambda leaf, update: jax.lax.dynamic_update_index_in_dim(leaf, update, index, 0),
        stacked,
        chunk,
    )


@jax.custom_vjp
def _reorder_positions(
    array: Shaped[Array, "B T ..."], order: Int[Array, "B T"], inverse: Int[Array, "B T"]
) -> Shaped[Array, "B T ..."]:
    """Puts position `order[b, t]` of row b at place t. The gradient is the inverse of this, and not
    a scatter, which a CPU makes one row after the other."""
    return jax.vmap(lambda row, row_order: jnp.take(row, row_order, axis=0))(array, order)


_reorder_positions.defvjp(
    lambda array, order, inverse: (_reorder_positions(array, order, inverse), (order, inverse)),
    lambda orders, gradient: (_reorder_positions(gradient, *reversed(orders)), None, None),
)


def _chunk_length(length: int, elements_per_position: int) -> int:
    """Positions of a chunk; on GPUs chunks are about equal, so that the last one is not padded."""
    if not has_gpus_in_scope():
        return max(1, min(length, CHUNK_ELEMENTS // elements_per_position))
    max_positions = max(1, min(CHUNK_POSITIONS_GPU, CHUNK_ELEMENTS_GPU // elements_per_position))
    even_positions = -(-length // -(-length // max_positions))
    return min(length, -(-even_positions // TILE_POSITIONS) * TILE_POSITIONS)
