"""Loops of rounds.

There is a loop over all slots, and smaller loops for the last rows (the tail). If rounds choose
their draft length, each loop has one inner loop per length.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxspec.drafts.base import Draft
from jaxspec.mesh import max_over_experts, sum_over_experts
from jaxspec.models.decoder import Decoder
from jaxspec.rollout import slots
from jaxspec.rollout.decode_state import (
    DecodeState,
    active_slots,
    gather_rows,
    has_unread_text,
    rows_of_slots,
)
from jaxspec.rollout.feedback import cost_table, length_chooser
from jaxspec.rollout.round import run_round
from jaxspec.rollout.settings import Settings
from jaxspec.state import RUNNING, Drafter

Condition = Callable[[DecodeState], Bool[Array, ""]]
"""Returns whether a loop continues."""
Body = Callable[[DecodeState], DecodeState]
"""Returns the state after one iteration of a loop."""


class Loops(NamedTuple):
    """Functions and limits of the loops."""

    run_rounds: Callable[[DecodeState, Condition, int], DecodeState]
    """(state, condition, loop index) -> state after rounds while the condition holds."""
    fill_slots: Callable[[DecodeState], DecodeState]
    """Gives slots and pages to rows."""
    should_continue: Callable[[DecodeState, int], Bool[Array, ""]]
    """(state, row threshold) -> whether to run another round.

    More rows than the threshold must be unfinished.

    With pages, rounds also stop for `fill_slots` and to read text.
    """
    repeat: Callable[[Condition, Body, DecodeState], DecodeState]
    """(condition, body, state) -> state after running the body while the condition holds.

    Contiguous caches need a single run, since nothing stops their rounds early.
    """
    group_size: int


def build_loops(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    settings: Settings,
    round_limit: Int[Array, ""],
    may_evict: bool,
) -> Loops:
    """Builds the loops up to round `round_limit`.

    `may_evict` says whether pages can run out.
    """
    # Pages are reserved for the longest block, since the next length is not known yet.
    refill_arguments = settings.group_size, draft.max_length + 1, may_evict

    @jax.named_scope("refill")
    def fill_slots(state: DecodeState) -> DecodeState:
        return slots.refill_slots(state, *refill_arguments)

    @jax.named_scope("refill")
    def needs_pause(state: DecodeState) -> Bool[Array, ""]:
        # Expert members run in lockstep, so all pause if one must.
        return max_over_experts(slots.needs_refill(state, *refill_arguments)) | has_unread_text(
            state
        )

    @jax.named_scope("refill")
    def retire_and_reserve(state: DecodeState) -> DecodeState:
        return slots.retire_rows_and_reserve_pages(state, *refill_arguments)

    # With pages, slots are filled between loops of rounds, so that the body of a round is compiled
    # without the loops of `refill_slots`. Slots with contiguous caches are filled in each round,
    # since a pause would make the tail copy the caches.
    is_paged = settings.page_size > 0
    after_round = retire_and_reserve if is_paged else fill_slots

    run_rounds = _build_rounds(target, drafter, draft, settings, after_round)

    def has_rows(state: DecodeState, row_threshold: int) -> Bool[Array, ""]:
        return has_unfinished_rows(state, row_threshold, round_limit)

    def has_rows_without_pause(state: DecodeState, row_threshold: int) -> Bool[Array, ""]:
        return has_rows(state, row_threshold) & ~needs_pause(state)

    if is_paged:
        return Loops(
            run_rounds, fill_slots, has_rows_without_pause, _repeat_body, settings.group_size
        )
    return Loops(run_rounds, fill_slots, has_rows, _run_body_once, settings.group_size)


def _build_rounds(
    target: Decoder, drafter: Drafter, draft: Draft, settings: Settings, after_round: Body
) -> Callable[[DecodeState, Condition, int], DecodeState]:
    """Builds `Loops.run_rounds`. `after_round` runs after each round."""

    def run_one_round(state: DecodeState, length: int) -> DecodeState:
        return after_round(run_round(target, drafter, draft, state, settings, length))

    lengths = length_chooser.lengths_of_rounds(drafter.chooser, settings.lengths, draft.max_length)

    # `compiled/counts.py` finds the loop by its scope.
    @jax.named_scope("rounds")
    def run_rounds(state: DecodeState, should_continue: Condition, loop: int) -> DecodeState:
        match lengths:
            case length_chooser.FixedLength(length):
                return lax.while_loop(
                    should_continue, lambda state: run_one_round(state, length), state
                )
            case length_chooser.ChosenLengths() as chosen:
                return _run_chosen_lengths(
                    run_one_round,
                    lambda state: _choose_next_length(chosen, state, loop, settings.max_new_tokens),
                    should_continue,
                    state,
                    chosen.lengths,
                )

    return run_rounds


@jax.named_scope("of_loops")
def _repeat_body(condition: Condition, body: Body, state: DecodeState) -> DecodeState:
    """Runs a body while the condition holds."""
    return lax.while_loop(condition, body, state)


def _run_body_once(condition: Condition, body: Body, state: DecodeState) -> DecodeState:
    """Runs the body once, since nothing stops it before its end."""
    return body(state)


def has_unfinished_rows(
    state: DecodeState, row_threshold: int, round_limit: Int[Array, ""]
) -> Bool[Array, ""]:
    """Returns whether more than `row_threshold` rows and some rounds are left."""
    # Evicted rows count too, so that a slice that starts with one stays in the same loop.
    running_count = jnp.sum(state.rollout.status == RUNNING)
    return max_over_experts(running_count > row_threshold) & (state.round[0] < round_limit)


def run_loops(
    loops: Loops, state: DecodeState, tail: tuple[int, ...], loop: int = 0
) -> DecodeState:
    """Runs rounds of all slots, then of the tail's fewer slots.

    Each loop ends once the unfinished rows fit the slots of the next one.
    """
    row_threshold = tail[0] if tail else 0
    state = loops.run_rounds(state, lambda state: loops.should_continue(state, row_threshold), loop)
    if not tail:
        return state

    def run_compact(state: DecodeState) -> DecodeState:
        compact, order = slots.gather_slots(state, row_threshold, loops.group_size)
        compact = run_loops(loops, compact, tail[1:], loop + 1)
        return slots.scatter_slots(state, compact, order, loops.group_size)

    with jax.named_scope("tail"):
        # If slots must be refilled first, `run_compact` is skipped and no rows move.
        return loops.repeat(lambda state: loops.should_continue(state, 0), run_compact, state)


def _run_chosen_lengths(
    run_one_round: Callable[[DecodeState, int], DecodeState],
    choose_length: Callable[[DecodeState], length_chooser.LengthChoice],
    should_continue: Condition,
    state: DecodeState,
    lengths: tuple[int, ...],
) -> DecodeState:
    """Runs rounds, and chooses the draft length before each."""

    def add_choice(state: DecodeState) -> tuple[DecodeState, length_chooser.LengthChoice]:
        return state, choose_length(state)

    def run_and_choose(
        loop_state: tuple[DecodeState, length_chooser.LengthChoice], length: int
    ) -> tuple[DecodeState, length_chooser.LengthChoice]:
        state, choice = loop_state
        acceptance = state.acceptance.replace(seconds_to_lose=choice.seconds_to_lose[None])
        return add_choice(run_one_round(state.replace(acceptance=acceptance), length))

    # Each length has an inner loop of its rounds. A `switch` over lengths would copy the caches.
    def run_each_length(
        loop_state: tuple[DecodeState, length_chooser.LengthChoice],
    ) -> tuple[DecodeState, length_chooser.LengthChoice]:
        for length_index, length in enumerate(lengths):
            loop_state = lax.while_loop(
                lambda loop_state, length_index=length_index: (
                    (loop_state[1].length_index == length_index) & should_continue(loop_state[0])
                ),
                lambda loop_state, length=length: run_and_choose(loop_state, length),
                loop_state,
            )
        return loop_state

    initial = add_choice(state)
    with jax.named_scope("of_loops"):
        return lax.while_loop(
            lambda loop_state: should_continue(loop_state[0]), run_each_length, initial
        )[0]


def _choose_next_length(
    chosen: length_chooser.ChosenLengths, state: DecodeState, loop: int, max_new_tokens: int
) -> length_chooser.LengthChoice:
    """Returns the draft length of the next round."""
    round_cost = chosen.chooser.round_cost
    lengths = gather_rows(state.rollout.lengths, rows_of_slots(state))
    # Attention reads the caches of all slots up to the longest row. Expert members must agree on
    # the length.
    longest = max_over_experts(jnp.max(jnp.where(active_slots(state), lengths, 0)))
    context_index = cost_table.find_context_index(longest, state.rollout.tokens.shape[1])
    # The table has a limited number of loops. Later ones cost as much as its last.
    cost = round_cost[:, min(loop, round_cost.shape[1] - 1), context_index]
    rollout = state.rollout
    work = _remaining_work(
        rollout.status == RUNNING,
        state.queue.waiting,
        max_new_tokens - (rollout.lengths - rollout.prompt_lengths),
    )
    acceptance = jax.tree.map(lambda leaf: leaf[0], state.acceptance)
    return length_chooser.choose_length(acceptance, cost, chosen.lengths, work)


def _remaining_work(
    running: Bool[Array, " R"], waiting: Bool[Array, " R"], tokens: Int[Array, " R"]
) -> length_chooser.RemainingWork:
    """Returns how many rows end together, and the tokens left to them.

    Args:
      running: whether each row has not ended.
      waiting: whether each row waits for a slot.
      tokens: tokens that each row may still generate.
    """
    # Expert members run in lockstep, so their rows end together.
    has_waiting = max_over_experts(jnp.any(running & waiting))
    row_count = sum_over_experts(jnp.sum(running, dtype=jnp.int32))
    most_tokens = max_over_experts(jnp.max(jnp.where(running, tokens, 0)))
    return length_chooser.RemainingWork(jnp.where(has_waiting, 1, row_count), most_tokens)
