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
from jaxspec.state import RUNNING, Known, PyTree, Rollout, Tree, pytree


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
    known: Known | None
    """Of the draft's acceptance, with a first axis of one; None: all rounds draft alike."""


def slot_count(engine: DecodeState) -> int:
    """Rows that are generated at once."""
    return len(engine.rollout.status) if engine.row is None else len(engine.row)


def taken(leaf: Array, row: Int[Array, " B"] | None) -> Array:
    """What a slot's row has; for an empty slot, that of the last row."""
    return leaf if row is None else jnp.take(leaf, row, axis=0, mode="clip")


def added(leaf: Array, row: Int[Array, " B"] | None, change: Array) -> Array:
    """Adds to what rows have, by slot."""
    return leaf + change if row is None else leaf.at[row].add(change, mode="drop")


def active(engine: DecodeState) -> Bool[Array, " B"]:
    """Slots with a row that has not ended."""
    running = taken(engine.rollout.status, engine.row) == RUNNING
    return running if engine.row is None else running & (engine.row < len(engine.rollout.status))


def waiting(engine: DecodeState) -> Bool[Array, ""]:
    """Whether a row has no slot yet."""
    return jnp.zeros((), bool) if engine.queue is None else jnp.any(engine.queue.waiting)


def may_run_out(engine: DecodeState, max_new_tokens: int) -> bool:
    """Whether there are fewer pages than all slots and prompts can need: whether a row can be
    evicted. Known when a program is traced, of an engine with all its slots."""
    if engine.paged is None:
        return False
    pages, count = engine.paged.pages, slot_count(engine)
    holders, of_row = pages.table.shape
    width = engine.rollout.tokens.shape[1] - max_new_tokens
    of_prompt = -(-width // engine.caches.page_size)
    return len(pages.references) < count * of_row + (holders - count) * of_prompt


# ---- refill


def refill(engine: DecodeState, group_size: int, block: int) -> DecodeState:
    """Frees the slots of rows that have ended, gives the others the pages that the next round of
    `block` positions writes to, and gives free slots to waiting rows while pages last.

    Running rows come first: a row that is admitted may have to be recomputed, so it must not lose
    its pages again in the same round.
    """
    if engine.queue is None:
        return engine

    def goes_on(engine: DecodeState) -> Bool[Array, ""]:
        return (
            waiting(engine)
            & jnp.any(_row(engine) == len(engine.rollout.status))
            & _fits(engine, group_size, block)
        )

    return lax.while_loop(
        goes_on,
        lambda engine: _admit(engine, group_size, block),
        _make_room(_retire(engine, group_size), block),
    )


def _row(engine: DecodeState) -> Int[Array, " B"]:
    assert engine.row is not None, "slots that are exchanged say what they hold"
    return engine.row


def _queue(engine: DecodeState) -> Queue:
    assert engine.queue is not None, "rows come from a queue, or go back to it"
    return engine.queue


def _retire(engine: DecodeState, group_size: int) -> DecodeState:
    """Empties the slots of rows that have ended; their pages, and those of prompts whose groups
    have, are free again."""
    if engine.row is None:
        return engine
    ended = ~active(engine)
    engine = engine.replace(row=jnp.where(ended, len(engine.rollout.status), engine.row))
    if engine.paged is None:
        return engine
    groups = jnp.any((engine.rollout.status == RUNNING).reshape(-1, group_size), axis=1)
    pages = release(engine.paged.pages, jnp.concatenate([ended, ~groups]))
    return engine.replace(paged=engine.paged.replace(pages=pages))


def _head(engine: DecodeState) -> Int[Array, ""]:
    """The next row to be admitted."""
    queue = _queue(engine)
    return queue.order[jnp.argmax(queue.waiting[queue.order])]


def shared(length: Int[Array, ""], size: int) -> Int[Array, ""]:
    """Pages of a prompt that no row of its group writes to: a draft reads the slot before the last
    one again, the target the last one."""
    return jnp.maximum(length - 2, 0) // size


def _fits(engine: DecodeState, group_size: int, block: int) -> Bool[Array, ""]:
    """Whether the next row's whole text, and a round beyond it, find free pages."""
    if engine.paged is None:
        return jnp.ones((), bool)
    row, size = _head(engine), engine.caches.page_size
    wanted = _pages_for(engine.rollout.lengths[row], block, size)
    return wanted - shared(engine.rollout.prompt_lengths[row], size) <= free(engine.paged.pages)


def _pages_for(length: Int[Array, "*B"], block: int, size: int) -> Int[Array, "*B"]:
    """Pages that a row of so many tokens writes to by the end of a round."""
    return (length + block - 2) // size + 1


def _admit(engine: DecodeState, group_size: int, block: int) -> DecodeState:
    """Puts the next row into the first free slot: a copy of what its prompt left, or of the pages
    that it will write to."""
    queue, rollout = _queue(engine), engine.rollout
    row, slot = _head(engine), jnp.argmax(_row(engine) == len(rollout.status)).astype(jnp.int32)
    prompt, length = row // group_size, rollout.prompt_lengths[row]
    statistics = rollout.statistics
    began = jnp.where(rollout.lengths[row] == length, engine.round[0], statistics.began[row])
    engine = engine.replace(
        rollout=rollout.replace(
            statistics=statistics.replace(began=statistics.began.at[row].set(began))
        ),
        row=_row(engine).at[slot].set(row),
        draft=jax.tree.map(
            lambda leaf, source: leaf.at[slot].set(source[prompt]),
            engine.draft,
            queue.prompts.draft,
        ),
        queue=queue.replace(waiting=queue.waiting.at[row].set(False)),
    )
    if engine.paged is None:
        assert queue.prompts.caches is not None, "prompts without pages have caches of their own"
        return engine.replace(
            caches=engine.caches.map(
                lambda cache, source: kv.put_row(cache, slot, source, prompt), queue.prompts.caches
            )
        )
    paged, count, size = engine.paged, slot_count(engine), engine.caches.page_size
    common, last = shared(length, size), (length - 1) // size
    pages = share(paged.pages, slot, count + prompt, common)
    wanted = _pages_for(rollout.lengths[row], block, size)
    pages = grow(pages, pages.held.at[slot].set(wanted))
    # no more than two hold the last two positions
    stretches = common + jnp.arange(2, dtype=jnp.int32)
    to = jnp.where(
        stretches <= last,
        jnp.take(pages.table[slot], stretches, mode="clip"),
        len(pages.references),
    )
    source = jnp.take(pages.table[count + prompt], stretches, mode="clip")
    admitted = paged.admitted.at[slot].set(jnp.max(paged.admitted) + 1)
    return engine.replace(
        caches=engine.caches.map(lambda cache: kv.copy_pages(cache, to, source)),
        paged=Paged(pages=pages, admitted=admitted),
    )


# ---- eviction


def _make_room(engine: DecodeState, block: int) -> DecodeState:
    """Gives every row the pages that the next round writes to; while there are too few, the
    youngest row loses its own and waits."""
    if engine.paged is None:
        return engine
    count, size = slot_count(engine), engine.caches.page_size

    def wanted(engine: DecodeState) -> Int[Array, " A"]:
        lengths = taken(engine.rollout.lengths, engine.row)
        needed = jnp.where(active(engine), _pages_for(lengths, block, size), 0)
        return _pages(engine).held.at[:count].max(needed)

    def too_few(engine: DecodeState) -> Bool[Array, ""]:
        pages = _pages(engine)
        return jnp.sum(wanted(engine) - pages.held, dtype=jnp.int32) > free(pages)

    engine = lax.while_loop(too_few, _evict, engine)
    return _with_pages(engine, grow(_pages(engine), wanted(engine)))


def _pages(engine: DecodeState) -> Pages:
    assert engine.paged is not None, "only small pages run out"
    return engine.paged.pages


def _with_pages(engine: DecodeState, pages: Pages) -> DecodeState:
    assert engine.paged is not None, "only small pages run out"
    return engine.replace(paged=engine.paged.replace(pages=pages))


def _evict(engine: DecodeState) -> DecodeState:
    """Takes the youngest row from its slot; its text stays where it is."""
    assert engine.paged is not None, "only small pages run out"
    queue, pages = _queue(engine), engine.paged.pages
    youngest = jnp.argmax(jnp.where(active(engine), engine.paged.admitted, -1)).astype(jnp.int32)
    row = _row(engine)
    engine = engine.replace(
        row=row.at[youngest].set(len(engine.rollout.status)),
        queue=queue.replace(waiting=queue.waiting.at[row[youngest]].set(True)),
    )
    return _with_pages(
        engine, release(pages, jnp.arange(len(pages.held), dtype=jnp.int32) == youngest)
    )


# ---- the tail


def gather(
    engine: DecodeState, count: int, group_size: int
) -> tuple[DecodeState, Int[Array, " b"]]:
    """An engine of `count` slots with the rows that have not ended, and which slots they had: pages
    stay where they are."""
    engine = _retire(engine, group_size)  # a slot that stays behind must hold no page
    order = jnp.argsort(~active(engine), stable=True)[:count].astype(jnp.int32)
    fewer = engine.replace(
        row=order if engine.row is None else engine.row[order],
        draft=jax.tree.map(lambda leaf: leaf[order], engine.draft),
    )
    if engine.paged is None:
        return fewer.replace(
            caches=engine.caches.map(lambda cache: kv.take_rows(cache, order))
        ), order
    paged, holders = engine.paged, _holders(engine, order)
    pages = paged.pages.replace(table=paged.pages.table[holders], held=paged.pages.held[holders])
    return fewer.replace(paged=Paged(pages=pages, admitted=paged.admitted[order])), order


def scatter(
    engine: DecodeState, fewer: DecodeState, order: Int[Array, " b"], group_size: int
) -> DecodeState:
    """The engine that `gather` took them from, after some rounds of the smaller one; what did not
    fit that one stays."""
    engine = _retire(engine, group_size)

    def put(leaf: Array, some: Array) -> Array:
        return leaf.at[order].set(some, unique_indices=True)

    whole = fewer.replace(
        row=None if engine.row is None else put(engine.row, _row(fewer)),
        draft=jax.tree.map(put, engine.draft, fewer.draft),
    )
    if engine.paged is None or fewer.paged is None:
        return whole.replace(
            caches=engine.caches.map(
                lambda cache, some: kv.put_rows(cache, order, some), fewer.caches
            )
        )
    holders, (before, after) = _holders(engine, order), (engine.paged, fewer.paged)
    pages = after.pages.replace(
        table=before.pages.table.at[holders].set(after.pages.table),
        held=before.pages.held.at[holders].set(after.pages.held),
    )
    return whole.replace(paged=Paged(pages=pages, admitted=put(before.admitted, after.admitted)))


def _holders(engine: DecodeState, order: Int[Array, " b"]) -> Int[Array, " a"]:
    """Those slots, and the prompts behind all slots."""
    return jnp.concatenate(
        [order, jnp.arange(slot_count(engine), len(_pages(engine).held), dtype=jnp.int32)]
    )
