"""Which row sits in which slot: rows wait in a FIFO queue, take the slots of rows that have ended,
are evicted when pages run out, move together.

Slots hold row numbers; texts, logprobs and statistics stay where the rollout has them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxspec.models.cache import PromptCopy
from jaxspec.rollout.decode_state import (
    DecodeState,
    active,
    rows_may_wait,
    rows_of_slots,
    slot_count,
    taken,
    waiting,
)
from jaxspec.rollout.pages import Pages, free, grow, release, share
from jaxspec.state import RUNNING

# ---- refill


def refill(state: DecodeState, group_size: int, block: int, evicts: bool) -> DecodeState:
    """Frees the slots of rows that have ended, gives the others the pages that the next round of
    `block` positions writes to, and gives free slots to waiting rows while pages last.

    Running rows come first: a row that is admitted may have to be recomputed, so it must not lose
    its pages again in the same round. `evicts`: whether pages can run out.
    """
    if not rows_may_wait(state):
        return state
    return lax.while_loop(
        lambda state: _can_admit(state, group_size, block),
        lambda state: _admit(state, group_size, block),
        _make_room(_retire(state, group_size), block, evicts),
    )


def go_on(state: DecodeState, group_size: int, block: int, evicts: bool) -> DecodeState:
    """Frees the slots of rows that have ended, and gives the others the pages that the next round
    writes to, unless there are too few: what `refill` does in most rounds, without its loops."""
    state = _retire(state, group_size)
    wanted = _wanted(state, block)
    if evicts:
        wanted = jnp.where(_too_few(state, block), state.pages.held, wanted)
    return state.replace(pages=grow(state.pages, wanted))


def must_refill(state: DecodeState, group_size: int, block: int, evicts: bool) -> Bool[Array, ""]:
    """Whether a row can be admitted, or must be evicted, before the next round."""
    admits = _can_admit(state, group_size, block)
    return admits | _too_few(state, block) if evicts else admits


def _can_admit(state: DecodeState, group_size: int, block: int) -> Bool[Array, ""]:
    free_slot = jnp.any(state.row == len(state.rollout.status))
    return waiting(state) & free_slot & _fits(state, group_size, block)


def _retire(state: DecodeState, group_size: int) -> DecodeState:
    """Empties the slots of rows that have ended; their pages, and those of prompts whose groups
    have, are free again."""
    ended = ~active(state)
    groups = jnp.any((state.rollout.status == RUNNING).reshape(-1, group_size), axis=1)
    return state.replace(
        row=jnp.where(ended, len(state.rollout.status), state.row),
        pages=release(state.pages, jnp.concatenate([ended, ~groups])),
    )


def _head(state: DecodeState) -> Int[Array, ""]:
    """The next row to be admitted."""
    queue = state.queue
    return queue.order[jnp.argmax(queue.waiting[queue.order])]


def _pages_for(state: DecodeState, lengths: Int[Array, "*B"], block: int) -> Int[Array, "*B"]:
    """Pages that rows of so many tokens have written to by the end of a round; none where caches
    are contiguous."""
    return jnp.minimum(
        (lengths + block - 2) // state.caches.page_size + 1, state.pages.table.shape[1]
    )


def shared(length: Int[Array, ""], size: int) -> Int[Array, ""]:
    """Pages of a prompt that no row of its group writes to: a draft reads the position before the
    last one again, the target the last one."""
    return jnp.maximum(length - 2, 0) // size


def _fits(state: DecodeState, group_size: int, block: int) -> Bool[Array, ""]:
    """Whether the next row's whole text, and a round beyond it, find free pages."""
    row = _head(state)
    wanted = _pages_for(state, state.rollout.lengths[row], block)
    common = shared(state.rollout.prompt_lengths[row], state.caches.page_size)
    return wanted - common <= free(state.pages)


def _admit(state: DecodeState, group_size: int, block: int) -> DecodeState:
    """Puts the next row into the first free slot: a copy of what its prompt left, or of the pages
    that it will write to."""
    queue, rollout, count = state.queue, state.rollout, slot_count(state)
    row, slot = _head(state), jnp.argmax(state.row == len(rollout.status)).astype(jnp.int32)
    prompt, length = row // group_size, rollout.prompt_lengths[row]
    statistics = rollout.statistics
    began = jnp.where(rollout.lengths[row] == length, state.round[0], statistics.start_round[row])
    size = state.caches.page_size
    common, last = shared(length, size), (length - 1) // size
    pages = share(state.pages, slot, count + prompt, common)
    wanted = _pages_for(state, rollout.lengths[row], block)
    pages = grow(pages, pages.held.at[slot].set(wanted))
    # The pages that it shares are its prompt's own; only those that it writes to are copies.
    seat = PromptCopy(slot, prompt, *_copied(pages, slot, count + prompt, common, last))
    return state.replace(
        rollout=rollout.replace(
            statistics=statistics.replace(start_round=statistics.start_round.at[row].set(began))
        ),
        row=state.row.at[slot].set(row),
        caches=state.caches.map(
            lambda cache, prompts: cache.layout.copy_prompt(cache, seat, prompts),
            queue.prompts.caches,
        ),
        draft=jax.tree.map(
            lambda leaf, source: leaf.at[slot].set(source[prompt]), state.draft, queue.prompts.draft
        ),
        queue=queue.replace(waiting=queue.waiting.at[row].set(False)),
        pages=pages,
        # An evicted row starts from its prompt once more, and then reads its own tokens.
        unread=state.unread.at[slot].set(rollout.lengths[row] - length),
        admitted=state.admitted.at[slot].set(jnp.max(state.admitted) + 1),
    )


def _copied(
    pages: Pages,
    slot: Int[Array, ""],
    prompt: Int[Array, ""],
    common: Int[Array, ""],
    last: Int[Array, ""],
) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Pages of the row in `slot` that begin as copies, and the pages of its prompt's that they are
    copies of: the last two positions of a prompt lie in no more than two."""
    count = min(2, pages.table.shape[1])
    indices = common + jnp.arange(count, dtype=jnp.int32)
    own = jnp.take(pages.table[slot], indices, mode="clip")
    to = jnp.where(indices <= last, own, len(pages.references))
    return to, jnp.take(pages.table[prompt], indices, mode="clip")


# ---- eviction


def _make_room(state: DecodeState, block: int, evicts: bool) -> DecodeState:
    """Gives every row the pages that the next round writes to; while there are too few, the
    youngest row is evicted and waits."""
    if evicts:
        state = lax.while_loop(lambda state: _too_few(state, block), _evict, state)
    return state.replace(pages=grow(state.pages, _wanted(state, block)))


def _wanted(state: DecodeState, block: int) -> Int[Array, " A"]:
    """How many pages each holder has once those in slots can run a round."""
    lengths = taken(state.rollout.lengths, rows_of_slots(state))
    # a row that has pages keeps them: they are freed all at once when it ends or is evicted
    needed = jnp.where(active(state), _pages_for(state, lengths, block), 0)
    return state.pages.held.at[: slot_count(state)].max(needed)


def _too_few(state: DecodeState, block: int) -> Bool[Array, ""]:
    missing = jnp.sum(_wanted(state, block) - state.pages.held, dtype=jnp.int32)
    return missing > free(state.pages)


def _evict(state: DecodeState) -> DecodeState:
    """Takes the youngest row from its slot; its text stays where it is."""
    queue, pages, row = state.queue, state.pages, state.row
    youngest = jnp.argmax(jnp.where(active(state), state.admitted, -1)).astype(jnp.int32)
    return state.replace(
        row=row.at[youngest].set(len(state.rollout.status)),
        queue=queue.replace(waiting=queue.waiting.at[row[youngest]].set(True)),
        pages=release(pages, jnp.arange(len(pages.held), dtype=jnp.int32) == youngest),
        unread=state.unread.at[youngest].set(0),
    )


# ---- the tail


def gather(state: DecodeState, count: int, group_size: int) -> tuple[DecodeState, Int[Array, " b"]]:
    """A state of `count` slots with the rows that have not ended, and which slots they had: pages
    stay where they are."""
    state = _retire(state, group_size)  # a slot that stays behind must hold no page
    order = jnp.argsort(~active(state), stable=True)[:count].astype(jnp.int32)
    pages, holders = state.pages, _holders(state, order)
    fewer = state.replace(
        row=state.row[order],
        caches=state.caches.map(lambda cache: cache.layout.take_rows(cache, order)),
        draft=jax.tree.map(lambda leaf: leaf[order], state.draft),
        pages=pages.replace(table=pages.table[holders], held=pages.held[holders]),
        unread=state.unread[holders],
        admitted=state.admitted[order],
    )
    return fewer, order


def scatter(
    state: DecodeState, fewer: DecodeState, order: Int[Array, " b"], group_size: int
) -> DecodeState:
    """The state that `gather` took them from, after some rounds of the smaller one; what did not
    fit that one stays."""
    state = _retire(state, group_size)

    def put(leaf: Array, some: Array) -> Array:
        return leaf.at[order].set(some, unique_indices=True)

    before, after, holders = state.pages, fewer.pages, _holders(state, order)
    return fewer.replace(
        row=put(state.row, fewer.row),
        caches=state.caches.map(
            lambda cache, some: cache.layout.write_rows(cache, order, some), fewer.caches
        ),
        draft=jax.tree.map(put, state.draft, fewer.draft),
        pages=after.replace(
            table=before.table.at[holders].set(after.table),
            held=before.held.at[holders].set(after.held),
        ),
        unread=state.unread.at[holders].set(fewer.unread),
        admitted=put(state.admitted, fewer.admitted),
    )


def _holders(state: DecodeState, order: Int[Array, " b"]) -> Int[Array, " a"]:
    """Rows of the page table: of the slots in `order`, and of the prompts, which stand behind all
    slots."""
    prompts = jnp.arange(slot_count(state), len(state.pages.held), dtype=jnp.int32)
    return jnp.concatenate([order, prompts])
