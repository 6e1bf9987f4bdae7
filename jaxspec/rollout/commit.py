"""Commits a verified block: cuts it where the response ends, and writes it into the rows."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int8

from jaxspec.drafts.base import Proposal, block_positions
from jaxspec.rollout.decode_state import DecodeState, active, added, rows_of_slots, taken
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.block import Compared
from jaxspec.rollout.verify import Verdict, leading
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
    matched: Int[Array, " R"] | None
    """Stop-string state of each row."""
    tokens: Int[Array, "B K1"]
    """Block of each slot: accepted drafts, then the next token."""
    kept: Int[Array, " B"]
    """Number of tokens of the block that each slot keeps."""


def commit_block(
    state: DecodeState,
    verdict: Verdict,
    proposal: Proposal,
    compared: Compared,
    settings: Settings,
) -> BlockCommit:
    """Cuts each block at its first end, and writes the tokens before the cut.

    A block ends at an end token, a stop string, the length limit or a failure. Slots whose rows
    have ended keep nothing.
    """
    rollout, rows, running = state.rollout, rows_of_slots(state), active(state)
    lengths, prompt_lengths = (
        taken(leaf, rows) for leaf in (rollout.lengths, rollout.prompt_lengths)
    )
    drafted = proposal.tokens
    offsets = jnp.arange(drafted.shape[1] + 1, dtype=jnp.int32)
    accepted = verdict.accepted[:, None]
    block = jnp.where(
        offsets < accepted, jnp.pad(drafted, ((0, 0), (0, 1))), verdict.next_token[:, None]
    )
    # No draft is accepted beyond a failure, so at most the last token of the block is not finite.
    finite_count = leading((offsets <= accepted) & compared.finite)
    ends = jnp.isin(block, jnp.asarray(settings.processing.stop_ids, jnp.int32))
    matched, stop_states = state.matched, None
    if settings.stop is not None and matched is not None:
        closes, stop_states = settings.stop(taken(matched, rows), block)
        response_positions = block_positions(lengths - prompt_lengths, block.shape[1])
        ends |= closes & (response_positions >= settings.processing.min_new_tokens)
    ends &= offsets < finite_count[:, None]
    first_end = jnp.argmax(ends, axis=1).astype(jnp.int32)
    until_end = jnp.where(jnp.any(ends, axis=1), first_end + 1, finite_count)
    room = prompt_lengths + settings.max_new_tokens - lengths
    count = jnp.where(running, jnp.minimum(until_end, room), 0)
    committed = offsets < count[:, None]
    if matched is not None and stop_states is not None:
        state_after = jnp.take_along_axis(stop_states, count[:, None], axis=1)[:, 0]
        matched = added(matched, rows, state_after - stop_states[:, 0])
    fails = finite_count <= verdict.accepted
    status = jnp.where(count == room, LENGTH, jnp.where(fails, FAILED, RUNNING))
    status = jnp.where(jnp.any(ends & committed, axis=1), EOS, status)
    # Positions beyond the buffer are dropped.
    places = jnp.where(committed, lengths[:, None] + offsets, rollout.tokens.shape[1])
    row = state.row[:, None]
    rollout = rollout.replace(
        tokens=rollout.tokens.at[row, places].set(block, mode="drop"),
        logprobs=rollout.logprobs.at[row, places].set(compared.logprobs(block), mode="drop"),
        origin=rollout.origin.at[row, places].set(
            _origins(offsets, verdict.accepted, proposal.lengths), mode="drop"
        ),
        lengths=added(rollout.lengths, rows, count),
        status=added(rollout.status, rows, jnp.where(running, status - RUNNING, 0)),
    )
    return BlockCommit(rollout, matched, block, count)


def _origins(
    offsets: Int[Array, " K1"], accepted: Int[Array, " B"], offered: Int[Array, " B"]
) -> Int8[Array, "B K1"]:
    """Origin of each token of the blocks, as in `Rollout.origin`."""
    next_token = jnp.where(accepted < offered, CORRECTION, BONUS)
    next_token = jnp.where(offered > 0, next_token, UNDRAFTED)[:, None]
    return jnp.where(offsets < accepted[:, None], DRAFTED + offsets, next_token).astype(jnp.int8)
