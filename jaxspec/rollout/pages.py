"""Page tables and reference counts of a shard's pool.

Owners of pages are the slots, then the prompts of the call. A prompt keeps its pages until its
group has ended. Rows of a group share the prompt pages that none of them writes to.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.state import Tree, pytree


@pytree
class Pages(Tree):
    """Page tables of one pool of P pages."""

    table: Int[Array, "A N"]
    """Page of each owner's n-th `page_size` positions, P if it has none."""
    page_counts: Int[Array, " A"]
    """Number of pages of each owner. They cover its first positions."""
    references: Int[Array, " P"]
    """Number of owners of each page, 0 if it is free."""


def init_pages(page_count: int, owner_count: int, pages_per_owner: int) -> Pages:
    """Returns a pool whose pages are all free."""
    return Pages(
        # An index beyond the pool: gathers clip or fill it, and scatters drop it.
        table=jnp.full((owner_count, pages_per_owner), page_count, jnp.int32),
        page_counts=jnp.zeros((owner_count,), jnp.int32),
        references=jnp.zeros((page_count,), jnp.int32),
    )


def count_free_pages(pages: Pages) -> Int[Array, ""]:
    """Returns the number of pages without an owner."""
    return jnp.sum(pages.references == 0, dtype=jnp.int32)


def allocate_pages(pages: Pages, target_counts: Int[Array, " A"]) -> Pages:
    """Gives each owner free pages up to `target_counts`.

    There must be enough free pages for all owners together.
    """
    missing_counts = jnp.maximum(target_counts - pages.page_counts, 0)
    last_ranks, is_free = jnp.cumsum(missing_counts, dtype=jnp.int32), pages.references == 0
    # The r-th free page goes to the r-th missing entry of the table, counted over all owners.
    rank = jnp.cumsum(is_free, dtype=jnp.int32) - 1
    is_allocated = is_free & (rank < last_ranks[-1])
    owner = jnp.searchsorted(last_ranks, rank, side="right", method="compare_all").astype(jnp.int32)
    page_index = (
        jnp.take(pages.page_counts + missing_counts - last_ranks, owner, mode="clip") + rank
    )
    page_ids = jnp.arange(len(is_free), dtype=jnp.int32)
    return Pages(
        # Pages that stay free get an owner beyond the table, and are dropped.
        table=pages.table.at[jnp.where(is_allocated, owner, len(last_ranks)), page_index].set(
            page_ids, mode="drop", unique_indices=True
        ),
        page_counts=pages.page_counts + missing_counts,
        references=pages.references + is_allocated.astype(jnp.int32),
    )


def release_pages(pages: Pages, owners: Bool[Array, " A"]) -> Pages:
    """Takes all pages from the marked owners.

    Pages without another owner are free again.
    """
    no_page = pages.references.shape[0]
    released_pages = jnp.where(owners[:, None], pages.table, no_page)
    return Pages(
        # An empty slot still runs in each round, and must not write to pages of other rows.
        table=jnp.where(owners[:, None], no_page, pages.table),
        page_counts=jnp.where(owners, 0, pages.page_counts),
        references=pages.references.at[released_pages].add(-1, mode="drop"),
    )


def share_pages(
    pages: Pages, owner: Int[Array, ""], source: Int[Array, ""], count: Int[Array, ""]
) -> Pages:
    """Shares the first `count` pages of `source` with `owner`.

    `owner` must have no pages before.
    """
    no_page = pages.references.shape[0]
    shared_pages = jnp.where(
        jnp.arange(pages.table.shape[1], dtype=jnp.int32) < count, pages.table[source], no_page
    )
    return Pages(
        table=pages.table.at[owner].set(shared_pages),
        page_counts=pages.page_counts.at[owner].set(count),
        references=pages.references.at[shared_pages].add(1, mode="drop"),
    )


# ---- sizes


def min_pool_size(
    prompt_count: int, prompt_length: int, response_length: int, draft_length: int, page_size: int
) -> int:
    """Returns the fewest pages with which every row of a shard can end.

    These are the pages of all prompts, and those of the longest row.
    """
    # Prompts keep their pages until their groups have ended, so they are counted in full.
    return prompt_count * -(-prompt_length // page_size) + -(
        -(prompt_length + response_length + draft_length) // page_size
    )


def max_pool_size(
    prompt_count: int,
    prompt_length: int,
    response_length: int,
    draft_length: int,
    page_size: int,
    slots: int,
) -> int:
    """Returns the most pages that a shard's prompts and slots can need.

    With so many pages no row is ever evicted.
    """
    return prompt_count * -(-prompt_length // page_size) + slots * -(
        -(prompt_length + response_length + draft_length) // page_size
    )


MIN_ROWS = 4
"""Minimum rows of maximum length in a pool of automatic size, and minimum automatic slots."""


def pool_size_for_rows(row_count: int, *shape: int) -> int:
    """Returns the pages that all prompts and `row_count` rows of maximum length need.

    `shape` is that of `min_pool_size`.
    """
    _, prompt_length, response_length, draft_length, page_size = shape
    return min_pool_size(*shape) + (row_count - 1) * -(
        -(prompt_length + response_length + draft_length) // page_size
    )


def estimate_row_capacity(page_count: int, *shape: int) -> int:
    """Returns the number of rows that fit `page_count` pages, at least `MIN_ROWS`.

    Rows are taken to be halfway through responses of maximum length. `shape` is that of
    `min_pool_size`.
    """
    prompt_count, prompt_length, response_length, draft_length, page_size = shape
    # One more page per row: its own copy of the last page of its prompt.
    pages_per_row = -(-(response_length // 2 + draft_length + 1) // page_size) + 1
    return max(
        MIN_ROWS, (page_count - prompt_count * -(-prompt_length // page_size)) // pages_per_row
    )
