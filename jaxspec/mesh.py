"""Device mesh, array layouts, and `shard_map` over mesh axes."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA, EXPERT, TENSOR = "data", "expert", "tensor"
AXES = (DATA, EXPERT, TENSOR)
ROWS = (DATA, EXPERT)
"""Mesh axes that shard rows. Each `data` shard runs its own generation loop. The `expert` members
of a shard run in lockstep and hold its experts between them."""


# ---- layouts of weights

LogicalAxes = tuple[str | None, ...]
"""Name of each dimension of a weight. None marks one that is never sharded."""
LAYERS = "layers"
"""First axis of the weights of stacked layers, which those of a single layer lack."""
Rules = Mapping[str, tuple[str, ...]]
"""Mesh axes that shard each logical axis of weights. All rules have the same logical axes."""
# Each data shard leaves its loop when its own rows have ended, so weights cannot be gathered over
# `data` inside the loop.
ROLLOUT_RULES: Rules = {
    LAYERS: (),
    "embed": (),
    "experts": (EXPERT,),
    "heads": (TENSOR,),
    "kv_heads": (TENSOR,),
    "ffn": (TENSOR,),
    "vocab": (TENSOR,),
}
"""Layout for generation. Each `data` shard holds all weights, sharded over `tensor`, and experts
over `expert`."""
TRAIN_RULES: Rules = {**ROLLOUT_RULES, "embed": ROWS}
"""Layout for training. Weights are also sharded over the row axes, along the embedding width
(FSDP)."""


def assign_shardings(mesh: Mesh, tree: Any, rules: Rules, shard_above: int = 0) -> Any:
    """Maps every leaf of `tree` to its sharding.

    Weights are flax variables. Their logical axes are stated where they are made, as in
    `nnx.Param(value, axes=("layers", "embed", "ffn"))`. Moments of an optimizer keep the axes of
    their weights. Leaves outside variables, such as counts, are replicated. A dimension whose size
    its mesh axes do not divide is sharded over fewer of them.

    Args:
      mesh: the mesh to shard over.
      tree: weights, or a tree that contains them, such as an optimizer state.
      rules: mesh axes of each logical axis.
      shard_above: weights with fewer elements are not sharded over the row axes, except experts
        over `expert`.

    Raises:
      ValueError: a weight has no logical axes, unknown ones, or not one for each dimension.
    """

    def choose_sharding(path: Any, node: Any) -> Any:
        if not isinstance(node, nnx.Variable):
            return NamedSharding(mesh, P())
        # optax leaves a variable empty if another optimizer has its moments.
        if not jax.tree.leaves(node):
            return node
        axes = _require_axes(path, node)
        is_small = node.size < shard_above
        spec = _partition_spec(mesh, node.shape, axes, rules, is_small)
        return jax.tree.map(lambda _: NamedSharding(mesh, spec), node)

    return jax.tree_util.tree_map_with_path(choose_sharding, tree, is_leaf=_is_variable)


def split_rollout_layout(mesh: Mesh, tree: Any) -> Any:
    """Maps every leaf of `tree` to a sharding that splits it over as many devices as it can.

    Weights are sharded as in the rollout layout, and their copies are then split over the remaining
    devices. So each device holds a part of what it has in the rollout layout. The shardings have
    another mesh of the same devices, whose axes are the prime factors of the row axes.
    """
    factors = _prime_factors(mesh.shape[DATA])
    names = tuple(f"{DATA}_{number}" for number in range(len(factors)))
    shape = (*factors, mesh.shape[EXPERT], mesh.shape[TENSOR])
    split_mesh = Mesh(
        mesh.devices.reshape(shape),
        (*names, EXPERT, TENSOR),
        axis_types=(AxisType.Auto,) * len(shape),
    )

    def choose_sharding(path: Any, node: Any) -> Any:
        if not isinstance(node, nnx.Variable) or not jax.tree.leaves(node):
            return jax.tree.map(lambda _: NamedSharding(split_mesh, P()), node)
        axes = _require_axes(path, node)
        spec = _partition_spec(split_mesh, node.shape, axes, ROLLOUT_RULES, is_small=False)
        spec = _split_further(split_mesh, node.shape, spec)
        return jax.tree.map(lambda _: NamedSharding(split_mesh, spec), node)

    return jax.tree_util.tree_map_with_path(choose_sharding, tree, is_leaf=_is_variable)


def _split_further(mesh: Mesh, shape: Sequence[int], spec: P) -> P:
    """Splits dimensions over mesh axes that a spec does not use, where their sizes allow it."""
    entries = [[*entry_axes(entry)] for entry in spec]
    used_axes = {axis for entry in entries for axis in entry}
    sizes = [
        size // math.prod(mesh.shape[axis] for axis in entry)
        for size, entry in zip(shape, entries, strict=True)
    ]
    # Large factors have fewer dimensions to choose from.
    free_axes = [axis for axis in mesh.axis_names if axis not in used_axes]
    for axis in sorted(free_axes, key=lambda name: -mesh.shape[name]):
        fitting = [size for size in sizes if size % mesh.shape[axis] == 0]
        if fitting and mesh.shape[axis] > 1:
            dimension = sizes.index(max(fitting))
            entries[dimension].append(axis)
            sizes[dimension] //= mesh.shape[axis]
    return P(*(tuple(entry) or None for entry in entries))


def _prime_factors(number: int) -> list[int]:
    """Returns the prime factors of a number, with repetitions."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def logical_axes(weight: nnx.Variable) -> LogicalAxes | None:
    """Returns the logical axes of a weight, None if it has none."""
    return weight.get_metadata("axes", None)


def require_weights(network: Any) -> None:
    """Checks that a network consists of weights with logical axes.

    Raises:
      ValueError: a leaf is no flax variable, or its logical axes are as `assign_shardings` refuses.
    """
    for path, node in jax.tree_util.tree_leaves_with_path(network, is_leaf=_is_variable):
        _require_axes(path, node)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _require_axes(path: Any, weight: Any) -> LogicalAxes:
    """Returns a weight's logical axes, one for each dimension."""
    axes = logical_axes(weight) if isinstance(weight, nnx.Variable) else None
    rank = len(weight.shape)
    # A single layer of a stack lacks its first axis.
    if axes is not None and axes[:1] == (LAYERS,) and len(axes) == rank + 1:
        axes = axes[1:]
    # Otherwise an unknown name would silently leave the weight whole on every device.
    if axes is None or len(axes) != rank or not {*axes} <= {*TRAIN_RULES, None}:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        raise ValueError(
            f"the weight {name} of shape {tuple(weight.shape)} has the logical axes {axes}; state"
            f" {rank} where it is made, nnx.Param(value, axes=...): each is one of"
            f" {', '.join(TRAIN_RULES)}, or None for a dimension that stays whole"
        )
    return axes


def _partition_spec(
    mesh: Mesh, shape: Sequence[int], axes: LogicalAxes, rules: Rules, is_small: bool
) -> P:
    """Returns the spec of a weight."""
    free_axes, entries = list(mesh.axis_names), []
    for name, size in zip(axes, shape, strict=True):
        # A mesh axis can shard only one dimension of an array.
        wanted_axes = () if name is None else rules[name]
        mesh_axes = tuple(axis for axis in wanted_axes if axis in free_axes)
        if is_small and DATA in mesh_axes:
            mesh_axes = ()
        while size % math.prod(mesh.shape[axis] for axis in mesh_axes):
            mesh_axes = mesh_axes[:-1]
        free_axes = [axis for axis in free_axes if axis not in mesh_axes]
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return P(*entries)


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of a `PartitionSpec` entry."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def keep_row_axes(spec: P) -> P:
    """Keeps only the row axes of a spec."""
    row_axes = [tuple(axis for axis in entry_axes(entry) if axis in ROWS) for entry in spec]
    return P(*(entry or None for entry in row_axes))


# ---- layouts of rows


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays (rows, ...)."""
    return NamedSharding(mesh, P(ROWS))


def update_row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays (updates, rows, ...)."""
    return NamedSharding(mesh, P(None, ROWS))


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays copied to every device."""
    return NamedSharding(mesh, P())


# ---- meshes and their devices


def make_mesh(
    data: int, tensor: int = 1, expert: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Builds the `data` x `expert` x `tensor` mesh.

    Its axes are Auto. It uses the first of `devices`, by default of those of all processes.
    """
    count = data * expert * tensor
    # `tensor` varies fastest, so its members are neighbors. They communicate in every layer.
    grid = np.asarray((jax.devices() if devices is None else devices)[:count])
    return Mesh(grid.reshape(data, expert, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def row_shard_count(mesh: Mesh) -> int:
    """Returns the number of shards of rows."""
    return mesh.shape[DATA] * mesh.shape[EXPERT]


def has_accelerators(mesh: Mesh) -> bool:
    """Returns whether a mesh has accelerators."""
    return mesh.devices.flat[0].platform != "cpu"


def has_single_cpu_shards(mesh: Mesh) -> bool:
    """Returns whether row shards are single CPU devices."""
    # Weights and caches are then laid out for XLA's CPU kernels.
    return not has_accelerators(mesh) and mesh.shape[TENSOR] == 1


# XLA copies the operands of matrix products to pad them to multiples of this size.
TILE = 128
"""Positions in a tile on accelerators."""


def round_to_tiles(mesh: Mesh, positions: int) -> int:
    """Rounds positions up to full tiles on accelerators. CPUs have no tiles."""
    return -(-positions // TILE) * TILE if has_accelerators(mesh) else positions


# ---- shard_map, and collectives inside it


def shard_map_rows(mesh: Mesh, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Maps a function over the shards of rows.

    The `shard_map` is manual over the row axes. Shards exchange data only through collectives in
    the function.
    """
    # A `tensor` axis of one device is manual too. As an Auto axis it would annotate every operation
    # with a sharding, which makes the program 1.5 times as long, and slower to compile.
    manual_axes = {*ROWS} if mesh.shape[TENSOR] > 1 else {*AXES}
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=manual_axes,
        check_vma=False,
    )


def shard_map_tensor(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Maps a function over `tensor`, inside `shard_map_rows`.

    Returns the function unchanged if `tensor` has one member or there is no mesh in scope.
    """
    # With an Auto axis, the compiler would choose how to split the function.
    mesh = jax.sharding.get_abstract_mesh()
    if TENSOR not in mesh.auto_axes or mesh.shape[TENSOR] == 1:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={TENSOR},
        check_vma=False,
    )


def sum_over_tensor(partial_sums: Any) -> Any:
    """Adds up partial sums over `tensor`, inside `shard_map_tensor`."""
    mesh = jax.sharding.get_abstract_mesh()
    return lax.psum(partial_sums, TENSOR) if _is_manual(TENSOR, mesh) else partial_sums


def max_over_experts(value: Any) -> Any:
    """Returns the maximum over `expert`, inside `shard_map_rows`.

    For booleans, this tells whether any member has True.
    """
    # All members take part whenever tokens are sent to experts. They must therefore agree on trip
    # counts and branches, or they would wait for each other forever.
    mesh = jax.sharding.get_abstract_mesh()
    return lax.pmax(value, EXPERT) if _is_manual(EXPERT, mesh) else value


def sum_over_experts(value: Any) -> Any:
    """Returns the sum over `expert`, inside `shard_map_rows`."""
    mesh = jax.sharding.get_abstract_mesh()
    return lax.psum(value, EXPERT) if _is_manual(EXPERT, mesh) else value


def _is_manual(axis: str, mesh: Any) -> bool:
    # A collective over a single member would only lengthen the program.
    return axis in mesh.manual_axes and mesh.shape[axis] > 1


# ---- kernels of the mesh in scope

_PLAIN_KERNELS = contextvars.ContextVar("plain twins of kernels", default=False)


@contextlib.contextmanager
def use_plain_kernels() -> Iterator[None]:
    """Traces plain twins of GPU kernels inside the context."""
    # A context variable, so that traces in other threads keep their kernels.
    token = _PLAIN_KERNELS.set(True)
    try:
        yield
    finally:
        _PLAIN_KERNELS.reset(token)


def device_kind_in_scope() -> str:
    """Returns the device kind of the mesh in scope.

    The text is empty without a mesh, and inside `use_plain_kernels`.
    """
    if _PLAIN_KERNELS.get():
        return ""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.device_kind


def has_gpus_in_scope() -> bool:
    """Returns whether the mesh in scope has NVIDIA GPUs.

    Inside `use_plain_kernels` this is always false.
    """
    return device_kind_in_scope().startswith("NVIDIA")
