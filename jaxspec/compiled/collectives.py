"""Collectives of a compiled program: between which devices, along which axes of the mesh, and how
many bytes."""

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
_SAMPLED_GROUPS = 8
"""Groups that are looked at: all are alike."""
_LISTED_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,{} ]*\})?)\}")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]+)\] \{([^}]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PERMUTE_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def collective_kind(op: Instruction) -> str:
    """The kind of a collective, begun or whole; empty for everything else."""
    name = op.opcode.removesuffix("-start")
    return name if name in KINDS else ""


def parse_device_groups(attributes: str, device_count: int) -> list[tuple[int, ...]]:
    """The groups of devices of a collective, whichever way they are written; devices are numbered
    as in the mesh, and none named are all of them."""
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
        order = [axis for axis in range(len(dims)) if axis not in group_axes] + group_axes
        return _expand_iota(dims, order, (-1, math.prod(dims[axis] for axis in group_axes)))
    iota_match = _IOTA_GROUPS.search(attributes)
    if iota_match is None:
        return [tuple(range(device_count))]
    dims = _parse_numbers(iota_match[2])
    order = _parse_numbers(iota_match[3]) if iota_match[3] else tuple(range(len(dims)))
    return _expand_iota(dims, order, _parse_numbers(iota_match[1]))


def collective_axes(op: Instruction, mesh: dict[str, int]) -> tuple[str, ...]:
    """The axes of the mesh, given by name and size, along which the devices of a collective's
    groups differ."""
    shape = tuple(mesh.values())
    is_crossed = np.zeros(len(shape), bool)
    for group in parse_device_groups(op.attributes, math.prod(shape))[:_SAMPLED_GROUPS]:
        coordinates = np.stack(np.unravel_index(np.array(group), shape))
        is_crossed |= np.any(coordinates != coordinates[:, :1], axis=1)
    return tuple(name for name, crossed in zip(mesh, is_crossed, strict=True) if crossed)


def devices_per_group(op: Instruction, device_count: int) -> int:
    """Devices of a group."""
    return len(parse_device_groups(op.attributes, device_count)[0])


def payload_bytes(op: Instruction) -> int:
    """Bytes of the whole array: of what an all-gather gives, of what a reduce-scatter takes, of
    either for the others; each device's own."""
    results = op.results
    # the beginning of one lists what it takes before what it gives
    is_start = op.opcode.endswith("-start") and len(results) > len(op.operands)
    output_shapes = results[len(op.operands) :] if is_start else results
    return sum(shape.byte_count for shape in output_shapes)


def bytes_sent(op: Instruction, device_count: int) -> int:
    """Bytes that each device sends, as in a ring."""
    group_devices, kind = devices_per_group(op, device_count), collective_kind(op)
    size = payload_bytes(op)
    match kind:
        case "all-reduce":
            return 2 * size * (group_devices - 1) // group_devices
        case "reduce-scatter":
            return size * (group_devices - 1)
        case "collective-permute" | "collective-broadcast":
            return size
        case _:
            return size * (group_devices - 1) // group_devices


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _expand_iota(
    dims: Sequence[int], order: Sequence[int], shape: Sequence[int]
) -> list[tuple[int, ...]]:
    device_ids = np.arange(math.prod(dims)).reshape(tuple(dims)).transpose(tuple(order))
    return [tuple(row) for row in device_ids.reshape(tuple(shape)).tolist()]
