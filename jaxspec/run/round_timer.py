"""Timer of rounds in the first rollout of a run, or the first on another machine."""

import functools
import time
from collections.abc import Callable

import jax
import numpy as np

from jaxspec.host.programs import ALL_ROUNDS, put_like
from jaxspec.host.round_cost import cost_file, load_costs
from jaxspec.inputs.streams import Stream
from jaxspec.mesh import replicated_sharding, row_shard_count
from jaxspec.processes.process_0 import broadcast_table
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.feedback import cost_table
from jaxspec.rollout.feedback.cost_table import TimedCosts
from jaxspec.rollout.generator import Generator
from jaxspec.state import (
    LengthChooser,
    Prompts,
    RolloutWeights,
)
from jaxspec.storage.tables import save_table

AdvanceRounds = Callable[[RolloutWeights, DecodeState, np.int32], DecodeState]
"""Runs the given number of rounds. Donates the decode state."""
AdvanceSlice = Callable[[DecodeState], DecodeState]
"""Runs the rounds of one slice."""
TIMED_ROUNDS = 4
"""Rounds that are timed for a length. With those around them, its three calls make 7 rounds."""
CHECK_INTERVAL = 64
"""Maximum rounds of the first rollout between two checks for costs that were not timed yet."""


class RoundTimer:
    """Timer of rounds in the first rollout.

    Forces each length for a few rounds, in each loop and context that the rollout reaches.
    """

    def __init__(self, generator: Generator, slice_rounds: int = ALL_ROUNDS) -> None:
        self._slice_rounds, settings = slice_rounds, generator.settings
        self._file = cost_file(generator, generator.prompt_length)
        self._max_length = generator.row_length
        self._tail = settings.tail[: cost_table.MAX_LOOPS - 1]
        shard_count = row_shard_count(generator.mesh)
        self._summarize_load = jax.jit(
            functools.partial(cost_table.summarize_load, shards=shard_count),
            out_shardings=replicated_sharding(generator.mesh),
        )
        self._times_next = False
        """Whether the next training rollout is timed, even if it is not the first."""
        self._costs: TimedCosts | None = None
        """Costs of the rollout that is being timed, if any."""
        self._was_timed = False
        """Whether the last slice was timed."""

    def request_timing(self) -> None:
        """Requests that the next training rollout is timed, even if it is not the first."""
        # For a run that is resumed on another machine, where rounds have other costs.
        self._times_next = True

    def prepare_rollout(
        self, advance: AdvanceRounds, weights: RolloutWeights, prompts: Prompts
    ) -> AdvanceSlice:
        """Returns the function that advances a rollout by a slice, and times it if it is due."""
        chooser = weights.drafter.chooser
        assert isinstance(chooser, LengthChooser), "lengths are chosen by costs"
        is_training = int(prompts.stream) == Stream.TRAIN
        is_timed = is_training and (int(prompts.batch) == 0 or self._times_next)
        self._costs, self._was_timed = None, False
        if not is_timed:
            return lambda decode_state: advance(weights, decode_state, np.int32(self._slice_rounds))
        saved = load_costs(self._file, chooser.round_cost.shape)
        is_known = bool(saved.any())
        costs = TimedCosts(saved if is_known else np.asarray(chooser.round_cost), final=is_known)
        self._costs = costs
        return functools.partial(self._advance_slice, costs, advance, weights)

    def finish_rollout(self) -> np.ndarray | None:
        """Returns the costs of a rollout that was timed, or None.

        Saves costs if all lengths were timed.
        """
        costs, self._costs = self._costs, None
        if costs is None:
            return None
        self._times_next = False
        # The next run times nothing if there is a file, so incomplete costs are not saved.
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
        forced_cost = cost_table.single_length_cost(costs.table.shape, length_index)
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
        _, short_seconds, long_seconds = broadcast_table(np.asarray(seconds, np.float32)).tolist()
        # Times that span two cells belong to neither.
        if self._find_cell(decode_state) == cell:
            costs.add_timing((length_index, *cell), short_seconds, long_seconds, TIMED_ROUNDS)
        return decode_state

    def _find_cell(self, decode_state: DecodeState) -> tuple[int, int] | None:
        """Returns loop and context of the next rounds.

        The busiest shard decides. Returns None if all rows have ended, or an evicted row waits.
        """
        rollout = decode_state.rollout
        load = self._summarize_load(
            rollout.status, rollout.lengths, rollout.prompt_lengths, decode_state.queue.waiting
        )
        rows, longest, evicted = np.asarray(load).tolist()
        # Recomputing an evicted row would be timed as part of some round.
        if evicted or not rows:
            return None
        context = cost_table.find_context_index(longest, self._max_length)
        return sum(rows <= size for size in self._tail), context


def _with_costs(weights: RolloutWeights, cost: np.ndarray) -> RolloutWeights:
    """Returns weights with other costs for choosing draft lengths."""
    chooser = weights.drafter.chooser
    assert isinstance(chooser, LengthChooser), "lengths are chosen by costs"
    chooser = chooser.replace(round_cost=put_like(cost, chooser.round_cost))
    return weights.replace(drafter=weights.drafter.replace(chooser=chooser))
