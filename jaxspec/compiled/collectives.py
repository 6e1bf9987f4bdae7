"""Collectives of a compiled program: devices, mesh axes and bytes."""

import math
import re
from collections.abc import Sequence

import numpy as np

from jaxspec.compiled.text import Instruction

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# All groups of a collective span the same mesh axes, and a large mesh has hundreds of groups.
_SAMPLED_GROUPS = 8
"""Number of device groups to inspect."""
# XLA prints groups as a list, by mesh axes, or as a reshaped and transposed iota. A
# collective-permute has pairs of devices instead.
_LISTED_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,{} ]*\})?)\}")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]+)\] \{([^}]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PERMUTE_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def collective_kind(op: Instruction) -> str:
    """Returns the collective's kind, "" for other instructions."""
    # The start of an asynchronous collective counts as the collective, its "-done" does not.
    name = op.opcode.removesuffix("-start")
    return name if name in KINDS else ""


def parse_device_groups(attributes: str, device_count: int) -> list[tuple[int, ...]]:
    """Parses the device groups of a collective.

    Reads lists, iotas and whole mesh axes. A collective-permute gives (source, target) pairs.
    Devices are numbered in row-major order of the mesh.

    Args:
      attributes: text after the operands of the instruction.
      device_count: number of devices of the mesh. They form one group if none is written.
    """
    permute_match = _PERMUTE_PAIRS.search(attributes)
    if permute_match:
        return [_parse_numbers(pair) for pair in re.findall(r"\{([\d,]+)\}", permute_match[1])]
    listed_match = _LISTED_GROUPS.search(attributes)
    if listed_match:
        listed_groups = [
            _parse_numbers(group) for group in re.findall(r"\{([\d, ]+)\}", listed_match[1])
        ]
        return listed_groups or [tuple(range(device_count))]
    mesh_match = _MESH_GROUPS.search(attributes)
    if mesh_match:
        axis_sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh_match[1])}
        group_axes = [
            list(axis_sizes).index(name) for name in re.findall(r"'(\w+)'", mesh_match[2])
        ]
        dims = list(axis_sizes.values())
        # With the axes of the groups last, each row of the reshaped device ids is one group.
        order = [axis for axis in range(len(dims)) if axis not in group_axes] + group_axes
        return _expand_iota(dims, order, (-1, math.prod(dims[axis] for axis in group_axes)))
    iota_match = _IOTA_GROUPS.search(attributes)
    if iota_match is None:
        return [tuple(range(device_count))]
    dims = _parse_numbers(iota_match[2])
    order = _parse_numbers(iota_match[3]) if iota_match[3] else tuple(range(len(dims)))
    return _expand_iota(dims, order, _parse_numbers(iota_match[1]))


def collective_axes(op: Instruction, mesh: dict[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes of a collective.

    Args:
      op: the collective.
      mesh: axis sizes by name.
    """
    shape = tuple(mesh.values())
    is_crossed = np.zeros(len(shape), bool)
    for group in parse_device_groups(op.attributes, math.prod(shape))[:_SAMPLED_GROUPS]:
        # An axis is crossed if its coordinate differs between devices of one group.
        coordinates = np.stack(np.unravel_index(np.array(group), shape))
        is_crossed |= np.any(coordinates != coordinates[:, :1], axis=1)
    return tuple(name for name, crossed in zip(mesh, is_crossed, strict=True) if crossed)


def devices_per_group(op: Instruction, device_count: int) -> int:
    """Returns the number of devices in each group."""
    return len(parse_device_groups(op.attributes, device_count)[0])


def payload_bytes(op: Instruction) -> int:
    """Counts the bytes of a collective's results.

    They are those of one device: the gathered array of an all-gather, a reduce-scatter's shard.
    """
    results = op.results
    # The start of an asynchronous collective may list its operands before its outputs.
    is_start = op.opcode.endswith("-start") and len(results) > len(op.operands)
    output_shapes = results[len(op.operands) :] if is_start else results
    return sum(shape.byte_count for shape in output_shapes)


def bytes_sent(op: Instruction, device_count: int) -> int:
    """Counts the bytes that each device sends, with ring algorithms."""
    group_devices, kind = devices_per_group(op, device_count), collective_kind(op)
    size = payload_bytes(op)
    match kind:
        case "all-reduce":
            # A reduce-scatter and an all-gather, each of which sends all shards but one.
            return 2 * size * (group_devices - 1) // group_devices
        case "reduce-scatter":
            # `size` is one shard here.
            return size * (group_devices - 1)
        case "collective-permute" | "collective-broadcast":
            return size
        case _:
            # `size` is the full array of an all-gather or all-to-all.
            return size * (group_devices - 1) // group_devices


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _expand_iota(
    dims: Sequence[int], order: Sequence[int], shape: Sequence[int]
) -> list[tuple[int, ...]]:
    # Iota notation: device ids in row-major order, transposed, then cut into groups.
    device_ids = np.arange(math.prod(dims)).reshape(tuple(dims)).transpose(tuple(order))
    return [tuple(row) for row in device_ids.reshape(tuple(shape)).tolist()]
