"""Loops of rounds: of all slots, of ever fewer for the last rows, and of every draft length."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxspec.drafts.base import Draft
from jaxspec.mesh import max_over_experts
from jaxspec.models.decoder import Decoder
from jaxspec.rollout import slots
from jaxspec.rollout.decode_state import (
    DecodeState,
    active,
    anything_unread,
    rows_of_slots,
    taken,
)
from jaxspec.rollout.feedback import length_chooser
from jaxspec.rollout.round import one_round
from jaxspec.rollout.settings import Settings
from jaxspec.state import RUNNING, Drafter

Condition = Callable[[DecodeState], Bool[Array, ""]]
"""Whether a loop goes on."""


class Loops(NamedTuple):
    """What the loops of rounds consist of."""

    rounds: Callable[[DecodeState, Condition, int], DecodeState]
    """Runs rounds while the condition holds, in the loop of that number."""
    fill: Callable[[DecodeState], DecodeState]
    """Gives slots and pages to rows."""
    pauses: Condition | None
    """Whether rounds end for `fill`, or for a row to be read. None: each round fills the slots."""
    limit: Int[Array, ""]
    group_size: int

    def goes_on(self, state: DecodeState, enough: int) -> Bool[Array, ""]:
        """Whether another round is run of more than `enough` rows."""
        goes_on = unfinished(state, enough, self.limit)
        return goes_on if self.pauses is None else goes_on & ~self.pauses(state)


def build_loops(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    settings: Settings,
    limit: Int[Array, ""],
    evicts: bool,
) -> Loops:
    """Builds the loops up to the round `limit`; `evicts` says whether pages can run out."""
    about_slots = settings.group_size, (draft.max_length if draft else 0) + 1, evicts

    @jax.named_scope("refill")
    def fill(state: DecodeState) -> DecodeState:
        return slots.refill(state, *about_slots)

    @jax.named_scope("refill")
    def pauses(state: DecodeState) -> Bool[Array, ""]:
        return max_over_experts(slots.must_refill(state, *about_slots)) | anything_unread(state)

    @jax.named_scope("refill")
    def go_on(state: DecodeState) -> DecodeState:
        return slots.go_on(state, *about_slots)

    # Rows that wait for pages are seated between loops: a round has no loop of its own, and no
    # body is compiled with it. Contiguous caches are seated by rounds, since a tail copies them.
    paged = settings.page_size > 0
    after_round = go_on if paged else fill

    def one(state: DecodeState, length: int) -> DecodeState:
        return after_round(one_round(target, drafter, draft, state, settings, length))

    # `compiled/counts.py` finds the loop by its scope
    @jax.named_scope("rounds")
    def rounds(state: DecodeState, goes_on: Condition, loop: int) -> DecodeState:
        if not settings.lengths:
            length = draft.max_length if draft else 0
            return lax.while_loop(goes_on, lambda state: one(state, length), state)
        return _rounds_of_choice(
            one,
            lambda state: _choice(drafter, state, settings, loop),
            goes_on,
            state,
            settings.lengths,
        )

    return Loops(rounds, fill, pauses if paged else None, limit, settings.group_size)


def unfinished(state: DecodeState, enough: int, limit: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether more than `enough` rows are left, and rounds to run them."""
    left = jnp.sum(state.rollout.status == RUNNING)
    return max_over_experts(left > enough) & (state.round[0] < limit)


def run_loops(
    loops: Loops, state: DecodeState, tail: tuple[int, ...], loop: int = 0
) -> DecodeState:
    """Runs rounds of all slots until the rows that are left fit fewer slots, then rounds of these.

    Evicted rows count as left, so that a slice which begins with one goes on in the same loop.
    """
    enough = tail[0] if tail else 0
    state = loops.rounds(state, lambda state: loops.goes_on(state, enough), loop)
    if not tail:
        return state

    def run_fewer(state: DecodeState) -> DecodeState:
        fewer, order = slots.gather(state, enough, loops.group_size)
        fewer = run_loops(loops, fewer, tail[1:], loop + 1)
        return slots.scatter(state, fewer, order, loops.group_size)

    with jax.named_scope("tail"):
        if loops.pauses is None:
            return run_fewer(state)
        # nothing is moved where all slots must be refilled first
        with jax.named_scope("of_loops"):
            return lax.while_loop(lambda state: loops.goes_on(state, 0), run_fewer, state)


def _rounds_of_choice(
    one: Callable[[DecodeState, int], DecodeState],
    choose: Callable[[DecodeState], length_chooser.Choice],
    unfinished: Condition,
    state: DecodeState,
    lengths: tuple[int, ...],
) -> DecodeState:
    """Rounds whose length is chosen before each. The outer loop runs one inner loop for every
    length, because a `switch` over lengths would copy the caches."""

    def with_choice(state: DecodeState) -> tuple[DecodeState, length_chooser.Choice]:
        return state, choose(state)

    def run_and_choose(
        carry: tuple[DecodeState, length_chooser.Choice], length: int
    ) -> tuple[DecodeState, length_chooser.Choice]:
        state, choice = carry
        acceptance = state.acceptance.replace(seconds_to_lose=choice.seconds_to_lose[None])
        return with_choice(one(state.replace(acceptance=acceptance), length))

    def every_length(
        carry: tuple[DecodeState, length_chooser.Choice],
    ) -> tuple[DecodeState, length_chooser.Choice]:
        for place, length in enumerate(lengths):
            carry = lax.while_loop(
                lambda carry, place=place: (carry[1].place == place) & unfinished(carry[0]),
                lambda carry, length=length: run_and_choose(carry, length),
                carry,
            )
        return carry

    start = with_choice(state)
    with jax.named_scope("of_loops"):
        return lax.while_loop(lambda carry: unfinished(carry[0]), every_length, start)[0]


def _choice(
    drafter: Drafter, state: DecodeState, settings: Settings, loop: int
) -> length_chooser.Choice:
    """The length of the next round."""
    assert drafter.chooser is not None, "lengths are chosen by a cost table"
    lengths = taken(state.rollout.lengths, rows_of_slots(state))
    # Attention reads the caches of all slots as far as the longest row has come.
    longest = max_over_experts(jnp.max(jnp.where(active(state), lengths, 0)))
    ends = length_chooser.contexts(state.rollout.tokens.shape[1])
    context = jnp.minimum(
        jnp.sum(jnp.asarray(ends, jnp.int32) < longest, dtype=jnp.int32),
        drafter.chooser.round_cost.shape[2] - 1,
    )
    # Costs are measured for so many loops of the tail; what comes after is as the last of them.
    cost = drafter.chooser.round_cost[
        :, min(loop, drafter.chooser.round_cost.shape[1] - 1), context
    ]
    return length_chooser.choose(
        jax.tree.map(lambda leaf: leaf[0], state.acceptance), cost, settings.lengths
    )
