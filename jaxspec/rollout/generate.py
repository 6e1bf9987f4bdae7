"""The rollout engine: `begin` (prefill), `advance` (rounds of draft, verify, commit), `collect`.

`generate` does all of it in one program.

All three work on the rows of one shard; `generate`, `begin_sharded` and `advance_sharded` run them
on every shard of a mesh, of which those that differ in `expert` alone step together.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, Key

from jaxspec.drafts.base import Draft
from jaxspec.mesh import ROWS, of_any_expert, on_each_shard, row_shards
from jaxspec.models.decoder import Decoder
from jaxspec.models.weight_layout import shard_specs
from jaxspec.rollout import length_chooser, slots
from jaxspec.rollout.decode_state import (
    DecodeState,
    active,
    anything_unread,
    may_run_out,
    rows_of_slots,
    slot_count,
    taken,
)
from jaxspec.rollout.prefill import append_unread, prepare
from jaxspec.rollout.round import Settings, one_round
from jaxspec.state import RUNNING, Drafter, Prompts, PyTree, Rollout

Condition = Callable[[DecodeState], Bool[Array, ""]]
"""Whether a loop goes on."""


def advance(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    state: DecodeState,
    max_rounds: Int[Array, ""] | int,
    settings: Settings,
    prefilled: bool = True,
) -> DecodeState:
    """Runs up to `max_rounds` rounds, or until every row has ended.

    Slices give the same tokens as one long call. `prefilled` says whether all prompts are read.
    """
    # Without a limit, `max_rounds` is the largest number: the sum must not pass it.
    limit = state.round[0] + jnp.minimum(max_rounds, jnp.iinfo(jnp.int32).max - state.round[0])
    # A shard of few rows begins with fewer slots than its tail's first loop has.
    tail = tuple(size for size in settings.tail if size < slot_count(state))
    evicts = may_run_out(state, settings.max_new_tokens)
    loops = _loops(target, drafter, draft, settings, limit, evicts)

    def read(state: DecodeState) -> DecodeState:
        return append_unread(target, drafter, draft, state, settings)

    if not evicts and not prefilled:
        state = read(state)
    if loops.pauses is None:
        return _run(loops, loops.fill(state), tail)

    def fill_and_run(state: DecodeState) -> DecodeState:
        return _run(loops, loops.fill(read(state) if evicts else state), tail)

    with jax.named_scope("of_loops"):
        return lax.while_loop(lambda state: _unfinished(state, 0, limit), fill_and_run, state)


class _Loops(NamedTuple):
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
        unfinished = _unfinished(state, enough, self.limit)
        return unfinished if self.pauses is None else unfinished & ~self.pauses(state)


def _loops(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    settings: Settings,
    limit: Int[Array, ""],
    evicts: bool,
) -> _Loops:
    about_slots = settings.group_size, (draft.length if draft else 0) + 1, evicts

    @jax.named_scope("refill")
    def fill(state: DecodeState) -> DecodeState:
        return slots.refill(state, *about_slots)

    @jax.named_scope("refill")
    def pauses(state: DecodeState) -> Bool[Array, ""]:
        return of_any_expert(slots.must_refill(state, *about_slots)) | anything_unread(state)

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
            length = draft.length if draft else 0
            return lax.while_loop(goes_on, lambda state: one(state, length), state)
        return _rounds_of_choice(
            one,
            lambda state: _choice(drafter, state, settings, loop),
            goes_on,
            state,
            settings.lengths,
        )

    return _Loops(rounds, fill, pauses if paged else None, limit, settings.group_size)


def _unfinished(state: DecodeState, enough: int, limit: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether more than `enough` rows are left, and rounds to run them."""
    left = jnp.sum(state.rollout.status == RUNNING)
    return of_any_expert(left > enough) & (state.round[0] < limit)


def _run(loops: _Loops, state: DecodeState, tail: tuple[int, ...], loop: int = 0) -> DecodeState:
    """Runs rounds of all slots until the rows that are left fit fewer slots, then rounds of these.

    Evicted rows count as left, so that a slice which begins with one goes on in the same loop.
    """
    enough = tail[0] if tail else 0
    state = loops.rounds(state, lambda state: loops.goes_on(state, enough), loop)
    if not tail:
        return state

    def run_fewer(state: DecodeState) -> DecodeState:
        fewer, order = slots.gather(state, enough, loops.group_size)
        fewer = _run(loops, fewer, tail[1:], loop + 1)
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
    longest = of_any_expert(jnp.max(jnp.where(active(state), lengths, 0)))
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


def begin(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    prompts: Prompts,
    first_prompt: Int[Array, ""],
    key: Key[Array, ""],
    settings: Settings,
) -> DecodeState:
    """Builds the state before the first round, with all prompts read; see `prepare`."""
    state = prepare(target, drafter, draft, prompts, first_prompt, key, settings)
    return append_unread(target, drafter, draft, state, settings)


def collect(state: DecodeState) -> Rollout:
    """The rows as they stand, without caches and queue."""
    return state.rollout


def generate(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    prompts: Prompts,
    key: Key[Array, ""],
    settings: Settings,
    mesh: Mesh,
) -> Rollout:
    """Answers every prompt `group_size` times; no Python between the first token and the last.

    Every data shard leaves its loop when its own rows have ended: only within one is anything said
    between devices.
    """

    def shard(
        target: Decoder,
        drafter: Drafter,
        prompts: Prompts,
        numbers: Int[Array, " n"],
        key: Key[Array, ""],
    ) -> Rollout:
        state = prepare(target, drafter, draft, prompts, numbers[0], key, settings)
        no_limit = jnp.iinfo(jnp.int32).max
        return collect(advance(target, drafter, draft, state, no_limit, settings, prefilled=False))

    inputs, numbers = _begin_inputs(mesh, (target, drafter), prompts)
    return on_each_shard(mesh, shard, inputs, P(ROWS))(target, drafter, prompts, numbers, key)


def begin_sharded(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    prompts: Prompts,
    key: Key[Array, ""],
    settings: Settings,
    mesh: Mesh,
) -> DecodeState:
    """`begin` on every shard of `mesh`."""

    def shard(
        target: Decoder,
        drafter: Drafter,
        prompts: Prompts,
        numbers: Int[Array, " n"],
        key: Key[Array, ""],
    ) -> DecodeState:
        return begin(target, drafter, draft, prompts, numbers[0], key, settings)

    inputs, numbers = _begin_inputs(mesh, (target, drafter), prompts)
    shards = row_shards(mesh)

    def of_a_shard(leaf: Array) -> Any:
        return (
            jax.ShapeDtypeStruct((leaf.shape[0] // shards, *leaf.shape[1:]), leaf.dtype)
            if leaf.ndim
            else leaf
        )

    # How each part is split depends on its shape, which what runs on one shard says.
    state = jax.eval_shape(
        shard, target, drafter, *jax.tree.map(of_a_shard, (prompts, numbers)), key
    )
    return on_each_shard(mesh, shard, inputs, _state_specs(state))(
        target, drafter, prompts, numbers, key
    )


def advance_sharded(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    state: DecodeState,
    max_rounds: Int[Array, ""],
    settings: Settings,
    mesh: Mesh,
) -> DecodeState:
    """`advance` on every shard of `mesh`."""

    def shard(
        target: Decoder, drafter: Drafter, state: DecodeState, max_rounds: Int[Array, ""]
    ) -> DecodeState:
        return advance(target, drafter, draft, state, max_rounds, settings)

    specs, networks = _state_specs(state), shard_specs(mesh, (target, drafter))
    return on_each_shard(mesh, shard, (*networks, specs, P()), specs)(
        target, drafter, state, max_rounds
    )


def _begin_inputs(mesh: Mesh, networks: PyTree, prompts: Prompts) -> tuple[Any, Array]:
    by_row = jax.tree.map(lambda leaf: P(ROWS) if leaf.ndim else P(), prompts)
    # Of the prompts' numbers, split like them, a shard gets its own first: a row's key holds its
    # number in the whole batch, so that tokens do not depend on the mesh.
    numbers = jnp.arange(prompts.tokens.shape[0], dtype=jnp.int32)
    return (*shard_specs(mesh, networks), by_row, P(ROWS), P()), numbers


def _state_specs(state: DecodeState) -> PyTree:
    """Rows (or pages) stand second in the caches of layers that are stacked, first everywhere
    else."""
    return jax.tree.map(lambda leaf: P(None, ROWS) if leaf.ndim == 5 else P(ROWS), state)
