"""Costs of a compiled step, and warnings."""

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
"""Names of phases in a compiled step."""
# Above this, experts must be multiplied with tokens that are not routed to them.
DENSE_EXPERT_RATIO = 3.0
"""Largest expected ratio of executed to needed products of a micro-batch."""

# Other dtypes are ignored: activations of a micro-batch may happen to have the sizes of a batch.
ROW_DTYPES = ("s32", "f32", "f64", "pred")
"""Dtypes of per-row records, such as tokens, log-probabilities and masks."""


class StepExpectation(NamedTuple):
    """Facts known about a step before compiling."""

    mesh: Mapping[str, int]
    """Mesh axis sizes. Each shard of the first axis runs its own generation loop."""
    row_axes: tuple[str, ...]
    """Mesh axes that shard rows, and over which weights are gathered."""
    vocab_size: int
    row_count: int
    """Rows of a batch."""
    row_length: int
    """Positions of the longest row."""
    layer_cache_bytes: int
    """Bytes of a layer's keys on a device. 0 turns the search for copies off."""
    sync_bytes: int
    """Bytes of sharded weights that a sync gathers on each device."""
    is_paged: bool
    """Whether keys and values are stored in pages."""
    micro_batch_flops: float
    """Operations on the policy's weights in a micro-batch's forward pass, per device."""
    has_experts: bool
    trains_draft: bool
    # The text of a program does not show command buffers.
    uses_command_buffers: bool
    """Whether generation's loops run inside CUDA graphs."""
    key_blocks: float
    """Key blocks that a round's attention reads for the longest row."""

    @property
    def data_axis(self) -> str:
        """Name of the mesh axis of data shards."""
        return next(iter(self.mesh))


class Findings(NamedTuple):
    """Results of analyzing a compiled step."""

    costs: ProgramCosts
    warnings: list[str]
    sync_moves: float
    """Ratio of the bytes that a sync gathers to those of the sharded weights."""

    @property
    def micro_batch_cost(self) -> Cost:
        """Cost of learning from one micro-batch."""
        loop = self.costs.largest_loop(LEARN)
        return loop.cost if loop else Cost()

    @property
    def decode_round_cost(self) -> Cost:
        """Cost of one round over all slots."""
        loop = self.costs.largest_loop(GENERATE, "rounds")
        return loop.cost if loop else Cost()

    @property
    def prefill_cost(self) -> Cost:
        """Cost of one prefill pass over prompt pieces."""
        loop = self.costs.largest_loop(GENERATE, "prefill")
        return loop.cost if loop else Cost()

    @property
    def cost_rows(self) -> dict[str, Cost]:
        """Costs of a step's parts, by label."""
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
    """Analyzes the text of a compiled step.

    Args:
      text: the program's HLO.
      expected: facts about the step.
      card: card that the program was compiled for, or None for other hardware.
    """
    program, mesh = Program(text), dict(expected.mesh)
    counter = CostCounter(program, mesh)
    # Generation seldom takes its expensive branches. Without draft training, a micro-batch never
    # takes the branch of the draft.
    rare_phases = {GENERATE} if expected.trains_draft else {GENERATE, LEARN}
    costs = counter.split_by_phase({GENERATE: expected.key_blocks}, rare_phases)
    loop = costs.largest_loop(GENERATE, "rounds")
    loop_computations = program.reachable_computations(list(loop.computations)) if loop else set()
    # Inside a CUDA graph the device evaluates the conditions of loops, not the host.
    if expected.uses_command_buffers:
        for cost in filter(None, (costs.phase_costs.get(GENERATE), loop and loop.cost)):
            cost.loops = 0
    sync = costs.phase_costs.setdefault(SYNC, Cost())
    _move_gathers(costs.phase_costs.get(LEARN, Cost()), sync, expected.row_axes)
    moved_bytes = 0.0
    for collective, byte_count in sync.bytes_sent.items():
        if _is_weight_gather(collective, expected.row_axes):
            shard_count = math.prod(mesh[axis] for axis in collective.axes)
            # In an all-gather each device sends the gathered bytes less one shard.
            moved_bytes += byte_count * shard_count / (shard_count - 1)
    sync_moves = moved_bytes / expected.sync_bytes if expected.sync_bytes else 0.0
    warnings = [
        *_network_warnings(expected, card),
        *_round_warnings(program, loop_computations, loop, expected),
        *_learning_warnings(program, costs, expected),
        *_copy_warnings(program, expected),
    ]
    if sync_moves > 1.05:
        warnings.append(
            f"sync sends {sync_moves:.2f} times the bytes of the sharded weights, in the dtype in"
            " which generation reads them"
        )
    return Findings(costs, warnings, sync_moves)


def _is_weight_gather(collective: Collective, row_axes: tuple[str, ...]) -> bool:
    return collective.kind == "all-gather" and not set(row_axes).isdisjoint(collective.axes)


def _move_gathers(update: Cost, sync: Cost, row_axes: tuple[str, ...]) -> None:
    """Moves weight gathers from update to sync."""
    # XLA names a resharding after the operation that produced the array. The update itself gathers
    # no weights, so these gathers belong to the sync that follows.
    for collective in [*update.collectives]:
        if _is_weight_gather(collective, row_axes):
            sync.collectives[collective] += update.collectives.pop(collective)
            sync.bytes_sent[collective] += update.bytes_sent.pop(collective)


def _network_warnings(expected: StepExpectation, card: Card | None) -> Iterator[str]:
    # All axes but the first communicate in every layer and need the bandwidth of NVLink.
    peer_count = math.prod(list(expected.mesh.values())[1:])
    axis_names = " x ".join(list(expected.mesh)[1:])
    if card and peer_count > card.domain:
        link_words = (
            f"domains of {card.domain} GPUs" if card.domain > 1 else "no NVLink between its GPUs"
        )
        yield (
            f"{axis_names} {peer_count} leaves the NVLink domain: {card.kind} has {link_words};"
            " use a smaller size"
        )
    elif card and card.domain % peer_count:
        yield (
            f"{axis_names} {peer_count} stays inside an NVLink domain of {card.domain}"
            f" {card.kind} only if nodes are allocated in segments of {peer_count} GPUs, or a"
            " multiple of that, within one domain (launch/slurm.sbatch, --segment)"
        )


def _round_warnings(
    program: Program,
    loop_computations: set[str],
    loop: DynamicLoop | None,
    expected: StepExpectation,
) -> Iterator[str]:
    if loop is None:
        return
    # Data shards run rounds independently. A collective between them would make all of them wait
    # for the slowest.
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
    # A micro-batch costs four forward passes: forward, recomputed forward, and a backward pass that
    # costs two. The limit leaves room for a pass that recomputes old logprobs.
    needed_flops, loop = expected.micro_batch_flops, costs.largest_loop(LEARN)
    ratio = loop.cost.flops / (4 * needed_flops) if loop and needed_flops else 0.0
    if expected.has_experts and ratio > DENSE_EXPERT_RATIO:
        yield (
            f"experts also process tokens that are not routed to them: a micro-batch makes"
            f" {ratio:.0f} times the products that its tokens need"
        )
    shard_count, replicated_arrays = (
        math.prod(expected.mesh[axis] for axis in expected.row_axes),
        set(),
    )
    # Arrays of next-token predictions have one position less.
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
            "rows are replicated over the data shards:"
            f" {_join_descriptions(replicated_arrays)} hold the whole batch"
        )
    if vocab_gathers:
        yield f"an all-gather of the whole vocabulary: {_join_descriptions(vocab_gathers)}"


def _gather_size(op: Instruction) -> int:
    """Returns the size of the gathered axis of an all-gather."""
    dimension = op.attributes.partition("dimensions={")[2].partition("}")[0]
    axis, sizes = (int(dimension) if dimension.isdecimal() else 0), op.results[-1].sizes
    return sizes[axis] if axis < len(sizes) else 0


def _copy_warnings(program: Program, expected: StepExpectation) -> Iterator[str]:
    # Generation updates its cache in place. A copy as large as a layer's keys means that XLA could
    # not do so.
    copies: set[str] = set()
    for name, op in program.iterate_instructions():
        if GENERATE not in op.scope.split("/") or not expected.layer_cache_bytes:
            continue
        if _is_copy(program, op) and op.result_bytes >= expected.layer_cache_bytes:
            shapes = ", ".join(f"{shape.dtype}{list(shape.sizes)}" for shape in op.results)
            copies.add(f"{shapes} ({op.name} in {name})")
    if copies:
        yield f"generation copies as much as a layer's keys: {_join_descriptions(copies)}"


def _is_copy(program: Program, op: Instruction) -> bool:
    """Returns whether an instruction only moves data."""
    if op.opcode in ("copy", "copy-start"):
        return True
    if op.opcode != "fusion":
        return False
    move_opcodes = {"parameter", "copy", "bitcast", "transpose", "reshape"}
    fused_opcodes = {
        fused.opcode for name in program.find_callees(op) for fused in program.computations[name]
    }
    return fused_opcodes <= move_opcodes and bool(fused_opcodes & {"copy", "transpose"})


def _join_descriptions(descriptions: set[str], limit: int = 3) -> str:
    ordered = sorted(descriptions)
    return "; ".join(ordered[:limit]) + (
        f" and {len(ordered) - limit} more" * (len(ordered) > limit)
    )
