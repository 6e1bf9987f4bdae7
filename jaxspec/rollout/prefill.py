"""How a call begins: every prompt is read once, for all rows of its group (prefill), and rows get
slots or wait."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key

from jaxspec import sampling
from jaxspec.drafts.base import Draft
from jaxspec.models.contiguous import empty_rows, rows_of
from jaxspec.models.decoder import Decoder
from jaxspec.models.paged import empty_pages, put_texts
from jaxspec.rollout import acceptance
from jaxspec.rollout.decode_state import Caches, DecodeState, Prefilled, Queue
from jaxspec.rollout.pages import Pages, grow, no_pages, smallest_pool, whole_pool
from jaxspec.rollout.round import Settings, by_matching, features
from jaxspec.state import (
    IDLE,
    RUNNING,
    AcceptanceEstimate,
    Drafter,
    Prompts,
    PyTree,
    Rollout,
)

PREFILL_TOKENS = 2**14
"""Prompt tokens that are read together."""


def begin(
    target: Decoder,
    drafter: Drafter,
    draft: Draft | None,
    prompts: Prompts,
    first_prompt: Int[Array, ""],
    key: Key[Array, ""],
    settings: Settings,
) -> DecodeState:
    """Prefills each prompt once, for all rows of its group.

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
    group, length = settings.group_size, draft.length if draft else 0
    size = width + settings.max_new_tokens
    longest = size + length  # headroom: a block may reach K positions beyond the last token kept
    with jax.named_scope("prefill"):
        prefilled = _prefill(target, drafter, draft, prompts)
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
        status=jnp.where(jnp.repeat(prompts.live, group), RUNNING, IDLE).astype(jnp.int32),
        version=jnp.zeros_like(lengths),
        statistics=acceptance.no_statistics(count * group, group, length, len(settings.grid), wide),
    )
    keys = sampling.row_keys(
        key,
        numbers.reshape(-1),
        sampling.TARGET if by_matching(draft, settings) else sampling.ROUND,
    )
    seats = min(settings.slots or count * group, count * group)
    waits = seats < count * group or settings.page_size > 0
    start = (
        _all_waiting(prefilled, prompts, seats, longest, settings)
        if waits
        else _all_seated(prefilled, group, longest, settings.chunk)
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
    prompts: Prefilled
    pages: Pages


def _all_seated(prefilled: Prefilled, group: int, longest: int, chunk: int) -> _Start:
    """A slot for every row, so that none ever waits."""
    prompts = len(prefilled.history_lengths)
    rows = prompts * group
    return _Start(
        row=jnp.arange(rows, dtype=jnp.int32),
        caches=prefilled.caches.map(lambda cache: rows_of(cache, group, longest, chunk)),
        draft=jax.tree.map(lambda leaf: jnp.repeat(leaf, group, axis=0), prefilled.draft),
        prompts=jax.tree.map(lambda leaf: leaf[:0], prefilled.replace(caches=None)).replace(
            caches=_without_rows(prefilled.caches)
        ),
        pages=no_pages(0, rows + prompts, 0),
    )


def _all_waiting(
    prefilled: Prefilled, prompts: Prompts, seats: int, longest: int, settings: Settings
) -> _Start:
    """Empty slots, for which all rows wait."""
    count, width = prompts.tokens.shape
    read, size = prefilled.caches, settings.page_size
    if not size:
        caches = read.map(lambda cache: empty_rows(cache, seats, longest, settings.chunk))
        pages = no_pages(0, seats + count, 0)
    else:
        of_row, of_prompt = -(-longest // size), -(-width // size)
        number = settings.pages or whole_pool(count, width, longest - width, 0, size, seats)
        least = smallest_pool(count, width, longest - width, 0, size)
        if number < least:
            raise ValueError(
                f"{number} pages of {size} positions for {count} prompts and rows of {longest};"
                f" {least} are the fewest"
            )
        wanted = jnp.where(prompts.live, (prompts.lengths - 1) // size + 1, 0)
        pages = grow(no_pages(number, seats + count, of_row), jnp.pad(wanted, (seats, 0)))
        table = pages.table[seats:, :of_prompt]
        caches = read.map(lambda cache: put_texts(empty_pages(cache, number, size), table, cache))
        prefilled = prefilled.replace(caches=_without_rows(read))
    return _Start(
        row=jnp.full((seats,), count * settings.group_size, jnp.int32),
        caches=caches,
        draft=jax.tree.map(
            lambda leaf: jnp.zeros((seats, *leaf.shape[1:]), leaf.dtype), prefilled.draft
        ),
        prompts=prefilled,
        pages=pages,
    )


def _without_rows(caches: Caches) -> Caches:
    """Of no prompt: what they hold is copied elsewhere."""
    return caches.map(lambda cache: cache.layout.take(cache, jnp.zeros((0,), jnp.int32)))


def _estimate(drafter: Drafter, length: int, settings: Settings) -> AcceptanceEstimate:
    """What lengths are chosen by; zeros where all rounds draft alike."""
    if not settings.lengths:
        nothing = jnp.zeros((1, length), jnp.float32)
        return AcceptanceEstimate(
            offered_in_turn=nothing, accepted=nothing, seconds_to_lose=jnp.zeros((1,), jnp.float32)
        )
    assert drafter.chooser is not None, "lengths are chosen by an estimate"
    return jax.tree.map(lambda leaf: leaf[None], drafter.chooser.acceptance)


def _prefill(target: Decoder, drafter: Drafter, draft: Draft | None, prompts: Prompts) -> Prefilled:
    """What target and draft keep of every prompt; some prompts at a time, so that memory does not
    grow with their number."""
    count, width = prompts.tokens.shape

    def read(prompts: Prompts) -> Prefilled:
        rows = len(prompts.tokens)
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
        forward = target(
            prompts.tokens,
            positions,
            target.empty_cache(rows, width),
            taps=draft.taps if draft else (),
        )
        assert forward.cache is not None, "a cache that goes in comes back"
        draft_state, cache = None, None
        if draft is not None:
            empty = draft.empty_cache(drafter.network, rows, width)
            draft_state, cache = draft.prefill(
                drafter.network, target, prompts, features(forward), empty
            )
        return Prefilled(
            caches=Caches(target=forward.cache, draft=cache),
            draft=draft_state,
            history=prompts.history,
            history_lengths=prompts.history_lengths,
        )

    some = max(1, PREFILL_TOKENS // width)
    if count <= some:
        return read(prompts)

    def numbered(rows: Int[Array, " n"]) -> Prefilled:
        return read(jax.tree.map(lambda leaf: leaf[rows] if leaf.ndim else leaf, prompts))

    def join(leaf: Array) -> Array:
        axis = int(leaf.ndim == 6)  # layers that are stacked come before prompts
        joined = jnp.moveaxis(leaf, 0, axis)
        shape = *joined.shape[:axis], turns * some, *joined.shape[axis + 2 :]
        return lax.slice_in_dim(joined.reshape(shape), 0, count, axis=axis)

    turns = -(-count // some)
    numbers = jnp.minimum(jnp.arange(turns * some, dtype=jnp.int32), count - 1)
    joined = jax.tree.map(join, lax.map(numbered, numbers.reshape(turns, some)))
    return joined.replace(caches=joined.caches.without_table())
