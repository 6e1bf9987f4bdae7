"""Prefill of known text: prompts, and the texts of evicted rows.

Text is read in pieces. One pass of the target reads a fixed number of pieces, of one text or
several. It writes keys and values directly to their final place (chunked prefill, Agrawal et
al., arXiv 2308.16369). An evicted row starts from its prompt and reads its own tokens again
(preemption by recompute, Kwon et al., arXiv 2309.06180).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxspec.drafts.base import Draft
from jaxspec.drafts.pieces import Pieces
from jaxspec.mesh import max_over_experts
from jaxspec.models.decoder import Decoder
from jaxspec.rollout.decode_state import Caches, DecodeState, gather_rows, slot_count
from jaxspec.rollout.round import run_target
from jaxspec.state import Drafter, PyTree


class Texts(NamedTuple):
    """H texts, and the positions of each that are still to be read."""

    tokens: Int[Array, "R S"]
    """Tokens of all rows."""
    rows: Int[Array, " H"]
    """Row of each text, R for an empty slot."""
    lengths: Int[Array, " H"]
    """Tokens of each text."""
    # The next round reads the last token.
    unread_counts: Int[Array, " H"]
    """Positions to read. They end before the last token."""
    table: Int[Array, "H N"]
    """Page table of each text."""


class PassSize(NamedTuple):
    """Size of a pass over known text."""

    piece_count: int
    piece_length: int
    """Positions per piece."""


def append_texts(
    target: Decoder, drafter: Drafter, draft: Draft, state: DecodeState, size: PassSize
) -> DecodeState:
    """Reads the unread text of slots and prompts into their pages."""
    rollout, prompts, slots = state.rollout, state.queue.prompts, slot_count(state)
    texts = Texts(
        tokens=rollout.tokens,
        rows=jnp.concatenate([state.row, prompts.first_row]),
        lengths=jnp.concatenate(
            [gather_rows(rollout.lengths, state.row), rollout.prompt_lengths[prompts.first_row]]
        ),
        unread_counts=state.unread_counts,
        table=state.pages.table,
    )
    # One array for slots and prompts, so that a pass can read pieces of both.
    draft_states = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves, axis=0), state.draft, prompts.draft
    )
    caches, draft_states = read_texts(
        target, drafter, draft, texts, state.caches, draft_states, size
    )
    slot_states, prompt_states = (
        jax.tree.map(lambda leaf, indices=indices: leaf[indices], draft_states)
        for indices in (slice(None, slots), slice(slots, None))
    )
    return state.replace(
        caches=caches,
        draft=slot_states,
        queue=state.queue.replace(prompts=prompts.replace(draft=prompt_states)),
        unread_counts=jnp.zeros_like(state.unread_counts),
    )


def read_texts(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    texts: Texts,
    caches: Caches,
    draft_state: PyTree,
    size: PassSize,
) -> tuple[Caches, PyTree]:
    """Reads the unread part of texts.

    Returns the caches without a table, and the draft state of each text.
    """
    piece_ends = jnp.cumsum(-(-texts.unread_counts // size.piece_length), dtype=jnp.int32)

    def read_pieces(
        pass_index: Int[Array, ""], loop_state: tuple[Caches, PyTree]
    ) -> tuple[Caches, PyTree]:
        caches, draft_state = loop_state
        pieces = select_pieces(texts, piece_ends, pass_index, size)
        # Pieces without a text get no page, so that they write nothing.
        table = jnp.take(
            texts.table,
            pieces.text_indices,
            axis=0,
            mode="fill",
            fill_value=caches.target.page_count,
        )
        caches = caches.with_table(table)
        target_pass = run_target(target, draft, pieces.tokens, pieces.positions, caches.target)
        draft_state, draft_cache = draft.prefill(
            drafter.network, target, draft_state, caches.draft, pieces, target_pass.features
        )
        return Caches(target=target_pass.cache, draft=draft_cache).without_table(), draft_state

    # Expert members run in lockstep, so all make the passes of the one with the most pieces.
    pass_count = max_over_experts((piece_ends[-1] + size.piece_count - 1) // size.piece_count)
    return lax.fori_loop(0, pass_count, read_pieces, (caches.without_table(), draft_state))


def select_pieces(
    texts: Texts, piece_ends: Int[Array, " H"], pass_index: Int[Array, ""], size: PassSize
) -> Pieces:
    """Returns the pieces of a pass.

    `piece_ends` is the cumulative number of pieces of the texts.
    """
    piece_numbers = pass_index * size.piece_count + jnp.arange(size.piece_count, dtype=jnp.int32)
    # `searchsorted` would be a loop of many kernels on GPUs.
    text_indices = jnp.sum(piece_numbers[:, None] >= piece_ends, axis=1, dtype=jnp.int32)
    first_piece = jnp.where(
        text_indices > 0, jnp.take(piece_ends, text_indices - 1, mode="clip"), 0
    )

    def gather_text(leaf: Int[Array, " H"]) -> Int[Array, " N"]:
        return jnp.take(leaf, text_indices, mode="clip")

    start_positions = (
        gather_text(texts.lengths - 1 - texts.unread_counts)
        + (piece_numbers - first_piece) * size.piece_length
    )
    # The last piece of a text may be shorter.
    piece_lengths = jnp.clip(gather_text(texts.lengths) - 1 - start_positions, 0, size.piece_length)
    has_text = text_indices < len(piece_ends)
    start_positions = jnp.where(has_text, start_positions, 0)
    positions = start_positions[:, None] + jnp.arange(size.piece_length, dtype=jnp.int32)
    # An empty slot has a row number beyond the last row.
    piece_rows = jnp.minimum(gather_text(texts.rows), len(texts.tokens) - 1)[:, None]
    tokens = texts.tokens[piece_rows, jnp.minimum(positions, texts.tokens.shape[1] - 1)]
    return Pieces(
        tokens=tokens,
        positions=positions,
        text_indices=text_indices,
        lengths=jnp.where(has_text, piece_lengths, 0),
    )
