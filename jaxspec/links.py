"""Links that move trees of arrays between two meshes, piece by piece.

Learner and generator may have different devices and layouts. A plan cuts every array into pieces,
so that each piece lies inside one source shard and one target shard. One program on the source mesh
slices the pieces, each piece is copied from one device to another, and one program on the target
mesh joins them. Neither program communicates, unless the link spreads arrays on the target mesh.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.mesh import entry_axes
from jaxspec.state import PyTree

Packed = list[list[jax.Array]]
"""Pieces of each array of a tree. The first axis counts devices, each of which has one entry."""
_Cell = tuple[int, ...]
"""Position of a piece in the grid of an array's pieces."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy of one piece from a source device to a target device."""

    array: int
    """Number of the array among those of its tree that have elements."""
    source_device: Any
    source_slot: int
    """Number of the piece among those of its source shard."""
    target_device: Any
    target_slot: int
    """Number of the piece among those of its target shard."""


@dataclasses.dataclass(frozen=True)
class ArrayPlan:
    """Plan of one array: how it is cut, and which copies move it."""

    number: int
    """Number of the array among those of its tree that have elements."""
    shape: tuple[int, ...]
    dtype: Any
    source: NamedSharding
    target: NamedSharding
    spreads: bool = False
    """Whether only one copy of every target shard is sent, and the target mesh spreads it."""

    @property
    def spread_axes(self) -> tuple[str, ...]:
        """Axes of the target mesh over which the array is spread."""
        used_axes = {axis for entry in self.target.spec for axis in entry_axes(entry)}
        sizes = self.target.mesh.shape
        free_axes = [axis for axis in sizes if axis not in used_axes and sizes[axis] > 1]
        return tuple(free_axes) if self.spreads else ()

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Number of pieces along each dimension."""
        return tuple(
            math.lcm(*counts)
            for counts in zip(
                _shard_counts(self, self.source), _shard_counts(self, self.target), strict=True
            )
        )

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of a piece."""
        return tuple(size // count for size, count in zip(self.shape, self.grid, strict=True))

    def list_cells(self, sharding: NamedSharding) -> dict[Any, list[_Cell]]:
        """Returns the cells of the pieces in each device's shard, in order."""
        shard_grid = [
            count // shards
            for count, shards in zip(self.grid, _shard_counts(self, sharding), strict=True)
        ]
        cells: dict[Any, list[_Cell]] = {}
        for device, index in sharding.devices_indices_map(self.shape).items():
            ranges = []
            for axis_slice, size, count in zip(index, self.piece_shape, shard_grid, strict=True):
                first = (axis_slice.start or 0) // size
                ranges.append(range(first, first + count))
            cells[device] = list(itertools.product(*ranges))
        return cells

    @cached_property
    def copies(self) -> list[Copy]:
        """Copies that move the array.

        Each target device gets every piece of its shard once, or one of its replicas does.
        """
        senders: dict[_Cell, list[tuple[Any, int]]] = {}
        for device, cells in self.list_cells(self.source).items():
            for slot, cell in enumerate(cells):
                senders.setdefault(cell, []).append((device, slot))
        copies = []
        cells_by_device = self.list_cells(self.target)
        # Devices of a shard have the same first cell.
        receivers: dict[_Cell, list[Any]] = {}
        for device, cells in cells_by_device.items():
            receivers.setdefault(cells[0], []).append(device)
        for device, cells in cells_by_device.items():
            same_shard = receivers[cells[0]]
            # Arrays take turns, so that no device receives all of them.
            if self.spreads and device != same_shard[self.number % len(same_shard)]:
                continue
            for slot, cell in enumerate(cells):
                # Replicas of a piece take turns, so that no device sends all of them.
                replicas = senders[cell]
                sender, sender_slot = replicas[len(copies) % len(replicas)]
                copies.append(Copy(self.number, sender, sender_slot, device, slot))
        return copies


def _shard_counts(plan: ArrayPlan, sharding: NamedSharding) -> list[int]:
    """Returns the number of shards along each dimension."""
    shard_shape = sharding.shard_shape(plan.shape)
    return [size // part for size, part in zip(plan.shape, shard_shape, strict=True)]


@runtime_checkable
class Link(Protocol):
    """Way of trees of one structure from a source mesh to a target mesh.

    `pack` and `unpack` are traced into a program of each side. `move` runs between the two.
    """

    source_layout: PyTree
    """Shapes and shardings of packed trees on the source mesh."""
    target_layout: PyTree
    """Shapes and shardings of packed trees on the target mesh."""

    @property
    def bytes(self) -> int:
        """Bytes that travel with each tree."""
        ...

    def pack(self, tree: PyTree) -> PyTree:
        """Packs a tree, in a program on the source mesh."""
        ...

    def move(self, packed: PyTree) -> PyTree:
        """Moves a packed tree to the target mesh. Returns before it has arrived."""
        ...

    def unpack(self, packed: PyTree) -> PyTree:
        """Unpacks a tree, in a program on the target mesh."""
        ...


def open_link(source: PyTree, target: PyTree) -> Link:
    """Opens a link for trees like `source`, which become trees like `target`.

    Args:
      source: shapes, dtypes and shardings of the arrays. All have one mesh.
      target: the same shapes and dtypes with the new shardings.
    """
    source_mesh, target_mesh = (jax.tree.leaves(tree)[0].sharding.mesh for tree in (source, target))
    return SameMesh(source) if source_mesh == target_mesh else MeshLink(source, target)


class SameMesh:
    """Link between two sides that share all devices. Layouts stay as they are."""

    bytes = 0

    def __init__(self, layout: PyTree) -> None:
        self.source_layout = self.target_layout = layout

    def pack(self, tree: PyTree) -> PyTree:
        """Copies a tree."""
        # The source may donate its own arrays before the target has read them.
        return jax.tree.map(jnp.copy, tree)

    def move(self, packed: PyTree) -> PyTree:
        """Returns the tree itself."""
        return packed

    def unpack(self, packed: PyTree) -> PyTree:
        """Returns the tree itself."""
        return packed


class MeshLink:
    """Link from a source mesh to another mesh.

    Args:
      source: shapes, dtypes and shardings of the arrays. All have one mesh.
      target: the same shapes and dtypes with the new shardings, on another mesh.
      spreads: whether each element of a matrix of real numbers travels once. `unpack` then
        communicates, where the target has several copies.
    """

    def __init__(self, source: PyTree, target: PyTree, spreads: bool = False) -> None:
        self._leaves, self._structure = jax.tree.flatten(target)
        # An array without elements has nothing to copy, and is made on the target mesh.
        self._is_empty = [leaf.size == 0 for leaf in self._leaves]
        layouts = zip(jax.tree.leaves(source), self._leaves, strict=True)
        self.plans = [
            ArrayPlan(
                *(number, leaf.shape, leaf.dtype, leaf.sharding, target_leaf.sharding),
                # Vectors are too small to be worth a collective.
                spreads=spreads and leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating),
            )
            for number, (leaf, target_leaf) in enumerate(pair for pair in layouts if pair[0].size)
        ]
        self.source_layout = [_describe_pieces(plan, plan.source) for plan in self.plans]
        self.target_layout = [_describe_pieces(plan, plan.target) for plan in self.plans]

    @property
    def bytes(self) -> int:
        """Bytes that travel with each tree."""
        return sum(
            len(plan.copies) * math.prod(plan.piece_shape) * jnp.dtype(plan.dtype).itemsize
            for plan in self.plans
        )

    def pack(self, tree: PyTree) -> Packed:
        """Cuts arrays on the source mesh into pieces, without communication."""
        leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
        return [_slice_pieces(plan, leaf) for plan, leaf in zip(self.plans, leaves, strict=True)]

    def unpack(self, packed: Packed) -> PyTree:
        """Joins pieces on the target mesh, and spreads them where the link does so."""
        arrays = iter(
            [_join_pieces(plan, pieces) for plan, pieces in zip(self.plans, packed, strict=True)]
        )
        return jax.tree.unflatten(
            self._structure,
            [
                jnp.zeros(leaf.shape, leaf.dtype) if is_empty else next(arrays)
                for leaf, is_empty in zip(self._leaves, self._is_empty, strict=True)
            ],
        )

    def move(self, packed: Packed) -> Packed:
        """Copies pieces to the target mesh, in one process. Returns before they have arrived."""
        # One call for all, since each call costs as much as many copies.
        arrived = jax.device_put(
            self.read_pieces(packed, self.copies), [copy.target_device for copy in self.copies]
        )
        return self.place_pieces(self.copies, arrived)

    @cached_property
    def copies(self) -> list[Copy]:
        """Copies that move a tree, in the same order in all processes."""
        return [copy for plan in self.plans for copy in plan.copies]

    def read_pieces(self, packed: Packed, copies: Sequence[Copy]) -> list[jax.Array]:
        """Returns the pieces of some copies from source devices of this process."""
        shards = [
            [{shard.device: shard.data for shard in piece.addressable_shards} for piece in pieces]
            for pieces in packed
        ]
        return [shards[copy.array][copy.source_slot][copy.source_device] for copy in copies]

    def describe_piece(self, copy: Copy) -> jax.ShapeDtypeStruct:
        """Returns shape and dtype of a copy's piece on its device."""
        plan = self.plans[copy.array]
        return jax.ShapeDtypeStruct((1, *plan.piece_shape), plan.dtype)

    def place_pieces(self, copies: Sequence[Copy], pieces: Sequence[jax.Array]) -> Packed:
        """Makes packed arrays on the target mesh of pieces on their target devices.

        In each process, `copies` are those to its own devices.
        """
        received: dict[tuple[int, int], dict[Any, jax.Array]] = {}
        for copy, piece in zip(copies, pieces, strict=True):
            received.setdefault((copy.array, copy.target_slot), {})[copy.target_device] = piece

        def place(array: int, slot: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            arrived = received.get((array, slot), {})
            local_pieces = [
                # Zeros add nothing when the piece of another replica is spread.
                arrived[device]
                if device in arrived
                else jnp.zeros((1, *leaf.shape[1:]), leaf.dtype, device=device)
                for device in leaf.sharding.addressable_devices
            ]
            return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, local_pieces)

        return [
            [place(array, slot, leaf) for slot, leaf in enumerate(layout)]
            for array, layout in enumerate(self.target_layout)
        ]


def _describe_pieces(plan: ArrayPlan, sharding: NamedSharding) -> list[jax.ShapeDtypeStruct]:
    """Describes the arrays that hold the pieces of an array, one for each slot of a shard."""
    mesh = sharding.mesh
    slots = len(next(iter(plan.list_cells(sharding).values())))
    by_device = NamedSharding(mesh, P(mesh.axis_names))
    shape = (mesh.size, *plan.piece_shape)
    return [jax.ShapeDtypeStruct(shape, plan.dtype, sharding=by_device)] * slots


def _compute_local_grid(plan: ArrayPlan, sharding: NamedSharding) -> list[int]:
    """Returns the number of pieces of a shard along each dimension."""
    counts = zip(plan.grid, _shard_counts(plan, sharding), strict=True)
    return [count // shards for count, shards in counts]


def _slice_pieces(plan: ArrayPlan, array: jax.Array) -> list[jax.Array]:
    """Slices every shard of an array into its pieces."""
    local_grid = _compute_local_grid(plan, plan.source)

    def slice_shard(shard: jax.Array) -> list[jax.Array]:
        pieces = []
        for cell in itertools.product(*map(range, local_grid)):
            starts = [number * size for number, size in zip(cell, plan.piece_shape, strict=True)]
            stops = [start + size for start, size in zip(starts, plan.piece_shape, strict=True)]
            pieces.append(jax.lax.slice(shard, starts, stops)[None])
        return pieces

    mesh = plan.source.mesh
    return _map_shards(mesh, slice_shard, plan.source.spec, P(mesh.axis_names))(array)


def _join_pieces(plan: ArrayPlan, pieces: Sequence[jax.Array]) -> jax.Array:
    """Joins the pieces of every shard of an array."""
    local_grid = _compute_local_grid(plan, plan.target)

    def join_shard(pieces: Sequence[jax.Array]) -> jax.Array:
        blocks = [piece[0] for piece in pieces]
        # The last dimension varies fastest, so it is joined first.
        for axis in reversed(range(len(local_grid))):
            count = local_grid[axis]
            blocks = [
                jnp.concatenate(blocks[first : first + count], axis) if count > 1 else blocks[first]
                for first in range(0, len(blocks), count)
            ]
        return jax.lax.psum(blocks[0], plan.spread_axes) if plan.spread_axes else blocks[0]

    mesh = plan.target.mesh
    return _map_shards(mesh, join_shard, P(mesh.axis_names), plan.target.spec)(list(pieces))


def _map_shards(mesh: Any, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
