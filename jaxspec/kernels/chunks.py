"""Functions of positions computed a chunk of positions at a time, and on a CPU only where their
results are wanted."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from jaxspec.mesh import gpus_in_scope
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
WIDE = 4096
"""Numbers of a position from which on a CPU computes only those that are wanted."""
CHUNK_POSITIONS_CPU = 128
"""Positions of a chunk of wanted ones on a CPU: enough for fast products, and few are padding."""
TILE = 16
"""Chunks on GPUs are a multiple of so many positions: XLA pads other products by copies."""


def in_chunks(
    function: Callable[..., Any],
    networks: PyTree,
    elements_per_position: int,
    *arrays: Array,
    wanted: Bool[Array, "B T"] | None = None,
) -> Any:
    """Maps `function` over chunks of the position axis (the second) and joins the results.

    The backward pass recomputes each chunk. If everything fits, there is one chunk and no loop.

    Args:
      function: of `networks` and arrays [B chunk ...]; returns a tree of floating arrays of that
        form.
      networks: all that it reads beside the arrays.
      elements_per_position: numbers that it holds for each position.
      *arrays: [B T ...].
      wanted: positions whose results matter; None: all. On a CPU a wide function is computed for
        these alone, a few others that fill up a chunk, and the rest is zero.
    """
    length = arrays[0].shape[1]
    chunk = _chunk_length(length, max(elements_per_position, 1))
    if wanted is not None and _worth_moving(elements_per_position):
        return _at_wanted(function, networks, min(chunk, CHUNK_POSITIONS_CPU), wanted, arrays)
    if chunk == length:
        return function(networks, *arrays)
    mapped = jax.lax.map(
        lambda parts: jax.checkpoint(function)(networks, *parts),
        tuple(_split(array, chunk) for array in arrays),
    )
    return jax.tree.map(lambda array: _join(array, length), mapped)


def where_wanted(
    function: Callable[..., Any],
    networks: PyTree,
    elements_per_position: int,
    *arrays: Array,
    wanted: Bool[Array, "B T"],
) -> Any:
    """Computes `function` of all positions at once; on a CPU a wide one as `in_chunks` does.

    It must not communicate between data shards, which have different numbers of chunks.
    """
    if not _worth_moving(elements_per_position):
        return function(networks, *arrays)
    chunk = min(arrays[0].shape[1], CHUNK_POSITIONS_CPU)
    return _at_wanted(function, networks, chunk, wanted, arrays)


def _worth_moving(elements_per_position: int) -> bool:
    """Whether computing a function at wanted positions alone pays for moving them."""
    return elements_per_position >= WIDE and not gpus_in_scope()


def _split(array: Shaped[Array, "B T ..."], chunk: int) -> Shaped[Array, "c B chunk ..."]:
    """Splits positions into chunks; the last one is padded with zeros."""
    rows, length, *rest = array.shape
    count = -(-length // chunk)
    padded = jnp.pad(array, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(padded.reshape(rows, count, chunk, *rest), 1, 0)


def _join(array: Shaped[Array, "c B chunk ..."], length: int) -> Shaped[Array, "B T ..."]:
    """Joins chunks to `length` positions."""
    moved = jnp.moveaxis(array, 0, 1)
    rows, count, chunk, *rest = moved.shape
    return moved.reshape(rows, count * chunk, *rest)[:, :length]


def _at_wanted(
    function: Callable[..., Any],
    networks: PyTree,
    chunk: int,
    wanted: Bool[Array, "B T"],
    arrays: tuple[Array, ...],
) -> Any:
    """Runs `function` on chunks of the wanted positions, which are moved to the front."""
    length = wanted.shape[1]
    order = jnp.argsort(~wanted, axis=1, stable=True)
    inverse = jnp.argsort(order, axis=1)
    most = jnp.max(jnp.sum(wanted, axis=1, dtype=jnp.int32))
    parts = tuple(_split(_reorder(array, order, inverse), chunk) for array in arrays)
    mapped = _map_first(function, networks, -(-most // chunk), parts)
    return jax.tree.map(lambda array: _reorder(_join(array, length), inverse, order), mapped)


def _map_first(
    function: Callable[..., Any], networks: PyTree, used: Int[Array, ""], parts: PyTree
) -> PyTree:
    """Maps a function over the first `used` of stacked chunks; the results of others are zeros.

    The number of chunks is known at run time only, so the backward pass is written out: a loop of
    as many chunks, each computed again.
    """

    @jax.custom_vjp
    def mapped(networks: PyTree, parts: PyTree, used: Int[Array, ""]) -> PyTree:
        shapes: PyTree = jax.eval_shape(function, networks, *_chunk_at(parts, 0))
        count = len(parts[0])
        nothing = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), shapes)

        def add(number: Int[Array, ""], before: PyTree) -> PyTree:
            return _with_chunk(before, number, function(networks, *_chunk_at(parts, number)))

        return jax.lax.fori_loop(0, used, add, nothing)

    def forward(*inputs: PyTree) -> tuple[PyTree, PyTree]:
        values = jax.tree.map(lambda leaf: leaf.value, inputs)
        flags = [_Flags(map(_has_gradient, jax.tree.leaves(tree))) for tree in inputs[:2]]
        return mapped(*values), (values, flags)

    def backward(residuals: PyTree, gradients: PyTree) -> tuple[PyTree, PyTree, None]:
        (networks, parts, used), (of_networks, of_parts) = residuals
        gradients = jax.tree.map(_whole, gradients)

        def add(number: Int[Array, ""], before: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            chunks = _chunk_at(parts, number)

            def of_learned(own: list[Array], own_chunks: list[Array]) -> PyTree:
                return function(of_networks.fill(networks, own), *of_parts.fill(chunks, own_chunks))

            _, pull = jax.vjp(of_learned, of_networks.pick(networks), of_parts.pick(chunks))
            slopes, of_chunks = pull(_chunk_at(gradients, number))
            total = jax.tree.map(lambda sum_, new: sum_ + new.astype(sum_.dtype), before[0], slopes)
            return total, _with_chunk(before[1], number, of_chunks)

        own = of_networks.pick(networks), of_parts.pick(parts)
        nothing = [_wide_zeros(leaf) for leaf in own[0]], jax.tree.map(jnp.zeros_like, own[1])
        found = jax.lax.fori_loop(0, used, add, nothing)
        totals = [total.astype(leaf.dtype) for total, leaf in zip(found[0], own[0], strict=True)]
        slopes = of_networks.fill(networks, totals, zero=True)
        return slopes, of_parts.fill(parts, found[1], zero=True), None

    mapped.defvjp(forward, backward, symbolic_zeros=True)
    return mapped(networks, parts, used)


@jax.tree_util.register_static
class _Flags(tuple[bool, ...]):
    """Which leaves of a tree have a gradient."""

    __slots__ = ()

    def pick(self, tree: PyTree) -> list[Array]:
        """The leaves that have one."""
        return list(itertools.compress(jax.tree.leaves(tree), self))

    def fill(self, tree: PyTree, leaves: Iterable[Array], zero: bool = False) -> PyTree:
        """The tree with other leaves where there is a gradient, and its own elsewhere.

        With `zero`, None elsewhere, which is the gradient there.
        """
        old, form = jax.tree.flatten(tree)
        rest = iter(leaves)
        pairs = zip(self, old, strict=True)
        merged = [next(rest) if flag else None if zero else leaf for flag, leaf in pairs]
        return jax.tree.unflatten(form, merged)


def _has_gradient(leaf: Any) -> bool:
    """Whether an input of a rule with symbolic zeros may have a gradient; an integer never has."""
    return bool(leaf.perturbed) and jnp.issubdtype(leaf.value.dtype, jnp.floating)


def _wide_zeros(leaf: Array) -> Array:
    """Zeros to add up gradients of many chunks on."""
    return jnp.zeros(leaf.shape, np.promote_types(leaf.dtype, np.float32))


_ZERO: Any = jax.custom_derivatives.SymbolicZero


def _whole(gradient: Any) -> Array:
    """A gradient as an array, also where it is known to be zero."""
    is_zero = isinstance(gradient, _ZERO)
    return jnp.zeros(gradient.shape, gradient.dtype) if is_zero else gradient


def _chunk_at(stacked: PyTree, number: Int[Array, ""] | int) -> PyTree:
    """Chunk `number` of every array."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), stacked
    )


def _with_chunk(stacked: PyTree, number: Int[Array, ""], chunk: PyTree) -> PyTree:
    """The stacked chunks with another one in place of `number`."""
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, number, 0), stacked, chunk
    )


@jax.custom_vjp
def _reorder(
    array: Shaped[Array, "B T ..."], order: Int[Array, "B T"], inverse: Int[Array, "B T"]
) -> Shaped[Array, "B T ..."]:
    """Puts position `order[b, t]` of row b at place t. The gradient is the inverse of this, and not
    a scatter, which a CPU makes one row after the other."""
    return jax.vmap(lambda row, places: jnp.take(row, places, axis=0))(array, order)


_reorder.defvjp(
    lambda array, order, inverse: (_reorder(array, order, inverse), (order, inverse)),
    lambda orders, gradient: (_reorder(gradient, *reversed(orders)), None, None),
)


def _chunk_length(length: int, elements_per_position: int) -> int:
    """Positions of a chunk; on GPUs chunks are about equal, so that the last one is not padded."""
    if not gpus_in_scope():
        return max(1, min(length, CHUNK_ELEMENTS // elements_per_position))
    most = max(1, min(CHUNK_POSITIONS_GPU, CHUNK_ELEMENTS_GPU // elements_per_position))
    even = -(-length // -(-length // most))
    return min(length, -(-even // TILE) * TILE)
