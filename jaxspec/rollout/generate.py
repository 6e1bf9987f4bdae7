"""The rollout engine: `begin` (prefill), `advance` (rounds of draft, verify, commit), `collect`;
`generate` composes them.

All three work on the rows of one `data` shard; `generate`, `begin_sharded` and `advance_sharded`
run them on every shard of a mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, Key

from jaxspec import sampling
from jaxspec.config.check import smallest_pool, whole_pool
from jaxspec.drafts.base import Draft
from jaxspec.mesh import DATA
from jaxspec.models import kv
from jaxspec.models.decoder import Decoder
from jaxspec.rollout import acceptance, length_chooser, slots
from jaxspec.rollout.pages import grow, no_pages
from jaxspec.rollout.recompute import recomputed
from jaxspec.rollout.round import Settings, by_matching, features, one_round
from jaxspec.rollout.slots import Caches, DecodeState, Paged, Prefilled, Queue
from jaxspec.state import IDLE, RUNNING, AcceptanceEstimate, Drafter, Prompts, PyTree, Rollout

PREFILL_TOKENS = 2**14
"""Prompt tokens that are read together."""

Condition = Callable[[DecodeState], Bool[Array, ""]]
"""Whether a loop goes on."""


def begin(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    prompts: Prompts,
    first_prompt: Int[Array, ""],
    key: Key[Array, ""],
    settings: Settings,
) -> DecodeState:
    """Prefills each prompt once, for all rows of its group.

    Args:
      target: the policy in the rollout layout.
      drafter: the draft's weights and temperatures.
      draft: None is plain decoding.
      prompts: those of this shard.
      first_prompt: number of this shard's first prompt among all prompts of the call.
      key: of the call; rows fold in their global number, so results do not depend on the mesh.
      settings: see `Settings`.
    """
    count, width = prompts.tokens.shape
    group, length = settings.group_size, draft.length if draft else 0
    size = width + settings.max_new_tokens
    longest = size + length  # headroom: a block may reach K positions beyond the last token kept
    with jax.named_scope("prefill"):
        prefilled = _prefill(target, drafter, draft, prompts)
    numbers = (first_prompt + jnp.arange(count, dtype=jnp.int32))[:, None] * group + jnp.arange(
        group, dtype=jnp.int32
    )
    lengths = jnp.repeat(prompts.lengths, group)
    inside = jnp.arange(width, dtype=jnp.int32) < prompts.lengths[:, None]
    tokens = jnp.pad(jnp.where(inside, prompts.tokens, 0), ((0, 0), (0, settings.max_new_tokens)))
    wide = np.promote_types(target.embedding[...].dtype, np.float32)
    rollout = Rollout(
        tokens=jnp.repeat(tokens, group, axis=0),
        prompt_lengths=lengths,
        lengths=lengths,
        logprobs=jnp.zeros((count * group, size), wide),
        status=jnp.where(jnp.repeat(prompts.live, group), RUNNING, IDLE).astype(jnp.int32),
        version=jnp.zeros_like(lengths),
        statistics=acceptance.no_statistics(count * group, group, length, len(settings.grid), wide),
    )
    keys = sampling.row_keys(
        key,
        numbers.reshape(-1),
        sampling.TARGET if by_matching(draft, settings) else sampling.ROUND,
    )
    chosen = min(settings.slots or count * group, count * group)
    if chosen < count * group or settings.page_size:
        state = _with_queue(rollout, keys, prefilled, prompts, chosen, longest, settings)
        return state.replace(acceptance=_estimate(drafter, settings))
    assert prefilled.caches is not None, "prompts are read into caches of their own"
    return DecodeState(
        rollout=rollout,
        row=None,
        keys=keys,
        caches=prefilled.caches.map(
            lambda cache: kv.rows_of(cache, group, longest, settings.chunk)
        ),
        draft=jax.tree.map(lambda leaf: jnp.repeat(leaf, group, axis=0), prefilled.draft),
        round=jnp.zeros((1,), jnp.int32),
        queue=None,
        paged=None,
        acceptance=_estimate(drafter, settings),
    )


def _with_queue(
    rollout: Rollout,
    keys: Key[Array, " R"],
    prefilled: Prefilled,
    prompts: Prompts,
    chosen: int,
    longest: int,
    settings: Settings,
) -> DecodeState:
    """An engine of `chosen` empty slots, for which all rows wait."""
    count, rows, size = len(prompts.tokens), len(keys), settings.page_size
    read, paged = prefilled.caches, None
    assert read is not None, "prompts are read into caches of their own"
    if not size:
        caches = read.map(lambda cache: kv.empty_rows(cache, chosen, longest, settings.chunk))
    else:
        width = prompts.tokens.shape[1]
        of_row, of_prompt = -(-longest // size), -(-width // size)
        number = settings.pages or whole_pool(count, width, longest - width, 0, size, chosen)
        least = smallest_pool(count, width, longest - width, 0, size)
        if number < least:
            raise ValueError(
                f"{number} pages of {size} positions for {count} prompts and rows of {longest};"
                f" {least} are the fewest"
            )
        wanted = jnp.where(prompts.live, (prompts.lengths - 1) // size + 1, 0)
        pages = grow(no_pages(number, chosen + count, of_row), jnp.pad(wanted, (chosen, 0)))
        table = pages.table[chosen:, :of_prompt]
        caches = read.map(
            lambda cache: kv.put_prompts(kv.empty_pages(cache, number, size), table, cache)
        )
        prefilled = prefilled.replace(caches=None)
        nothing = jnp.zeros((chosen,), jnp.int32)
        paged = Paged(pages=pages, admitted=nothing)
    return DecodeState(
        rollout=rollout,
        row=jnp.full((chosen,), rows, jnp.int32),
        keys=keys,
        caches=caches,
        draft=jax.tree.map(
            lambda leaf: jnp.zeros((chosen, *leaf.shape[1:]), leaf.dtype), prefilled.draft
        ),
        round=jnp.zeros((1,), jnp.int32),
        queue=Queue(
            waiting=rollout.status == RUNNING,
            order=jnp.arange(rows, dtype=jnp.int32),
            prompts=prefilled,
        ),
        paged=paged,
        acceptance=None,
    )


def _estimate(drafter: Drafter, settings: Settings) -> AcceptanceEstimate | None:
    if not settings.lengths:
        return None
    assert drafter.chooser is not None, "lengths are chosen by an estimate"
    return jax.tree.map(lambda leaf: leaf[None], drafter.chooser.acceptance)


def _prefill(target: Decoder, drafter: Drafter, draft: Draft | None, prompts: Prompts) -> Prefilled:
    """What target and draft keep of every prompt; some prompts at a time, so that memory does not
    grow with their number."""
    count, width = prompts.tokens.shape

    def read(prompts: Prompts) -> Prefilled:
        rows = len(prompts.tokens)
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
        forward = target(
            prompts.tokens,
            positions,
            target.empty_cache(rows, width),
            taps=draft.taps if draft else (),
        )
        assert forward.cache is not None, "a cache that goes in comes back"
        draft_state, cache = None, None
        if draft is not None:
            empty = draft.empty_cache(drafter.network, rows, width)
            draft_state, cache = draft.prefill(
                drafter.network, target, prompts, features(forward), empty
            )
        return Prefilled(
            caches=Caches(target=forward.cache, draft=cache),
            draft=draft_state,
            history=prompts.history,
            history_lengths=prompts.history_lengths,
        )

    some = max(1, PREFILL_TOKENS // width)
    if count <= some:
        return read(prompts)

    def numbered(rows: Int[Array, " n"]) -> Prefilled:
        return read(jax.tree.map(lambda leaf: leaf[rows] if leaf.ndim else leaf, prompts))

    def join(leaf: Array) -> Array:
        axis = int(leaf.ndim == 6)  # layers that are stacked come before prompts
        joined = jnp.moveaxis(leaf, 0, axis)
        shape = *joined.shape[:axis], turns * some, *joined.shape[axis + 2 :]
        return lax.slice_in_dim(joined.reshape(shape), 0, count, axis=axis)

    turns = -(-count // some)
    numbers = jnp.minimum(jnp.arange(turns * some, dtype=jnp.int32), count - 1)
    return jax.tree.map(join, lax.map(numbered, numbers.reshape(turns, some)))


def advance(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    state: DecodeState,
    max_rounds: Int[Array, ""] | int,
    settings: Settings,
) -> DecodeState:
    """Runs up to `max_rounds` rounds, or until every row has ended; slices give the same tokens as
    one long call."""
    limit = state.round[0] + jnp.minimum(max_rounds, jnp.iinfo(jnp.int32).max - state.round[0])
    tail = tuple(size for size in settings.tail if size < slots.slot_count(state))
    evicts = slots.may_run_out(state, settings.max_new_tokens)

    def one(state: DecodeState, length: int) -> DecodeState:
        state = seated(target, drafter, draft, state, settings, evicts)
        return one_round(target, drafter, draft, state, settings, length)

    def rounds(state: DecodeState, unfinished: Condition, loop: int) -> DecodeState:
        if not settings.lengths:
            length = draft.length if draft else 0
            return lax.while_loop(unfinished, lambda state: one(state, length), state)
        return _rounds_of_choice(
            one,
            lambda state: _choice(drafter, state, settings, loop),
            unfinished,
            state,
            settings.lengths,
        )

    return _run(rounds, state, limit, tail, settings.group_size)


def seated(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    state: DecodeState,
    settings: Settings,
    evicts: bool,
) -> DecodeState:
    """What a round starts from: as many rows in slots as fit, with all that they need.

    `evicts` says whether a row can lose its pages; recompute is compiled only where one can.
    """
    block = (draft.length if draft else 0) + 1
    with jax.named_scope("refill"):
        filled = slots.refill(state, settings.group_size, block)
        if not evicts:
            return filled
        return recomputed(target, drafter, draft, state, filled, settings.group_size)


def _run(
    rounds: Callable[[DecodeState, Condition, int], DecodeState],
    state: DecodeState,
    limit: Int[Array, ""],
    tail: tuple[int, ...],
    group_size: int,
    loop: int = 0,
) -> DecodeState:
    """Rounds of all slots until the rows that are left fit the next smaller number, then rounds of
    that many.

    Rows are left whether they sit in a slot or wait, evicted, for pages: a slice that begins with
    one waiting goes on in the same loop.
    """
    enough = tail[0] if tail else 0

    def unfinished(state: DecodeState) -> Bool[Array, ""]:
        left = jnp.sum(state.rollout.status == RUNNING)
        return (left > enough) & (state.round[0] < limit)

    state = rounds(state, unfinished, loop)
    if not tail:
        return state
    with jax.named_scope("tail"):
        fewer, order = slots.gather(state, enough, group_size)
        fewer = _run(rounds, fewer, limit, tail[1:], group_size, loop + 1)
        return slots.scatter(state, fewer, order, group_size)


def _rounds_of_choice(
    one: Callable[[DecodeState, int], DecodeState],
    choose: Callable[[DecodeState], length_chooser.Choice],
    unfinished: Condition,
    state: DecodeState,
    lengths: tuple[int, ...],
) -> DecodeState:
    """Rounds of the length that is chosen before each: a loop for every length inside of one, since
    a `switch` would copy the caches."""

    def chosen(state: DecodeState) -> tuple[DecodeState, length_chooser.Choice]:
        return state, choose(state)

    def made(
        carry: tuple[DecodeState, length_chooser.Choice], length: int
    ) -> tuple[DecodeState, length_chooser.Choice]:
        state, choice = carry
        assert state.acceptance is not None, "lengths are chosen by an estimate"
        return chosen(
            one(
                state.replace(
                    acceptance=state.acceptance.replace(
                        seconds_to_lose=choice.seconds_to_lose[None]
                    )
                ),
                length,
            )
        )

    def in_turn(
        carry: tuple[DecodeState, length_chooser.Choice],
    ) -> tuple[DecodeState, length_chooser.Choice]:
        for place, length in enumerate(lengths):
            carry = lax.while_loop(
                lambda carry, place=place: (carry[1].place == place) & unfinished(carry[0]),
                lambda carry, length=length: made(carry, length),
                carry,
            )
        return carry

    return lax.while_loop(lambda carry: unfinished(carry[0]), in_turn, chosen(state))[0]


def _choice(
    drafter: Drafter, state: DecodeState, settings: Settings, loop: int
) -> length_chooser.Choice:
    """The length of the next round."""
    assert drafter.chooser is not None, "lengths are chosen by a cost table"
    assert state.acceptance is not None, "lengths are chosen by an estimate"
    lengths = slots.taken(state.rollout.lengths, state.row)
    longest = jnp.max(jnp.where(slots.active(state), lengths, 0))
    ends = length_chooser.contexts(state.rollout.tokens.shape[1])
    context = jnp.minimum(
        jnp.searchsorted(jnp.asarray(ends, jnp.int32), longest),
        drafter.chooser.round_cost.shape[2] - 1,
    )
    cost = drafter.chooser.round_cost[
        :, min(loop, drafter.chooser.round_cost.shape[1] - 1), context
    ]
    return length_chooser.choose(
        jax.tree.map(lambda leaf: leaf[0], state.acceptance), cost, settings.lengths
    )


def collect(state: DecodeState) -> Rollout:
    """The rows as they stand, without the engine's caches."""
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

    Rows are sharded over `data`; every shard leaves its loop when its own rows have ended, and only
    `tensor` peers communicate.
    """

    def shard(
        target: Decoder,
        drafter: Drafter,
        prompts: Prompts,
        numbers: Int[Array, " n"],
        key: Key[Array, ""],
    ) -> Rollout:
        state = begin(target, drafter, draft, prompts, numbers[0], key, settings)
        return collect(advance(target, drafter, draft, state, jnp.iinfo(jnp.int32).max, settings))

    inputs, numbers = _begin_inputs(prompts)
    return _on_each_shard(mesh, shard, inputs, P(DATA))(target, drafter, prompts, numbers, key)


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

    inputs, numbers = _begin_inputs(prompts)

    def of_a_shard(leaf: Array) -> Any:
        return (
            jax.ShapeDtypeStruct((leaf.shape[0] // mesh.shape[DATA], *leaf.shape[1:]), leaf.dtype)
            if leaf.ndim
            else leaf
        )

    state = jax.eval_shape(
        shard, target, drafter, *jax.tree.map(of_a_shard, (prompts, numbers)), key
    )
    return _on_each_shard(mesh, shard, inputs, _engine_specs(state))(
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

    specs = _engine_specs(state)
    return _on_each_shard(mesh, shard, (P(), P(), specs, P()), specs)(
        target, drafter, state, max_rounds
    )


def _begin_inputs(prompts: Prompts) -> tuple[tuple[Any, ...], Int[Array, " n"]]:
    by_row = jax.tree.map(lambda leaf: P(DATA) if leaf.ndim else P(), prompts)
    return (P(), P(), by_row, P(DATA), P()), jnp.arange(prompts.tokens.shape[0], dtype=jnp.int32)


def _engine_specs(state: DecodeState) -> PyTree:
    """Rows (or pages) stand second in the caches of layers that are stacked, first everywhere
    else."""
    return jax.tree.map(lambda leaf: P(None, DATA) if leaf.ndim == 5 else P(DATA), state)


def _on_each_shard(mesh: Mesh, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={DATA},
        check_vma=False,
    )
