"""Drafting with EAGLE-3 and MTP networks.

Each round first re-reads the committed tokens with the target's features. It then drafts on its own
outputs.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafts.base import (
    Committed,
    Context,
    Draft,
    DrawnProposal,
    Sampler,
    block_positions,
)
from jaxspec.drafts.pieces import Pieces
from jaxspec.kernels.visible import AttentionMask
from jaxspec.mesh import max_over_experts
from jaxspec.models.attention import attend_cache
from jaxspec.models.cache import KVCache, locate_block, write_block
from jaxspec.models.contiguous import empty_cache
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.mtp import Mtp
from jaxspec.state import Prompts, Tree, pytree

Network = Eagle3 | Mtp


@pytree
class RecurrentState(Tree):
    """Committed positions that the draft has yet to read.

    In the cache, position t of layer stack 0 reads the features of position t and the token after
    it. Stack k reads the output of stack k-1 at position t-1 and that token.
    """

    features: Float[Array, "B K1 C"]
    """Target features at the pending positions.

    They range from `first_position` to the last position whose next token is committed.
    """
    first_position: Int[Array, " B"]
    prior_outputs: Float[Array, "B N1 D"]
    """Outputs of all stacks but the last at the position before `first_position`, or zeros."""
    last_outputs: Float[Array, "B N1 D"]
    """Outputs of the same stacks at the last position read: `prior_outputs` of the next block."""


def recurrent_draft(max_draft_length: int, taps: tuple[int, ...] = (), depth: int = 1) -> Draft:
    """Builds a draft from an EAGLE-3 or MTP network.

    It proposes up to `max_draft_length` tokens per round. The network has `depth` layer stacks:
    EAGLE-3 one, MTP one for each of its layers. Stack i mod `depth` drafts token i+1 of a block.

    A position attends to the positions that it saw in training. In stack k, a true position sees
    true positions up to k before it, and itself. A drafted position sees true positions, and those
    drafted by the same stack.
    """

    def make_cache(network: Network, rows: int, positions: int) -> KVCache:
        config = network.config
        return empty_cache(
            depth * network.stack,
            rows,
            positions,
            config.kv_heads,
            config.head_size,
            network.norm[...].dtype,
        )

    def catch_up(
        network: Network, target: Decoder, state: RecurrentState, cache: KVCache, context: Context
    ) -> tuple[RecurrentState, KVCache]:
        # Leaves room for the one position that the round commits.
        return _limit_pending(max_draft_length, depth, network, target, state, cache, context)

    def propose(
        network: Network,
        target: Decoder,
        state: RecurrentState,
        cache: KVCache,
        context: Context,
        sample: Sampler,
        length: int,
    ) -> tuple[RecurrentState, KVCache, DrawnProposal]:
        # A shorter round reads a shorter block, which must hold all pending positions.
        if length < max_draft_length:
            state, cache = _limit_pending(length + 1, depth, network, target, state, cache, context)
        positions = block_positions(state.first_position, length + 1)
        embedded = network.embed_tokens(target, context.tokens_at(positions + 1))
        block = state.features[:, : length + 1]
        cache, outputs = _read_block(
            network, cache, _pending_shift(state), block, embedded, positions, depth
        )
        # A row of one token has no position to draft from yet, so its count is 0.
        pending_count = _count_pending(state, context)
        last_pending = jnp.maximum(pending_count - 1, 0)
        outputs_at_last = [
            jnp.take_along_axis(output, last_pending[:, None, None], axis=1) for output in outputs
        ]
        last_outputs = jnp.where(
            (pending_count > 0)[:, None, None],
            jnp.concatenate([state.last_outputs[:, :0], *outputs_at_last[:-1]], axis=1),
            state.last_outputs,
        )
        hidden, last_position = outputs_at_last[0], (state.first_position + last_pending)[:, None]
        ids = None if network.vocabulary is None else network.vocabulary[...]
        tokens, logits_by_depth = [], []
        for offset in range(length):
            logits = network.logits(target, hidden)[:, 0]
            token = sample(logits, offset, ids)
            tokens.append(token)
            logits_by_depth.append(logits)
            if offset + 1 < length:
                step = offset + 1
                # In this stack's layers, keys drafted by other stacks are stale.
                mask = AttentionMask(step % depth, last_position, last_position + step, depth)
                cache, hidden = _run_stack(
                    network,
                    step % depth,
                    cache,
                    hidden,
                    network.embed_tokens(target, token[:, None]),
                    last_position + step,
                    mask,
                )
        lengths = jnp.where(pending_count > 0, length, 0).astype(jnp.int32)
        proposal = DrawnProposal(
            jnp.stack(tokens, axis=1), jnp.stack(logits_by_depth, axis=1), lengths, ids
        )
        return state.replace(last_outputs=last_outputs), cache, proposal

    def commit(state: RecurrentState, committed: Committed) -> RecurrentState:
        # A row that ended commits nothing, so its pending block stays as it is.
        has_committed = committed.lengths > 0
        if committed.positions.shape[1] == 1:
            return _append_position(state, committed, has_committed)
        # The state has a static size, so a shorter block is padded.
        padding = max_draft_length + 1 - committed.positions.shape[1]
        return state.replace(
            features=jnp.where(
                has_committed[:, None, None],
                jnp.pad(committed.features, ((0, 0), (0, padding), (0, 0))),
                state.features,
            ),
            first_position=jnp.where(
                has_committed, committed.positions[:, 0], state.first_position
            ),
            prior_outputs=jnp.where(
                has_committed[:, None, None], state.last_outputs, state.prior_outputs
            ),
        )

    return Draft(
        max_length=max_draft_length,
        taps=taps,
        is_stochastic=True,
        empty_cache=make_cache,
        init_state=partial(_init_state, max_draft_length, max(1, len(taps)), depth),
        prefill=partial(_prefill_pieces, depth),
        catch_up=catch_up,
        propose=propose,
        commit=commit,
    )


def _init_state(
    max_draft_length: int,
    feature_count: int,
    depth: int,
    network: Network,
    target: Decoder,
    prompts: Prompts,
) -> RecurrentState:
    rows, dtype = len(prompts.tokens), target.norm[...].dtype
    width = feature_count * target.config.embed
    outputs = jnp.zeros((rows, depth - 1, network.config.embed), dtype)
    return RecurrentState(
        features=jnp.zeros((rows, max_draft_length + 1, width), dtype),
        first_position=jnp.zeros((rows,), jnp.int32),
        prior_outputs=outputs,
        last_outputs=outputs,
    )


def _prefill_pieces(
    depth: int,
    network: Network,
    target: Decoder,
    state: RecurrentState,
    cache: KVCache,
    pieces: Pieces,
    features: Float[Array, "N T C"],
) -> tuple[RecurrentState, KVCache]:
    # Entry t reads token t+1, so a piece of tokens is read at the positions before them.
    positions = pieces.positions - 1
    embedded = network.embed_tokens(target, pieces.tokens)
    prior_features = pieces.shift_values(features, state.features[:, 0])

    def shift_outputs(stack_index: int, outputs: Float[Array, "N T D"]) -> Float[Array, "N T D"]:
        shifted = pieces.shift_values(outputs, state.prior_outputs[:, stack_index - 1])
        # The position before a text attends to nothing, so its output is NaN.
        return jnp.where((positions > 0)[:, :, None], shifted, 0)

    cache, outputs = _read_block(
        network, cache, shift_outputs, prior_features, embedded, positions, depth
    )
    prior_outputs = state.prior_outputs
    for stack_index, output in enumerate(outputs[:-1]):
        # NaN outputs before a text must not enter the state either.
        valid_output = jnp.where((positions >= 0)[:, :, None], output, 0)
        prior_outputs = prior_outputs.at[:, stack_index].set(
            pieces.scatter_last(prior_outputs[:, stack_index], valid_output)
        )
    prior_features = pieces.scatter_last(state.features[:, 0], features)
    new_state = state.replace(
        features=state.features.at[:, 0].set(prior_features),
        # The next round reads this position again, as its pending block.
        first_position=pieces.scatter_last(state.first_position, pieces.positions),
        prior_outputs=prior_outputs,
        last_outputs=prior_outputs,
    )
    return new_state, cache


def _count_pending(state: RecurrentState, context: Context) -> Int[Array, " B"]:
    """Counts each row's pending positions.

    The count is below 1 if there are none.
    """
    return context.lengths - 1 - state.first_position


def _limit_pending(
    limit: int,
    depth: int,
    network: Network,
    target: Decoder,
    state: RecurrentState,
    cache: KVCache,
    context: Context,
) -> tuple[RecurrentState, KVCache]:
    """Leaves at most `limit` pending positions per row.

    If a row has more, all pending positions but the last are read, in every row.
    """
    width = state.features.shape[1]

    def read_all_but_last(
        carry: tuple[RecurrentState, KVCache, Bool[Array, ""]],
    ) -> tuple[RecurrentState, KVCache, Bool[Array, ""]]:
        state, cache, _ = carry
        positions = block_positions(state.first_position, width)
        embedded = network.embed_tokens(target, context.tokens_at(positions + 1))
        cache, outputs = _read_block(
            network, cache, _pending_shift(state), state.features, embedded, positions, depth
        )
        return (
            _advance_state(
                state, outputs, jnp.clip(_count_pending(state, context) - 1, 0, width - 1)
            ),
            cache,
            jnp.zeros((), bool),
        )

    # A loop of at most one iteration, since a `cond` would copy the cache.
    needs_reading = max_over_experts(jnp.any(_count_pending(state, context) > limit))
    state, cache, _ = lax.while_loop(
        lambda carry: carry[2], read_all_but_last, (state, cache, needs_reading)
    )
    return state, cache


def _advance_state(
    state: RecurrentState, outputs: list[Float[Array, "B T D"]], count: Int[Array, " B"]
) -> RecurrentState:
    """Drops the first `count` pending positions.

    `outputs` are their outputs by stack.
    """
    width, last_read = state.features.shape[1], jnp.maximum(count - 1, 0)[:, None, None]
    kept_indices = jnp.minimum(block_positions(count, width), width - 1)
    prior_outputs = [jnp.take_along_axis(output, last_read, axis=1) for output in outputs[:-1]]
    return state.replace(
        features=jnp.take_along_axis(state.features, kept_indices[:, :, None], axis=1),
        first_position=state.first_position + count,
        prior_outputs=jnp.where(
            (count > 0)[:, None, None],
            jnp.concatenate([state.prior_outputs[:, :0], *prior_outputs], axis=1),
            state.prior_outputs,
        ),
    )


def _append_position(
    state: RecurrentState, committed: Committed, has_committed: Bool[Array, " B"]
) -> RecurrentState:
    """Appends one pending position, for which `catch_up` made room."""
    width = state.features.shape[1]
    # An index past the buffer is dropped, so ended rows append nothing.
    index = jnp.where(has_committed, committed.positions[:, 0] - state.first_position, width)
    rows = jnp.arange(len(index), dtype=jnp.int32)
    return state.replace(
        features=state.features.at[rows, index].set(committed.features[:, 0], mode="drop")
    )


ShiftOutputs = Callable[[int, Float[Array, "B T D"]], Float[Array, "B T D"]]
"""(stack index, outputs of the stack before) -> its outputs at each preceding position."""


def _pending_shift(state: RecurrentState) -> ShiftOutputs:
    """Returns a function that shifts outputs by one position.

    The first position gets the output before the pending block.
    """

    def shift_outputs(stack_index: int, outputs: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return jnp.concatenate(
            [state.prior_outputs[:, stack_index - 1, None], outputs[:, :-1]], axis=1
        )

    return shift_outputs


def _read_block(
    network: Network,
    cache: KVCache,
    shift_outputs: ShiftOutputs,
    features: Float[Array, "B T C"],
    embedded: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    depth: int,
) -> tuple[KVCache, list[Float[Array, "B T D"]]]:
    """Reads a block with true features in all stacks.

    Returns the outputs by stack.
    """
    hidden, outputs = network.to_hidden(features), []
    for stack_index in range(depth):
        if stack_index > 0:
            hidden = shift_outputs(stack_index, hidden)
        # Of the last `stack_index` positions, this stack has right keys only for its own.
        mask = AttentionMask(stack_index, positions - stack_index, positions, depth)
        cache, hidden = _run_stack(network, stack_index, cache, hidden, embedded, positions, mask)
        outputs.append(hidden)
    return cache, outputs


def _run_stack(
    network: Network,
    stack_index: int,
    cache: KVCache,
    hidden: Float[Array, "B T D"],
    embedded: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    mask: AttentionMask,
) -> tuple[KVCache, Float[Array, "B T D"]]:
    """Runs one stack's layers and updates the cache."""
    addresses = locate_block(cache, positions)
    for layer in range(stack_index * network.stack, (stack_index + 1) * network.stack):
        heads = network.attention_inputs(layer, hidden, embedded, positions)
        cache = write_block(cache, layer, addresses, heads.key, heads.value)
        attention = attend_cache(heads.query, cache, layer, mask)
        hidden = network.layer_output(layer, heads.residual, attention)
    return cache, hidden
