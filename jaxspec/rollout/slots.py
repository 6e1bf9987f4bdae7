"""Which row sits in which slot: rows wait in a queue, take the slots of rows that have ended, give
up their pages, move together.

All of it is local to a `data` shard. Slots hold row numbers; texts, logprobs and statistics stay
where the rollout has them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Key

from jaxspec.models import kv
from jaxspec.models.kv import KVCache
from jaxspec.rollout.pages import Pages, free, grow, release, share
from jaxspec.state import RUNNING, AcceptanceEstimate, PyTree, Rollout, Tree, pytree


@pytree
class Caches(Tree):
    """Keys and values of target and draft, slot for slot; None: a draft without."""

    target: KVCache
    draft: KVCache | None

    def map(self, function: Callable[..., KVCache], *others: "Caches") -> "Caches":
        """Both, changed alike."""
        target = function(self.target, *(other.target for other in others))
        return Caches(
            target=target,
            draft=None
            if self.draft is None
            else function(self.draft, *(other.draft for other in others)),
        )

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.target.page_size


@pytree
class Prefilled(Tree):
    """What every row of a group starts from, by prompt."""

    caches: Caches | None
    """None: they lie in the prompts' pages."""
    draft: PyTree
    history: Int[Array, "n H S"]
    """As of `Prompts`: where a row is recomputed, its draft starts from its prompt once more."""
    history_lengths: Int[Array, "n H"]


@pytree
class Queue(Tree):
    """The rows that have no slot."""

    waiting: Bool[Array, " R"]
    order: Int[Array, " R"]
    """Rows in the order in which they are admitted; who was evicted comes again before those behind
    it."""
    prompts: Prefilled


@pytree
class Paged(Tree):
    """What slots with small pages carry: these may run out."""

    pages: Pages
    """Of the slots, then of the prompts."""
    admitted: Int[Array, " B"]
    """How many admissions there were before that of each slot's row."""


@pytree
class DecodeState(Tree):
    """Everything a rollout carries between rounds. R rows, of which B are in slots."""

    rollout: Rollout
    """The rows so far."""
    row: Int[Array, " B"] | None
    """The row in each slot, R where there is none; None: slot b has row b."""
    keys: Key[Array, " R"]
    caches: Caches
    """The target's is valid below the last committed token, which the next round reads."""
    draft: PyTree
    """What else the draft keeps, by slot."""
    round: Int[Array, " 1"]
    """Rounds so far."""
    queue: Queue | None
    """None: every row has a slot of its own."""
    paged: Paged | None
    """None: a slot has one page, which is as long as a row."""
    acceptance: AcceptanceEstimate | None
    """Of the draft's acceptance, with a first axis of one; None: all rounds draft alike."""


def slot_count(state: DecodeState) -> int:
    """Rows that are generated at once."""
    return len(state.rollout.status) if state.row is None else len(state.row)


def taken(leaf: Array, row: Int[Array, " B"] | None) -> Array:
    """What a slot's row has; for an empty slot, that of the last row."""
    return leaf if row is None else jnp.take(leaf, row, axis=0, mode="clip")


def added(leaf: Array, row: Int[Array, " B"] | None, change: Array) -> Array:
    """Adds to what rows have, by slot."""
    return leaf + change if row is None else leaf.at[row].add(change, mode="drop")


def active(state: DecodeState) -> Bool[Array, " B"]:
    """Slots with a row that has not ended."""
    running = taken(state.rollout.status, state.row) == RUNNING
    return running if state.row is None else running & (state.row < len(state.rollout.status))


def waiting(state: DecodeState) -> Bool[Array, ""]:
    """Whether a row has no slot yet."""
    return jnp.zeros((), bool) if state.queue is None else jnp.any(state.queue.waiting)


def may_run_out(state: DecodeState, max_new_tokens: int) -> bool:
    """Whether there are fewer pages than all slots and prompts can need: whether a row can be
    evicted. Known when a program is traced, of an engine with all its slots."""
    if state.paged is None:
        return False
    pages, count = state.paged.pages, slot_count(state)
    holders, of_row = pages.table.shape
    width = state.rollout.tokens.shape[1] - max_new_tokens
    of_prompt = -(-width // state.caches.page_size)
    return len(pages.references) < count * of_row + (holders - count) * of_prompt


# ---- refill


def refill(state: DecodeState, group_size: int, block: int) -> DecodeState:
    """Frees the slots of rows that have ended, gives the others the pages that the next round of
    `block` positions writes to, and gives free slots to waiting rows while pages last.

    Running rows come first: a row that is admitted may have to be recomputed, so it must not lose
    its pages again in the same round.
    """
    if state.queue is None:
        return state

    def goes_on(state: DecodeState) -> Bool[Array, ""]:
        return (
            waiting(state)
            & jnp.any(_row(state) == len(state.rollout.status))
            & _fits(state, group_size, block)
        )

    return lax.while_loop(
        goes_on,
        lambda state: _admit(state, group_size, block),
        _make_room(_retire(state, group_size), block),
    )


def _row(state: DecodeState) -> Int[Array, " B"]:
    assert state.row is not None, "slots that are exchanged say what they hold"
    return state.row


def _queue(state: DecodeState) -> Queue:
    assert state.queue is not None, "rows come from a queue, or go back to it"
    return state.queue


def _retire(state: DecodeState, group_size: int) -> DecodeState:
    """Empties the slots of rows that have ended; their pages, and those of prompts whose groups
    have, are free again."""
    if state.row is None:
        return state
    ended = ~active(state)
    state = state.replace(row=jnp.where(ended, len(state.rollout.status), state.row))
    if state.paged is None:
        return state
    groups = jnp.any((state.rollout.status == RUNNING).reshape(-1, group_size), axis=1)
    pages = release(state.paged.pages, jnp.concatenate([ended, ~groups]))
    return state.replace(paged=state.paged.replace(pages=pages))


def _head(state: DecodeState) -> Int[Array, ""]:
    """The next row to be admitted."""
    queue = _queue(state)
    return queue.order[jnp.argmax(queue.waiting[queue.order])]


def shared(length: Int[Array, ""], size: int) -> Int[Array, ""]:
    """Pages of a prompt that no row of its group writes to: a draft reads the slot before the last
    one again, the target the last one."""
    return jnp.maximum(length - 2, 0) // size


def _fits(state: DecodeState, group_size: int, block: int) -> Bool[Array, ""]:
    """Whether the next row's whole text, and a round beyond it, find free pages."""
    if state.paged is None:
        return jnp.ones((), bool)
    row, size = _head(state), state.caches.page_size
    wanted = _pages_for(state.rollout.lengths[row], block, size)
    return wanted - shared(state.rollout.prompt_lengths[row], size) <= free(state.paged.pages)


def _pages_for(length: Int[Array, "*B"], block: int, size: int) -> Int[Array, "*B"]:
    """Pages that a row of so many tokens writes to by the end of a round."""
    return (length + block - 2) // size + 1


def _admit(state: DecodeState, group_size: int, block: int) -> DecodeState:
    """Puts the next row into the first free slot: a copy of what its prompt left, or of the pages
    that it will write to."""
    queue, rollout = _queue(state), state.rollout
    row, slot = _head(state), jnp.argmax(_row(state) == len(rollout.status)).astype(jnp.int32)
    prompt, length = row // group_size, rollout.prompt_lengths[row]
    statistics = rollout.statistics
    began = jnp.where(rollout.lengths[row] == length, state.round[0], statistics.began[row])
    state = state.replace(
        rollout=rollout.replace(
            statistics=statistics.replace(began=statistics.began.at[row].set(began))
        ),
        row=_row(state).at[slot].set(row),
        draft=jax.tree.map(
            lambda leaf, source: leaf.at[slot].set(source[prompt]),
            state.draft,
            queue.prompts.draft,
        ),
        queue=queue.replace(waiting=queue.waiting.at[row].set(False)),
    )
    if state.paged is None:
        assert queue.prompts.caches is not None, "prompts without pages have caches of their own"
        return state.replace(
            caches=state.caches.map(
                lambda cache, source: kv.put_row(cache, slot, source, prompt), queue.prompts.caches
            )
        )
    paged, count, size = state.paged, slot_count(state), state.caches.page_size
    common, last = shared(length, size), (length - 1) // size
    pages = share(paged.pages, slot, count + prompt, common)
    wanted = _pages_for(rollout.lengths[row], block, size)
    pages = grow(pages, pages.held.at[slot].set(wanted))
    # no more than two hold the last two positions
    page_indices = common + jnp.arange(2, dtype=jnp.int32)
    to = jnp.where(
        page_indices <= last,
        jnp.take(pages.table[slot], page_indices, mode="clip"),
        len(pages.references),
    )
    source = jnp.take(pages.table[count + prompt], page_indices, mode="clip")
    admitted = paged.admitted.at[slot].set(jnp.max(paged.admitted) + 1)
    return state.replace(
        caches=state.caches.map(lambda cache: kv.copy_pages(cache, to, source)),
        paged=Paged(pages=pages, admitted=admitted),
    )


# ---- eviction


def _make_room(state: DecodeState, block: int) -> DecodeState:
    """Gives every row the pages that the next round writes to; while there are too few, the
    youngest row loses its own and waits."""
    if state.paged is None:
        return state
    count, size = slot_count(state), state.caches.page_size

    def wanted(state: DecodeState) -> Int[Array, " A"]:
        lengths = taken(state.rollout.lengths, state.row)
        needed = jnp.where(active(state), _pages_for(lengths, block, size), 0)
        return _pages(state).held.at[:count].max(needed)

    def too_few(state: DecodeState) -> Bool[Array, ""]:
        pages = _pages(state)
        return jnp.sum(wanted(state) - pages.held, dtype=jnp.int32) > free(pages)

    state = lax.while_loop(too_few, _evict, state)
    return _with_pages(state, grow(_pages(state), wanted(state)))


def _pages(state: DecodeState) -> Pages:
    assert state.paged is not None, "only small pages run out"
    return state.paged.pages


def _with_pages(state: DecodeState, pages: Pages) -> DecodeState:
    assert state.paged is not None, "only small pages run out"
    return state.replace(paged=state.paged.replace(pages=pages))


def _evict(state: DecodeState) -> DecodeState:
    """Takes the youngest row from its slot; its text stays where it is."""
    assert state.paged is not None, "only small pages run out"
    queue, pages = _queue(state), state.paged.pages
    youngest = jnp.argmax(jnp.where(active(state), state.paged.admitted, -1)).astype(jnp.int32)
    row = _row(state)
    state = state.replace(
        row=row.at[youngest].set(len(state.rollout.status)),
        queue=queue.replace(waiting=queue.waiting.at[row[youngest]].set(True)),
    )
    return _with_pages(
        state, release(pages, jnp.arange(len(pages.held), dtype=jnp.int32) == youngest)
    )


# ---- the tail


def gather(state: DecodeState, count: int, group_size: int) -> tuple[DecodeState, Int[Array, " b"]]:
    """An engine of `count` slots with the rows that have not ended, and which slots they had: pages
    stay where they are."""
    state = _retire(state, group_size)  # a slot that stays behind must hold no page
    order = jnp.argsort(~active(state), stable=True)[:count].astype(jnp.int32)
    fewer = state.replace(
        row=order if state.row is None else state.row[order],
        draft=jax.tree.map(lambda leaf: leaf[order], state.draft),
    )
    if state.paged is None:
        return fewer.replace(
            caches=state.caches.map(lambda cache: kv.take_rows(cache, order))
        ), order
    paged, holders = state.paged, _holders(state, order)
    pages = paged.pages.replace(table=paged.pages.table[holders], held=paged.pages.held[holders])
    return fewer.replace(paged=Paged(pages=pages, admitted=paged.admitted[order])), order


def scatter(
    state: DecodeState, fewer: DecodeState, order: Int[Array, " b"], group_size: int
) -> DecodeState:
    """The engine that `gather` took them from, after some rounds of the smaller one; what did not
    fit that one stays."""
    state = _retire(state, group_size)

    def put(leaf: Array, some: Array) -> Array:
        return leaf.at[order].set(some, unique_indices=True)

    whole = fewer.replace(
        row=None if state.row is None else put(state.row, _row(fewer)),
        draft=jax.tree.map(put, state.draft, fewer.draft),
    )
    if state.paged is None or fewer.paged is None:
        return whole.replace(
            caches=state.caches.map(
                lambda cache, some: kv.put_rows(cache, order, some), fewer.caches
            )
        )
    holders, (before, after) = _holders(state, order), (state.paged, fewer.paged)
    pages = after.pages.replace(
        table=before.pages.table.at[holders].set(after.pages.table),
        held=before.pages.held.at[holders].set(after.pages.held),
    )
    return whole.replace(paged=Paged(pages=pages, admitted=put(before.admitted, after.admitted)))


def _holders(state: DecodeState, order: Int[Array, " b"]) -> Int[Array, " a"]:
    """Those slots, and the prompts behind all slots."""
    return jnp.concatenate(
        [order, jnp.arange(slot_count(state), len(_pages(state).held), dtype=jnp.int32)]
    )
