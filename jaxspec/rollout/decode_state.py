"""Loop state of generation.

All fields are always present. XLA removes from a program those that it never changes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, Key

from jaxspec.mesh import ROWS, max_over_experts
from jaxspec.models.cache import KVCache, no_table
from jaxspec.rollout.pages import Pages
from jaxspec.state import RUNNING, AcceptanceEstimate, PyTree, Rollout, Tree, pytree


@pytree
class Caches(Tree):
    """Key-value caches of target and draft."""

    target: KVCache
    draft: KVCache | None
    """None if the draft has no cache."""

    def map(self, function: Callable[..., KVCache], *other_caches: "Caches") -> "Caches":
        """Applies a function to each cache, and to its counterparts in `other_caches`."""
        # A missing cache is an empty tree.
        return jax.tree.map(
            function, self, *other_caches, is_leaf=lambda node: isinstance(node, KVCache)
        )

    def with_table(self, table: Int[Array, "B N"]) -> "Caches":
        """Returns the caches with a page table, as a round needs them."""
        return self.map(lambda cache: cache.replace(table=table))

    def without_table(self) -> "Caches":
        """Returns the caches without a page table, as the state stores them."""
        # Between rounds `DecodeState.pages` has the table.
        return self.with_table(no_table())

    @property
    def page_size(self) -> int:
        """Positions per page."""
        return self.target.page_size


@pytree
class PromptState(Tree):
    """Initial state of the rows of each prompt.

    Empty (n = 0) if every row has a slot from the start.
    """

    first_row: Int[Array, " n"]
    """First row of each prompt's group."""
    caches: Caches
    """Caches of the prompts, empty if their keys and values are in pages."""
    draft: PyTree
    """Draft state after each prompt."""


@pytree
class Queue(Tree):
    """FIFO queue of rows without a slot."""

    waiting: Bool[Array, " R"]
    """Whether each row waits for a slot."""
    # The order never changes. An evicted row therefore returns before all rows after it.
    admission_order: Int[Array, " R"]
    """Rows in order of admission."""
    prompts: PromptState


@pytree
class DecodeState(Tree):
    """Loop state of R rows in B slots.

    Each shard of rows has its own.
    """

    rollout: Rollout
    """Rows generated so far."""
    row: Int[Array, " B"]
    """Row in each slot, R if the slot is empty."""
    keys: Key[Array, " R"]
    """Noise key of each row."""
    # The next round reads the last committed token.
    caches: Caches
    """Caches of the slots. The target's is valid below each row's last committed token, except for
    the positions in `unread_counts`."""
    draft: PyTree
    """Draft state of each slot, in addition to its cache."""
    # One entry rather than a scalar, so that data shards can each have their own.
    round: Int[Array, " 1"]
    """Number of rounds so far."""
    queue: Queue
    pages: Pages
    """Pages of the slots, then of the prompts. There are 0 if caches are contiguous."""
    unread_counts: Int[Array, " A"]
    """Positions of each owner of pages that `append_texts` must still read."""
    admission_index: Int[Array, " B"]
    """Order in which the slots' rows were admitted. The youngest row has the highest index."""
    acceptance: AcceptanceEstimate
    """Acceptance of the draft, with a first axis of one. Constant if all rounds have one draft
    length."""
    stop_state: Int[Array, " R"]
    """Stop-string automaton state of each row. Constant without stop strings."""


def row_specs(state: DecodeState) -> PyTree:
    """Returns partition specs over the row axes."""
    # Caches have an axis of pages. All other fields begin with rows, slots, prompts or owners of
    # pages, or with a single entry that each shard has for itself.
    return jax.tree.map(
        lambda node: node.page_specs() if isinstance(node, KVCache) else P(ROWS),
        state,
        is_leaf=lambda node: isinstance(node, KVCache),
    )


def slot_count(state: DecodeState) -> int:
    """Returns the number of slots."""
    return len(state.row)


def rows_may_wait(state: DecodeState) -> bool:
    """Returns whether a row may lack a slot. Known at trace time."""
    return len(state.queue.prompts.first_row) > 0


def pages_may_run_out(state: DecodeState, max_new_tokens: int) -> bool:
    """Returns whether a row may be evicted. Known at trace time.

    Rows may be evicted if there are fewer pages than all slots and prompts can need. `state` must
    have all its slots, not those of a tail loop.
    """
    pages, slots = state.pages, slot_count(state)
    owner_count, pages_per_row = pages.table.shape
    if not pages_per_row:
        return False
    prompt_length = state.rollout.tokens.shape[1] - max_new_tokens
    pages_per_prompt = -(-prompt_length // state.caches.page_size)
    return len(pages.references) < slots * pages_per_row + (owner_count - slots) * pages_per_prompt


Rows = slice | Int[Array, " B"]
"""Index of each slot's row."""


def rows_of_slots(state: DecodeState) -> Rows:
    """Returns each slot's row: a full slice if slots and rows coincide."""
    # XLA does not know that the rows are in order, and makes each scatter a loop on CPUs: 7 loops
    # more in a plain round, 13 in one with a draft.
    in_order = not rows_may_wait(state) and slot_count(state) == len(state.rollout.status)
    return slice(None) if in_order else state.row


def gather_rows(leaf: Array, rows: Rows) -> Array:
    """Gathers values by slot. An empty slot gets those of the last row."""
    return leaf[rows] if isinstance(rows, slice) else jnp.take(leaf, rows, axis=0, mode="clip")


def add_to_rows(leaf: Array, rows: Rows, change: Array) -> Array:
    """Adds a change per slot to the rows. Empty slots change nothing."""
    return leaf + change if isinstance(rows, slice) else leaf.at[rows].add(change, mode="drop")


def active_slots(state: DecodeState) -> Bool[Array, " B"]:
    """Returns which slots have a running row."""
    running = gather_rows(state.rollout.status, rows_of_slots(state)) == RUNNING
    # An empty slot has gathered the status of the last row.
    return running & (state.row < len(state.rollout.status))


def has_unread_text(state: DecodeState) -> Bool[Array, ""]:
    """Returns whether a text must be read before the next round."""
    # Expert members of a shard run in lockstep, so they decide together.
    return max_over_experts(jnp.any(state.unread_counts > 0))


def has_waiting_rows(state: DecodeState) -> Bool[Array, ""]:
    """Returns whether a row waits for a slot."""
    return jnp.any(state.queue.waiting)
