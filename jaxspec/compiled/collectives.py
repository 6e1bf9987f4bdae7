"""Collectives of a compiled program: devices, mesh axes and bytes."""

import math
import re

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
# XLA prints groups as a list, as a reshaped and transposed iota, or by the axes of a mesh of its
# own. That mesh may be in another order than the iota, and groups may span a factor of an axis:
# 'tensor':(2)4 is the middle factor of tensor = 2 x 4 x rest. A collective-permute has pairs.
_LISTED_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,{} ]*\})?)\}")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]+)\]"
    r"(?:, device_ids=\((?P<ids>[\d,]+|\[[\d,]+\](?:T\([\d,]+\))?)\))?"
    r" \{(?P<axes>[^}]*)\}"
)
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
_GROUP_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_PERMUTE_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def collective_kind(op: Instruction) -> str:
    """Returns the collective's kind, "" for other instructions."""
    # The start of an asynchronous collective counts as the collective, its "-done" does not.
    name = op.opcode.removesuffix("-start")
    return name if name in KINDS else ""


def parse_device_groups(attributes: str, device_count: int) -> list[tuple[int, ...]]:
    """Parses the device groups of a collective.

    A collective-permute gives (source, target) pairs. Devices are numbered in row-major order of
    the program's mesh.

    Args:
      attributes: text after the operands of the instruction.
      device_count: number of devices of the mesh. They form one group if none is written.

    Raises:
      ValueError: the groups are written in an unknown form.
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
        return _parse_mesh_groups(mesh_match)
    iota_match = _IOTA_GROUPS.search(attributes)
    if iota_match:
        return _rows_to_tuples(_parse_iota(iota_match[2]).reshape(_parse_numbers(iota_match[1])))
    # Guessing here would name wrong axes.
    if "replica_groups=" in attributes or "source_target_pairs=" in attributes:
        raise ValueError(f"device groups of an unknown form: {attributes}")
    return [tuple(range(device_count))]


def _parse_mesh_groups(match: re.Match[str]) -> list[tuple[int, ...]]:
    """Parses groups that are written by mesh axes."""
    mesh = {name: int(size) for name, size in _MESH_AXIS.findall(match["mesh"])}
    factors = [
        # Without sizes a group spans the whole axis.
        (name, int(before or 1), int(size or mesh[name]))
        for name, before, size in _GROUP_AXIS.findall(match["axes"])
    ]
    dims: list[int] = []
    # Dimension of a factor, by its axis and the product of the factors before it.
    places: dict[tuple[str, int], int] = {}
    for axis, axis_size in mesh.items():
        covered = 1
        for _, before, size in sorted(factor for factor in factors if factor[0] == axis):
            places[axis, before] = len(dims) + 1
            dims += [before // covered, size]
            covered = before * size
        dims.append(axis_size // covered)
    group_dims = [places[axis, before] for axis, before, _ in factors]
    # With the dimensions of the groups last, each row of the reshaped device ids is one group.
    order = [dim for dim in range(len(dims)) if dim not in group_dims] + group_dims
    group_size = math.prod(dims[dim] for dim in group_dims)
    ids = _parse_device_ids(match["ids"], math.prod(mesh.values()))
    return _rows_to_tuples(ids.reshape(dims).transpose(order).reshape(-1, group_size))


def _parse_device_ids(text: str | None, device_count: int) -> np.ndarray:
    """Parses the devices of a mesh. Without any they are in order."""
    if text is None:
        return np.arange(device_count)
    return _parse_iota(text) if text.startswith("[") else np.array(_parse_numbers(text))


def _parse_iota(text: str) -> np.ndarray:
    """Parses `[dims]T(order)`: device ids in row-major order, transposed."""
    match = _IOTA.fullmatch(text)
    assert match is not None, "the pattern around it has matched"
    dims = _parse_numbers(match[1])
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(_parse_numbers(match[2])) if match[2] else ids


def collective_axes(op: Instruction, mesh: dict[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes of a collective.

    An axis also counts if groups span only a part of it.

    Args:
      op: the collective.
      mesh: axis sizes by name.
    """
    shape = tuple(mesh.values())
    groups = parse_device_groups(op.attributes, math.prod(shape))
    devices = [device for group in groups for device in group]
    first_devices = [group[0] for group in groups for _ in group]
    # An axis is crossed if its coordinate differs between devices of one group.
    coordinates, first_coordinates = (
        np.stack(np.unravel_index(np.array(ids, int), shape)) for ids in (devices, first_devices)
    )
    is_crossed = np.any(coordinates != first_coordinates, axis=1)
    return tuple(name for name, crossed in zip(mesh, is_crossed, strict=True) if crossed)


def devices_per_group(op: Instruction, device_count: int) -> int:
    """Returns the number of devices in a group, the largest one."""
    return max(map(len, parse_device_groups(op.attributes, device_count)), default=1)


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


def _rows_to_tuples(groups: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(row) for row in groups.tolist()]
