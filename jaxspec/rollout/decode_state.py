"""What a rollout carries from round to round. It has one shape: every part is always there, and XLA
removes those that a program never changes."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from jaxspec.mesh import max_over_experts
from jaxspec.models.cache import KVCache, no_table
from jaxspec.rollout.pages import Pages
from jaxspec.state import RUNNING, AcceptanceEstimate, PyTree, Rollout, Tree, pytree


@pytree
class Caches(Tree):
    """Keys and values of target and draft, slot for slot."""

    target: KVCache
    draft: KVCache | None
    """None: there is no draft, or one without a cache."""

    def map(self, function: Callable[..., KVCache], *other_caches: "Caches") -> "Caches":
        """Both, changed alike."""
        target = function(self.target, *(other.target for other in other_caches))
        if self.draft is None:
            return Caches(target=target, draft=None)
        return Caches(
            target=target, draft=function(self.draft, *(other.draft for other in other_caches))
        )

    def with_table(self, table: Int[Array, "B N"]) -> "Caches":
        """As a round reads and writes them."""
        return self.map(lambda cache: cache.replace(table=table))

    def without_table(self) -> "Caches":
        """As they lie between rounds."""
        return self.with_table(no_table())

    @property
    def page_size(self) -> int:
        """Positions of a page."""
        return self.target.page_size


@pytree
class PromptState(Tree):
    """State that every row of a group starts from, by prompt.

    Empty (n = 0) where every row has a slot from the start.
    """

    first_row: Int[Array, " n"]
    """The first row of its group."""
    caches: Caches
    """Empty too where the prompts' keys and values lie in pages."""
    draft: PyTree


@pytree
class Queue(Tree):
    """The rows that have no slot."""

    waiting: Bool[Array, " R"]
    admission_order: Int[Array, " R"]
    """Rows in order of admission; an evicted row comes again before those behind it."""
    prompts: PromptState


StopStrings = Callable[
    [Int[Array, " B"], Int[Array, "B T"]], tuple[Bool[Array, "B T"], Int[Array, "B T1"]]
]
"""(states, tokens) -> whether a stop string ends inside each token, and the states before them and
after each. A state says how much of a stop string a text ends with; 0: nothing."""


@pytree
class DecodeState(Tree):
    """Everything a rollout carries between rounds. R rows, of which B are in slots; all of it is
    local to a `data` shard."""

    rollout: Rollout
    """The rows so far."""
    row: Int[Array, " B"]
    """The row in each slot, R where there is none."""
    keys: Key[Array, " R"]
    caches: Caches
    """The target's is valid below the last committed token, which the next round reads, but for
    what `unread_counts` says is unread."""
    draft: PyTree
    """What else the draft keeps, by slot."""
    round: Int[Array, " 1"]
    """Rounds so far."""
    queue: Queue
    pages: Pages
    """Of the slots, then of the prompts. There are none where caches are contiguous."""
    unread_counts: Int[Array, " A"]
    """Positions of each holder of pages that `append_texts` has yet to read."""
    admission_index: Int[Array, " B"]
    """How many admissions there were before that of each slot's row."""
    acceptance: AcceptanceEstimate
    """Of the draft, with a first axis of one; it stays as it is where all rounds draft alike."""
    stop_state: Int[Array, " R"] | None
    """How much of a stop string each response ends with; None: there are none, and nothing of them
    is compiled."""


def slot_count(state: DecodeState) -> int:
    """Rows that are generated at once."""
    return len(state.row)


def rows_may_wait(state: DecodeState) -> bool:
    """Whether a row may have no slot. Known when a program is traced."""
    return len(state.queue.prompts.first_row) > 0


def pages_may_run_out(state: DecodeState, max_new_tokens: int) -> bool:
    """Whether there are fewer pages than all slots and prompts can need: whether a row can be
    evicted. Known when a program is traced, of a state with all its slots."""
    pages, slots = state.pages, slot_count(state)
    owner_count, pages_per_row = pages.table.shape
    if not pages_per_row:
        return False
    prompt_length = state.rollout.tokens.shape[1] - max_new_tokens
    pages_per_prompt = -(-prompt_length // state.caches.page_size)
    return len(pages.references) < slots * pages_per_row + (owner_count - slots) * pages_per_prompt


Rows = slice | Int[Array, " B"]
"""The row of each slot, as an index."""


def rows_of_slots(state: DecodeState) -> Rows:
    """All rows in order where each has a slot of its own, else `row`.

    That they are in order is known when a program is traced, but not to XLA, which makes a loop of
    each scatter on a CPU: a plain round would have 7 loops more, one with a draft 13.
    """
    in_order = not rows_may_wait(state) and slot_count(state) == len(state.rollout.status)
    return slice(None) if in_order else state.row


def gather_rows(leaf: Array, rows: Rows) -> Array:
    """What a slot's row has; for an empty slot, that of the last row."""
    return leaf[rows] if isinstance(rows, slice) else jnp.take(leaf, rows, axis=0, mode="clip")


def add_to_rows(leaf: Array, rows: Rows, change: Array) -> Array:
    """Adds to what rows have, by slot."""
    return leaf + change if isinstance(rows, slice) else leaf.at[rows].add(change, mode="drop")


def active_slots(state: DecodeState) -> Bool[Array, " B"]:
    """Slots with a row that has not ended."""
    running = gather_rows(state.rollout.status, rows_of_slots(state)) == RUNNING
    return running & (state.row < len(state.rollout.status))


def has_unread_text(state: DecodeState) -> Bool[Array, ""]:
    """Whether a row cannot take part in a round before its text is read."""
    return max_over_experts(jnp.any(state.unread_counts > 0))


def has_waiting_rows(state: DecodeState) -> Bool[Array, ""]:
    """Whether a row has no slot yet."""
    return jnp.any(state.queue.waiting)
