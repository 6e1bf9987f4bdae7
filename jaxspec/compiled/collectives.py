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
_ENOUGH = 8
"""Groups that are looked at: all are alike."""
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,{} ]*\})?)\}")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]+)\] \{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def kind_of(instruction: Instruction) -> str:
    """The kind of a collective, begun or whole; empty for everything else."""
    name = instruction.opcode.removesuffix("-start")
    return name if name in KINDS else ""


def groups(attributes: str, devices: int) -> list[tuple[int, ...]]:
    """The groups of devices of a collective, whichever way they are written; devices are numbered
    as in the mesh, and none named are all of them."""
    pairs = _PAIRS.search(attributes)
    if pairs:
        return [_numbers(pair) for pair in re.findall(r"\{([\d,]+)\}", pairs[1])]
    listed = _LISTED.search(attributes)
    if listed:
        found = [_numbers(group) for group in re.findall(r"\{([\d, ]+)\}", listed[1])]
        return found or [tuple(range(devices))]
    named = _NAMED.search(attributes)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        inner = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named[2])]
        dims = list(sizes.values())
        order = [place for place in range(len(dims)) if place not in inner] + inner
        return _rows(dims, order, (-1, math.prod(dims[place] for place in inner)))
    iota = _IOTA.search(attributes)
    if iota is None:
        return [tuple(range(devices))]
    dims = _numbers(iota[2])
    order = _numbers(iota[3]) if iota[3] else tuple(range(len(dims)))
    return _rows(dims, order, _numbers(iota[1]))


def axes(instruction: Instruction, mesh: dict[str, int]) -> tuple[str, ...]:
    """The axes of the mesh, given by name and size, along which the devices of a collective's
    groups differ."""
    shape = tuple(mesh.values())
    differ = np.zeros(len(shape), bool)
    for group in groups(instruction.rest, math.prod(shape))[:_ENOUGH]:
        places = np.stack(np.unravel_index(np.array(group), shape))
        differ |= np.any(places != places[:, :1], axis=1)
    return tuple(name for name, differs in zip(mesh, differ, strict=True) if differs)


def peers(instruction: Instruction, devices: int) -> int:
    """Devices of a group."""
    return len(groups(instruction.rest, devices)[0])


def payload(instruction: Instruction) -> int:
    """Bytes of the whole array: of what an all-gather gives, of what a reduce-scatter takes, of
    either for the others; each device's own."""
    results = instruction.results
    # the beginning of one lists what it takes before what it gives
    begun = instruction.opcode.endswith("-start") and len(results) > len(instruction.operands)
    given = results[len(instruction.operands) :] if begun else results
    return sum(shape.bytes for shape in given)


def sent(instruction: Instruction, devices: int) -> int:
    """Bytes that each device sends, as in a ring."""
    count, kind = peers(instruction, devices), kind_of(instruction)
    size = payload(instruction)
    match kind:
        case "all-reduce":
            return 2 * size * (count - 1) // count
        case "reduce-scatter":
            return size * (count - 1)
        case "collective-permute" | "collective-broadcast":
            return size
        case _:
            return size * (count - 1) // count


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _rows(dims: Sequence[int], order: Sequence[int], shape: Sequence[int]) -> list[tuple[int, ...]]:
    devices = np.arange(math.prod(dims)).reshape(tuple(dims)).transpose(tuple(order))
    return [tuple(row) for row in devices.reshape(tuple(shape)).tolist()]
