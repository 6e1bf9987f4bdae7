"""Costs counted from a compiled program's text.

Counts matrix products, bytes, kernels, loops and collectives, with the trip counts of loops.
"""

# XLA's own `cost_analysis` counts the body of a loop once, and gives nothing for absent devices.

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
"""Opcodes that launch no kernel."""
_CONTAINER_OPCODES = ("while", "conditional", "call", "async-start")
"""Opcodes whose computations launch their own kernels."""
_SLICE_OPCODES = ("dynamic-slice", "slice", "gather")
_IN_PLACE_OPCODES = ("dynamic-update-slice", "scatter")
"""Opcodes that overwrite part of their first operand."""
_VIEW_OPCODES = ("bitcast", "reshape")
# Within a fusion these read an operand only where a later instruction reads their result.
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
"""Opcodes that compute each output element from one element per operand."""
ATTENTION_TARGETS = ("mosaic_gpu", "__gpu$xla.gpu.triton")
"""Prefixes of custom-call targets of the kernels of this package and of tokamax."""

# Generation marks a loop of loops by `jax.named_scope("of_loops")`. Inner loops count separately.
_OUTER_LOOP = re.compile(r"of_loops/while$")
"""Scope of a loop whose body consists of other loops."""
# `kernels/grouped.py` writes the count, since the compiler states none for a data-dependent loop.
_TYPICAL_TRIPS = re.compile(r"usually_(\d+)_turns/while$")
"""Scope that names the typical trip count of a data-dependent loop."""
_BACKWARD_PRODUCTS = {"dkv_kernel": 4, "dq_kernel": 3, "_bwd": 5}
"""Matrix products of backward attention kernels, by a part of the kernel's name."""


class Collective(NamedTuple):
    """Kind and mesh axes of a collective."""

    kind: str
    axes: tuple[str, ...]


@dataclasses.dataclass
class Cost:
    """Cost of one execution, on each device."""

    flops: float = 0.0
    """Operations of matrix products, two per multiply-add."""
    bytes: float = 0.0
    """Bytes that kernels read and write."""
    kernels: float = 0.0
    """Kernel launches."""
    loops: float = 0.0
    """Loops that the host drives, reading their condition back in each iteration."""
    collectives: Counter[Collective] = dataclasses.field(default_factory=Counter)
    """Number of executions of each collective."""
    bytes_sent: Counter[Collective] = dataclasses.field(default_factory=Counter)
    """Bytes that each device sends."""

    def add_cost(self, other: "Cost", repeats: float = 1.0) -> None:
        """Adds another cost, `repeats` times."""
        for name in ("flops", "bytes", "kernels", "loops"):
            setattr(self, name, getattr(self, name) + repeats * getattr(other, name))
        for totals, additions in (
            (self.collectives, other.collectives),
            (self.bytes_sent, other.bytes_sent),
        ):
            for key, value in additions.items():
                totals[key] += value * repeats  # pyright: ignore[reportArgumentType]


class DynamicLoop(NamedTuple):
    """Loop with a data-dependent trip count."""

    phase: str
    scope: str
    """Name stack of the loop, outermost scope first."""
    computations: tuple[str, ...]
    """Names of the loop's condition and body."""
    cost: Cost
    """Cost of one iteration."""


class ProgramCosts(NamedTuple):
    """Costs of a program, split by phase."""

    phase_costs: dict[str, Cost]
    """Cost of each phase, without its data-dependent loops."""
    loops: list[DynamicLoop]
    """Data-dependent loops of all phases."""

    def largest_loop(self, phase: str, scope: str = "") -> DynamicLoop | None:
        """Finds the loop with the most FLOPs per iteration, if there is one.

        Args:
          phase: phase of the loop.
          scope: a name that the loop's scope must contain, if given.
        """
        scopes = {scope} if scope else set()
        candidates = [
            loop
            for loop in self.loops
            if loop.phase == phase and scopes <= set(loop.scope.split("/"))
        ]
        return max(candidates, key=lambda loop: loop.cost.flops, default=None)


def phase_name(scope: str) -> str:
    """Returns the outermost scope within the compiled function, or ""."""
    # A scope reads "jit(FUNCTION)/PHASE/...".
    names = scope.split("/")
    return names[1].strip("()") if len(names) > 1 and names[0].startswith("jit(") else ""


class CostCounter:
    """Counts the costs of a program's computations."""

    def __init__(self, program: Program, mesh: dict[str, int]):
        """Takes a program and its mesh axis sizes."""
        self.program, self._mesh = program, mesh
        # A computation may be called from many places.
        self._cache: dict[tuple[str, float, bool], Cost] = {}

    def count_computation(
        self, computation: str, outer_trips: float = 1.0, cheapest: bool = False
    ) -> Cost:
        """Counts the cost of a computation.

        A data-dependent loop inside counts with the trip count that its scope names. Without one,
        it counts as blockwise causal attention if it has products, and once otherwise.

        Args:
          computation: name of the computation.
          outer_trips: trip count of the loop whose body this is.
          cheapest: whether a conditional counts as its cheapest branch instead of its most
            expensive one.
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
        # An asynchronous operation counts once, at its "-start".
        if op.opcode in _NO_KERNEL_OPCODES or op.opcode.endswith(("-done", "-update")):
            return
        callees = self.program.find_callees(op)
        if op.opcode == "while":
            iteration = self._count_iteration(op, float(op.trip_count or 1), cheapest)
            typical_match = _TYPICAL_TRIPS.search(op.scope)
            # In blockwise causal attention, query block i reads i of `outer_trips` key blocks.
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
        """Counts one iteration of a loop: its condition and its body."""
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
        """Splits the program's cost into phases and data-dependent loops.

        Args:
          key_blocks: number of key blocks that attention reads for the longest row, by phase.
          rare_phases: phases whose loops take the expensive branch of a conditional only rarely.
            There, the cheapest branch counts.
        """
        phase_costs: dict[str, Cost] = {}
        loops: list[DynamicLoop] = []
        phase = ""
        for computation, op in self._iterate_flat_instructions(self.program.entry):
            # Instructions that the compiler inserts have no scope, and count for the phase before.
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

    def _iterate_flat_instructions(self, computation: str) -> Iterator[tuple[str, Instruction]]:
        """Yields instructions, descending into conditionals, calls and outer loops."""
        for op in self.program.computations[computation]:
            is_outer_loop = op.opcode == "while" and _OUTER_LOOP.search(op.scope)
            if is_outer_loop or op.opcode in ("conditional", "call"):
                for name in self.program.find_callees(op):
                    yield from self._iterate_flat_instructions(name)
            else:
                yield computation, op

    # ---- products

    def count_flops(self, computation: str, op: Instruction) -> int:
        """Counts operations of an instruction's matrix products."""
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
        """Counts the bytes read and written by a kernel.

        An array that is sliced or updated in place counts with the part that is touched.
        """
        operands = self._operand_shapes(computation, op)
        if op.opcode in ("fusion", "fusion-start"):
            return sum(self._count_fusion_bytes(name) for name in self.program.find_callees(op))
        # A slice, or an update, is read once and written once.
        if op.opcode in _SLICE_OPCODES:
            return 2 * op.result_bytes
        if op.opcode in _IN_PLACE_OPCODES:
            return 2 * sum(shape.byte_count for shape in operands[1:])
        if op.opcode == "custom-call" and op.call_target.startswith(ATTENTION_TARGETS):
            # The largest operands are pools of pages. How many pages the kernel reads cannot be
            # seen in their shapes, so pools are left out.
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
        """Counts the bytes read from a fusion's parameter."""
        return -(
            -source.result_bytes * _count_reads(source, users) // max(_count_elements(source), 1)
        )

    def _count_written_bytes(self, computation: str, root: Instruction) -> int:
        instructions = self.program.instructions_by_name[computation]
        inputs = [instructions[name] for name in root.operands if name in instructions]
        # A fusion with several outputs has a tuple as its root.
        if root.opcode == "tuple":
            return sum(self._count_written_bytes(computation, op) for op in inputs)
        if root.opcode in _VIEW_OPCODES and inputs:
            return self._count_written_bytes(computation, inputs[0])
        if root.opcode in _IN_PLACE_OPCODES:
            # Operands: (array, indices, updates) and (array, update, start indices).
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
    """Counts the elements that a fusion reads of a value."""
    element_count, read_count = _count_elements(source), 0
    for user in users.get(source.name, []):
        is_first_operand = user.operands[0] == source.name
        # The other operands of a slice or update (indices, new values) are read in full.
        if user.opcode in _SLICE_OPCODES and is_first_operand:
            read_count += _count_elements(user) if user.is_root else _count_reads(user, users)
        elif user.opcode in (*_VIEW_OPCODES, *_ELEMENTWISE_OPCODES) and not user.is_root:
            read_count += _count_reads(user, users)
        elif user.opcode not in _IN_PLACE_OPCODES or not is_first_operand:
            read_count += element_count
    # Users may read the same elements.
    return min(element_count, read_count)


def _dot_flops(result: Shape, left: Shape, contracted_axes: list[int]) -> int:
    return 2 * result.element_count * math.prod(left.sizes[axis] for axis in contracted_axes)


def _attention_flops(op: Instruction, operands: list[Shape]) -> int:
    """Counts the operations of a causal attention kernel.

    Queries have shape [T N H], keys and values [T M H], with optional leading batch axes. Returns 0
    for other kernels.
    """
    head_arrays = [shape for shape in operands if len(shape.sizes) in (3, 4)][:3]
    if len(head_arrays) < 3 or head_arrays[0].sizes[:-2] != head_arrays[1].sizes[:-2]:
        # A kernel that reads pages: shapes do not give the number of keys.
        return 0
    *batch_sizes, length, head_count, head_size = head_arrays[0].sizes
    # The forward pass makes two products: scores, and the weighted sum of values.
    product_count = next(
        (count for name, count in _BACKWARD_PRODUCTS.items() if name in op.scope), 2
    )
    # Two operations per multiply-add, half of which the causal mask removes.
    return product_count * math.prod(batch_sizes) * head_count * length * length * head_size
