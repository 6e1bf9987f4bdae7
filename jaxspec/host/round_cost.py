"""Round costs by draft length.

On a CPU a pilot times rounds before the first batch. On an accelerator public figures of the card
predict them, and the first rollout corrects the predictions.
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
from jaxspec.host.programs import abstract_leaf, compile_for_generator, put_like, times_real_rounds
from jaxspec.inputs.streams import Stream
from jaxspec.mesh import EXPERT, TENSOR, replicated_sharding, row_shard_count
from jaxspec.processes.devices import describe_machine
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.feedback import length_chooser
from jaxspec.rollout.feedback.length_chooser import TimedCosts
from jaxspec.rollout.generator import Generator
from jaxspec.state import (
    EOS,
    AcceptanceEstimate,
    LengthChooser,
    Prompts,
    RolloutWeights,
    TrainState,
)
from jaxspec.step import Step
from jaxspec.storage.cache import cache_folder, read_sources
from jaxspec.storage.tables import load_table, save_table
from jaxspec.system.terminal import print_line

AdvanceRounds = Callable[[RolloutWeights, DecodeState, np.int32], DecodeState]
"""Runs the given number of rounds. Donates the decode state."""
AdvanceSlice = Callable[[DecodeState], DecodeState]
"""Runs the rounds of one slice."""
PILOT_ROUNDS = 16
"""Largest number of rounds in a timed call of the pilot."""
MIN_REPEATS, MAX_REPEATS, PILOT_SECONDS = 7, 100, 0.3
"""Limits on the repeats of a pilot's pair of calls, and seconds to spend on them in between."""
TIMED_ROUNDS = 4
"""Rounds that the first rollout times for a length: with the warm-up, 21 rounds for 3 lengths."""
CHECK_INTERVAL = 64
"""Rounds between checks of the first rollout for costs that were not timed yet."""
UNBOUNDED = np.iinfo(np.int32).max
"""Number of rounds of a slice that runs until all rows have ended."""


def add_length_chooser(step: Step, state: TrainState, prompts: Prompts) -> TrainState:
    """Adds round costs, if the generator chooses draft lengths."""
    if state.generator.chooser is None:
        return state
    predicts_costs = times_real_rounds(step.generator)  # predictions need only shapes
    weights = jax.eval_shape(step.sync, state) if predicts_costs else jax.jit(step.sync)(state)
    chooser = make_length_chooser(step.generator, weights, prompts)
    chooser = put_like(
        chooser, jax.tree.map(abstract_leaf, chooser, step.state_shardings().generator.chooser)
    )
    return state.replace(generator=state.generator.replace(chooser=chooser))


def make_length_chooser(
    generator: Generator, weights: RolloutWeights, prompts: Prompts
) -> LengthChooser:
    """Returns round costs and the draft's acceptance.

    Costs that an earlier run saved are reused. Otherwise they are measured on a CPU, and predicted
    on an accelerator. Acceptance is measured on a CPU, and unknown on an accelerator.
    """
    if times_real_rounds(generator):
        return predict_chooser(generator, weights)
    return _run_pilot(generator, weights, prompts)


# ---- by a pilot


def _run_pilot(generator: Generator, weights: RolloutWeights, prompts: Prompts) -> LengthChooser:
    """Measures round costs and the draft's acceptance.

    Costs are measured once for each model and shape, then cached. End tokens and stop strings are
    off. All processes use the times of process 0. Costs leave out the tokens that a draft catches
    up on after rounds of other lengths.
    """
    # With the noise of a training batch, lengths would depend on that batch's own tokens, and the
    # tokens would follow another distribution.
    prompts = prompts.replace(
        stream=put_like(
            np.int32(Stream.PILOT),
            abstract_leaf(prompts.stream, replicated_sharding(generator.mesh)),
        )
    )
    settings, mesh = generator.settings, generator.mesh
    generator = _without_ends(generator)
    longest = prompts.tokens.shape[1] + settings.max_new_tokens
    empty = length_chooser.init_chooser(settings.lengths, longest)

    # A table in which one length is cheapest makes the run's own program choose that length.
    def force_length(length_index: int) -> RolloutWeights:
        cost = jnp.asarray(length_chooser.single_length_cost(empty.round_cost.shape, length_index))
        chooser = jax.device_put(
            LengthChooser(acceptance=empty.acceptance, round_cost=cost), replicated_sharding(mesh)
        )
        return weights.replace(drafter=weights.drafter.replace(chooser=chooser))

    begin, decode_state = compile_for_generator(
        generator, generator.begin, force_length(0), prompts
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, decode_state)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    advance, _ = compile_for_generator(
        generator, generator.advance, force_length(0), decode_state, rounds, out_shardings=shardings
    )
    warmup_rounds = max(
        1, min(PILOT_ROUNDS, settings.max_new_tokens // (settings.lengths[-1] + 1) - 1)
    )
    state = begin(force_length(0), prompts)
    statistics = advance(
        force_length(len(settings.lengths) - 1), state, jnp.int32(warmup_rounds)
    ).rollout.statistics
    total = jax.jit(
        lambda counts: jnp.sum(counts, axis=0, dtype=jnp.float32),
        out_shardings=replicated_sharding(mesh),
    )
    offered_in_turn, accepted = (
        np.asarray(total(leaf)) for leaf in (statistics.reached, statistics.accepted)
    )
    file = _cost_file(generator, prompts.tokens.shape[1])
    cost = _load_costs(file, empty.round_cost.shape)
    if not cost.any():
        shards, room_tokens = (
            row_shard_count(mesh),
            (warmup_rounds + 1) * (settings.lengths[-1] + 1),
        )
        for loop, live in enumerate((settings.slots, *settings.tail)):
            for context, context_end in enumerate(length_chooser.context_buckets(longest)):
                set_workload = functools.partial(
                    _set_workload,
                    live=live,
                    shards=shards,
                    first_position=context_end - room_tokens,
                )
                pilot_state = jax.jit(set_workload, out_shardings=shardings)(state)
                for length_index, length in enumerate(settings.lengths):
                    run = functools.partial(advance, force_length(length_index), pilot_state)
                    cost[length_index, loop:, context] = _time_round(
                        run, max(1, min(PILOT_ROUNDS, room_tokens // (length + 1) - 1))
                    )
        cost = _broadcast_table(cost)
        if jax.process_index() == 0:
            save_table(file, cost, "the next run times its rounds anew")
    estimate = AcceptanceEstimate(
        reached=jnp.asarray(offered_in_turn),
        accepted=jnp.asarray(accepted),
        seconds_to_lose=jnp.zeros((), jnp.float32),
    )
    return LengthChooser(acceptance=estimate, round_cost=jnp.asarray(cost))


def _set_workload(state: DecodeState, live: int, shards: int, first_position: int) -> DecodeState:
    """Limits a state to `live` rows per shard, near position `first_position`."""
    rollout = state.rollout
    numbers = jnp.arange(len(rollout.status), dtype=jnp.int32) % (len(rollout.status) // shards)
    status = jnp.where(numbers < live, rollout.status, EOS)
    skipped_tokens = jnp.maximum(first_position - rollout.prompt_lengths, 0)
    queue = state.queue
    moved_rollout = rollout.replace(
        status=status,
        prompt_lengths=rollout.prompt_lengths + skipped_tokens,
        lengths=rollout.lengths + skipped_tokens,
    )
    queue = queue.replace(waiting=queue.waiting & (numbers < live))
    return state.replace(rollout=moved_rollout, queue=queue)


def _time_round(run: Any, rounds: int) -> float:
    """Returns the seconds of a round: the time that `rounds` more of them add to a call."""

    def time_call(count: int) -> float:
        start_time = time.perf_counter()
        jax.block_until_ready(run(jnp.int32(count)))
        return time.perf_counter() - start_time

    time_call(1)  # warm-up
    # Calls have collectives, so all processes must make the same number of them.
    pair_seconds = float(
        _broadcast_table(np.asarray(time_call(1) + time_call(1 + rounds), np.float32))
    )
    pairs = [
        (time_call(1), time_call(1 + rounds))
        for _ in range(max(MIN_REPEATS, min(MAX_REPEATS, int(PILOT_SECONDS / pair_seconds))))
    ]
    # Other programs can only slow a call down, so the minimum is the best estimate.
    short_seconds, long_seconds = (min(times) for times in zip(*pairs, strict=True))
    return length_chooser.round_seconds(short_seconds, long_seconds, rounds)


# ---- by public figures


def predict_chooser(generator: Generator, weights: RolloutWeights) -> LengthChooser:
    """Loads costs of an earlier run, or predicts them.

    `weights` may be shapes only.
    """
    empty = length_chooser.init_chooser(generator.settings.lengths, generator.row_length)
    cost = _load_costs(_cost_file(generator, generator.prompt_length), empty.round_cost.shape)
    if not cost.any():
        settings = generator.settings
        cost = length_chooser.predict_costs(
            _find_devices(generator.mesh),
            weights.target,
            weights.drafter.network,
            settings.lengths,
            (settings.slots, *settings.tail),
            generator.row_length,
        )
    return empty.replace(round_cost=jnp.asarray(cost))


def _find_devices(mesh: Mesh) -> GeneratorDevices:
    """Returns the public figures of a shard's devices. Prints a remark if they are unknown."""
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
    """Timer of rounds in the first rollout.

    Forces each length for a few rounds, in each loop and context that the rollout reaches.
    """

    def __init__(self, generator: Generator, slice_rounds: int = UNBOUNDED) -> None:
        self._slice_rounds, settings = slice_rounds, generator.settings
        self._file = _cost_file(generator, generator.prompt_length)
        self._context_ends = length_chooser.context_buckets(generator.row_length)
        self._tail = settings.tail[: length_chooser.MAX_LOOPS - 1]
        shard_count = row_shard_count(generator.mesh)
        self._find_busiest = jax.jit(
            functools.partial(length_chooser.summarize_load, shards=shard_count),
            out_shardings=replicated_sharding(generator.mesh),
        )
        self._times_next = False
        """Whether the next training rollout is timed, even if it is not the first."""
        self._costs: TimedCosts | None = None
        """Costs of the rollout that is being timed, if any."""
        self._was_timed = False
        """Whether the last slice was timed."""

    def time_next_rollout(self) -> None:
        """Times the next training rollout, whatever its number."""
        # For a resumed run from another machine, where rounds had other costs.
        self._times_next = True

    def begin_rollout(
        self, advance: AdvanceRounds, weights: RolloutWeights, prompts: Prompts
    ) -> AdvanceSlice:
        """Begins a rollout. Returns the function that advances it by a slice."""
        chooser = weights.drafter.chooser
        assert chooser is not None, "lengths are chosen by costs"
        is_training = int(prompts.stream) == Stream.TRAIN
        is_timed = is_training and (int(prompts.batch) == 0 or self._times_next)
        self._costs, self._was_timed = None, False
        if not is_timed:
            return lambda decode_state: advance(weights, decode_state, np.int32(self._slice_rounds))
        saved = _load_costs(self._file, chooser.round_cost.shape)
        is_known = bool(saved.any())
        costs = TimedCosts(saved if is_known else np.asarray(chooser.round_cost), final=is_known)
        self._costs = costs
        return functools.partial(self._advance_slice, costs, advance, weights)

    def end_rollout(self) -> np.ndarray | None:
        """Saves and returns a timed rollout's costs. None if it was not timed."""
        costs, self._costs = self._costs, None
        if costs is None:
            return None
        self._times_next = False
        # The next run times nothing if there is a file, so an incomplete one is not saved.
        if costs.has_all_lengths and jax.process_index() == 0:
            save_table(self._file, costs.table, "the next run times its rounds anew")
        return costs.table

    def _advance_slice(
        self,
        costs: TimedCosts,
        advance: AdvanceRounds,
        weights: RolloutWeights,
        decode_state: DecodeState,
    ) -> DecodeState:
        cell = self._find_cell(decode_state)
        # Right after a timed slice, repeats of known costs can wait.
        can_retime = not self._was_timed
        length_index = None if cell is None else costs.next_length_index(*cell, retime=can_retime)
        self._was_timed = length_index is not None
        if cell is None or length_index is None:
            rounds = np.int32(min(self._slice_rounds, CHECK_INTERVAL))
            return advance(_with_costs(weights, costs.table), decode_state, rounds)
        seconds = []
        forced_cost = length_chooser.single_length_cost(costs.table.shape, length_index)
        forced_weights = _with_costs(weights, forced_cost)
        # The first call loads the kernels of the length, and lets its draft catch up on tokens. The
        # second and third differ by TIMED_ROUNDS, which cancels the fixed cost of a call.
        for rounds in (1, 1, 1 + TIMED_ROUNDS):
            start_time = time.perf_counter()
            decode_state = jax.block_until_ready(
                advance(forced_weights, decode_state, np.int32(rounds))
            )
            seconds.append(time.perf_counter() - start_time)
        # All processes must choose alike. Only past times decide, so sampling stays exact.
        _, short_seconds, long_seconds = _broadcast_table(np.asarray(seconds, np.float32)).tolist()
        # Times that span two cells belong to neither.
        if self._find_cell(decode_state) == cell:
            costs.add_timing((length_index, *cell), short_seconds, long_seconds, TIMED_ROUNDS)
        return decode_state

    def _find_cell(self, decode_state: DecodeState) -> tuple[int, int] | None:
        """Returns loop and context of the next rounds.

        The busiest shard decides. None if all rows have ended, or if a preempted row waits.
        """
        rollout = decode_state.rollout
        busiest_shard = self._find_busiest(
            rollout.status, rollout.lengths, rollout.prompt_lengths, decode_state.queue.waiting
        )
        rows, longest, evicted = np.asarray(busiest_shard).tolist()
        # Recomputing a preempted row would be timed as part of some round.
        if evicted or not rows:
            return None
        context = min(
            int(np.searchsorted(self._context_ends, longest)), len(self._context_ends) - 1
        )
        return sum(rows <= size for size in self._tail), context


def _with_costs(weights: RolloutWeights, cost: np.ndarray) -> RolloutWeights:
    """Replaces the costs for choosing draft lengths."""
    chooser = weights.drafter.chooser
    assert chooser is not None, "lengths are chosen by costs"
    chooser = chooser.replace(round_cost=put_like(cost, chooser.round_cost))
    return weights.replace(drafter=weights.drafter.replace(chooser=chooser))


# ---- kept for the next run


def _broadcast_table(table: np.ndarray) -> np.ndarray:
    return (
        np.array(multihost_utils.broadcast_one_to_all(table)) if jax.process_count() > 1 else table
    )


def _load_costs(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Loads the costs in process 0's file. Zeros without one."""
    return _broadcast_table(load_table(file, shape, "rounds are timed anew"))


def _cost_file(generator: Generator, prompt_length: int) -> Path:
    """Returns the cache file of a generator's costs."""
    # Rounds cost the same whatever ends a row, so end tokens are not part of the key.
    return cache_folder() / "costs" / f"{_cost_key(_without_ends(generator), prompt_length)}.json"


def _without_ends(generator: Generator) -> Generator:
    """Removes end tokens and stop strings from a generator."""
    processing = generator.settings.processing._replace(stop_ids=())
    return generator.make_variant(processing=processing, stop=None)


def _cost_key(generator: Generator, prompt_length: int) -> str:
    """Returns the cache key of a cost table."""
    settings = generator.settings
    # By name, since the repr of a function contains its address.
    rule_field = {"rule": getattr(settings.rule, "__name__", None)}
    shape = settings._replace(**rule_field, verification=settings.verification.name)
    code = read_sources(
        *("host/round_cost.py", "compiled/roofline.py", "models/*.py", "kernels/*.py"),
        *("drafts/*.py", "rollout/**/*.py", "sampling.py"),
    )
    environment = jax.__version__, describe_machine(generator.mesh), generator.compiler_options
    networks = generator.weight_layouts, generator.description
    key_parts = *environment, shape, prompt_length, *networks, code
    return hashlib.sha256(repr(key_parts).encode()).hexdigest()[:16]
