"""Costs of rounds of each draft length on this machine, for runs that choose lengths by them.

On a CPU a pilot times them before the first batch. On an accelerator compiling a pilot would take
minutes. There public figures predict them, and the first rounds of the run are timed.
"""

import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxspec.compiled.roofline import DEFAULT_CARD, GeneratorDevices, find_card_by_kind
from jaxspec.host.programs import ahead_with, placed, put, times_real_rounds
from jaxspec.inputs.streams import Stream
from jaxspec.mesh import EXPERT, TENSOR, machine, replicated, row_shards
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.feedback import length_chooser
from jaxspec.rollout.feedback.length_chooser import TimedCosts
from jaxspec.rollout.generator import Generator
from jaxspec.state import (
    EOS,
    AcceptanceEstimate,
    LengthChooser,
    Prompts,
    Ready,
    TrainState,
)
from jaxspec.step import Step
from jaxspec.storage.cache import cache_folder, read_sources
from jaxspec.storage.tables import load_table, save_table
from jaxspec.system.terminal import print_line

Advance = Callable[[Ready, DecodeState, np.int32], DecodeState]
"""Makes so many rounds. Donates the rollout that it is given."""
OneSlice = Callable[[DecodeState], DecodeState]
"""Makes the rounds of one slice."""
ROUNDS = 16
"""Rounds that are timed together, at most."""
REPEATS, MOST_REPEATS, SECONDS = 7, 100, 0.3
"""Calls of each number of rounds: at least and at most so many, and as long as they take."""
REAL_ROUNDS = 4
"""Rounds of real work that are timed for a length, after two others: 21 for three lengths."""
LOOK_EVERY = 64
"""Rounds after which the first rollout looks whether its rounds have costs that were not timed."""
UNBOUNDED = np.iinfo(np.int32).max
"""Rounds of a slice that goes on to the end."""


def with_chooser(step: Step, state: TrainState, prompts: Prompts) -> TrainState:
    """Adds the costs that draft lengths are chosen by, unless all rounds draft alike."""
    if state.generator.chooser is None:
        return state
    predicts = times_real_rounds(step.generator)  # for which shapes are enough
    ready = jax.eval_shape(step.sync, state) if predicts else jax.jit(step.sync)(state)
    chooser = measured_chooser(step.generator, ready, prompts)
    chooser = put(chooser, jax.tree.map(placed, chooser, step.state_shardings().generator.chooser))
    return state.replace(generator=state.generator.replace(chooser=chooser))


def measured_chooser(generator: Generator, ready: Ready, prompts: Prompts) -> LengthChooser:
    """Returns the costs of this machine and the draft's acceptance, as far as they are known.

    On a CPU both are measured now, unless an earlier run has kept the costs. On an accelerator
    costs that were not kept are predicted, and nothing is known of acceptance.
    """
    if times_real_rounds(generator):
        return predicted_chooser(generator, ready)
    return _piloted_chooser(generator, ready, prompts)


# ---- by a pilot


def _piloted_chooser(generator: Generator, ready: Ready, prompts: Prompts) -> LengthChooser:
    """The cost table of this machine, measured once for each model and shape, and the acceptance of
    the draft on some prompts.

    Every round is one of the program that a run uses, with the table that makes it choose that
    length; end tokens and stop strings are off. The same on every process: process 0's seconds
    count. What a draft reads more after rounds of other lengths is in no cost: a wide pass now and
    then.
    """
    # With the coins of a batch, its lengths would be chosen by what these bring, and its tokens
    # would follow another distribution.
    prompts = prompts.replace(
        stream=put(np.int32(Stream.PILOT), placed(prompts.stream, replicated(generator.mesh)))
    )
    settings, mesh = generator.settings, generator.mesh
    generator = _without_ends(generator)
    longest = prompts.tokens.shape[1] + settings.max_new_tokens
    empty = length_chooser.unmeasured(settings.lengths, longest)

    def forced(place: int) -> Ready:
        cost = jnp.asarray(length_chooser.forced_cost(empty.round_cost.shape, place))
        chooser = jax.device_put(
            LengthChooser(acceptance=empty.acceptance, round_cost=cost), replicated(mesh)
        )
        return ready.replace(drafter=ready.drafter.replace(chooser=chooser))

    begin, running = ahead_with(generator, generator.begin, forced(0), prompts)
    same = jax.tree.map(lambda leaf: leaf.sharding, running)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    advance, _ = ahead_with(
        generator, generator.advance, forced(0), running, rounds, out_shardings=same
    )
    few = max(1, min(ROUNDS, settings.max_new_tokens // (settings.lengths[-1] + 1) - 1))
    state = begin(forced(0), prompts)
    made = advance(forced(len(settings.lengths) - 1), state, jnp.int32(few)).rollout.statistics
    total = jax.jit(
        lambda counts: jnp.sum(counts, axis=0, dtype=jnp.float32), out_shardings=replicated(mesh)
    )
    offered_in_turn, accepted = (
        np.asarray(total(leaf)) for leaf in (made.offered_in_turn, made.accepted)
    )
    file = _file(generator, prompts.tokens.shape[1])
    cost = _kept(file, empty.round_cost.shape)
    if not cost.any():
        shards, room = row_shards(mesh), (few + 1) * (settings.lengths[-1] + 1)
        for loop, live in enumerate((settings.slots, *settings.tail)):
            for context, end in enumerate(length_chooser.contexts(longest)):
                placed_at = functools.partial(_with, live=live, shards=shards, start=end - room)
                prepared = jax.jit(placed_at, out_shardings=same)(state)
                for place, length in enumerate(settings.lengths):
                    run = functools.partial(advance, forced(place), prepared)
                    cost[place, loop:, context] = _seconds(
                        run, max(1, min(ROUNDS, room // (length + 1) - 1))
                    )
        cost = _from_process_0(cost)
        if jax.process_index() == 0:
            save_table(file, cost, "the next run times its rounds anew")
    estimate = AcceptanceEstimate(
        offered_in_turn=jnp.asarray(offered_in_turn),
        accepted=jnp.asarray(accepted),
        seconds_to_lose=jnp.zeros((), jnp.float32),
    )
    return LengthChooser(acceptance=estimate, round_cost=jnp.asarray(cost))


def _with(state: DecodeState, live: int, shards: int, start: int) -> DecodeState:
    """The state with `live` rows of each shard, which begin at about position `start`."""
    rollout = state.rollout
    numbers = jnp.arange(len(rollout.status), dtype=jnp.int32) % (len(rollout.status) // shards)
    status = jnp.where(numbers < live, rollout.status, EOS)
    ahead_by = jnp.maximum(start - rollout.prompt_lengths, 0)
    queue = state.queue
    moved = rollout.replace(
        status=status,
        prompt_lengths=rollout.prompt_lengths + ahead_by,
        lengths=rollout.lengths + ahead_by,
    )
    queue = queue.replace(waiting=queue.waiting & (numbers < live))
    return state.replace(rollout=moved, queue=queue)


def _seconds(run: Any, rounds: int) -> float:
    """Seconds of a round: what `rounds` more of them add to a call, both at their fastest, since
    others' work only ever adds."""

    def taken(count: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(jnp.int32(count)))
        return time.perf_counter() - began

    taken(1)
    # all must make the same number of calls
    once = float(_from_process_0(np.asarray(taken(1) + taken(1 + rounds), np.float32)))
    pairs = [
        (taken(1), taken(1 + rounds))
        for _ in range(max(REPEATS, min(MOST_REPEATS, int(SECONDS / once))))
    ]
    short, long = (min(times) for times in zip(*pairs, strict=True))
    return length_chooser.seconds_of_round(short, long, rounds)


# ---- by public figures


def predicted_chooser(generator: Generator, ready: Ready) -> LengthChooser:
    """Returns the costs that an earlier run has timed, or those that public figures predict.

    Of `ready` only the shapes count.
    """
    empty = length_chooser.unmeasured(generator.settings.lengths, generator.row_length)
    cost = _kept(_file(generator, generator.prompt_length), empty.round_cost.shape)
    if not cost.any():
        settings = generator.settings
        cost = length_chooser.predicted_cost(
            _devices(generator.mesh),
            ready.target,
            ready.drafter.network,
            settings.lengths,
            (settings.slots, *settings.tail),
            generator.row_length,
        )
    return empty.replace(round_cost=jnp.asarray(cost))


def _devices(mesh: Mesh) -> GeneratorDevices:
    """The devices of a shard in public figures, with a remark if there are none of them."""
    kind = mesh.devices.flat[0].device_kind
    card = find_card_by_kind(kind)
    if card is None and jax.process_index() == 0:
        print_line(
            f"no public figures of {kind} are known: until its rounds are timed, draft lengths are"
            f" chosen by those of {DEFAULT_CARD}"
        )
    return GeneratorDevices(card or DEFAULT_CARD, mesh.shape[TENSOR], mesh.shape[EXPERT])


# ---- by the first rounds of a run


class RoundTimer:
    """Times rounds of each draft length in the first rollout of a run on a machine.

    A length is forced for a few rounds, in each loop and context that the rollout comes to.
    Choices depend on seconds of earlier rounds alone, those of process 0 on every process:
    sampling stays exact.
    """

    def __init__(self, generator: Generator, slice_rounds: int = UNBOUNDED) -> None:
        self._slice_rounds, settings = slice_rounds, generator.settings
        self._file = _file(generator, generator.prompt_length)
        self._ends = length_chooser.contexts(generator.row_length)
        self._tail = settings.tail[: length_chooser.LOOPS - 1]
        self._look = jax.jit(
            functools.partial(length_chooser.busiest, shards=row_shards(generator.mesh)),
            out_shardings=replicated(generator.mesh),
        )
        self._anew = False
        """Whether the next training rollout is timed, whatever its number."""
        self._costs: TimedCosts | None = None
        """Of the rollout that is being timed."""
        self._rests = False
        """Whether the last slice was timed: only costs that are not known are timed right after."""

    def time_anew(self) -> None:
        """Times the next training rollout: the run comes from another machine."""
        self._anew = True

    def begin(self, advance: Advance, ready: Ready, prompts: Prompts) -> OneSlice:
        """Returns how a rollout is advanced by a slice."""
        chooser = ready.drafter.chooser
        assert chooser is not None, "lengths are chosen by costs"
        trains = int(prompts.stream) == Stream.TRAIN
        first = trains and (int(prompts.batch) == 0 or self._anew)
        self._costs, self._rests = None, False
        if not first:
            return lambda running: advance(ready, running, np.int32(self._slice_rounds))
        saved = _kept(self._file, chooser.round_cost.shape)
        known = bool(saved.any())
        costs = TimedCosts(saved if known else np.asarray(chooser.round_cost), final=known)
        self._costs = costs
        return functools.partial(self._one_slice, costs, advance, ready)

    def end(self) -> np.ndarray | None:
        """Keeps and returns the costs after the first rollout. None: it was another one."""
        costs, self._costs = self._costs, None
        if costs is None:
            return None
        self._anew = False
        # with a length missing, the next run would not time it either
        if costs.has_all_lengths and jax.process_index() == 0:
            save_table(self._file, costs.table, "the next run times its rounds anew")
        return costs.table

    def _one_slice(
        self, costs: TimedCosts, advance: Advance, ready: Ready, running: DecodeState
    ) -> DecodeState:
        cell = self._cell(running)
        place = None if cell is None else costs.due(*cell, again=not self._rests)
        self._rests = place is not None
        if cell is None or place is None:
            rounds = np.int32(min(self._slice_rounds, LOOK_EVERY))
            return advance(_choosing_by(ready, costs.table), running, rounds)
        seconds = []
        forced = _choosing_by(ready, length_chooser.forced_cost(costs.table.shape, place))
        # The first rounds of a length load its kernels, and read what its draft has missed. The
        # others tell what a call takes by itself from what its rounds take.
        for rounds in (1, 1, 1 + REAL_ROUNDS):
            began = time.perf_counter()
            running = jax.block_until_ready(advance(forced, running, np.int32(rounds)))
            seconds.append(time.perf_counter() - began)
        _, short, long = _from_process_0(np.asarray(seconds, np.float32)).tolist()
        if self._cell(running) == cell:
            costs.add((place, *cell), short, long, REAL_ROUNDS)
        return running

    def _cell(self, running: DecodeState) -> tuple[int, int] | None:
        """Loop and context of the next rounds, of the shard that has most to do.

        None: a row waits to be recomputed, which would count as the cost of some round, or all rows
        have ended.
        """
        rollout = running.rollout
        found = self._look(
            rollout.status, rollout.lengths, rollout.prompt_lengths, running.queue.waiting
        )
        rows, longest, evicted = np.asarray(found).tolist()
        if evicted or not rows:
            return None
        context = min(int(np.searchsorted(self._ends, longest)), len(self._ends) - 1)
        return sum(rows <= size for size in self._tail), context


def _choosing_by(ready: Ready, cost: np.ndarray) -> Ready:
    """Weights whose draft lengths are chosen by some costs."""
    chooser = ready.drafter.chooser
    assert chooser is not None, "lengths are chosen by costs"
    chooser = chooser.replace(round_cost=put(cost, chooser.round_cost))
    return ready.replace(drafter=ready.drafter.replace(chooser=chooser))


# ---- kept for the next run


def _from_process_0(table: np.ndarray) -> np.ndarray:
    return (
        np.array(multihost_utils.broadcast_one_to_all(table)) if jax.process_count() > 1 else table
    )


def _kept(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The costs in process 0's file, or zeros."""
    return _from_process_0(load_table(file, shape, "rounds are timed anew"))


def _file(generator: Generator, prompt: int) -> Path:
    """Where the costs of a generator are kept, whatever ends its rows."""
    return cache_folder() / "costs" / f"{_key(_without_ends(generator), prompt)}.json"


def _without_ends(generator: Generator) -> Generator:
    """The generator whose rows end by length alone."""
    processing = generator.settings.processing._replace(stop_ids=())
    return generator.with_(processing=processing, stop=None)


def _key(generator: Generator, prompt: int) -> str:
    """What a cost table depends on."""
    settings = generator.settings
    # by name: what a function is written as differs from process to process
    named = {"rule": getattr(settings.rule, "__name__", None)}
    shape = settings._replace(**named, verification=settings.verification.name)
    code = read_sources(
        *("host/round_cost.py", "compiled/roofline.py", "models/*.py", "kernels/*.py"),
        *("drafts/*.py", "rollout/**/*.py", "sampling.py"),
    )
    where = jax.__version__, machine(generator.mesh), generator.compiler_options
    parts = *where, shape, prompt, generator.weight_layouts, generator.about, code
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
