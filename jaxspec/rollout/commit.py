"""Commit of verified blocks.

A block is cut where the response ends, and written into its row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int8

from jaxspec.drafts.base import Proposal, block_positions
from jaxspec.rollout.decode_state import (
    DecodeState,
    active_slots,
    add_to_rows,
    gather_rows,
    rows_of_slots,
)
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.block import BlockComparison
from jaxspec.rollout.verify import Verdict, count_leading
from jaxspec.state import (
    BONUS,
    CORRECTION,
    DRAFTED,
    EOS,
    FAILED,
    LENGTH,
    RUNNING,
    UNDRAFTED,
    Rollout,
)
from jaxspec.tokens.stop_strings import NoStopStrings


class BlockCommit(NamedTuple):
    """Result of committing a block."""

    rollout: Rollout
    stop_state: Int[Array, " R"]
    """Stop-string state of each row."""
    tokens: Int[Array, "B K1"]
    """Accepted drafts of each slot, then its next token, repeated to the end of the block."""
    token_counts: Int[Array, " B"]
    """Number of tokens of the block that each slot keeps."""


class _Cut(NamedTuple):
    """End of each block's committed tokens."""

    token_counts: Int[Array, " B"]
    """Number of tokens to keep."""
    status: Int[Array, " B"]
    """Status of the row after them."""


def commit_block(
    state: DecodeState,
    verdict: Verdict,
    proposal: Proposal,
    comparison: BlockComparison,
    settings: Settings,
) -> BlockCommit:
    """Cuts each block at its first end, and writes the tokens before the cut.

    A block ends at an end token, a stop string, the length limit or a failure. Slots without a
    running row keep nothing.
    """
    rollout, rows, running = state.rollout, rows_of_slots(state), active_slots(state)
    lengths = gather_rows(rollout.lengths, rows)
    offsets = jnp.arange(proposal.tokens.shape[1] + 1, dtype=jnp.int32)
    # Entries after the next token repeat it, and are never committed.
    block = jnp.where(
        offsets < verdict.accepted[:, None],
        jnp.pad(proposal.tokens, ((0, 0), (0, 1))),
        verdict.next_token[:, None],
    )
    stops = _find_stop_strings(state, block, settings)
    cut = _cut_block(state, block, verdict.accepted, comparison, stops.is_stop, settings)
    committed = offsets < cut.token_counts[:, None]
    # Tokens after the cut get a position beyond the buffer, and are dropped.
    positions = jnp.where(committed, lengths[:, None] + offsets, rollout.tokens.shape[1])
    row_indices = state.row[:, None]
    rollout = rollout.replace(
        tokens=rollout.tokens.at[row_indices, positions].set(block, mode="drop"),
        logprobs=rollout.logprobs.at[row_indices, positions].set(
            comparison.logprobs(block), mode="drop"
        ),
        origin=rollout.origin.at[row_indices, positions].set(
            _token_origins(offsets, verdict.accepted, proposal.lengths), mode="drop"
        ),
        lengths=add_to_rows(rollout.lengths, rows, cut.token_counts),
        status=add_to_rows(rollout.status, rows, jnp.where(running, cut.status - RUNNING, 0)),
    )
    return BlockCommit(
        rollout, stops.update_stop_state(state, cut.token_counts), block, cut.token_counts
    )


class _NothingToFind(NamedTuple):
    """Result of a rollout without stop strings, for which nothing is compiled."""

    is_stop: Bool[Array, ""]

    def update_stop_state(self, state: DecodeState, count: Int[Array, " B"]) -> Int[Array, " R"]:
        """Returns the stop-string state of each row, unchanged."""
        return state.stop_state


class _FoundStopStrings(NamedTuple):
    """Stop strings of the blocks."""

    is_stop: Bool[Array, "B K1"]
    """Tokens inside which a stop string ends the response."""
    offset_states: Int[Array, "B K2"]
    """Automaton states before the first token and after each."""

    def update_stop_state(self, state: DecodeState, count: Int[Array, " B"]) -> Int[Array, " R"]:
        """Returns the stop-string state of each row after `count` tokens."""
        state_after = jnp.take_along_axis(self.offset_states, count[:, None], axis=1)[:, 0]
        # A difference, because `add_to_rows` adds.
        change = state_after - self.offset_states[:, 0]
        return add_to_rows(state.stop_state, rows_of_slots(state), change)


def _find_stop_strings(
    state: DecodeState, block: Int[Array, "B K1"], settings: Settings
) -> _NothingToFind | _FoundStopStrings:
    """Finds the stop strings in each block."""
    if isinstance(settings.stop, NoStopStrings):
        return _NothingToFind(jnp.zeros((), bool))
    rollout, rows = state.rollout, rows_of_slots(state)
    is_stop, offset_states = settings.stop(gather_rows(state.stop_state, rows), block)
    first_positions = gather_rows(rollout.lengths, rows) - gather_rows(rollout.prompt_lengths, rows)
    response_positions = block_positions(first_positions, block.shape[1])
    # Before the minimum length, stop strings end nothing. End tokens cannot be sampled there.
    is_stop &= response_positions >= settings.processing.min_new_tokens
    return _FoundStopStrings(is_stop, offset_states)


def _cut_block(
    state: DecodeState,
    block: Int[Array, "B K1"],
    accepted: Int[Array, " B"],
    comparison: BlockComparison,
    is_stop: Bool[Array, "*#B"],
    settings: Settings,
) -> _Cut:
    """Finds the first end of each block."""
    rollout, rows = state.rollout, rows_of_slots(state)
    lengths, prompt_lengths = (
        gather_rows(leaf, rows) for leaf in (rollout.lengths, rollout.prompt_lengths)
    )
    offsets = jnp.arange(block.shape[1], dtype=jnp.int32)
    # No draft is accepted beyond a failure, so at most the last token of the block is not finite.
    finite_count = count_leading((offsets <= accepted[:, None]) & comparison.finite)
    is_end = jnp.isin(block, jnp.asarray(settings.processing.stop_ids, jnp.int32)) | is_stop
    is_end &= offsets < finite_count[:, None]
    first_end = jnp.argmax(is_end, axis=1).astype(jnp.int32)
    count_to_end = jnp.where(jnp.any(is_end, axis=1), first_end + 1, finite_count)
    room = prompt_lengths + settings.max_new_tokens - lengths
    count = jnp.where(active_slots(state), jnp.minimum(count_to_end, room), 0)
    has_failed = finite_count <= accepted
    status = jnp.where(count == room, LENGTH, jnp.where(has_failed, FAILED, RUNNING))
    # An end at the length limit counts as EOS.
    has_end = jnp.any(is_end & (offsets < count[:, None]), axis=1)
    return _Cut(count, jnp.where(has_end, EOS, status))


def _token_origins(
    offsets: Int[Array, " K1"], accepted: Int[Array, " B"], draft_counts: Int[Array, " B"]
) -> Int8[Array, "B K1"]:
    """Returns the origin of each token of the blocks, as in `Rollout.origin`."""
    next_token = jnp.where(accepted < draft_counts, CORRECTION, BONUS)
    next_token = jnp.where(draft_counts > 0, next_token, UNDRAFTED)[:, None]
    return jnp.where(offsets < accepted[:, None], DRAFTED + offsets, next_token).astype(jnp.int8)
