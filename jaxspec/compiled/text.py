"""Parser for the text of compiled programs (HLO)."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_ASSIGNMENT = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]\d\w*|token|opaque)\[([\d,<= ]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SCOPE = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_BITS = re.compile(r"\d+")
# Quoted strings are matched as a whole, so that parentheses inside them do not count.
_NESTED = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')
"""A parenthesis or a quoted string."""


class Shape(NamedTuple):
    """Data type and sizes of an array."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def element_count(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def byte_count(self) -> int:
        """Bytes in memory."""
        # Tokens only order operations, and opaque values have no known size.
        if self.dtype in ("token", "opaque"):
            return 0
        # The first number in the name of a type is its bits: s4, bf16, f8e4m3fn. A pred has a byte.
        bits = 8 if self.dtype == "pred" else int(_BITS.findall(self.dtype)[0])
        return -(-self.element_count * bits // 8)


class Instruction(NamedTuple):
    """Instruction of a program."""

    name: str
    opcode: str
    results: tuple[Shape, ...]
    operands: tuple[str, ...]
    """Names of instructions in the same computation."""
    attributes: str
    """Text after the operands."""
    is_root: bool

    @property
    def scope(self) -> str:
        """Name stack of functions and scopes, outermost first."""
        match = _SCOPE.search(self.attributes)
        return match[1] if match else ""

    @property
    def call_target(self) -> str:
        """Target of a custom call, or ""."""
        match = _TARGET.search(self.attributes)
        return match[1] if match else ""

    @property
    def trip_count(self) -> int | None:
        """Trip count of a loop, or None if it depends on data."""
        match = _TRIPS.search(self.attributes)
        return int(match[1]) if match else None

    @property
    def result_bytes(self) -> int:
        """Bytes of all results."""
        return sum(shape.byte_count for shape in self.results)


class Program:
    """Compiled program as computations of instructions."""

    def __init__(self, text: str):
        """Parses the text of a program."""
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        name = ""
        for line in text.splitlines():
            head = _COMPUTATION.match(line)
            if head:
                name = head[2]
                self.entry = name if head[1] else self.entry
                self.computations[name] = []
            elif name and (assignment := _ASSIGNMENT.match(line)):
                self.computations[name].append(_parse_instruction(line, assignment))

    @functools.cached_property
    def instructions_by_name(self) -> dict[str, dict[str, Instruction]]:
        """Instructions by computation and name."""
        return {
            name: {op.name: op for op in instructions}
            for name, instructions in self.computations.items()
        }

    def find_callees(self, op: Instruction) -> list[str]:
        """Returns the computations called by an instruction, in order."""
        # Metadata is free text, in which a name is no call.
        attributes = op.attributes.split(", metadata=")[0]
        return [name for name in _NAME.findall(attributes) if name in self.computations]

    def iterate_instructions(self) -> Iterator[tuple[str, Instruction]]:
        """Yields all instructions with their computation's name."""
        for name, instructions in self.computations.items():
            for op in instructions:
                yield name, op

    def reachable_computations(self, names: list[str]) -> set[str]:
        """Returns computations and all that they call, transitively."""
        pending, visited = list(names), set()
        while pending:
            name = pending.pop()
            if name not in visited:
                visited.add(name)
                pending += [
                    callee for op in self.computations[name] for callee in self.find_callees(op)
                ]
        return visited

    def reachable_from(self, is_caller: Callable[[Instruction], bool]) -> set[str]:
        """Returns all computations that the selected instructions call, transitively."""
        callers = [op for _, op in self.iterate_instructions() if is_caller(op)]
        return self.reachable_computations(
            [name for op in callers for name in self.find_callees(op)]
        )


def _parse_instruction(line: str, assignment: re.Match[str]) -> Instruction:
    shape_end = _find_shape_end(line, assignment.end())
    opcode = _OPCODE.match(line, shape_end)
    # XLA prints no such line, but a line that is not understood must not stop the analysis.
    if opcode is None:
        return Instruction(assignment[2], "", (), (), line[shape_end:], bool(assignment[1]))
    close_position = _find_closing(line, opcode.end() - 1)
    operand_text = line[opcode.end() : close_position]
    # The parentheses of a constant hold its value, those of a parameter its number.
    operands = () if opcode[1] == "constant" else tuple(_NAME.findall(operand_text))
    attributes = line[close_position + 1 :]
    # The number of a parameter is kept at the beginning of its attributes.
    if opcode[1] == "parameter":
        attributes = f"{operand_text}{attributes}"
    # A dynamic dimension is written with its bound, as "<=N".
    shapes = tuple(
        Shape(dtype, tuple(int(re.sub(r"\D", "", size)) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(line[assignment.end() : shape_end])
    )
    return Instruction(assignment[2], opcode[1], shapes, operands, attributes, bool(assignment[1]))


def _find_shape_end(line: str, position: int) -> int:
    """Finds the end of the result's shape."""
    # A tuple is in parentheses, and there are spaces between its shapes.
    if line[position] == "(":
        return _find_closing(line, position) + 1
    shape_end = line.find(" ", position)
    return len(line) if shape_end < 0 else shape_end


def _find_closing(line: str, position: int) -> int:
    """Finds the parenthesis that closes the one at `position`, or the end of the line."""
    depth = 0
    for token in _NESTED.finditer(line, position):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0:
            return token.start()
    return len(line)
