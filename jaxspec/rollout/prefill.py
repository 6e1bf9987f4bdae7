"""The state that a call starts from: its rows, their slots or places in the queue, and prompts to
read once for all rows of a group."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from jaxspec import sampling
from jaxspec.drafts.base import Draft
from jaxspec.models.contiguous import empty_rows, expand_prompts
from jaxspec.models.decoder import Decoder
from jaxspec.models.paged import empty_pages
from jaxspec.rollout.append import PassSize, Texts, append, read_texts
from jaxspec.rollout.decode_state import Caches, DecodeState, PromptState, Queue
from jaxspec.rollout.feedback import acceptance
from jaxspec.rollout.pages import Pages, grow, no_pages, smallest_pool, whole_pool
from jaxspec.rollout.round import by_matching
from jaxspec.rollout.settings import Settings
from jaxspec.state import (
    IDLE,
    PROMPT,
    RUNNING,
    AcceptanceEstimate,
    Drafter,
    Prompts,
    PyTree,
    Rollout,
)

PASS_TOKENS = 2**14
"""Most tokens of a pass over known text in whole prompts."""
PIECES = 32
"""Pieces of a pass, where text is read in pieces.

With 128 positions each, their products keep an accelerator busy, and their attention scores are
few enough to be there at once, without a loop of its own in each layer.
"""


def pass_size(prompts: int, width: int, longest: int, settings: Settings) -> PassSize:
    """Returns the size of a pass over known text: that of prompts, or of a row of `longest`."""
    positions = settings.piece or width
    # The pieces of one row attend to all of it, each for itself: few of those at a time.
    most = max(prompts * -(-width // positions), min(PIECES, -(-longest // positions)))
    pieces = PIECES if settings.piece else max(1, PASS_TOKENS // positions)
    return PassSize(min(pieces, most), positions)


def prepare(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    prompts: Prompts,
    first_prompt: Int[Array, ""],
    key: Key[Array, ""],
    settings: Settings,
) -> DecodeState:
    """Builds the state before the first round.

    Prompts are read where caches are contiguous. Those in pages are left to `append`.

    Args:
      target: the policy in the rollout layout.
      drafter: the draft's weights and temperatures.
      draft: None is plain decoding.
      prompts: those of this shard.
      first_prompt: number of this shard's first prompt among all prompts of the call.
      key: of the call; rows fold in their global number, so results do not depend on the mesh.
      settings: see `Settings`.
    """
    count, width = prompts.tokens.shape
    group, length = settings.group_size, draft.max_length if draft else 0
    size = width + settings.max_new_tokens
    longest = size + length  # headroom: a block may reach K positions beyond the last token kept
    numbers = (first_prompt + jnp.arange(count, dtype=jnp.int32))[:, None] * group + jnp.arange(
        group, dtype=jnp.int32
    )
    lengths = jnp.repeat(prompts.lengths, group)
    inside = jnp.arange(width, dtype=jnp.int32) < prompts.lengths[:, None]
    tokens = jnp.pad(jnp.where(inside, prompts.tokens, 0), ((0, 0), (0, settings.max_new_tokens)))
    wide = np.promote_types(target.embedding[...].dtype, np.float32)
    rollout = Rollout(
        tokens=jnp.repeat(tokens, group, axis=0),
        prompt_lengths=lengths,
        lengths=lengths,
        logprobs=jnp.zeros((count * group, size), wide),
        origin=jnp.full((count * group, size), PROMPT, jnp.int8),
        status=jnp.where(jnp.repeat(prompts.live, group), RUNNING, IDLE).astype(jnp.int32),
        version=jnp.zeros_like(lengths),
        statistics=acceptance.no_statistics(count * group, group, length, len(settings.grid), wide),
    )
    keys = sampling.row_keys(
        key,
        numbers.reshape(-1),
        sampling.TARGET_STREAM if by_matching(draft, settings) else sampling.ROUND_STREAM,
    )
    seats = min(settings.slots or count * group, count * group)
    waits = seats < count * group or settings.page_size > 0
    empty = _empty(target, drafter, draft, prompts, group)
    if not settings.page_size:
        with jax.named_scope("prefill"):
            empty = _read(target, drafter, draft, prompts, empty, settings)
    start = (
        _all_waiting(empty, prompts, seats, longest, settings)
        if waits
        else _all_seated(empty, group, longest, settings.chunk)
    )
    return DecodeState(
        rollout=rollout,
        row=start.row,
        keys=keys,
        caches=start.caches,
        draft=start.draft,
        round=jnp.zeros((1,), jnp.int32),
        queue=Queue(
            waiting=(rollout.status == RUNNING) & waits,
            order=jnp.arange(count * group, dtype=jnp.int32),
            prompts=start.prompts,
        ),
        pages=start.pages,
        unread=jnp.pad(
            _unread(prompts) if settings.page_size else 0 * prompts.lengths, (len(start.row), 0)
        ),
        admitted=jnp.zeros_like(start.row),
        acceptance=_estimate(drafter, length, settings),
        # the text of a prompt does not count
        matched=jnp.zeros_like(lengths) if settings.stop else None,
    )


class _Start(NamedTuple):
    """What rows and slots start from."""

    row: Int[Array, " B"]
    caches: Caches
    draft: PyTree
    prompts: PromptState
    pages: Pages


def _all_seated(read: PromptState, group: int, longest: int, chunk: int) -> _Start:
    """A slot for every row, so that none ever waits."""
    prompts = read.caches.target.page_count
    rows = prompts * group
    return _Start(
        row=jnp.arange(rows, dtype=jnp.int32),
        caches=read.caches.map(lambda cache: expand_prompts(cache, group, longest, chunk)),
        draft=jax.tree.map(lambda leaf: jnp.repeat(leaf, group, axis=0), read.draft),
        prompts=PromptState(
            row=read.row[:0],
            caches=_without_rows(read.caches),
            draft=jax.tree.map(lambda leaf: leaf[:0], read.draft),
        ),
        pages=no_pages(0, rows + prompts, 0),
    )


def _all_waiting(
    read: PromptState, prompts: Prompts, seats: int, longest: int, settings: Settings
) -> _Start:
    """Empty slots, for which all rows wait."""
    count, width = prompts.tokens.shape
    size = settings.page_size
    if not size:
        caches = read.caches.map(lambda cache: empty_rows(cache, seats, longest, settings.chunk))
        pages = no_pages(0, seats + count, 0)
    else:
        of_row = -(-longest // size)
        number = settings.pages or whole_pool(count, width, longest - width, 0, size, seats)
        least = smallest_pool(count, width, longest - width, 0, size)
        if number < least:
            raise ValueError(
                f"rollout.engine.pages is {number}, of {size} positions, for {count} prompts and"
                f" rows of {longest}; {least} are the fewest"
            )
        wanted = jnp.where(prompts.live, (prompts.lengths - 1) // size + 1, 0)
        pages = grow(no_pages(number, seats + count, of_row), jnp.pad(wanted, (seats, 0)))
        caches = read.caches.map(lambda cache: empty_pages(cache, number, size))
        read = read.replace(caches=_without_rows(read.caches))
    return _Start(
        row=jnp.full((seats,), count * settings.group_size, jnp.int32),
        caches=caches,
        draft=jax.tree.map(
            lambda leaf: jnp.zeros((seats, *leaf.shape[1:]), leaf.dtype), read.draft
        ),
        prompts=read,
        pages=pages,
    )


def _without_rows(caches: Caches) -> Caches:
    """Of no prompt: what they hold is copied elsewhere."""
    return caches.map(lambda cache: cache.layout.take_rows(cache, jnp.zeros((0,), jnp.int32)))


def _estimate(drafter: Drafter, length: int, settings: Settings) -> AcceptanceEstimate:
    """What lengths are chosen by; zeros where all rounds draft alike."""
    if not settings.lengths:
        nothing = jnp.zeros((1, length), jnp.float32)
        return AcceptanceEstimate(
            reached=nothing, accepted=nothing, seconds_to_lose=jnp.zeros((1,), jnp.float32)
        )
    assert drafter.chooser is not None, "lengths are chosen by an estimate"
    return jax.tree.map(lambda leaf: leaf[None], drafter.chooser.acceptance)


def _unread(prompts: Prompts) -> Int[Array, " n"]:
    """Positions of each prompt that are to be read; the first round reads its last token."""
    return jnp.where(prompts.live, jnp.maximum(prompts.lengths - 1, 0), 0)


def _empty(
    target: Decoder, drafter: Drafter, draft: Draft | None, prompts: Prompts, group: int
) -> PromptState:
    """State of prompts of which nothing is read."""
    shape = prompts.tokens.shape
    row = jnp.arange(shape[0], dtype=jnp.int32) * group
    caches = Caches(target=target.empty_cache(*shape), draft=None)
    if draft is None:
        return PromptState(row=row, caches=caches, draft=None)
    return PromptState(
        row=row,
        caches=caches.replace(draft=draft.empty_cache(drafter.network, *shape)),
        draft=draft.init_state(drafter.network, target, prompts),
    )


def _read(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    prompts: Prompts,
    empty: PromptState,
    settings: Settings,
) -> PromptState:
    """Reads all prompts into contiguous caches."""
    count, width = prompts.tokens.shape
    rows = jnp.arange(count, dtype=jnp.int32)
    texts = Texts(prompts.tokens, rows, prompts.lengths, _unread(prompts), rows[:, None])
    size = pass_size(count, width, 0, settings)
    caches, state = read_texts(target, drafter, draft, texts, empty.caches, empty.draft, size)
    return empty.replace(caches=caches, draft=state)


def append_unread(
    target: Decoder, drafter: Drafter, draft: Draft | None, state: DecodeState, settings: Settings
) -> DecodeState:
    """Reads all text that no round has read; contiguous prompts are read from the start."""
    if not settings.page_size:
        return state
    with jax.named_scope("prefill"):
        prompts = len(state.rollout.status) // settings.group_size
        longest = state.rollout.tokens.shape[1]
        size = pass_size(prompts, longest - settings.max_new_tokens, longest, settings)
        return append(target, drafter, draft, state, size)
