"""What a part of a compiled program costs, counted from its text with the trip counts of its
loops: products, bytes, kernels, loops, and what goes between devices.

XLA's own `cost_analysis` counts a loop once, and says nothing of a program for devices that are not
there.
"""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from jaxspec.compiled.collectives import axes, kind_of, sent
from jaxspec.compiled.text import Instruction, Program, Shape

_DIMS = re.compile(r"(lhs|rhs)_(contracting|batch)_dims=\{([\d,]*)\}")
_GEMM = re.compile(r'"dot_dimension_numbers":(\{[^}]*\})')
_NOTHING = (
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "add-dependency",
)
"""Opcodes that no kernel is started for."""
_INTO = ("while", "conditional", "call", "async-start")
"""Opcodes whose computations consist of kernels themselves."""
_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = ("dynamic-update-slice", "scatter")
"""Opcodes that write a part of their first operand."""
_SAME = ("bitcast", "reshape")
_BY_ELEMENT = (
    "broadcast",
    "compare",
    "convert",
    "divide",
    "exponential",
    "is-finite",
    "maximum",
    "minimum",
    "multiply",
    "select",
    "subtract",
)
"""Opcodes of whose operands an element is read for one of the result, or for several."""
ATTENTION = ("mosaic_gpu", "__gpu$xla.gpu.triton")
"""Beginnings of the targets of kernels that this package writes or takes from tokamax."""

_OF_LOOPS = re.compile(r"of_loops/while$")
"""The scope of a loop that consists of other loops, each of which counts by itself."""
_USUAL = re.compile(r"usually_(\d+)_turns/while$")
_MADE = {"dkv_kernel": 4, "dq_kernel": 3, "_bwd": 5}
"""Products that the kernels of attention's backward pass make, by what stands in their names; those
of the forward pass make two."""


class Exchange(NamedTuple):
    """Collectives that are alike."""

    kind: str
    axes: tuple[str, ...]


@dataclasses.dataclass
class Cost:
    """Of running something once, on each device."""

    products: float = 0.0
    """Operations of matrix products: two for each multiplication."""
    bytes: float = 0.0
    """Read and written by its kernels."""
    kernels: float = 0.0
    loops: float = 0.0
    """Loops begun by the host, which reads back at each turn whether to go on."""
    exchanges: Counter[Exchange] = dataclasses.field(default_factory=Counter)
    sent: Counter[Exchange] = dataclasses.field(default_factory=Counter)
    """Bytes."""

    def add(self, other: "Cost", times: float = 1.0) -> None:
        """Something that runs so often beside this."""
        for name in ("products", "bytes", "kernels", "loops"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for mine, theirs in ((self.exchanges, other.exchanges), (self.sent, other.sent)):
            for key, value in theirs.items():
                mine[key] += value * times  # pyright: ignore[reportArgumentType]


class Turn(NamedTuple):
    """One turn of a loop that runs as often as the data ask for."""

    phase: str
    scope: str
    computations: tuple[str, ...]
    cost: Cost


class Parts(NamedTuple):
    """What a program consists of."""

    once: dict[str, Cost]
    """By phase."""
    turns: list[Turn]

    def largest(self, phase: str, part: str = "") -> Turn | None:
        """The loop of a phase, or of a scope in it, with most products a turn."""
        scopes = {part} if part else set()
        found = [
            turn
            for turn in self.turns
            if turn.phase == phase and scopes <= set(turn.scope.split("/"))
        ]
        return max(found, key=lambda turn: turn.cost.products, default=None)


def phase_of(scope: str) -> str:
    """The outermost name of a scope inside the function that was compiled."""
    inside = scope.split("/")
    return inside[1].strip("()") if len(inside) > 1 and inside[0].startswith("jit(") else ""


class Counted:
    """A program's costs, by computation, for a mesh given by its axes' names and sizes."""

    def __init__(self, program: Program, mesh: dict[str, int]):
        self.program, self._mesh = program, mesh
        self._known: dict[tuple[str, float, bool], Cost] = {}

    def of(self, computation: str, around: float = 1.0, rarely: bool = False) -> Cost:
        """The cost of a computation, which is the body of a loop of `around` trips.

        Of branches in it, the one that costs most counts, or with `rarely` the one that costs
        least. A loop inside that decides as it goes how often it runs may say in its scope how
        often that usually is (`kernels/grouped.py`); otherwise it is one of attention by blocks: a
        block of queries sees the blocks before it, half of all on average. One without products
        counts once.
        """
        key = (computation, around, rarely)
        if key not in self._known:
            cost = Cost()
            for each in self.program.computations[computation]:
                self._add(cost, computation, each, around, rarely)
            self._known[key] = cost
        return self._known[key]

    def _add(
        self, cost: Cost, computation: str, each: Instruction, around: float, rarely: bool
    ) -> None:
        if each.opcode in _NOTHING or each.opcode.endswith(("-done", "-update")):
            return
        called = self.program.called(each)
        if each.opcode == "while":
            turn = self._turn(each, float(each.trips or 1), rarely)
            usual = _USUAL.search(each.scope)
            guessed = float(usual[1]) if usual else (around + 1) / 2 if turn.products else 1.0
            cost.loops += 1
            cost.add(turn, guessed if each.trips is None else float(each.trips))
        elif each.opcode == "conditional":
            branches = [self.of(name, around, rarely) for name in called]
            pick = min if rarely else max
            cost.add(pick(branches, key=lambda branch: (branch.products, branch.bytes)))
        elif each.opcode in _INTO and called:
            cost.add(self.of(called[0], around, rarely))
        else:
            self._add_kernel(cost, computation, each)

    def _turn(self, loop: Instruction, around: float, rarely: bool) -> Cost:
        """One turn of a loop: its body, and the condition."""
        cost = Cost()
        for name in self.program.called(loop):
            cost.add(self.of(name, around, rarely))
        return cost

    def _add_kernel(self, cost: Cost, computation: str, each: Instruction) -> None:
        cost.kernels += 1
        cost.products += self.products(computation, each)
        cost.bytes += self.bytes(computation, each)
        kind = kind_of(each)
        if kind:
            exchange = Exchange(kind, axes(each, self._mesh))
            cost.exchanges[exchange] += 1
            cost.sent[exchange] += sent(each, math.prod(self._mesh.values()))

    # ---- parts

    def parts(self, blocks: Mapping[str, float], rarely: Collection[str]) -> "Parts":
        """What the program does once, by phase, and each of its loops that runs as often as the
        data ask for.

        Args:
          blocks: by phase, of keys that attention goes through for the longest row.
          rarely: phases in whose loops a branch stands for what seldom happens.
        """
        once: dict[str, Cost] = {}
        turns: list[Turn] = []
        phase = ""
        for computation, each in self._flat(self.program.entry):
            # what the compiler adds says nothing of where it comes from
            phase = phase_of(each.scope) or phase
            if each.opcode == "while" and each.trips is None:
                cost = self._turn(each, blocks.get(phase, 1.0), phase in rarely)
                turns.append(Turn(phase, each.scope, tuple(self.program.called(each)), cost))
            else:
                self._add(once.setdefault(phase, Cost()), computation, each, 1.0, False)
        return Parts(once, turns)

    def _flat(self, computation: str) -> Iterator[tuple[str, Instruction]]:
        """The instructions of a computation; of branches, calls, loops of loops, those inside."""
        for each in self.program.computations[computation]:
            of_loops = each.opcode == "while" and _OF_LOOPS.search(each.scope)
            if of_loops or each.opcode in ("conditional", "call"):
                for name in self.program.called(each):
                    yield from self._flat(name)
            else:
                yield computation, each

    # ---- products

    def products(self, computation: str, each: Instruction) -> int:
        """Operations of the matrix products of one instruction, what it fuses included."""
        operands = self._operands(computation, each)
        match each.opcode:
            case "dot":
                said = {f"{side}_{what}": dims for side, what, dims in _DIMS.findall(each.rest)}
                contracted = [int(place) for place in said["lhs_contracting"].split(",") if place]
                return _product(each.results[0], operands[0], contracted)
            case "custom-call":
                return self._called_products(each, operands)
            case "fusion" | "fusion-start":
                return sum(
                    self.products(name, inner)
                    for name in self.program.called(each)
                    for inner in self.program.computations[name]
                )
        return 0

    def _called_products(self, each: Instruction, operands: list[Shape]) -> int:
        found = _GEMM.search(each.rest) if each.target.startswith("__cublas") else None
        if found:
            places = [int(place) for place in json.loads(found[1])["lhs_contracting_dimensions"]]
            return _product(each.results[0], operands[0], places)
        if each.target.startswith(ATTENTION):
            return _attention(each, operands)
        return 0

    # ---- bytes

    def bytes(self, computation: str, each: Instruction) -> int:
        """Bytes that a kernel reads and writes; of what it slices or updates in place, the part."""
        operands = self._operands(computation, each)
        if each.opcode in ("fusion", "fusion-start"):
            return sum(self._fused_bytes(name) for name in self.program.called(each))
        if each.opcode in _SLICES:
            return 2 * each.bytes
        if each.opcode in _IN_PLACE:
            return 2 * sum(shape.bytes for shape in operands[1:])
        if each.opcode == "custom-call" and each.target.startswith(ATTENTION):
            # a pool is read page by page, which its shape does not say
            largest = max((shape.bytes for shape in operands), default=0)
            rest = sum(shape.bytes for shape in operands if shape.bytes < largest)
            return each.bytes + rest
        return each.bytes + sum(shape.bytes for shape in operands)

    def _fused_bytes(self, name: str) -> int:
        lines = self.program.computations[name]
        users: dict[str, list[Instruction]] = {}
        for each in lines:
            for operand in each.operands:
                users.setdefault(operand, []).append(each)
        total = 0
        for each in lines:
            if each.opcode == "parameter":
                total += min(each.bytes, self._read_of(each, users))
            if each.root:
                total += self._written(name, each)
        return total

    def _read_of(self, source: Instruction, users: dict[str, list[Instruction]]) -> int:
        """Bytes that a fusion reads of one of its parameters."""
        return -(-source.bytes * _touched(source, users) // max(_elements(source), 1))

    def _written(self, computation: str, root: Instruction) -> int:
        lines = self.program.by_name[computation]
        inner = [lines[name] for name in root.operands if name in lines]
        if root.opcode == "tuple":
            return sum(self._written(computation, each) for each in inner)
        if root.opcode in _SAME and inner:
            return self._written(computation, inner[0])
        if root.opcode in _IN_PLACE:
            return inner[-1].bytes if root.opcode == "scatter" else inner[1].bytes
        return root.bytes

    def _operands(self, computation: str, each: Instruction) -> list[Shape]:
        lines = self.program.by_name[computation]
        return [
            shape for name in each.operands if name in lines for shape in lines[name].results[:1]
        ]


def _elements(each: Instruction) -> int:
    return sum(shape.elements for shape in each.results)


def _touched(source: Instruction, users: dict[str, list[Instruction]]) -> int:
    """Elements of a value that a fusion computes, or reads: those that its users ask for, of which
    some look at every element where they stand and others at a part."""
    whole, total = _elements(source), 0
    for user in users.get(source.name, []):
        first = user.operands[0] == source.name
        if user.opcode in _SLICES and first:
            total += _elements(user) if user.root else _touched(user, users)
        elif user.opcode in (*_SAME, *_BY_ELEMENT) and not user.root:
            total += _touched(user, users)
        elif user.opcode not in _IN_PLACE or not first:
            total += whole
    return min(whole, total)


def _product(result: Shape, left: Shape, contracted: list[int]) -> int:
    return 2 * result.elements * math.prod(left.sizes[place] for place in contracted)


def _attention(each: Instruction, operands: list[Shape]) -> int:
    """Of a kernel of causal attention among as many keys as queries, [T N H] and [T M H], of whose
    products the mask leaves half."""
    wide = [shape for shape in operands if len(shape.sizes) in (3, 4)][:3]
    if len(wide) < 3 or wide[0].sizes[:-2] != wide[1].sizes[:-2]:
        return 0
    *rows, length, heads, size = wide[0].sizes
    made = next((count for name, count in _MADE.items() if name in each.scope), 2)
    return made * math.prod(rows) * heads * length * length * size
