"""Assignment of rows to slots.

Rows wait in a FIFO queue and take the slots of rows that have ended. If pages run out, the youngest
row is evicted. The last rows move to fewer slots. A slot has a row's number, caches and draft
state. Texts, logprobs and statistics stay in the rollout.
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
    """Retires ended rows, then admits waiting rows while slots and pages last.

    In between, running rows get the pages that the next round of `block_length` positions writes
    to. For these, the youngest rows are evicted. `may_evict` says whether pages can run out. If no
    row can ever wait, nothing changes.
    """
    if not rows_may_wait(state):
        return state
    # Running rows get their pages first. An admitted row may have to be recomputed, so it must not
    # lose its pages again in the same round.
    return lax.while_loop(
        lambda state: _can_admit(state, group_size, block_length),
        lambda state: _admit_next_row(state, group_size, block_length),
        _reserve_pages(_retire_rows(state, group_size), block_length, may_evict),
    )


def retire_rows_and_reserve_pages(
    state: DecodeState, group_size: int, block_length: int, may_evict: bool
) -> DecodeState:
    """Retires ended rows, and gives running rows pages for the next round.

    This is `refill_slots` without its loops, for rounds that neither admit nor evict. If there are
    too few pages, it gives none.
    """
    state = _retire_rows(state, group_size)
    page_counts = _page_counts_for_round(state, block_length)
    # `allocate_pages` needs enough free pages. Without them the loop of rounds ends, and
    # `refill_slots` evicts rows.
    if may_evict:
        page_counts = jnp.where(
            _lacks_pages(state, block_length), state.pages.page_counts, page_counts
        )
    return state.replace(pages=allocate_pages(state.pages, page_counts))


def needs_refill(
    state: DecodeState, group_size: int, block_length: int, may_evict: bool
) -> Bool[Array, ""]:
    """Returns whether a row can be admitted or must be evicted."""
    admits = _can_admit(state, group_size, block_length)
    return admits | _lacks_pages(state, block_length) if may_evict else admits


def _can_admit(state: DecodeState, group_size: int, block_length: int) -> Bool[Array, ""]:
    has_free_slot = jnp.any(state.row == len(state.rollout.status))
    return has_waiting_rows(state) & has_free_slot & _next_row_fits(state, group_size, block_length)


def _retire_rows(state: DecodeState, group_size: int) -> DecodeState:
    """Empties the slots of ended rows, and frees their pages.

    Pages of a prompt are freed once its whole group has ended.
    """
    is_empty = ~active_slots(state)
    # Rows that wait count as running too: they still need their prompt.
    has_running_row = jnp.any((state.rollout.status == RUNNING).reshape(-1, group_size), axis=1)
    return state.replace(
        row=jnp.where(is_empty, len(state.rollout.status), state.row),
        pages=release_pages(state.pages, jnp.concatenate([is_empty, ~has_running_row])),
    )


def _next_row(state: DecodeState) -> Int[Array, ""]:
    """Returns the next row to admit, or any row if none waits."""
    queue = state.queue
    # `argmax` gives the first row that waits.
    return queue.admission_order[jnp.argmax(queue.waiting[queue.admission_order])]


def _count_pages_needed(
    state: DecodeState, lengths: Int[Array, "*B"], block_length: int
) -> Int[Array, "*B"]:
    """Returns the pages that rows of `lengths` tokens need for a round, 0 if contiguous."""
    # A round writes from the last token on, so its last position is length + block_length - 2.
    return jnp.minimum(
        (lengths + block_length - 2) // state.caches.page_size + 1, state.pages.table.shape[1]
    )


def shared_page_count(length: Int[Array, ""], page_size: int) -> Int[Array, ""]:
    """Returns the number of prompt pages that a group shares."""
    # Rounds rewrite the last two prompt positions: the draft reads the one before the last again,
    # the target the last one. Their pages are copied.
    return jnp.maximum(length - 2, 0) // page_size


def _next_row_fits(state: DecodeState, group_size: int, block_length: int) -> Bool[Array, ""]:
    """Returns whether free pages suffice for the next row's text and one round."""
    row = _next_row(state)
    page_count = _count_pages_needed(state, state.rollout.lengths[row], block_length)
    shared_count = shared_page_count(state.rollout.prompt_lengths[row], state.caches.page_size)
    return page_count - shared_count <= count_free_pages(state.pages)


def _admit_next_row(state: DecodeState, group_size: int, block_length: int) -> DecodeState:
    """Moves the next row into the first free slot.

    The slot gets a copy of the prompt's contiguous cache, or of the prompt pages that it writes to.
    """
    queue, rollout, prompts_start = state.queue, state.rollout, slot_count(state)
    row, slot = _next_row(state), jnp.argmax(state.row == len(rollout.status)).astype(jnp.int32)
    prompt, length = row // group_size, rollout.prompt_lengths[row]
    statistics = rollout.statistics
    # A row with tokens was evicted before, and keeps its first round.
    start_round = jnp.where(
        rollout.lengths[row] == length, state.round[0], statistics.start_round[row]
    )
    page_size = state.caches.page_size
    shared_count, last_page = shared_page_count(length, page_size), (length - 1) // page_size
    pages = share_pages(state.pages, slot, prompts_start + prompt, shared_count)
    page_count = _count_pages_needed(state, rollout.lengths[row], block_length)
    pages = allocate_pages(pages, pages.page_counts.at[slot].set(page_count))
    # The other pages of the prompt are shared.
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
        # An evicted row starts from its prompt again, so all its own tokens are unread.
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
    """Returns the pages of `slot` that start as copies, and their sources in the prompt."""
    # The last two positions of a prompt are in at most two pages.
    count = min(2, pages.table.shape[1])
    indices = shared_count + jnp.arange(count, dtype=jnp.int32)
    row_pages = jnp.take(pages.table[slot], indices, mode="clip")
    # Copies to an index beyond the pool are dropped: there may be only one page to copy.
    copied_pages = jnp.where(indices <= last_page, row_pages, len(pages.references))
    return copied_pages, jnp.take(pages.table[prompt], indices, mode="clip")


# ---- eviction


def _reserve_pages(state: DecodeState, block_length: int, may_evict: bool) -> DecodeState:
    """Gives all running rows pages for the next round.

    While there are too few pages, evicts the youngest row.
    """
    if may_evict:
        state = lax.while_loop(
            lambda state: _lacks_pages(state, block_length), _evict_youngest_row, state
        )
    return state.replace(
        pages=allocate_pages(state.pages, _page_counts_for_round(state, block_length))
    )


def _page_counts_for_round(state: DecodeState, block_length: int) -> Int[Array, " A"]:
    """Returns each owner's page count for the next round."""
    lengths = gather_rows(state.rollout.lengths, rows_of_slots(state))
    needed_counts = jnp.where(
        active_slots(state), _count_pages_needed(state, lengths, block_length), 0
    )
    # Counts never shrink: a row's pages are freed all at once when it ends or is evicted.
    return state.pages.page_counts.at[: slot_count(state)].max(needed_counts)


def _lacks_pages(state: DecodeState, block_length: int) -> Bool[Array, ""]:
    missing_count = jnp.sum(
        _page_counts_for_round(state, block_length) - state.pages.page_counts, dtype=jnp.int32
    )
    return missing_count > count_free_pages(state.pages)


def _evict_youngest_row(state: DecodeState) -> DecodeState:
    """Evicts the youngest row, and returns it to the queue.

    Its text stays in the rollout.
    """
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
    """Gathers running rows into a state of `count` slots.

    Also returns the slots that they had. Contiguous caches are copied. Of paged caches only the
    page tables move.
    """
    # The smaller state has no table of the slots left out, so these must own no page.
    state = _retire_rows(state, group_size)
    # Running rows first, in the order of their slots.
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
    """Scatters the slots of `gather_slots` back after some rounds.

    `state` is the one that they were gathered from. Its other slots stay as they were.
    """
    # As in `gather_slots`, so that the slots left out own no page.
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
    """Returns page table indices of the slots in `order`, then of all prompts."""
    # In the table, prompts come after all slots.
    prompts = jnp.arange(slot_count(state), len(state.pages.page_counts), dtype=jnp.int32)
    return jnp.concatenate([order, prompts])
