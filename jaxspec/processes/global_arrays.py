"""Global arrays from values of each process, and back."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.mesh import row_sharding
from jaxspec.processes import roles


def from_host_values(leaf: Any, values: np.ndarray) -> jax.Array:
    """Makes a global array from host values.

    Every process must have the values of its own shards. `leaf` gives shape and sharding.
    """
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])


def locate_rows(mesh: Mesh, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Locates the rows of a row-sharded array.

    Returns:
      A boolean mask (processes, count) of the processes that hold a copy of each row, and the
      number (count,) of the process that owns each row.
    """
    copies = np.zeros((jax.process_count(), count), bool)
    owners = np.full(count, -1)
    # A `tensor` axis over several processes copies rows. The device with the lowest id decides, so
    # that each row has one owner, and all processes name the same one.
    for device, (rows,) in sorted(
        row_sharding(mesh).devices_indices_map((count,)).items(), key=lambda item: item[0].id
    ):
        copies[device.process_index, rows] = True
        owners[rows] = np.where(owners[rows] < 0, device.process_index, owners[rows])
    return copies, owners


def own_rows(mesh: Mesh, count: int) -> np.ndarray:
    """Returns the numbers of the rows that this process owns."""
    return np.flatnonzero(locate_rows(mesh, count)[1] == jax.process_index()).astype(np.int32)


def read_local_rows(array: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Reads rows of a global array.

    Each row must have a copy in this process. Communicates with no other process, and allocates
    memory for the requested rows only.
    """
    host = np.zeros((len(rows), *array.shape[1:]), array.dtype)
    for shard in array.addressable_shards:
        start_row, stop_row, _ = shard.index[0].indices(array.shape[0])
        in_shard = (rows >= start_row) & (rows < stop_row)
        if in_shard.any():
            host[(in_shard, *shard.index[1:])] = np.asarray(shard.data)[rows[in_shard] - start_row]
    return host


def from_local_rows(leaf: Any, rows: np.ndarray, values: np.ndarray) -> jax.Array:
    """Makes a global array from local rows.

    `values` are the rows that have a copy in this process, and `rows` their ascending numbers.
    `leaf` gives shape and sharding. No process allocates memory for rows of others.
    """

    def read_shard(index: Any) -> np.ndarray:
        shard_rows = np.arange(*index[0].indices(leaf.shape[0]))
        return values[(np.searchsorted(rows, shard_rows), *index[1:])]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, read_shard)


def sum_over_processes(table: np.ndarray) -> np.ndarray:
    """Adds up a table over the processes that work together (`roles`).

    Each process fills in its own entries and leaves the others at zero, which joins the tables.
    """
    if roles.member_count() == 1:
        return table
    # An all-reduce, since a gather would need room for the tables of all processes in each one.
    mesh, sum_tables = _compile_process_sum(roles.list_members())
    local_table = jax.device_put(table[None], mesh.local_devices[0])
    tables = jax.make_array_from_single_device_arrays(
        (mesh.size, *table.shape), NamedSharding(mesh, P("process")), [local_table]
    )
    return np.asarray(sum_tables(tables).addressable_data(0))


def gather_over_processes(number: int) -> np.ndarray:
    """Returns the numbers of all processes that work together, below 2^31, in order."""
    members = roles.list_members()
    table = np.zeros(len(members), np.int32)
    table[members.index(jax.process_index())] = number
    return sum_over_processes(table)


def any_over_processes(flag: bool) -> bool:
    """Returns whether any of the processes that work together has the flag."""
    return bool(gather_over_processes(int(flag)).any())


@functools.cache
def _compile_process_sum(
    members: tuple[int, ...],
) -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
    """Compiles a sum over processes.

    Returns a mesh with one device of each process, and the function.
    """
    # Later entries replace earlier ones, so the order is reversed to keep each first device.
    first_devices = {device.process_index: device for device in reversed(jax.devices())}
    devices = np.asarray([first_devices[process] for process in members])
    mesh = Mesh(devices, ("process",), axis_types=(AxisType.Auto,))
    return mesh, jax.jit(
        # NumPy's rule would widen small integers, and the table must keep its type.
        lambda table: table.sum(axis=0, dtype=table.dtype),
        out_shardings=NamedSharding(mesh, P()),
    )
