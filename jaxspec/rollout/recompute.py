"""Recompute of rows that were evicted (preemption by recompute; Kwon et al., arXiv 2309.06180).

An evicted row keeps its text and loses its keys, values and draft state. When it gets a slot again,
its text is read as if it were a prompt, and the row is then like any other.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafts.base import Draft
from jaxspec.kernels.order import after, computed
from jaxspec.mesh import of_any_expert
from jaxspec.models.cache import KVCache
from jaxspec.models.decoder import Decoder
from jaxspec.models.paged import put_texts
from jaxspec.rollout.decode_state import Caches, DecodeState, active, taken
from jaxspec.rollout.round import features
from jaxspec.rollout.slots import shared
from jaxspec.state import Drafter, Prompts

BLOCK = 512
"""Tokens of a row that the target reads in one pass."""


def recomputed(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    before: DecodeState,
    state: DecodeState,
    group_size: int,
) -> DecodeState:
    """Reads the texts of all rows that were admitted since `before` with more than their prompts,
    one row at a time: rows are evicted seldom, and one by one.

    A member of `expert` that has fewer of them goes on reading, of no row, with the others."""
    rollout, row = state.rollout, state.row
    admitted = state.admitted > jnp.max(before.admitted)
    longer = taken(rollout.lengths, row) > taken(rollout.prompt_lengths, row)

    def one(
        carry: tuple[DecodeState, Bool[Array, " B"]],
    ) -> tuple[DecodeState, Bool[Array, " B"]]:
        state, left = carry
        slot = jnp.where(jnp.any(left), jnp.argmax(left), len(left)).astype(jnp.int32)
        read = _one(target, drafter, draft, state, slot, group_size)
        return read, left.at[slot].set(False, mode="drop")

    left = admitted & longer & active(state)
    return lax.while_loop(lambda carry: of_any_expert(jnp.any(carry[1])), one, (state, left))[0]


def _one(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    state: DecodeState,
    slot: Int[Array, ""],
    group_size: int,
) -> DecodeState:
    """Reads the text of the row in `slot`, and puts what target and draft keep of it there; of a
    slot beyond all there are, some text, which goes nowhere."""
    there = slot < len(state.row)
    row = jnp.minimum(
        state.row[jnp.minimum(slot, len(state.row) - 1)], len(state.rollout.status) - 1
    )
    text = _text(state, row, group_size)
    cache, read = _through_target(target, draft, text)
    draft_state, draft_cache = state.draft, None
    if draft is not None:
        # a draft that reads the text alone must wait for the loop that read it before (`order.py`)
        tokens = after(text.tokens, [computed(read)])
        empty = draft.empty_cache(drafter.network, *tokens.shape)
        fresh, draft_cache = draft.prefill(
            drafter.network, target, text.replace(tokens=tokens), read, empty
        )
        draft_state = jax.tree.map(
            lambda leaf, source: leaf.at[slot].set(source[0], mode="drop"), state.draft, fresh
        )
    # pages that the group shares are as they were
    pages, size = state.pages, state.caches.page_size
    common = shared(state.rollout.prompt_lengths[row], size)
    own = jnp.arange(pages.table.shape[1], dtype=jnp.int32) >= common
    table = jnp.where(own & there, pages.table[slot], len(pages.references))[None]
    written = Caches(target=cache, draft=draft_cache)
    return state.replace(
        caches=state.caches.map(lambda pool, source: put_texts(pool, table, source), written),
        draft=draft_state,
    )


def _text(state: DecodeState, row: Int[Array, ""], group_size: int) -> Prompts:
    """The row's prompt and response so far, as the only prompt of a call."""
    prompts, prompt, nothing = state.queue.prompts, row // group_size, jnp.zeros((), jnp.int32)
    return Prompts(
        tokens=state.rollout.tokens[row][None],
        lengths=state.rollout.lengths[row][None],
        live=jnp.ones((1,), bool),
        stream=nothing,
        batch=nothing,
        history=prompts.history[prompt][None],
        history_lengths=prompts.history_lengths[prompt][None],
    )


def _through_target(
    target: Decoder, draft: Draft | None, text: Prompts
) -> tuple[KVCache, Float[Array, "n S C"]]:
    """Keys and values of the text, and the features that a draft reads; zeros beyond its last
    block."""
    size = text.tokens.shape[1]
    block = min(BLOCK, size)
    taps = draft.taps if draft else ()

    def one(index: Int[Array, ""] | int, cache: KVCache) -> tuple[Int[Array, ""], KVCache, Array]:
        # the last block of a row as long as can be begins early enough to be whole
        start = jnp.minimum(index * block, size - block)
        positions = (start + jnp.arange(block, dtype=jnp.int32))[None]
        tokens = lax.dynamic_slice_in_dim(text.tokens, start, block, axis=1)
        forward = target(tokens, positions, cache, taps)
        assert forward.cache is not None, "a cache that goes in comes back"
        return start, forward.cache, features(forward)

    def read(
        index: Int[Array, ""], carry: tuple[KVCache, Float[Array, "n S C"]]
    ) -> tuple[KVCache, Float[Array, "n S C"]]:
        start, cache, found = one(index, carry[0])
        return cache, lax.dynamic_update_slice_in_dim(carry[1], found, start, axis=1)

    empty = target.empty_cache(1, size)
    found = jax.eval_shape(lambda cache: one(0, cache)[2], empty)
    nothing = jnp.zeros((1, size, found.shape[2]), found.dtype)
    blocks = of_any_expert((text.lengths[0] - 1) // block + 1)
    return lax.fori_loop(0, blocks, read, (empty, nothing))
