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
    active_slots,
    gather_rows,
    has_waiting_rows,
    rows_may_wait,
    rows_of_slots,
    slot_count,
)
from jaxspec.rollout.pages import (
    Pages,
    allocate_pages,
    count_free_pages,
    release_pages,
    share_pages,
)
from jaxspec.state import RUNNING

# ---- refill


def refill_slots(
    state: DecodeState, group_size: int, block_length: int, may_evict: bool
) -> DecodeState:
    """Frees the slots of rows that have ended, gives the others the pages that the next round of
    `block_length` positions writes to, and gives free slots to waiting rows while pages last.

    Running rows come first: a row that is admitted may have to be recomputed, so it must not lose
    its pages again in the same round. `may_evict`: whether pages can run out.
    """
    if not rows_may_wait(state):
        return state
    return lax.while_loop(
        lambda state: _can_admit(state, group_size, block_length),
        lambda state: _admit_next_row(state, group_size, block_length),
        _reserve_pages(_retire_rows(state, group_size), block_length, may_evict),
    )


def retire_and_extend(
    state: DecodeState, group_size: int, block_length: int, may_evict: bool
) -> DecodeState:
    """Frees the slots of rows that have ended, and gives the others the pages that the next round
    writes to, unless there are too few: what `refill_slots` does in most rounds, without its
    loops."""
    state = _retire_rows(state, group_size)
    page_counts = _page_counts_for_round(state, block_length)
    if may_evict:
        page_counts = jnp.where(
            _lacks_pages(state, block_length), state.pages.page_counts, page_counts
        )
    return state.replace(pages=allocate_pages(state.pages, page_counts))


def needs_refill(
    state: DecodeState, group_size: int, block_length: int, may_evict: bool
) -> Bool[Array, ""]:
    """Whether a row can be admitted, or must be evicted, before the next round."""
    admits = _can_admit(state, group_size, block_length)
    return admits | _lacks_pages(state, block_length) if may_evict else admits


def _can_admit(state: DecodeState, group_size: int, block_length: int) -> Bool[Array, ""]:
    has_free_slot = jnp.any(state.row == len(state.rollout.status))
    return has_waiting_rows(state) & has_free_slot & _next_row_fits(state, group_size, block_length)


def _retire_rows(state: DecodeState, group_size: int) -> DecodeState:
    """Empties the slots of rows that have ended; their pages, and those of prompts whose groups
    have, are free again."""
    is_empty = ~active_slots(state)
    has_running_row = jnp.any((state.rollout.status == RUNNING).reshape(-1, group_size), axis=1)
    return state.replace(
        row=jnp.where(is_empty, len(state.rollout.status), state.row),
        pages=release_pages(state.pages, jnp.concatenate([is_empty, ~has_running_row])),
    )


def _next_row(state: DecodeState) -> Int[Array, ""]:
    """The next row to be admitted."""
    queue = state.queue
    return queue.admission_order[jnp.argmax(queue.waiting[queue.admission_order])]


def _count_pages_needed(
    state: DecodeState, lengths: Int[Array, "*B"], block_length: int
) -> Int[Array, "*B"]:
    """Pages that rows of so many tokens have written to by the end of a round; none where caches
    are contiguous."""
    return jnp.minimum(
        (lengths + block_length - 2) // state.caches.page_size + 1, state.pages.table.shape[1]
    )


def shared_page_count(length: Int[Array, ""], page_size: int) -> Int[Array, ""]:
    """Pages of a prompt that no row of its group writes to: a draft reads the position before the
    last one again, the target the last one."""
    return jnp.maximum(length - 2, 0) // page_size


def _next_row_fits(state: DecodeState, group_size: int, block_length: int) -> Bool[Array, ""]:
    """Whether the next row's whole text, and a round beyond it, find free pages."""
    row = _next_row(state)
    page_count = _count_pages_needed(state, state.rollout.lengths[row], block_length)
    shared_count = shared_page_count(state.rollout.prompt_lengths[row], state.caches.page_size)
    return page_count - shared_count <= count_free_pages(state.pages)


def _admit_next_row(state: DecodeState, group_size: int, block_length: int) -> DecodeState:
    """Puts the next row into the first free slot: a copy of what its prompt left, or of the pages
    that it will write to."""
    queue, rollout, prompts_start = state.queue, state.rollout, slot_count(state)
    row, slot = _next_row(state), jnp.argmax(state.row == len(rollout.status)).astype(jnp.int32)
    prompt, length = row // group_size, rollout.prompt_lengths[row]
    statistics = rollout.statistics
    start_round = jnp.where(
        rollout.lengths[row] == length, state.round[0], statistics.start_round[row]
    )
    page_size = state.caches.page_size
    shared_count, last_page = shared_page_count(length, page_size), (length - 1) // page_size
    pages = share_pages(state.pages, slot, prompts_start + prompt, shared_count)
    page_count = _count_pages_needed(state, rollout.lengths[row], block_length)
    pages = allocate_pages(pages, pages.page_counts.at[slot].set(page_count))
    # The pages that it shares are its prompt's own; only those that it writes to are copies.
    prompt_copy = PromptCopy(
        slot,
        prompt,
        *_select_copied_pages(pages, slot, prompts_start + prompt, shared_count, last_page),
    )
    return state.replace(
        rollout=rollout.replace(
            statistics=statistics.replace(
                start_round=statistics.start_round.at[row].set(start_round)
            )
        ),
        row=state.row.at[slot].set(row),
        caches=state.caches.map(
            lambda cache, prompts: cache.layout.copy_prompt(cache, prompt_copy, prompts),
            queue.prompts.caches,
        ),
        draft=jax.tree.map(
            lambda leaf, source: leaf.at[slot].set(source[prompt]), state.draft, queue.prompts.draft
        ),
        queue=queue.replace(waiting=queue.waiting.at[row].set(False)),
        pages=pages,
        # An evicted row starts from its prompt once more, and then reads its own tokens.
        unread_counts=state.unread_counts.at[slot].set(rollout.lengths[row] - length),
        admission_index=state.admission_index.at[slot].set(jnp.max(state.admission_index) + 1),
    )


def _select_copied_pages(
    pages: Pages,
    slot: Int[Array, ""],
    prompt: Int[Array, ""],
    shared_count: Int[Array, ""],
    last_page: Int[Array, ""],
) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Pages of the row in `slot` that begin as copies, and the pages of its prompt's that they are
    copies of: the last two positions of a prompt lie in no more than two."""
    count = min(2, pages.table.shape[1])
    indices = shared_count + jnp.arange(count, dtype=jnp.int32)
    row_pages = jnp.take(pages.table[slot], indices, mode="clip")
    copied_pages = jnp.where(indices <= last_page, row_pages, len(pages.references))
    return copied_pages, jnp.take(pages.table[prompt], indices, mode="clip")


# ---- eviction


def _reserve_pages(state: DecodeState, block_length: int, may_evict: bool) -> DecodeState:
    """Gives every row the pages that the next round writes to; while there are too few, the
    youngest row is evicted and waits."""
    if may_evict:
        state = lax.while_loop(
            lambda state: _lacks_pages(state, block_length), _evict_youngest_row, state
        )
    return state.replace(
        pages=allocate_pages(state.pages, _page_counts_for_round(state, block_length))
    )


def _page_counts_for_round(state: DecodeState, block_length: int) -> Int[Array, " A"]:
    """How many pages each holder has once those in slots can run a round."""
    lengths = gather_rows(state.rollout.lengths, rows_of_slots(state))
    # a row that has pages keeps them: they are freed all at once when it ends or is evicted
    needed_counts = jnp.where(
        active_slots(state), _count_pages_needed(state, lengths, block_length), 0
    )
    return state.pages.page_counts.at[: slot_count(state)].max(needed_counts)


def _lacks_pages(state: DecodeState, block_length: int) -> Bool[Array, ""]:
    missing_count = jnp.sum(
        _page_counts_for_round(state, block_length) - state.pages.page_counts, dtype=jnp.int32
    )
    return missing_count > count_free_pages(state.pages)


def _evict_youngest_row(state: DecodeState) -> DecodeState:
    """Takes the youngest row from its slot; its text stays where it is."""
    queue, pages, row = state.queue, state.pages, state.row
    youngest = jnp.argmax(jnp.where(active_slots(state), state.admission_index, -1)).astype(
        jnp.int32
    )
    return state.replace(
        row=row.at[youngest].set(len(state.rollout.status)),
        queue=queue.replace(waiting=queue.waiting.at[row[youngest]].set(True)),
        pages=release_pages(pages, jnp.arange(len(pages.page_counts), dtype=jnp.int32) == youngest),
        unread_counts=state.unread_counts.at[youngest].set(0),
    )


# ---- the tail


def gather_slots(
    state: DecodeState, count: int, group_size: int
) -> tuple[DecodeState, Int[Array, " b"]]:
    """A state of `count` slots with the rows that have not ended, and which slots they had: pages
    stay where they are."""
    state = _retire_rows(state, group_size)  # a slot that stays behind must hold no page
    order = jnp.argsort(~active_slots(state), stable=True)[:count].astype(jnp.int32)
    pages, owners = state.pages, _owner_indices(state, order)
    compact = state.replace(
        row=state.row[order],
        caches=state.caches.map(lambda cache: cache.layout.take_rows(cache, order)),
        draft=jax.tree.map(lambda leaf: leaf[order], state.draft),
        pages=pages.replace(table=pages.table[owners], page_counts=pages.page_counts[owners]),
        unread_counts=state.unread_counts[owners],
        admission_index=state.admission_index[order],
    )
    return compact, order


def scatter_slots(
    state: DecodeState, compact: DecodeState, order: Int[Array, " b"], group_size: int
) -> DecodeState:
    """The state that `gather_slots` took them from, after some rounds of the smaller one; what
    did not fit that one stays."""
    state = _retire_rows(state, group_size)

    def scatter_leaf(leaf: Array, compact_leaf: Array) -> Array:
        return leaf.at[order].set(compact_leaf, unique_indices=True)

    full_pages, compact_pages, owners = state.pages, compact.pages, _owner_indices(state, order)
    return compact.replace(
        row=scatter_leaf(state.row, compact.row),
        caches=state.caches.map(
            lambda cache, compact_leaf: cache.layout.write_rows(cache, order, compact_leaf),
            compact.caches,
        ),
        draft=jax.tree.map(scatter_leaf, state.draft, compact.draft),
        pages=compact_pages.replace(
            table=full_pages.table.at[owners].set(compact_pages.table),
            page_counts=full_pages.page_counts.at[owners].set(compact_pages.page_counts),
        ),
        unread_counts=state.unread_counts.at[owners].set(compact.unread_counts),
        admission_index=scatter_leaf(state.admission_index, compact.admission_index),
    )


def _owner_indices(state: DecodeState, order: Int[Array, " b"]) -> Int[Array, " a"]:
    """Rows of the page table: of the slots in `order`, and of the prompts, which stand behind all
    slots."""
    prompts = jnp.arange(slot_count(state), len(state.pages.page_counts), dtype=jnp.int32)
    return jnp.concatenate([order, prompts])
