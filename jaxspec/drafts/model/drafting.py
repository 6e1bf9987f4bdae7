"""Drafting with a smaller decoder, which has its own cache.

Source: Leviathan et al., arXiv 2211.17192.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.drafts.base import (
    Committed,
    Context,
    Draft,
    DrawnProposal,
    Sampler,
    block_positions,
)
from jaxspec.drafts.pieces import Pieces
from jaxspec.kernels.order import add_dependency, signal_ready
from jaxspec.mesh import max_over_experts
from jaxspec.models.cache import KVCache
from jaxspec.models.decoder import Decoder, DecoderOutput
from jaxspec.state import Prompts, Tree, pytree


@pytree
class ModelState(Tree):
    """Progress of the draft model in each row's text."""

    cached_length: Int[Array, " B"]
    """Number of leading positions in the cache."""


def model_draft(max_draft_length: int) -> Draft:
    """Builds a draft from a `Decoder`.

    It proposes up to `max_draft_length` tokens per round. The decoder reads the text itself and
    uses no hidden states of the target.
    """

    def propose(
        network: Decoder,
        target: Decoder,
        state: ModelState,
        cache: KVCache,
        context: Context,
        sample: Sampler,
        length: int,
    ) -> tuple[ModelState, KVCache, DrawnProposal]:
        # The last token is new. If all drafts were accepted, so is the one before it: the last
        # draft was drawn but never read. A row of one token starts with it and also reads the
        # position after it, which the next step overwrites.
        pending_start = jnp.maximum(context.lengths - 2, 0)
        # Rounds without drafts committed positions that the draft has not read.
        cached_length, cache = _read_blocks(
            network, cache, context, state.cached_length, pending_start, max_draft_length + 1
        )
        # Later collectives over `tensor` must run after those of that loop (see `order.py`).
        pending_start = add_dependency(pending_start, [signal_ready(cached_length)])
        # Two positions in every row, so that the shape is static.
        output = _run_block(network, cache, context, pending_start, 2)
        last_position = (context.lengths - 1)[:, None]
        hidden = jnp.take_along_axis(
            output.hidden, (last_position - pending_start[:, None])[:, :, None], axis=1
        )
        tokens, logits_by_depth = [], []
        for offset in range(length):
            logits = network.logits(hidden)[:, 0]
            token = sample(logits, offset)
            tokens.append(token)
            logits_by_depth.append(logits)
            if offset + 1 < length:
                output = network(token[:, None], last_position + 1 + offset, output.cache)
                hidden = output.hidden
        lengths = jnp.full_like(context.lengths, length)
        proposal = DrawnProposal(
            tokens=jnp.stack(tokens, axis=1),
            logits=jnp.stack(logits_by_depth, axis=1),
            lengths=lengths,
        )
        return ModelState(cached_length=context.lengths), _require_cache(output.cache), proposal

    return Draft(
        max_length=max_draft_length,
        taps=(),
        is_stochastic=True,
        empty_cache=lambda network, rows, positions: network.empty_cache(rows, positions),
        init_state=_init_state,
        prefill=_prefill_pieces,
        catch_up=_skip_catch_up,
        propose=propose,
        commit=_commit_block,
    )


def _run_block(
    network: Decoder, cache: KVCache, context: Context, start: Int[Array, " B"], count: int
) -> DecoderOutput:
    """Reads `count` tokens of each row, from `start` on."""
    positions = block_positions(start, count)
    return network(context.tokens_at(positions), positions, cache)


def _read_blocks(
    network: Decoder,
    cache: KVCache,
    context: Context,
    start: Int[Array, " B"],
    end: Int[Array, " B"],
    count: int,
) -> tuple[Int[Array, " B"], KVCache]:
    """Reads tokens from `start` to `end`, in blocks of `count`.

    Returns the rows' ends, and the cache. `start` may be after `end`.
    """

    def read_next_block(
        carry: tuple[Int[Array, " B"], KVCache],
    ) -> tuple[Int[Array, " B"], KVCache]:
        start, cache = carry
        return jnp.minimum(start + count, end), _require_cache(
            _run_block(network, cache, context, start, count).cache
        )

    return lax.while_loop(
        lambda carry: max_over_experts(jnp.any(carry[0] < end)),
        read_next_block,
        (jnp.minimum(start, end), cache),
    )


def _skip_catch_up(
    network: Decoder, target: Decoder, state: ModelState, cache: KVCache, context: Context
) -> tuple[ModelState, KVCache]:
    # Committed tokens stay in the context, so the next proposal can read them itself.
    return state, cache


def _commit_block(state: ModelState, committed: Committed) -> ModelState:
    # Accepted drafts are in the cache, except the last of a block, which was never read.
    # Positions of rejected drafts are overwritten before anything attends to them.
    drafts = committed.positions.shape[1] - 1
    return state.replace(
        cached_length=state.cached_length + jnp.clip(committed.lengths - 1, 0, max(drafts - 1, 0))
    )


def _init_state(network: Decoder, target: Decoder, prompts: Prompts) -> ModelState:
    return ModelState(cached_length=jnp.zeros_like(prompts.lengths))


def _prefill_pieces(
    network: Decoder,
    target: Decoder,
    state: ModelState,
    cache: KVCache,
    pieces: Pieces,
    features: Float[Array, "N T C"],
) -> tuple[ModelState, KVCache]:
    cache = _require_cache(network(pieces.tokens, pieces.positions, cache).cache)
    return ModelState(
        cached_length=pieces.scatter_last(state.cached_length, pieces.positions + 1)
    ), cache


def _require_cache(cache: KVCache | None) -> KVCache:
    assert cache is not None, "a decoder called with a cache must return it"
    return cache
