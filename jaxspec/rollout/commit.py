"""Commit of verified blocks.

A block is cut where the response ends, and written into its row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int8

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


class BlockCommit(NamedTuple):
    """Result of committing a block."""

    rollout: Rollout
    stop_state: Int[Array, " R"] | None
    """Stop-string state of each row."""
    tokens: Int[Array, "B K1"]
    """Block of each slot: accepted drafts, then the next token."""
    token_counts: Int[Array, " B"]
    """Number of tokens of the block that each slot keeps."""


def commit_block(
    state: DecodeState,
    verdict: Verdict,
    proposal: Proposal,
    comparison: BlockComparison,
    settings: Settings,
) -> BlockCommit:
    """Cuts each block at its first end, and writes it.

    A block ends at an end token, a stop string, the length limit or a failure. Slots whose rows
    have ended keep nothing.
    """
    rollout, rows, running = state.rollout, rows_of_slots(state), active_slots(state)
    lengths, prompt_lengths = (
        gather_rows(leaf, rows) for leaf in (rollout.lengths, rollout.prompt_lengths)
    )
    draft_tokens = proposal.tokens
    offsets = jnp.arange(draft_tokens.shape[1] + 1, dtype=jnp.int32)
    accepted = verdict.accepted[:, None]
    # Entries after the next token repeat it, and are never committed.
    block = jnp.where(
        offsets < accepted, jnp.pad(draft_tokens, ((0, 0), (0, 1))), verdict.next_token[:, None]
    )
    # No draft is accepted beyond a failure, so at most the last token of the block is not finite.
    finite_count = count_leading((offsets <= accepted) & comparison.finite)
    is_end = jnp.isin(block, jnp.asarray(settings.processing.stop_ids, jnp.int32))
    stop_state, offset_states = state.stop_state, None
    if settings.stop is not None and stop_state is not None:
        is_stop, offset_states = settings.stop(gather_rows(stop_state, rows), block)
        response_positions = block_positions(lengths - prompt_lengths, block.shape[1])
        # Before the minimum length, stop strings end nothing. End tokens cannot be sampled there.
        is_end |= is_stop & (response_positions >= settings.processing.min_new_tokens)
    is_end &= offsets < finite_count[:, None]
    first_end = jnp.argmax(is_end, axis=1).astype(jnp.int32)
    count_to_end = jnp.where(jnp.any(is_end, axis=1), first_end + 1, finite_count)
    room = prompt_lengths + settings.max_new_tokens - lengths
    count = jnp.where(running, jnp.minimum(count_to_end, room), 0)
    committed = offsets < count[:, None]
    if stop_state is not None and offset_states is not None:
        state_after = jnp.take_along_axis(offset_states, count[:, None], axis=1)[:, 0]
        # A difference, because `add_to_rows` adds.
        stop_state = add_to_rows(stop_state, rows, state_after - offset_states[:, 0])
    has_failed = finite_count <= verdict.accepted
    # An end token at the length limit counts as EOS.
    status = jnp.where(count == room, LENGTH, jnp.where(has_failed, FAILED, RUNNING))
    status = jnp.where(jnp.any(is_end & committed, axis=1), EOS, status)
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
        lengths=add_to_rows(rollout.lengths, rows, count),
        status=add_to_rows(rollout.status, rows, jnp.where(running, status - RUNNING, 0)),
    )
    return BlockCommit(rollout, stop_state, block, count)


def _token_origins(
    offsets: Int[Array, " K1"], accepted: Int[Array, " B"], draft_counts: Int[Array, " B"]
) -> Int8[Array, "B K1"]:
    """Returns the origin of each token of the blocks, as in `Rollout.origin`."""
    next_token = jnp.where(accepted < draft_counts, CORRECTION, BONUS)
    next_token = jnp.where(draft_counts > 0, next_token, UNDRAFTED)[:, None]
    return jnp.where(offsets < accepted[:, None], DRAFTED + offsets, next_token).astype(jnp.int8)
