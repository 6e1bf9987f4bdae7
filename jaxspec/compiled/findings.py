"""What is found in a compiled step: its costs by phase, and what should not be there."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxspec.compiled.collectives import kind_of
from jaxspec.compiled.counts import ATTENTION, Cost, Counted, Exchange, Parts, Turn
from jaxspec.compiled.hardware import Card
from jaxspec.compiled.text import Instruction, Program

LEARN, SYNC, GENERATE = "train", "prepare", "generate"
"""Phases of a step, as they are called in its program."""
DENSELY = 3.0
"""Products of a micro-batch over those that its tokens need, from which on experts are taken to be
multiplied with tokens that are not theirs."""

RECORDED = ("s32", "f32", "f64", "pred")
"""Types of what is recorded of rows; activations of a micro-batch may have the sizes of a batch."""


class Expected(NamedTuple):
    """What is known of a step before it is compiled."""

    mesh: Mapping[str, int]
    """The axes of the mesh; the first has the data shards, each of which generates by itself."""
    by_rows: tuple[str, ...]
    """The axes that split rows, over which weights are gathered."""
    vocab: int
    rows: int
    """Of a batch."""
    row_length: int
    layer_cache: int
    """Bytes of a layer's keys on a device, or of its values."""
    synced: int
    """Bytes of the split weights that a sync makes whole on each device."""
    paged: bool
    micro_batch: float
    """Products that the positions of a micro-batch need of the policy's weights, forward."""
    experts: bool
    draft_learns: bool
    command_buffers: bool
    """Whether generation's loops go into CUDA graphs; the text of a program does not say so."""
    blocks: float
    """Of keys that a round's attention goes through for the longest row."""

    @property
    def shards(self) -> str:
        """The name of the axis of the data shards."""
        return next(iter(self.mesh))


class Findings(NamedTuple):
    """What a program says of a step."""

    parts: Parts
    warnings: list[str]
    sync_moves: float
    """How often a sync moves each split weight."""

    @property
    def micro_batch(self) -> Cost:
        """Of learning from one."""
        turn = self.parts.largest(LEARN)
        return turn.cost if turn else Cost()

    @property
    def round(self) -> Cost:
        """Of all slots."""
        turn = self.parts.largest(GENERATE, "rounds")
        return turn.cost if turn else Cost()

    @property
    def prefill(self) -> Cost:
        """Of a pass over pieces of prompts."""
        turn = self.parts.largest(GENERATE, "prefill")
        return turn.cost if turn else Cost()

    @property
    def rows(self) -> dict[str, Cost]:
        """What a step consists of."""
        once = self.parts.once
        return {
            "a micro-batch": self.micro_batch,
            "the update": once.get(LEARN, Cost()),
            "sync": once.get(SYNC, Cost()),
            "beside the rounds": once.get(GENERATE, Cost()),
            "a pass over prompts": self.prefill,
            "a round": self.round,
        }


def read(text: str, expected: Expected, card: Card | None) -> Findings:
    """Finds it in the text of a compiled step for so many devices of a card, or of another
    kind."""
    program, mesh = Program(text), dict(expected.mesh)
    counted = Counted(program, mesh)
    rarely = {GENERATE} if expected.draft_learns else {GENERATE, LEARN}
    parts = counted.parts({GENERATE: expected.blocks}, rarely)
    loop = parts.largest(GENERATE, "rounds")
    inside = program.reached(list(loop.computations)) if loop else set()
    if expected.command_buffers:
        for cost in filter(None, (parts.once.get(GENERATE), loop and loop.cost)):
            cost.loops = 0
    sync = parts.once.setdefault(SYNC, Cost())
    _take_gathers(parts.once.get(LEARN, Cost()), sync, expected.by_rows)
    moved = 0.0
    for exchange, size in sync.sent.items():
        if _gathers(exchange, expected.by_rows):
            shards = math.prod(mesh[axis] for axis in exchange.axes)
            moved += size * shards / (shards - 1)  # a shard does not send to itself
    moves = moved / expected.synced if expected.synced else 0.0
    warnings = [
        *_of_network(expected, card),
        *_of_round(program, inside, loop, expected),
        *_of_learning(program, parts, expected),
        *_of_copies(program, expected),
    ]
    if moves > 1.05:
        warnings.append(
            f"sync sends {moves:.2f} times the bytes of the split weights, in the type in which"
            " generation reads them"
        )
    return Findings(parts, warnings, moves)


def _gathers(exchange: Exchange, by_rows: tuple[str, ...]) -> bool:
    return exchange.kind == "all-gather" and not set(by_rows).isdisjoint(exchange.axes)


def _take_gathers(update: Cost, sync: Cost, by_rows: tuple[str, ...]) -> None:
    """Gives a sync the gathers that XLA, which names an array's way to another layout after where
    the array was made, takes for parts of the update: that itself makes nothing whole."""
    for exchange in [*update.exchanges]:
        if _gathers(exchange, by_rows):
            sync.exchanges[exchange] += update.exchanges.pop(exchange)
            sync.sent[exchange] += update.sent.pop(exchange)


def _of_network(expected: Expected, card: Card | None) -> Iterator[str]:
    peers = math.prod(list(expected.mesh.values())[1:])
    names = " x ".join(list(expected.mesh)[1:])
    if card and peers > card.domain:
        joined = (
            f"domains of {card.domain} GPUs" if card.domain > 1 else "no NVLink between its GPUs"
        )
        yield f"{names} {peers} leaves the NVLink domain: {card.kind} has {joined}; give less"
    elif card and card.domain % peers:
        yield (
            f"{names} {peers} stays inside an NVLink domain, of {card.domain} {card.kind}, only"
            f" where nodes come in segments of {peers} GPUs, or of a multiple, that lie in one"
            " (launch/slurm.sbatch, --segment)"
        )


def _of_round(
    program: Program, inside: set[str], loop: Turn | None, expected: Expected
) -> Iterator[str]:
    if loop is None:
        return
    wide = [exchange for exchange in loop.cost.exchanges if expected.shards in exchange.axes]
    for exchange in wide:
        yield (
            f"a round waits for other data shards: {loop.cost.exchanges[exchange]:.0f}"
            f" {exchange.kind} over {', '.join(exchange.axes)}"
        )
    kernels = any(
        each.opcode == "custom-call" and each.target.startswith(ATTENTION)
        for name in inside
        for each in program.computations[name]
    )
    if expected.paged and not kernels:
        yield (
            "no kernel reads pages on this hardware: each round gathers them, which costs memory"
            " and time"
        )


def _of_learning(program: Program, parts: Parts, expected: Expected) -> Iterator[str]:
    needed, loop = expected.micro_batch, parts.largest(LEARN)
    # forward, recomputed, and twice backward; and the pass before the update where there is one
    ratio = loop.cost.products / (4 * needed) if loop and needed else 0.0
    if expected.experts and ratio > DENSELY:
        yield (
            f"experts are multiplied with tokens that are not theirs: a micro-batch makes"
            f" {ratio:.0f} times the products that its tokens need"
        )
    shards, whole = math.prod(expected.mesh[axis] for axis in expected.by_rows), set()
    lengths = {expected.row_length, expected.row_length - 1}
    gathered: set[str] = set()
    for _, each in program.instructions():
        for shape in each.results:
            pairs = zip(shape.sizes, shape.sizes[1:], strict=False)
            if shape.dtype in RECORDED and any(
                rows == expected.rows and length in lengths for rows, length in pairs
            ):
                whole.add(f"{shape.dtype}{list(shape.sizes)}")
        if kind_of(each) == "all-gather" and _gathered_size(each) == expected.vocab:
            gathered.add(", ".join(f"{shape.dtype}{list(shape.sizes)}" for shape in each.results))
    if shards > 1 and whole:
        yield f"rows are replicated over the data shards: {_some(whole)} hold all of a batch"
    if gathered:
        yield f"an all-gather of the whole vocabulary: {_some(gathered)}"


def _gathered_size(each: Instruction) -> int:
    """Elements along the axis that an all-gather makes whole."""
    said = each.rest.partition("dimensions={")[2].partition("}")[0]
    place, sizes = (int(said) if said.isdecimal() else 0), each.results[-1].sizes
    return sizes[place] if place < len(sizes) else 0


def _of_copies(program: Program, expected: Expected) -> Iterator[str]:
    found: set[str] = set()
    for name, each in program.instructions():
        if GENERATE not in each.scope.split("/") or not expected.layer_cache:
            continue
        if _copies(program, each) and each.bytes >= expected.layer_cache:
            shapes = ", ".join(f"{shape.dtype}{list(shape.sizes)}" for shape in each.results)
            found.add(f"{shapes} ({each.name} in {name})")
    if found:
        yield f"generation copies as much as a layer's keys: {_some(found)}"


def _copies(program: Program, each: Instruction) -> bool:
    """Whether an instruction gives what it takes, moved."""
    if each.opcode in ("copy", "copy-start"):
        return True
    if each.opcode != "fusion":
        return False
    moves = {"parameter", "copy", "bitcast", "transpose", "reshape"}
    inner = {line.opcode for name in program.called(each) for line in program.computations[name]}
    return inner <= moves and bool(inner & {"copy", "transpose"})


def _some(found: set[str], most: int = 3) -> str:
    listed = sorted(found)
    return "; ".join(listed[:most]) + (f" and {len(listed) - most} more" * (len(listed) > most))
