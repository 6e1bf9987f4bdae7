"""Reading of known text: prompts, and the texts of rows that lost their pages.

Text is read in pieces. One pass of the target reads the next pieces of all texts, however many
rows they belong to, and writes keys and values where they stay (chunked prefill; Agrawal et al.,
arXiv 2308.16369). A row that was evicted starts from its prompt once more and reads its own tokens
again (preemption by recompute; Kwon et al., arXiv 2309.06180).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxspec.drafts.base import Draft
from jaxspec.drafts.pieces import Pieces
from jaxspec.mesh import max_over_experts
from jaxspec.models.cache import KVCache
from jaxspec.models.decoder import Decoder
from jaxspec.rollout.decode_state import Caches, DecodeState, slot_count, taken
from jaxspec.rollout.round import features
from jaxspec.state import Drafter, PyTree


class Texts(NamedTuple):
    """H texts with a part that is not read yet."""

    tokens: Int[Array, "R S"]
    """Of all rows."""
    row: Int[Array, " H"]
    """The row of each text."""
    length: Int[Array, " H"]
    unread: Int[Array, " H"]
    """Positions to read, up to the last but one. The last token is read by the next round."""
    table: Int[Array, "H N"]
    """Pages of each text."""


class PassSize(NamedTuple):
    """Size of a pass over known text."""

    pieces: int
    positions: int
    """Of each piece."""


def append(
    target: Decoder, drafter: Drafter, draft: Draft | None, state: DecodeState, size: PassSize
) -> DecodeState:
    """Reads what prompts and rows in slots have yet to read, into their pages."""
    rollout, prompts, slots = state.rollout, state.queue.prompts, slot_count(state)
    texts = Texts(
        tokens=rollout.tokens,
        row=jnp.concatenate([state.row, prompts.row]),
        length=jnp.concatenate(
            [taken(rollout.lengths, state.row), rollout.prompt_lengths[prompts.row]]
        ),
        unread=state.unread,
        table=state.pages.table,
    )
    both = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=0), state.draft, prompts.draft)
    caches, both = read_texts(target, drafter, draft, texts, state.caches, both, size)
    of_slots, of_prompts = (
        jax.tree.map(lambda leaf, part=part: leaf[part], both)
        for part in (slice(None, slots), slice(slots, None))
    )
    return state.replace(
        caches=caches,
        draft=of_slots,
        queue=state.queue.replace(prompts=prompts.replace(draft=of_prompts)),
        unread=jnp.zeros_like(state.unread),
    )


def read_texts(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    texts: Texts,
    caches: Caches,
    draft_state: PyTree,
    size: PassSize,
) -> tuple[Caches, PyTree]:
    """Reads the unread part of texts.

    Returns the caches without a table, and the draft's state of each text.
    """
    ends = jnp.cumsum(-(-texts.unread // size.positions), dtype=jnp.int32)

    def read(turn: Int[Array, ""], carry: tuple[Caches, PyTree]) -> tuple[Caches, PyTree]:
        caches, draft_state = carry
        pieces = take_pieces(texts, ends, turn, size)
        # no page where there is no text, so that nothing is written
        table = jnp.take(
            texts.table,
            pieces.text_indices,
            axis=0,
            mode="fill",
            fill_value=caches.target.page_count,
        )
        caches = caches.with_table(table)
        taps = draft.taps if draft else ()
        forward = target(pieces.tokens, pieces.positions, caches.target, taps)
        assert forward.cache is not None, "a cache that goes in comes back"
        draft_cache: KVCache | None = caches.draft
        if draft is not None:
            draft_state, draft_cache = draft.prefill(
                drafter.network, target, draft_state, draft_cache, pieces, features(forward)
            )
        return Caches(target=forward.cache, draft=draft_cache).without_table(), draft_state

    turns = max_over_experts((ends[-1] + size.pieces - 1) // size.pieces)
    return lax.fori_loop(0, turns, read, (caches.without_table(), draft_state))


def take_pieces(
    texts: Texts, ends: Int[Array, " H"], turn: Int[Array, ""], size: PassSize
) -> Pieces:
    """Returns the pieces of a pass; `ends` counts those of all texts up to each."""
    number = turn * size.pieces + jnp.arange(size.pieces, dtype=jnp.int32)
    # `searchsorted` would be a loop of many kernels on a GPU
    text = jnp.sum(number[:, None] >= ends, axis=1, dtype=jnp.int32)
    before = jnp.where(text > 0, jnp.take(ends, text - 1, mode="clip"), 0)

    def of_text(leaf: Int[Array, " H"]) -> Int[Array, " N"]:
        return jnp.take(leaf, text, mode="clip")

    start = of_text(texts.length - 1 - texts.unread) + (number - before) * size.positions
    length = jnp.clip(of_text(texts.length) - 1 - start, 0, size.positions)
    there = text < len(ends)
    start = jnp.where(there, start, 0)
    positions = start[:, None] + jnp.arange(size.positions, dtype=jnp.int32)
    row = jnp.minimum(of_text(texts.row), len(texts.tokens) - 1)[:, None]
    tokens = texts.tokens[row, jnp.minimum(positions, texts.tokens.shape[1] - 1)]
    return Pieces(
        tokens=tokens, positions=positions, text_indices=text, lengths=jnp.where(there, length, 0)
    )
