"""The text of a compiled program (XLA's HLO), read into computations and instructions."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_MADE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]\d\w*|token|opaque)\[([\d,<= ]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SCOPE = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_BITS = re.compile(r"\d+")
_NESTED = re.compile(r'[()]|"(?:[^"\\]|\\.)*"')
"""A parenthesis, or a whole text in quotes."""


class Shape(NamedTuple):
    """An array of a program."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """What it takes of memory."""
        if self.dtype in ("token", "opaque"):
            return 0
        bits = 8 if self.dtype == "pred" else int(_BITS.findall(self.dtype)[0])
        return -(-self.elements * bits // 8)


class Instruction(NamedTuple):
    """A line of a program."""

    name: str
    opcode: str
    results: tuple[Shape, ...]
    operands: tuple[str, ...]
    """By name, in the same computation."""
    rest: str
    """All that stands after the operands."""
    root: bool

    @property
    def scope(self) -> str:
        """Where it comes from: the names of functions and scopes, from outside in."""
        found = _SCOPE.search(self.rest)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """What a custom call calls."""
        found = _TARGET.search(self.rest)
        return found[1] if found else ""

    @property
    def trips(self) -> int | None:
        """How often a loop runs; None: the program decides as it goes."""
        found = _TRIPS.search(self.rest)
        return int(found[1]) if found else None

    @property
    def bytes(self) -> int:
        """Of its results."""
        return sum(shape.bytes for shape in self.results)


class Program:
    """A compiled program, by computation."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        name = ""
        for line in text.splitlines():
            head = _HEAD.match(line)
            if head:
                name = head[2]
                self.entry = name if head[1] else self.entry
                self.computations[name] = []
            elif name and (made := _MADE.match(line)):
                self.computations[name].append(_read(line, made))

    @functools.cached_property
    def by_name(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation."""
        return {
            name: {each.name: each for each in lines} for name, lines in self.computations.items()
        }

    def called(self, instruction: Instruction) -> list[str]:
        """The computations that an instruction names, in order."""
        said = instruction.rest.split(", metadata=")[0]
        return [name for name in _NAME.findall(said) if name in self.computations]

    def instructions(self) -> Iterator[tuple[str, Instruction]]:
        """All of them, each with its computation's name."""
        for name, lines in self.computations.items():
            for each in lines:
                yield name, each

    def reached(self, names: list[str]) -> set[str]:
        """These computations and those that they call, however deep."""
        waiting, seen = list(names), set()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += [
                    called for each in self.computations[name] for called in self.called(each)
                ]
        return seen

    def reached_from(self, is_root: Callable[[Instruction], bool]) -> set[str]:
        """The computations that the chosen instructions call, however deep."""
        roots = [each for _, each in self.instructions() if is_root(each)]
        return self.reached([name for each in roots for name in self.called(each)])


def _read(line: str, made: re.Match[str]) -> Instruction:
    shape_end = _after_shape(line, made.end())
    opcode = _OPCODE.match(line, shape_end)
    if opcode is None:  # nothing that XLA prints
        return Instruction(made[2], "", (), (), line[shape_end:], bool(made[1]))
    end = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : end]
    # what a constant holds is no operand
    operands = () if opcode[1] == "constant" else tuple(_NAME.findall(inside))
    rest = line[end + 1 :]
    if opcode[1] == "parameter":
        rest = f"{inside}{rest}"
    shapes = tuple(
        Shape(dtype, tuple(int(re.sub(r"\D", "", size)) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(line[made.end() : shape_end])
    )
    return Instruction(made[2], opcode[1], shapes, operands, rest, bool(made[1]))


def _after_shape(line: str, start: int) -> int:
    """Where the opcode stands: behind the type of the result, which may be a tuple."""
    if line[start] == "(":
        return _closing(line, start) + 1
    end = line.find(" ", start)
    return len(line) if end < 0 else end


def _closing(line: str, start: int) -> int:
    """The place of the parenthesis that closes the one at `start`; texts in quotes do not count."""
    depth = 0
    for found in _NESTED.finditer(line, start):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return len(line)
