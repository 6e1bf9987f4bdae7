"""What is found in a compiled step: its costs by phase, and what should not be there."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxspec.compiled.collectives import collective_kind
from jaxspec.compiled.counts import (
    ATTENTION_TARGETS,
    Collective,
    Cost,
    CostCounter,
    DynamicLoop,
    ProgramCosts,
)
from jaxspec.compiled.hardware import Card
from jaxspec.compiled.text import Instruction, Program

LEARN, SYNC, GENERATE = "train", "prepare", "generate"
"""Phases of a step, as they are called in its program."""
DENSE_EXPERT_RATIO = 3.0
"""Products of a micro-batch over those that its tokens need, from which on experts are taken to be
multiplied with tokens that are not theirs."""

ROW_DTYPES = ("s32", "f32", "f64", "pred")
"""Types of what is recorded of rows; activations of a micro-batch may have the sizes of a batch."""


class StepExpectation(NamedTuple):
    """What is known of a step before it is compiled."""

    mesh: Mapping[str, int]
    """The axes of the mesh; the first has the data shards, each of which generates by itself."""
    row_axes: tuple[str, ...]
    """The axes that split rows, over which weights are gathered."""
    vocab_size: int
    row_count: int
    """Of a batch."""
    row_length: int
    layer_cache_bytes: int
    """Bytes of a layer's keys on a device, or of its values."""
    sync_bytes: int
    """Bytes of the split weights that a sync makes whole on each device."""
    is_paged: bool
    micro_batch_flops: float
    """Products that the positions of a micro-batch need of the policy's weights, forward."""
    has_experts: bool
    trains_draft: bool
    uses_command_buffers: bool
    """Whether generation's loops go into CUDA graphs; the text of a program does not say so."""
    key_blocks: float
    """Of keys that a round's attention goes through for the longest row."""

    @property
    def data_axis(self) -> str:
        """The name of the axis of the data shards."""
        return next(iter(self.mesh))


class Findings(NamedTuple):
    """What a program says of a step."""

    costs: ProgramCosts
    warnings: list[str]
    sync_moves: float
    """How often a sync moves each split weight."""

    @property
    def micro_batch_cost(self) -> Cost:
        """Of learning from one."""
        loop = self.costs.largest_loop(LEARN)
        return loop.cost if loop else Cost()

    @property
    def decode_round_cost(self) -> Cost:
        """Of all slots."""
        loop = self.costs.largest_loop(GENERATE, "rounds")
        return loop.cost if loop else Cost()

    @property
    def prefill_cost(self) -> Cost:
        """Of a pass over pieces of prompts."""
        loop = self.costs.largest_loop(GENERATE, "prefill")
        return loop.cost if loop else Cost()

    @property
    def cost_rows(self) -> dict[str, Cost]:
        """What a step consists of."""
        phase_costs = self.costs.phase_costs
        return {
            "a micro-batch": self.micro_batch_cost,
            "the update": phase_costs.get(LEARN, Cost()),
            "sync": phase_costs.get(SYNC, Cost()),
            "beside the rounds": phase_costs.get(GENERATE, Cost()),
            "a pass over prompts": self.prefill_cost,
            "a round": self.decode_round_cost,
        }


def analyze_step(text: str, expected: StepExpectation, card: Card | None) -> Findings:
    """Finds it in the text of a compiled step for so many devices of a card, or of another
    kind."""
    program, mesh = Program(text), dict(expected.mesh)
    counter = CostCounter(program, mesh)
    rare_phases = {GENERATE} if expected.trains_draft else {GENERATE, LEARN}
    costs = counter.split_by_phase({GENERATE: expected.key_blocks}, rare_phases)
    loop = costs.largest_loop(GENERATE, "rounds")
    loop_computations = program.reachable_computations(list(loop.computations)) if loop else set()
    if expected.uses_command_buffers:
        for cost in filter(None, (costs.phase_costs.get(GENERATE), loop and loop.cost)):
            cost.loops = 0
    sync = costs.phase_costs.setdefault(SYNC, Cost())
    _move_gathers(costs.phase_costs.get(LEARN, Cost()), sync, expected.row_axes)
    moved_bytes = 0.0
    for collective, byte_count in sync.bytes_sent.items():
        if _is_weight_gather(collective, expected.row_axes):
            shard_count = math.prod(mesh[axis] for axis in collective.axes)
            moved_bytes += (
                byte_count * shard_count / (shard_count - 1)
            )  # a shard does not send to itself
    sync_moves = moved_bytes / expected.sync_bytes if expected.sync_bytes else 0.0
    warnings = [
        *_network_warnings(expected, card),
        *_round_warnings(program, loop_computations, loop, expected),
        *_learning_warnings(program, costs, expected),
        *_copy_warnings(program, expected),
    ]
    if sync_moves > 1.05:
        warnings.append(
            f"sync sends {sync_moves:.2f} times the bytes of the split weights, in the type in"
            " which generation reads them"
        )
    return Findings(costs, warnings, sync_moves)


def _is_weight_gather(collective: Collective, row_axes: tuple[str, ...]) -> bool:
    return collective.kind == "all-gather" and not set(row_axes).isdisjoint(collective.axes)


def _move_gathers(update: Cost, sync: Cost, row_axes: tuple[str, ...]) -> None:
    """Gives a sync the gathers that XLA, which names an array's way to another layout after where
    the array was made, takes for parts of the update: that itself makes nothing whole."""
    for collective in [*update.collectives]:
        if _is_weight_gather(collective, row_axes):
            sync.collectives[collective] += update.collectives.pop(collective)
            sync.bytes_sent[collective] += update.bytes_sent.pop(collective)


def _network_warnings(expected: StepExpectation, card: Card | None) -> Iterator[str]:
    peer_count = math.prod(list(expected.mesh.values())[1:])
    axis_names = " x ".join(list(expected.mesh)[1:])
    if card and peer_count > card.domain:
        link_words = (
            f"domains of {card.domain} GPUs" if card.domain > 1 else "no NVLink between its GPUs"
        )
        yield (
            f"{axis_names} {peer_count} leaves the NVLink domain: {card.kind} has {link_words};"
            " give less"
        )
    elif card and card.domain % peer_count:
        yield (
            f"{axis_names} {peer_count} stays inside an NVLink domain, of {card.domain}"
            f" {card.kind}, only where nodes come in segments of {peer_count} GPUs, or of a"
            " multiple, that lie in one (launch/slurm.sbatch, --segment)"
        )


def _round_warnings(
    program: Program,
    loop_computations: set[str],
    loop: DynamicLoop | None,
    expected: StepExpectation,
) -> Iterator[str]:
    if loop is None:
        return
    cross_shard = [
        collective for collective in loop.cost.collectives if expected.data_axis in collective.axes
    ]
    for collective in cross_shard:
        yield (
            f"a round waits for other data shards: {loop.cost.collectives[collective]:.0f}"
            f" {collective.kind} over {', '.join(collective.axes)}"
        )
    has_kernels = any(
        op.opcode == "custom-call" and op.call_target.startswith(ATTENTION_TARGETS)
        for name in loop_computations
        for op in program.computations[name]
    )
    if expected.is_paged and not has_kernels:
        yield (
            "no kernel reads pages on this hardware: each round gathers them, which costs memory"
            " and time"
        )


def _learning_warnings(
    program: Program, costs: ProgramCosts, expected: StepExpectation
) -> Iterator[str]:
    needed_flops, loop = expected.micro_batch_flops, costs.largest_loop(LEARN)
    # forward, recomputed, and twice backward; and the pass before the update where there is one
    ratio = loop.cost.flops / (4 * needed_flops) if loop and needed_flops else 0.0
    if expected.has_experts and ratio > DENSE_EXPERT_RATIO:
        yield (
            f"experts are multiplied with tokens that are not theirs: a micro-batch makes"
            f" {ratio:.0f} times the products that its tokens need"
        )
    shard_count, replicated_arrays = (
        math.prod(expected.mesh[axis] for axis in expected.row_axes),
        set(),
    )
    row_lengths = {expected.row_length, expected.row_length - 1}
    vocab_gathers: set[str] = set()
    for _, op in program.iterate_instructions():
        for shape in op.results:
            size_pairs = zip(shape.sizes, shape.sizes[1:], strict=False)
            if shape.dtype in ROW_DTYPES and any(
                rows == expected.row_count and length in row_lengths for rows, length in size_pairs
            ):
                replicated_arrays.add(f"{shape.dtype}{list(shape.sizes)}")
        if collective_kind(op) == "all-gather" and _gather_size(op) == expected.vocab_size:
            vocab_gathers.add(
                ", ".join(f"{shape.dtype}{list(shape.sizes)}" for shape in op.results)
            )
    if shard_count > 1 and replicated_arrays:
        yield (
            f"rows are replicated over the data shards: {_join_some(replicated_arrays)} hold all of"
            " a batch"
        )
    if vocab_gathers:
        yield f"an all-gather of the whole vocabulary: {_join_some(vocab_gathers)}"


def _gather_size(op: Instruction) -> int:
    """Elements along the axis that an all-gather makes whole."""
    dimension = op.attributes.partition("dimensions={")[2].partition("}")[0]
    axis, sizes = (int(dimension) if dimension.isdecimal() else 0), op.results[-1].sizes
    return sizes[axis] if axis < len(sizes) else 0


def _copy_warnings(program: Program, expected: StepExpectation) -> Iterator[str]:
    copies: set[str] = set()
    for name, op in program.iterate_instructions():
        if GENERATE not in op.scope.split("/") or not expected.layer_cache_bytes:
            continue
        if _is_copy(program, op) and op.result_bytes >= expected.layer_cache_bytes:
            shapes = ", ".join(f"{shape.dtype}{list(shape.sizes)}" for shape in op.results)
            copies.add(f"{shapes} ({op.name} in {name})")
    if copies:
        yield f"generation copies as much as a layer's keys: {_join_some(copies)}"


def _is_copy(program: Program, op: Instruction) -> bool:
    """Whether an instruction gives what it takes, moved."""
    if op.opcode in ("copy", "copy-start"):
        return True
    if op.opcode != "fusion":
        return False
    move_opcodes = {"parameter", "copy", "bitcast", "transpose", "reshape"}
    fused_opcodes = {
        fused.opcode for name in program.find_callees(op) for fused in program.computations[name]
    }
    return fused_opcodes <= move_opcodes and bool(fused_opcodes & {"copy", "transpose"})


def _join_some(descriptions: set[str], limit: int = 3) -> str:
    ordered = sorted(descriptions)
    return "; ".join(ordered[:limit]) + (
        f" and {len(ordered) - limit} more" * (len(ordered) > limit)
    )
