"""Who owns which page of a shard's pool: page tables and reference counts, as pure functions over
integer arrays.

Holders are the slots, then the prompts of the call: a prompt keeps its own pages until its group
has ended, and its rows share those that no row writes to.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.state import Tree, pytree


@pytree
class Pages(Tree):
    """The page tables of one pool of P pages."""

    table: Int[Array, "A N"]
    """Page of each holder's n-th page_size positions; P where it has none."""
    page_counts: Int[Array, " A"]
    """How many pages a holder has: those of its first positions."""
    references: Int[Array, " P"]
    """Holders of each page; 0: free."""


def init_pages(page_count: int, owner_count: int, pages_per_owner: int) -> Pages:
    """A pool whose pages are all free."""
    return Pages(
        table=jnp.full((owner_count, pages_per_owner), page_count, jnp.int32),
        page_counts=jnp.zeros((owner_count,), jnp.int32),
        references=jnp.zeros((page_count,), jnp.int32),
    )


def count_free_pages(pages: Pages) -> Int[Array, ""]:
    """Pages that nobody holds."""
    return jnp.sum(pages.references == 0, dtype=jnp.int32)


def allocate_pages(pages: Pages, target_counts: Int[Array, " A"]) -> Pages:
    """Gives every holder free pages until it holds as many as `target_counts`; all of them
    together must be free."""
    missing_counts = jnp.maximum(target_counts - pages.page_counts, 0)
    last_ranks, is_free = jnp.cumsum(missing_counts, dtype=jnp.int32), pages.references == 0
    # the r-th free page goes to the r-th page index that lacks one
    rank = jnp.cumsum(is_free, dtype=jnp.int32) - 1
    is_allocated = is_free & (rank < last_ranks[-1])
    owner = jnp.searchsorted(last_ranks, rank, side="right", method="compare_all").astype(jnp.int32)
    page_index = (
        jnp.take(pages.page_counts + missing_counts - last_ranks, owner, mode="clip") + rank
    )
    page_ids = jnp.arange(len(is_free), dtype=jnp.int32)
    return Pages(
        table=pages.table.at[jnp.where(is_allocated, owner, len(last_ranks)), page_index].set(
            page_ids, mode="drop", unique_indices=True
        ),
        page_counts=pages.page_counts + missing_counts,
        references=pages.references + is_allocated.astype(jnp.int32),
    )


def release_pages(pages: Pages, owners: Bool[Array, " A"]) -> Pages:
    """Takes all pages from the holders that are marked; those that nobody else holds are free
    again."""
    no_page = pages.references.shape[0]
    released_pages = jnp.where(owners[:, None], pages.table, no_page)
    return Pages(
        table=jnp.where(owners[:, None], no_page, pages.table),
        page_counts=jnp.where(owners, 0, pages.page_counts),
        references=pages.references.at[released_pages].add(-1, mode="drop"),
    )


def share_pages(
    pages: Pages, owner: Int[Array, ""], source: Int[Array, ""], count: Int[Array, ""]
) -> Pages:
    """Gives a holder of nothing the first `count` pages of another one, which keeps them too."""
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
    """Pages with which a shard's longest row can end: those of all its prompts, which stay until
    their groups have ended, and its own."""
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
    """Pages that a shard's prompts and slots can need: no row ever loses its own."""
    return prompt_count * -(-prompt_length // page_size) + slots * -(
        -(prompt_length + response_length + draft_length) // page_size
    )


MIN_ROWS = 4
"""Rows of the longest kind that a pool holds at least where its size is chosen, and slots at
least."""


def pool_size_for_rows(row_count: int, *shape: int) -> int:
    """Pages with which so many of the longest rows can be generated at once; `shape` is that of
    `min_pool_size`."""
    _, prompt_length, response_length, draft_length, page_size = shape
    return min_pool_size(*shape) + (row_count - 1) * -(
        -(prompt_length + response_length + draft_length) // page_size
    )


def rows_in_pool(page_count: int, *shape: int) -> int:
    """Rows that some pages hold halfway through their longest answers, each with the pages of its
    prompt that others write to as well; `shape` is that of `min_pool_size`."""
    prompt_count, prompt_length, response_length, draft_length, page_size = shape
    pages_per_row = -(-(response_length // 2 + draft_length + 1) // page_size) + 1
    return max(
        MIN_ROWS, (page_count - prompt_count * -(-prompt_length // page_size)) // pages_per_row
    )
