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

from jaxspec.compiled.collectives import bytes_sent, collective_axes, collective_kind
from jaxspec.compiled.text import Instruction, Program, Shape

_DIMS = re.compile(r"(lhs|rhs)_(contracting|batch)_dims=\{([\d,]*)\}")
_GEMM = re.compile(r'"dot_dimension_numbers":(\{[^}]*\})')
_NO_KERNEL_OPCODES = (
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
_CONTAINER_OPCODES = ("while", "conditional", "call", "async-start")
"""Opcodes whose computations consist of kernels themselves."""
_SLICE_OPCODES = ("dynamic-slice", "slice", "gather")
_IN_PLACE_OPCODES = ("dynamic-update-slice", "scatter")
"""Opcodes that write a part of their first operand."""
_VIEW_OPCODES = ("bitcast", "reshape")
_ELEMENTWISE_OPCODES = (
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
ATTENTION_TARGETS = ("mosaic_gpu", "__gpu$xla.gpu.triton")
"""Beginnings of the targets of kernels that this package writes or takes from tokamax."""

_OUTER_LOOP = re.compile(r"of_loops/while$")
"""The scope of a loop that consists of other loops, each of which counts by itself."""
_TYPICAL_TRIPS = re.compile(r"usually_(\d+)_turns/while$")
_BACKWARD_PRODUCTS = {"dkv_kernel": 4, "dq_kernel": 3, "_bwd": 5}
"""Products that the kernels of attention's backward pass make, by what stands in their names; those
of the forward pass make two."""


class Collective(NamedTuple):
    """Collectives that are alike."""

    kind: str
    axes: tuple[str, ...]


@dataclasses.dataclass
class Cost:
    """Of running something once, on each device."""

    flops: float = 0.0
    """Operations of matrix products: two for each multiplication."""
    bytes: float = 0.0
    """Read and written by its kernels."""
    kernels: float = 0.0
    loops: float = 0.0
    """Loops begun by the host, which reads back at each turn whether to go on."""
    collectives: Counter[Collective] = dataclasses.field(default_factory=Counter)
    bytes_sent: Counter[Collective] = dataclasses.field(default_factory=Counter)
    """Bytes."""

    def add_cost(self, other: "Cost", repeats: float = 1.0) -> None:
        """Something that runs so often beside this."""
        for name in ("flops", "bytes", "kernels", "loops"):
            setattr(self, name, getattr(self, name) + repeats * getattr(other, name))
        for totals, additions in (
            (self.collectives, other.collectives),
            (self.bytes_sent, other.bytes_sent),
        ):
            for key, value in additions.items():
                totals[key] += value * repeats  # pyright: ignore[reportArgumentType]


class DynamicLoop(NamedTuple):
    """One turn of a loop that runs as often as the data ask for."""

    phase: str
    scope: str
    computations: tuple[str, ...]
    cost: Cost


class ProgramCosts(NamedTuple):
    """What a program consists of."""

    phase_costs: dict[str, Cost]
    """By phase."""
    loops: list[DynamicLoop]

    def largest_loop(self, phase: str, scope: str = "") -> DynamicLoop | None:
        """The loop of a phase, or of a scope in it, with most products a turn."""
        scopes = {scope} if scope else set()
        candidates = [
            loop
            for loop in self.loops
            if loop.phase == phase and scopes <= set(loop.scope.split("/"))
        ]
        return max(candidates, key=lambda loop: loop.cost.flops, default=None)


def phase_name(scope: str) -> str:
    """The outermost name of a scope inside the function that was compiled."""
    names = scope.split("/")
    return names[1].strip("()") if len(names) > 1 and names[0].startswith("jit(") else ""


class CostCounter:
    """A program's costs, by computation, for a mesh given by its axes' names and sizes."""

    def __init__(self, program: Program, mesh: dict[str, int]):
        self.program, self._mesh = program, mesh
        self._cache: dict[tuple[str, float, bool], Cost] = {}

    def count_computation(
        self, computation: str, outer_trips: float = 1.0, cheapest: bool = False
    ) -> Cost:
        """The cost of a computation, which is the body of a loop of `outer_trips` trips.

        Of branches in it, the one that costs most counts, or with `cheapest` the one that costs
        least. A loop inside that decides as it goes how often it runs may say in its scope how
        often that usually is (`kernels/grouped.py`); otherwise it is one of attention by blocks: a
        block of queries sees the blocks before it, half of all on average. One without products
        counts once.
        """
        key = (computation, outer_trips, cheapest)
        if key not in self._cache:
            cost = Cost()
            for op in self.program.computations[computation]:
                self._add_instruction(cost, computation, op, outer_trips, cheapest)
            self._cache[key] = cost
        return self._cache[key]

    def _add_instruction(
        self, cost: Cost, computation: str, op: Instruction, outer_trips: float, cheapest: bool
    ) -> None:
        if op.opcode in _NO_KERNEL_OPCODES or op.opcode.endswith(("-done", "-update")):
            return
        callees = self.program.find_callees(op)
        if op.opcode == "while":
            iteration = self._count_iteration(op, float(op.trip_count or 1), cheapest)
            typical_match = _TYPICAL_TRIPS.search(op.scope)
            trips = (
                float(typical_match[1])
                if typical_match
                else (outer_trips + 1) / 2
                if iteration.flops
                else 1.0
            )
            cost.loops += 1
            cost.add_cost(iteration, trips if op.trip_count is None else float(op.trip_count))
        elif op.opcode == "conditional":
            branches = [self.count_computation(name, outer_trips, cheapest) for name in callees]
            choose = min if cheapest else max
            cost.add_cost(choose(branches, key=lambda branch: (branch.flops, branch.bytes)))
        elif op.opcode in _CONTAINER_OPCODES and callees:
            cost.add_cost(self.count_computation(callees[0], outer_trips, cheapest))
        else:
            self._add_kernel(cost, computation, op)

    def _count_iteration(self, loop: Instruction, outer_trips: float, cheapest: bool) -> Cost:
        """One turn of a loop: its body, and the condition."""
        cost = Cost()
        for name in self.program.find_callees(loop):
            cost.add_cost(self.count_computation(name, outer_trips, cheapest))
        return cost

    def _add_kernel(self, cost: Cost, computation: str, op: Instruction) -> None:
        cost.kernels += 1
        cost.flops += self.count_flops(computation, op)
        cost.bytes += self.count_bytes(computation, op)
        kind = collective_kind(op)
        if kind:
            collective = Collective(kind, collective_axes(op, self._mesh))
            cost.collectives[collective] += 1
            cost.bytes_sent[collective] += bytes_sent(op, math.prod(self._mesh.values()))

    # ---- parts

    def split_by_phase(
        self, key_blocks: Mapping[str, float], rare_phases: Collection[str]
    ) -> "ProgramCosts":
        """What the program does once, by phase, and each of its loops that runs as often as the
        data ask for.

        Args:
          key_blocks: by phase, of keys that attention goes through for the longest row.
          rare_phases: phases in whose loops a branch stands for what seldom happens.
        """
        phase_costs: dict[str, Cost] = {}
        loops: list[DynamicLoop] = []
        phase = ""
        for computation, op in self._iterate_flat(self.program.entry):
            # what the compiler adds says nothing of where it comes from
            phase = phase_name(op.scope) or phase
            if op.opcode == "while" and op.trip_count is None:
                cost = self._count_iteration(op, key_blocks.get(phase, 1.0), phase in rare_phases)
                loops.append(
                    DynamicLoop(phase, op.scope, tuple(self.program.find_callees(op)), cost)
                )
            else:
                self._add_instruction(
                    phase_costs.setdefault(phase, Cost()), computation, op, 1.0, False
                )
        return ProgramCosts(phase_costs, loops)

    def _iterate_flat(self, computation: str) -> Iterator[tuple[str, Instruction]]:
        """The instructions of a computation; of branches, calls, loops of loops, those inside."""
        for op in self.program.computations[computation]:
            is_outer_loop = op.opcode == "while" and _OUTER_LOOP.search(op.scope)
            if is_outer_loop or op.opcode in ("conditional", "call"):
                for name in self.program.find_callees(op):
                    yield from self._iterate_flat(name)
            else:
                yield computation, op

    # ---- products

    def count_flops(self, computation: str, op: Instruction) -> int:
        """Operations of the matrix products of one instruction, what it fuses included."""
        operands = self._operand_shapes(computation, op)
        match op.opcode:
            case "dot":
                dims_by_kind = {
                    f"{side}_{kind}": dims for side, kind, dims in _DIMS.findall(op.attributes)
                }
                axes = [int(axis) for axis in dims_by_kind["lhs_contracting"].split(",") if axis]
                return _dot_flops(op.results[0], operands[0], axes)
            case "custom-call":
                return self._count_call_flops(op, operands)
            case "fusion" | "fusion-start":
                return sum(
                    self.count_flops(name, fused)
                    for name in self.program.find_callees(op)
                    for fused in self.program.computations[name]
                )
        return 0

    def _count_call_flops(self, op: Instruction, operands: list[Shape]) -> int:
        match = _GEMM.search(op.attributes) if op.call_target.startswith("__cublas") else None
        if match:
            axes = [int(axis) for axis in json.loads(match[1])["lhs_contracting_dimensions"]]
            return _dot_flops(op.results[0], operands[0], axes)
        if op.call_target.startswith(ATTENTION_TARGETS):
            return _attention_flops(op, operands)
        return 0

    # ---- bytes

    def count_bytes(self, computation: str, op: Instruction) -> int:
        """Bytes that a kernel reads and writes; of what it slices or updates in place, the part."""
        operands = self._operand_shapes(computation, op)
        if op.opcode in ("fusion", "fusion-start"):
            return sum(self._count_fusion_bytes(name) for name in self.program.find_callees(op))
        if op.opcode in _SLICE_OPCODES:
            return 2 * op.result_bytes
        if op.opcode in _IN_PLACE_OPCODES:
            return 2 * sum(shape.byte_count for shape in operands[1:])
        if op.opcode == "custom-call" and op.call_target.startswith(ATTENTION_TARGETS):
            # a pool is read page by page, which its shape does not say
            pool_bytes = max((shape.byte_count for shape in operands), default=0)
            other_bytes = sum(
                shape.byte_count for shape in operands if shape.byte_count < pool_bytes
            )
            return op.result_bytes + other_bytes
        return op.result_bytes + sum(shape.byte_count for shape in operands)

    def _count_fusion_bytes(self, computation: str) -> int:
        instructions = self.program.computations[computation]
        users: dict[str, list[Instruction]] = {}
        for op in instructions:
            for operand in op.operands:
                users.setdefault(operand, []).append(op)
        byte_count = 0
        for op in instructions:
            if op.opcode == "parameter":
                byte_count += min(op.result_bytes, self._count_read_bytes(op, users))
            if op.is_root:
                byte_count += self._count_written_bytes(computation, op)
        return byte_count

    def _count_read_bytes(self, source: Instruction, users: dict[str, list[Instruction]]) -> int:
        """Bytes that a fusion reads of one of its parameters."""
        return -(
            -source.result_bytes * _count_reads(source, users) // max(_count_elements(source), 1)
        )

    def _count_written_bytes(self, computation: str, root: Instruction) -> int:
        instructions = self.program.instructions_by_name[computation]
        inputs = [instructions[name] for name in root.operands if name in instructions]
        if root.opcode == "tuple":
            return sum(self._count_written_bytes(computation, op) for op in inputs)
        if root.opcode in _VIEW_OPCODES and inputs:
            return self._count_written_bytes(computation, inputs[0])
        if root.opcode in _IN_PLACE_OPCODES:
            return inputs[-1].result_bytes if root.opcode == "scatter" else inputs[1].result_bytes
        return root.result_bytes

    def _operand_shapes(self, computation: str, op: Instruction) -> list[Shape]:
        by_name = self.program.instructions_by_name[computation]
        return [
            shape for name in op.operands if name in by_name for shape in by_name[name].results[:1]
        ]


def _count_elements(op: Instruction) -> int:
    return sum(shape.element_count for shape in op.results)


def _count_reads(source: Instruction, users: dict[str, list[Instruction]]) -> int:
    """Elements of a value that a fusion computes, or reads: those that its users ask for, of which
    some look at every element where they stand and others at a part."""
    element_count, read_count = _count_elements(source), 0
    for user in users.get(source.name, []):
        is_first_operand = user.operands[0] == source.name
        if user.opcode in _SLICE_OPCODES and is_first_operand:
            read_count += _count_elements(user) if user.is_root else _count_reads(user, users)
        elif user.opcode in (*_VIEW_OPCODES, *_ELEMENTWISE_OPCODES) and not user.is_root:
            read_count += _count_reads(user, users)
        elif user.opcode not in _IN_PLACE_OPCODES or not is_first_operand:
            read_count += element_count
    return min(element_count, read_count)


def _dot_flops(result: Shape, left: Shape, contracted_axes: list[int]) -> int:
    return 2 * result.element_count * math.prod(left.sizes[axis] for axis in contracted_axes)


def _attention_flops(op: Instruction, operands: list[Shape]) -> int:
    """Of a kernel of causal attention among as many keys as queries, [T N H] and [T M H], of whose
    products the mask leaves half."""
    head_arrays = [shape for shape in operands if len(shape.sizes) in (3, 4)][:3]
    if len(head_arrays) < 3 or head_arrays[0].sizes[:-2] != head_arrays[1].sizes[:-2]:
        return 0
    *batch_sizes, length, head_count, head_size = head_arrays[0].sizes
    product_count = next(
        (count for name, count in _BACKWARD_PRODUCTS.items() if name in op.scope), 2
    )
    return product_count * math.prod(batch_sizes) * head_count * length * length * head_size
