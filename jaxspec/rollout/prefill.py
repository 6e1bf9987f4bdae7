"""Initial state of a call.

It has the rows, their slots or places in the queue, and the prompts. A prompt is read once for all
rows of its group.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from jaxspec import sampling
from jaxspec.drafts.base import Draft
from jaxspec.models.contiguous import empty_rows, expand_prompts
from jaxspec.models.decoder import Decoder
from jaxspec.models.paged import empty_pages
from jaxspec.rollout.append import PassSize, Texts, append_texts, read_texts
from jaxspec.rollout.decode_state import Caches, DecodeState, PromptState, Queue
from jaxspec.rollout.feedback import acceptance
from jaxspec.rollout.feedback.length_chooser import lengths_of_rounds
from jaxspec.rollout.pages import Pages, allocate_pages, init_pages, max_pool_size, min_pool_size
from jaxspec.rollout.settings import Settings
from jaxspec.state import (
    IDLE,
    PROMPT,
    RUNNING,
    Drafter,
    Prompts,
    PyTree,
    Rollout,
)

PASS_TOKENS = 2**14
"""Maximum tokens of a pass over whole prompts, unless a single prompt has more."""
# With 128 positions each, their matrix products keep an accelerator busy. Their attention scores
# are few enough to exist all at once, without a loop in each layer.
PIECES = 32
"""Pieces of a pass, if text is read in pieces."""


def choose_pass_size(
    prompt_count: int, prompt_length: int, max_length: int, settings: Settings
) -> PassSize:
    """Returns the size of a pass over known text.

    The text is all prompts, or an evicted row of up to `max_length` tokens.
    """
    piece_length = settings.piece or prompt_length
    # Each piece of a row attends to all of the row's text, so a pass reads few of them.
    max_pieces = max(
        prompt_count * -(-prompt_length // piece_length),
        min(PIECES, -(-max_length // piece_length)),
    )
    piece_count = PIECES if settings.piece else max(1, PASS_TOKENS // piece_length)
    return PassSize(min(piece_count, max_pieces), piece_length)


def prepare_state(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    prompts: Prompts,
    first_prompt: Int[Array, ""],
    key: Key[Array, ""],
    settings: Settings,
) -> DecodeState:
    """Builds the state before the first round.

    With contiguous caches, prompts are read here. With paged caches, `append_unread_texts` reads
    them.

    Args:
      target: the policy in the rollout layout.
      drafter: the draft's weights and temperatures.
      draft: functions of the draft.
      prompts: prompts of this shard.
      first_prompt: index of this shard's first prompt among all prompts of the call.
      key: noise key of the call.
      settings: settings of the rollout.

    Raises:
      ValueError: if the pool has too few pages for the prompts and the longest row.
    """
    # At least float32, also for weights of 16 bits.
    accum_dtype = np.promote_types(target.embedding[...].dtype, np.float32)
    rollout = _init_rollout(prompts, draft.max_length, accum_dtype, settings)
    keys = _make_row_keys(len(prompts.lengths), first_prompt, key, settings)
    initial = _init_slots(target, drafter, draft, prompts, settings)
    rows_wait = len(initial.prompts.first_row) > 0
    lengths = lengths_of_rounds(drafter.chooser, settings.lengths, draft.max_length)
    return DecodeState(
        rollout=rollout,
        row=initial.row,
        keys=keys,
        caches=initial.caches,
        draft=initial.draft,
        round=jnp.zeros((1,), jnp.int32),
        queue=Queue(
            waiting=(rollout.status == RUNNING) & rows_wait,
            admission_order=jnp.arange(len(rollout.status), dtype=jnp.int32),
            prompts=initial.prompts,
        ),
        pages=initial.pages,
        unread_counts=jnp.pad(
            _count_unread(prompts) if settings.page_size else 0 * prompts.lengths,
            (len(initial.row), 0),
        ),
        admission_index=jnp.zeros_like(initial.row),
        acceptance=lengths.init_estimate(),
        # Stop strings do not start in the prompt.
        stop_state=jnp.zeros_like(rollout.lengths),
    )


def _init_rollout(prompts: Prompts, draft_length: int, dtype: Any, settings: Settings) -> Rollout:
    """Creates the rows, with prompts only."""
    count, prompt_width = prompts.tokens.shape
    group = settings.group_size
    row_count, row_length = count * group, prompt_width + settings.max_new_tokens
    lengths = jnp.repeat(prompts.lengths, group)
    inside = jnp.arange(prompt_width, dtype=jnp.int32) < prompts.lengths[:, None]
    tokens = jnp.pad(jnp.where(inside, prompts.tokens, 0), ((0, 0), (0, settings.max_new_tokens)))
    return Rollout(
        tokens=jnp.repeat(tokens, group, axis=0),
        prompt_lengths=lengths,
        lengths=lengths,
        logprobs=jnp.zeros((row_count, row_length), dtype),
        origin=jnp.full((row_count, row_length), PROMPT, jnp.int8),
        status=jnp.where(jnp.repeat(prompts.live, group), RUNNING, IDLE).astype(jnp.int32),
        version=jnp.zeros_like(lengths),
        statistics=acceptance.init_statistics(
            row_count, group, draft_length, len(settings.grid), dtype
        ),
    )


def _make_row_keys(
    count: int, first_prompt: Int[Array, ""], key: Key[Array, ""], settings: Settings
) -> Key[Array, " R"]:
    """Derives the noise key of each row."""
    # Keys depend on a row's number in the whole batch, so that results do not depend on the mesh.
    group = settings.group_size
    numbers = (first_prompt + jnp.arange(count, dtype=jnp.int32))[:, None] * group + jnp.arange(
        group, dtype=jnp.int32
    )
    return sampling.row_keys(key, numbers.reshape(-1), settings.mode.stream)


class _InitialState(NamedTuple):
    """Initial slots, caches and pages."""

    row: Int[Array, " B"]
    caches: Caches
    draft: PyTree
    prompts: PromptState
    pages: Pages


def _init_slots(
    target: Decoder, drafter: Drafter, draft: Draft, prompts: Prompts, settings: Settings
) -> _InitialState:
    """Creates the slots. With contiguous caches, reads the prompts first."""
    count, prompt_width = prompts.tokens.shape
    group, row_count = settings.group_size, count * settings.group_size
    # Headroom: a block may reach K positions beyond the last committed token.
    capacity = prompt_width + settings.max_new_tokens + draft.max_length
    # More slots than rows would stay empty.
    slot_total = min(settings.slots or row_count, row_count)
    prompt_state = _empty_prompt_state(target, drafter, draft, prompts, group)
    # Each slot starts from a copy of its prompt's contiguous cache, so prompts are read first.
    if not settings.page_size:
        with jax.named_scope("prefill"):
            prompt_state = _read_prompts(target, drafter, draft, prompts, prompt_state, settings)
    if slot_total < row_count or settings.page_size:
        return _queue_all_rows(prompt_state, prompts, slot_total, capacity, settings)
    return _assign_all_slots(prompt_state, group, capacity, settings.chunk)


def _assign_all_slots(
    prompt_state: PromptState, group: int, capacity: int, chunk_size: int
) -> _InitialState:
    """Assigns a slot to every row, so that none ever waits."""
    prompt_count = prompt_state.caches.target.page_count
    rows = prompt_count * group
    return _InitialState(
        row=jnp.arange(rows, dtype=jnp.int32),
        caches=prompt_state.caches.map(
            lambda cache: expand_prompts(cache, group, capacity, chunk_size)
        ),
        draft=jax.tree.map(lambda leaf: jnp.repeat(leaf, group, axis=0), prompt_state.draft),
        prompts=PromptState(
            first_row=prompt_state.first_row[:0],
            caches=_drop_rows(prompt_state.caches),
            draft=jax.tree.map(lambda leaf: leaf[:0], prompt_state.draft),
        ),
        pages=init_pages(0, rows + prompt_count, 0),
    )


def _queue_all_rows(
    prompt_state: PromptState, prompts: Prompts, slot_total: int, capacity: int, settings: Settings
) -> _InitialState:
    """Creates empty slots, for which all rows wait."""
    prompt_count, prompt_width = prompts.tokens.shape
    page_size = settings.page_size
    if not page_size:
        caches = prompt_state.caches.map(
            lambda cache: empty_rows(cache, slot_total, capacity, settings.chunk)
        )
        pages = init_pages(0, slot_total + prompt_count, 0)
    else:
        pages_per_row = -(-capacity // page_size)
        # `capacity` has the draft's headroom already, hence a draft length of 0.
        page_count = settings.pages or max_pool_size(
            prompt_count, prompt_width, capacity - prompt_width, 0, page_size, slot_total
        )
        min_pages = min_pool_size(prompt_count, prompt_width, capacity - prompt_width, 0, page_size)
        if page_count < min_pages:
            raise ValueError(
                f"rollout.engine.pages is {page_count}, but {prompt_count} prompts and one row of"
                f" {capacity} positions need {min_pages} pages of {page_size} positions: set at"
                f" least {min_pages}"
            )
        # Padding prompts are never read, so they get no page.
        prompt_pages = jnp.where(prompts.live, (prompts.lengths - 1) // page_size + 1, 0)
        pages = allocate_pages(
            init_pages(page_count, slot_total + prompt_count, pages_per_row),
            jnp.pad(prompt_pages, (slot_total, 0)),
        )
        caches = prompt_state.caches.map(lambda cache: empty_pages(cache, page_count, page_size))
        # Prompts are read into their pages.
        prompt_state = prompt_state.replace(caches=_drop_rows(prompt_state.caches))
    return _InitialState(
        # A row number beyond the last row marks an empty slot.
        row=jnp.full((slot_total,), prompt_count * settings.group_size, jnp.int32),
        caches=caches,
        draft=jax.tree.map(
            lambda leaf: jnp.zeros((slot_total, *leaf.shape[1:]), leaf.dtype), prompt_state.draft
        ),
        prompts=prompt_state,
        pages=pages,
    )


def _drop_rows(caches: Caches) -> Caches:
    """Returns caches without rows."""
    # Keys and values of prompts are stored elsewhere: in the slots, or in pages.
    return caches.map(lambda cache: cache.layout.take_rows(cache, jnp.zeros((0,), jnp.int32)))


def _count_unread(prompts: Prompts) -> Int[Array, " n"]:
    """Returns the number of positions to read of each prompt."""
    # The first round reads the last token.
    return jnp.where(prompts.live, jnp.maximum(prompts.lengths - 1, 0), 0)


def _empty_prompt_state(
    target: Decoder, drafter: Drafter, draft: Draft, prompts: Prompts, group: int
) -> PromptState:
    """Creates the state of prompts before they are read."""
    shape = prompts.tokens.shape
    first_row = jnp.arange(shape[0], dtype=jnp.int32) * group
    return PromptState(
        first_row=first_row,
        caches=Caches(
            target=target.empty_cache(*shape), draft=draft.empty_cache(drafter.network, *shape)
        ),
        draft=draft.init_state(drafter.network, target, prompts),
    )


def _read_prompts(
    target: Decoder,
    drafter: Drafter,
    draft: Draft,
    prompts: Prompts,
    prompt_state: PromptState,
    settings: Settings,
) -> PromptState:
    """Reads all prompts into contiguous caches."""
    prompt_count, prompt_width = prompts.tokens.shape
    rows = jnp.arange(prompt_count, dtype=jnp.int32)
    texts = Texts(prompts.tokens, rows, prompts.lengths, _count_unread(prompts), rows[:, None])
    size = choose_pass_size(prompt_count, prompt_width, 0, settings)
    caches, draft_state = read_texts(
        target, drafter, draft, texts, prompt_state.caches, prompt_state.draft, size
    )
    return prompt_state.replace(caches=caches, draft=draft_state)


def append_unread_texts(
    target: Decoder, drafter: Drafter, draft: Draft, state: DecodeState, settings: Settings
) -> DecodeState:
    """Reads all unread text of paged caches."""
    # `prepare_state` has read prompts of contiguous caches, whose rows are never evicted.
    if not settings.page_size:
        return state
    with jax.named_scope("prefill"):
        prompt_count = len(state.rollout.status) // settings.group_size
        max_length = state.rollout.tokens.shape[1]
        size = choose_pass_size(
            prompt_count, max_length - settings.max_new_tokens, max_length, settings
        )
        return append_texts(target, drafter, draft, state, size)
