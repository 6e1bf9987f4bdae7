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
    held: Int[Array, " A"]
    """How many pages a holder has: those of its first positions."""
    references: Int[Array, " P"]
    """Holders of each page; 0: free."""


def no_pages(pages: int, holders: int, row_pages: int) -> Pages:
    """A pool whose pages are all free."""
    return Pages(
        table=jnp.full((holders, row_pages), pages, jnp.int32),
        held=jnp.zeros((holders,), jnp.int32),
        references=jnp.zeros((pages,), jnp.int32),
    )


def free(pages: Pages) -> Int[Array, ""]:
    """Pages that nobody holds."""
    return jnp.sum(pages.references == 0, dtype=jnp.int32)


def grow(pages: Pages, wanted: Int[Array, " A"]) -> Pages:
    """Gives every holder free pages until it holds as many as `wanted`; all of them together must
    be free."""
    need = jnp.maximum(wanted - pages.held, 0)
    ends, unused = jnp.cumsum(need, dtype=jnp.int32), pages.references == 0
    # the r-th free page goes to the r-th page index that lacks one
    rank = jnp.cumsum(unused, dtype=jnp.int32) - 1
    given = unused & (rank < ends[-1])
    holder = jnp.searchsorted(ends, rank, side="right", method="compare_all").astype(jnp.int32)
    page_index = jnp.take(pages.held + need - ends, holder, mode="clip") + rank
    numbers = jnp.arange(len(unused), dtype=jnp.int32)
    return Pages(
        table=pages.table.at[jnp.where(given, holder, len(ends)), page_index].set(
            numbers, mode="drop", unique_indices=True
        ),
        held=pages.held + need,
        references=pages.references + given.astype(jnp.int32),
    )


def release(pages: Pages, holders: Bool[Array, " A"]) -> Pages:
    """Takes all pages from the holders that are marked; those that nobody else holds are free
    again."""
    nobody = pages.references.shape[0]
    lost = jnp.where(holders[:, None], pages.table, nobody)
    return Pages(
        table=jnp.where(holders[:, None], nobody, pages.table),
        held=jnp.where(holders, 0, pages.held),
        references=pages.references.at[lost].add(-1, mode="drop"),
    )


def share(
    pages: Pages, holder: Int[Array, ""], source: Int[Array, ""], count: Int[Array, ""]
) -> Pages:
    """Gives a holder of nothing the first `count` pages of another one, which keeps them too."""
    nobody = pages.references.shape[0]
    row = jnp.where(
        jnp.arange(pages.table.shape[1], dtype=jnp.int32) < count, pages.table[source], nobody
    )
    return Pages(
        table=pages.table.at[holder].set(row),
        held=pages.held.at[holder].set(count),
        references=pages.references.at[row].add(1, mode="drop"),
    )


# ---- sizes


def smallest_pool(
    prompts: int, prompt: int, response: int, draft_length: int, page_size: int
) -> int:
    """Pages with which a shard's longest row can end: those of all its prompts, which stay until
    their groups have ended, and its own."""
    return prompts * -(-prompt // page_size) + -(-(prompt + response + draft_length) // page_size)


def whole_pool(
    prompts: int, prompt: int, response: int, draft_length: int, page_size: int, slots: int
) -> int:
    """Pages that a shard's prompts and slots can need: no row ever loses its own."""
    return prompts * -(-prompt // page_size) + slots * -(
        -(prompt + response + draft_length) // page_size
    )


FEW = 4
"""Rows of the longest kind that a pool holds at least where its size is chosen, and slots at
least."""


def pool_of_rows(rows: int, *shape: int) -> int:
    """Pages with which so many of the longest rows can be generated at once; `shape` is that of
    `smallest_pool`."""
    _, prompt, response, draft, size = shape
    return smallest_pool(*shape) + (rows - 1) * -(-(prompt + response + draft) // size)


def rows_in(pages: int, *shape: int) -> int:
    """Rows that some pages hold halfway through their longest answers, each with the pages of its
    prompt that others write to as well; `shape` is that of `smallest_pool`."""
    count, prompt, response, draft, size = shape
    own = -(-(response // 2 + draft + 1) // size) + 1
    return max(FEW, (pages - count * -(-prompt // size)) // own)
