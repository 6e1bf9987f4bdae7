"""Devices and names: the mesh, and the rules from logical axes to mesh axes."""

import contextlib
import contextvars
import functools
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.inputs.checked import ConfigError, first_line, require
from jaxspec.processes.environment import environment_number, parse_whole_number

DATA, EXPERT, TENSOR = "data", "expert", "tensor"
AXES = (DATA, EXPERT, TENSOR)
ROWS = (DATA, EXPERT)
"""What splits rows: over data shards, each with a loop of its own, and within one over the members
that hold the experts between them and step together."""
_MOST_DEVICES = 512
"""More devices of a CPU than any machine has cores; XLA would not get to an end with a million."""

Rules = Mapping[str, tuple[str, ...]]
"""Logical axis to mesh axes; of a leaf, no mesh axis splits two."""
ROLLOUT_RULES: Rules = {
    "experts": (EXPERT,),
    "heads": (TENSOR,),
    "kv_heads": (TENSOR,),
    "ffn": (TENSOR,),
    "vocab": (TENSOR,),
}
"""Rollout layout: each `data` shard holds whole weights, split over `tensor`, and the experts over
`expert`."""
TRAIN_RULES: Rules = {**ROLLOUT_RULES, "embed": ROWS}
"""Train layout: all are split over what splits rows too (FSDP), along the embedding width."""


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count() -> int:
    """Threads of each device of a CPU."""
    return environment_number("NPROC", 1) or core_count()


def describe_machine(mesh: Mesh) -> dict[str, Any]:
    """What a program runs on."""
    device, cpu_info = mesh.devices.flat[0], Path("/proc/cpuinfo")
    cpu_model = (
        re.search(r"model name\s*: (.*)", cpu_info.read_text(encoding="utf-8"))
        if cpu_info.exists()
        else None
    )
    return {
        "device": device.device_kind,
        "mesh": dict(mesh.shape),
        "cpu": cpu_model[1] if cpu_model else platform.machine(),
        "cores": os.cpu_count(),
    }


def prepare_devices(device_count: int = 0, threads_per_device: int = 0) -> None:
    """On a CPU, makes one device per core with one thread each, or `device_count`, with
    `threads_per_device` each (0: all).

    Rows need nothing of one another while they are generated: on two cores, two devices of one
    thread each decoded small models 1.1 to 2.8 times as fast as one device with both threads.

    Must run before JAX starts its backends; leaves an explicit XLA_FLAGS or JAX_NUM_CPU_DEVICES as
    it is.

    Raises:
      ConfigError: an environment variable that it reads, or that XLA would end the process for,
        holds no such number.
    """
    environment_number("NPROC", 1)
    configured_count, local_count = (
        environment_number(name, 1, _MOST_DEVICES)
        for name in ("JAX_NUM_CPU_DEVICES", "JAXSPEC_LOCAL_DEVICES")
    )
    if _has_forced_devices() or configured_count:
        return
    # whoever wanted more is told what there is
    count = local_count or min(device_count or core_count(), _MOST_DEVICES)
    # read by XLA's CPU client when it starts
    os.environ.setdefault("NPROC", str(threads_per_device or max(1, core_count() // count)))
    jax.config.update("jax_num_cpu_devices", count)


def _has_forced_devices() -> bool:
    """Whether XLA_FLAGS says how many devices a CPU has; of flags that it cannot read, XLA says
    less or far too much."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    if not flags:
        os.environ.pop("XLA_FLAGS", None)  # for a value of blanks XLA ends the process
    has_file = flags and not flags[0].startswith("--")
    require(
        not has_file or Path(flags[0]).is_file(),
        f"XLA_FLAGS starts with {flags[:1]}: neither a flag (--NAME=VALUE) nor a file of flags",
    )
    counts = [
        flag.partition("=")[2]
        for flag in flags
        if flag.startswith("--xla_force_host_platform_device_count")
    ]
    for count in counts:
        is_valid = 1 <= (parse_whole_number(count) or 0) <= _MOST_DEVICES
        flag = f"--xla_force_host_platform_device_count={count}"
        require(
            is_valid,
            f"XLA_FLAGS has {flag}; give a whole number, 1 or more and at most {_MOST_DEVICES}",
        )
    return bool(counts)


def count_devices() -> int:
    """Starts JAX's backends, once all processes are joined; returns the devices of all of them.

    Raises:
      ConfigError: there is no device of the kind that JAX_PLATFORMS names.
    """
    try:
        return jax.device_count()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        problem = (
            f"JAX_PLATFORMS is {platforms!r}, and there is no such device here"
            if platforms
            else "JAX finds no device here"
        )
        details = f" ({first_line(error)})" if str(error) else ""
        raise ConfigError(
            f"{problem}{details}; unset JAX_PLATFORMS, or install JAX for that device (bash"
            " launch/venv.sh)"
        ) from error


def has_accelerators(mesh: Mesh) -> bool:
    """Whether its devices are accelerators."""
    return mesh.devices.flat[0].platform != "cpu"


TILE = 128
"""Positions of a tile on accelerators. XLA pads the operands of other products by copies."""


def round_to_tiles(mesh: Mesh, positions: int) -> int:
    """Positions rounded up to whole tiles of its devices; on CPUs as they are."""
    return -(-positions // TILE) * TILE if has_accelerators(mesh) else positions


def has_single_cpu_shards(mesh: Mesh) -> bool:
    """Whether every data shard is one device, a CPU: there, weights and caches are laid out for
    XLA's kernels."""
    return not has_accelerators(mesh) and mesh.shape[TENSOR] == 1


def make_mesh(
    data: int, tensor: int = 1, expert: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """Builds the `data` x `expert` x `tensor` mesh over the first of some devices, or of those of
    all processes; axes are Auto."""
    count = data * expert * tensor
    grid = np.asarray((jax.devices() if devices is None else devices)[:count])
    return Mesh(grid.reshape(data, expert, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def row_shard_count(mesh: Mesh) -> int:
    """Into how many parts rows are split."""
    return mesh.shape[DATA] * mesh.shape[EXPERT]


def assign_shardings(
    mesh: Mesh,
    tree: Any,
    axes: Mapping[str, tuple[str | None, ...]],
    rules: Rules,
    shard_above: int = 0,
) -> Any:
    """Maps every leaf of `tree` to its sharding; leaves of fewer than `shard_above` elements are
    not split where rows are, but for their experts.

    A leaf is looked up in `axes` by the last attribute name on its path (`.layers.query.value` is
    `query`), so optimizer states follow their weights, and a layer by itself has the axes of the
    stack but the first; a dimension that its mesh axes do not divide is split by fewer of them, or
    replicated, as is a leaf without an entry.
    """

    def choose_sharding(path: Any, leaf: Any) -> NamedSharding:
        names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        if names and names[-1] == "value":  # the content of a flax Param
            names.pop()
        logical_axes = axes.get(names[-1], ()) if names else ()
        if logical_axes[:1] == (None,) and leaf.ndim == len(logical_axes) - 1:
            logical_axes = logical_axes[1:]
        if len(logical_axes) != leaf.ndim:
            return NamedSharding(mesh, P())
        is_small, free_axes = leaf.size < shard_above, list(mesh.axis_names)
        entries = []
        for name, size in zip(logical_axes, leaf.shape, strict=True):
            mesh_axes = tuple(axis for axis in rules.get(name or "", ()) if axis in free_axes)
            if is_small and DATA in mesh_axes:
                mesh_axes = ()
            while size % math.prod(mesh.shape[axis] for axis in mesh_axes):
                mesh_axes = mesh_axes[:-1]
            free_axes = [axis for axis in free_axes if axis not in mesh_axes]
            entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
        return NamedSharding(mesh, P(*entries))

    return jax.tree_util.tree_map_with_path(choose_sharding, tree)


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def keep_row_axes(spec: P) -> P:
    """How a leaf is split over the axes that split rows alone."""
    row_axes = [tuple(axis for axis in entry_axes(entry) if axis in ROWS) for entry in spec]
    return P(*(entry or None for entry in row_axes))


def shard_map_rows(mesh: Mesh, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """The function of every shard of rows by itself: a `shard_map` that is manual over what splits
    them, in which all that goes between shards is what the function says.

    A `tensor` axis of one device is manual too: else JAX says of every operation how it is split
    over that axis, which makes a program a half longer and slower to compile.
    """
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
    """Inside `shard_map_rows`: the function on every member of `tensor` by itself, where the
    compiler would split it as it likes. Where there is one member, or no mesh, the function."""
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
    """Inside `shard_map_tensor`: what the members of `tensor` have parts of."""
    mesh = jax.sharding.get_abstract_mesh()
    return lax.psum(partial_sums, TENSOR) if _is_manual(TENSOR, mesh) else partial_sums


def max_over_experts(value: Any) -> Any:
    """Inside `shard_map_rows`: the largest value of the members of `expert`, or whether something
    holds for any. They step together, as all take part when tokens go to the experts, so that what
    they decide about steps must be the same."""
    mesh = jax.sharding.get_abstract_mesh()
    return lax.pmax(value, EXPERT) if _is_manual(EXPERT, mesh) else value


def sum_over_experts(value: Any) -> Any:
    """Inside `shard_map_rows`: the sum of what the members of `expert` counted."""
    mesh = jax.sharding.get_abstract_mesh()
    return lax.psum(value, EXPERT) if _is_manual(EXPERT, mesh) else value


_PLAIN_KERNELS = contextvars.ContextVar("plain twins of kernels", default=False)


@contextlib.contextmanager
def use_plain_kernels() -> Iterator[None]:
    """Programs that this thread traces meanwhile have no GPU kernels, but their plain twins."""
    token = _PLAIN_KERNELS.set(True)
    try:
        yield
    finally:
        _PLAIN_KERNELS.reset(token)


def device_kind_in_scope() -> str:
    """Kind of the devices of the mesh in scope; empty without one, or without kernels."""
    if _PLAIN_KERNELS.get():
        return ""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.device_kind


def has_gpus_in_scope() -> bool:
    """Whether they are NVIDIA GPUs."""
    return device_kind_in_scope().startswith("NVIDIA")


def _is_manual(axis: str, mesh: Any) -> bool:
    return axis in mesh.manual_axes and mesh.shape[axis] > 1


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays whose first axis is rows (or prompts)."""
    return NamedSharding(mesh, P(ROWS))


def update_row_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays whose first axis is updates on a batch, and the second rows."""
    return NamedSharding(mesh, P(None, ROWS))


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of what every device holds whole."""
    return NamedSharding(mesh, P())


def from_host_values(leaf: Any, values: np.ndarray) -> jax.Array:
    """Values that every process has where it needs them, as a global array of the shape and
    sharding of `leaf`."""
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])


def locate_rows(mesh: Mesh, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which processes have a copy of each of `count` rows, as a mask (processes, count), and the
    one of them that owns it (holds the first copy), as numbers (count,).

    Every row is owned by exactly one process, also where `tensor` spans several.
    """
    copies = np.zeros((jax.process_count(), count), bool)
    owners = np.full(count, -1)
    for device, (rows,) in sorted(
        row_sharding(mesh).devices_indices_map((count,)).items(), key=lambda item: item[0].id
    ):
        copies[device.process_index, rows] = True
        owners[rows] = np.where(owners[rows] < 0, device.process_index, owners[rows])
    return copies, owners


def read_local_rows(array: jax.Array, rows: np.ndarray) -> np.ndarray:
    """The given rows, all of which have a copy here, without touching other processes, and without
    room for their rows."""
    host = np.zeros((len(rows), *array.shape[1:]), array.dtype)
    for shard in array.addressable_shards:
        start_row, stop_row, _ = shard.index[0].indices(array.shape[0])
        in_shard = (rows >= start_row) & (rows < stop_row)
        if in_shard.any():
            host[(in_shard, *shard.index[1:])] = np.asarray(shard.data)[rows[in_shard] - start_row]
    return host


def from_local_rows(leaf: Any, rows: np.ndarray, values: np.ndarray) -> jax.Array:
    """Values of the rows that have a copy here, whose numbers ascend, as a global array of the
    shape and sharding of `leaf`; no process has room for the rows of others."""

    def read_shard(index: Any) -> np.ndarray:
        shard_rows = np.arange(*index[0].indices(leaf.shape[0]))
        return values[(np.searchsorted(rows, shard_rows), *index[1:])]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, read_shard)


def sum_over_processes(table: np.ndarray) -> np.ndarray:
    """A table of which every process has some entries, and zeros elsewhere, whole. It is added up
    on its way, so that none holds as many tables as there are processes."""
    if jax.process_count() == 1:
        return table
    mesh, sum_tables = _compile_process_sum()
    local_table = jax.device_put(table[None], mesh.local_devices[0])
    tables = jax.make_array_from_single_device_arrays(
        (jax.process_count(), *table.shape), NamedSharding(mesh, P("process")), [local_table]
    )
    return np.asarray(sum_tables(tables).addressable_data(0))


@functools.cache
def _compile_process_sum() -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
    """One device of each process, and what adds up an array over its first axis, which is split
    over them."""
    first_devices = {device.process_index: device for device in reversed(jax.devices())}
    devices = np.asarray([first_devices[process] for process in sorted(first_devices)])
    mesh = Mesh(devices, ("process",), axis_types=(AxisType.Auto,))
    return mesh, jax.jit(
        lambda table: table.sum(axis=0, dtype=table.dtype), out_shardings=NamedSharding(mesh, P())
    )
