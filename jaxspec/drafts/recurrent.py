"""EAGLE-3 and MTP drafting: every round first re-reads the kept tokens with the target's true
features, then drafts on its own states."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafts.base import Context, Draft, Kept, Proposal, Sampler, block_positions
from jaxspec.drafts.pieces import Pieces
from jaxspec.kernels.visible import AttentionMask
from jaxspec.mesh import of_any_expert
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
    """The block that the draft has yet to read.

    In its cache, position t of turn 0 reads the features of position t and the token after it; of
    turn k, the output of turn k-1 at position t-1 and that token.
    """

    features: Float[Array, "B K1 C"]
    """The target's, at the pending positions: from `first` to the last whose next token is
    committed."""
    first: Int[Array, " B"]
    before: Float[Array, "B N1 D"]
    """Outputs of all turns but the last at the position before `first`; zeros where there is
    none."""
    ends: Float[Array, "B N1 D"]
    """Outputs of the same turns at the last position that was read: `before` of the next block."""


def recurrent(max_draft_length: int, taps: tuple[int, ...] = (), depth: int = 1) -> Draft:
    """A draft of up to `max_draft_length` tokens a round from a network that runs a stack of
    layers in each of `depth` turns.

    Token i+1 of a block comes from turn i mod `depth`. A position attends to what it saw in
    training: in turn k, the true positions up to k before its own and its own; when drafting, the
    true positions and those that the same turn has drafted. EAGLE-3 has one turn, MTP a turn for
    each of its layers.
    """

    def empty(network: Network, rows: int, positions: int) -> KVCache:
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
        # leaves room for the position that the round commits
        return _within(max_draft_length, depth, network, target, state, cache, context)

    def propose(
        network: Network,
        target: Decoder,
        state: RecurrentState,
        cache: KVCache,
        context: Context,
        sample: Sampler,
        length: int,
    ) -> tuple[RecurrentState, KVCache, Proposal]:
        if length < max_draft_length:
            state, cache = _within(length + 1, depth, network, target, state, cache, context)
        positions = block_positions(state.first, length + 1)
        embedded = network.embed_tokens(target, context.at(positions + 1))
        block = state.features[:, : length + 1]
        cache, outputs = _read(network, cache, _after(state), block, embedded, positions, depth)
        # none in a row of one token: it has nothing to draft from
        pending = _pending(state, context)
        last = jnp.maximum(pending - 1, 0)
        at_last = [jnp.take_along_axis(output, last[:, None, None], axis=1) for output in outputs]
        ends = jnp.where(
            (pending > 0)[:, None, None],
            jnp.concatenate([state.ends[:, :0], *at_last[:-1]], axis=1),
            state.ends,
        )
        hidden, last_position = at_last[0], (state.first + last)[:, None]
        ids = None if network.vocabulary is None else network.vocabulary[...]
        drafted, drawn_from = [], []
        for offset in range(length):
            logits = network.logits(target, hidden)[:, 0]
            token = sample(logits, offset, ids)
            drafted.append(token)
            drawn_from.append(logits)
            if offset + 1 < length:
                step = offset + 1
                # what other turns drafted is stale in its layers
                visible = AttentionMask(step % depth, last_position, last_position + step, depth)
                cache, hidden = _turn(
                    network,
                    step % depth,
                    cache,
                    hidden,
                    network.embed_tokens(target, token[:, None]),
                    last_position + step,
                    visible,
                )
        count = jnp.where(pending > 0, length, 0).astype(jnp.int32)
        proposal = Proposal(jnp.stack(drafted, axis=1), jnp.stack(drawn_from, axis=1), count, ids)
        return state.replace(ends=ends), cache, proposal

    def commit(state: RecurrentState, kept: Kept) -> RecurrentState:
        # a row that kept nothing (it had ended) keeps its pending block too
        went_on = kept.length > 0
        if kept.positions.shape[1] == 1:
            return _appended(state, kept, went_on)
        padding = max_draft_length + 1 - kept.positions.shape[1]
        return state.replace(
            features=jnp.where(
                went_on[:, None, None],
                jnp.pad(kept.features, ((0, 0), (0, padding), (0, 0))),
                state.features,
            ),
            first=jnp.where(went_on, kept.positions[:, 0], state.first),
            before=jnp.where(went_on[:, None, None], state.ends, state.before),
        )

    return Draft(
        length=max_draft_length,
        taps=taps,
        draws=True,
        empty_cache=empty,
        start=partial(_start, max_draft_length, max(1, len(taps)), depth),
        read=partial(_read_along, depth),
        catch_up=catch_up,
        propose=propose,
        commit=commit,
    )


def _start(
    max_draft_length: int,
    features: int,
    depth: int,
    network: Network,
    target: Decoder,
    prompts: Prompts,
) -> RecurrentState:
    rows, dtype = len(prompts.tokens), target.norm[...].dtype
    width = features * target.config.embed
    outputs = jnp.zeros((rows, depth - 1, network.config.embed), dtype)
    return RecurrentState(
        features=jnp.zeros((rows, max_draft_length + 1, width), dtype),
        first=jnp.zeros((rows,), jnp.int32),
        before=outputs,
        ends=outputs,
    )


def _read_along(
    depth: int,
    network: Network,
    target: Decoder,
    state: RecurrentState,
    cache: KVCache,
    pieces: Pieces,
    features: Float[Array, "N T C"],
) -> tuple[RecurrentState, KVCache]:
    # A position reads the token after it, so each piece is read from the position before it on.
    positions = pieces.positions - 1
    embedded = network.embed_tokens(target, pieces.tokens)
    pending = pieces.shift(features, state.features[:, 0])

    def move(turn: int, outputs: Float[Array, "N T D"]) -> Float[Array, "N T D"]:
        moved = pieces.shift(outputs, state.before[:, turn - 1])
        # what stands before a text sees nothing, and its output is NaN
        return jnp.where((positions > 0)[:, :, None], moved, 0)

    cache, outputs = _read(network, cache, move, pending, embedded, positions, depth)
    before = state.before
    for turn, output in enumerate(outputs[:-1]):
        whole = jnp.where((positions >= 0)[:, :, None], output, 0)
        before = before.at[:, turn].set(pieces.put_last(before[:, turn], whole))
    pending = pieces.put_last(state.features[:, 0], features)
    read = state.replace(
        features=state.features.at[:, 0].set(pending),
        # read again by the next round, as its pending block
        first=pieces.put_last(state.first, pieces.positions),
        before=before,
        ends=before,
    )
    return read, cache


def _pending(state: RecurrentState, context: Context) -> Int[Array, " B"]:
    """Positions that each row has yet to read; below 1 where there is nothing to read."""
    return context.lengths - 1 - state.first


def _within(
    limit: int,
    depth: int,
    network: Network,
    target: Decoder,
    state: RecurrentState,
    cache: KVCache,
    context: Context,
) -> tuple[RecurrentState, KVCache]:
    """At most `limit` pending positions in every row: where one has more, all of them but the last
    are read, in all rows."""
    width = state.features.shape[1]

    def read(
        carry: tuple[RecurrentState, KVCache, Bool[Array, ""]],
    ) -> tuple[RecurrentState, KVCache, Bool[Array, ""]]:
        state, cache, _ = carry
        positions = block_positions(state.first, width)
        embedded = network.embed_tokens(target, context.at(positions + 1))
        cache, outputs = _read(
            network, cache, _after(state), state.features, embedded, positions, depth
        )
        return (
            _moved_on(state, outputs, jnp.clip(_pending(state, context) - 1, 0, width - 1)),
            cache,
            jnp.zeros((), bool),
        )

    # At most one turn: a `cond` would copy the cache.
    needed = of_any_expert(jnp.any(_pending(state, context) > limit))
    state, cache, _ = lax.while_loop(lambda carry: carry[2], read, (state, cache, needed))
    return state, cache


def _moved_on(
    state: RecurrentState, outputs: list[Float[Array, "B T D"]], count: Int[Array, " B"]
) -> RecurrentState:
    """The state after its first `count` pending positions, at which each turn gave `outputs`."""
    width, at_last = state.features.shape[1], jnp.maximum(count - 1, 0)[:, None, None]
    places = jnp.minimum(block_positions(count, width), width - 1)
    before = [jnp.take_along_axis(output, at_last, axis=1) for output in outputs[:-1]]
    return state.replace(
        features=jnp.take_along_axis(state.features, places[:, :, None], axis=1),
        first=state.first + count,
        before=jnp.where(
            (count > 0)[:, None, None],
            jnp.concatenate([state.before[:, :0], *before], axis=1),
            state.before,
        ),
    )


def _appended(state: RecurrentState, kept: Kept, went_on: Bool[Array, " B"]) -> RecurrentState:
    """The state with one position more to read, for which `catch_up` made room."""
    width = state.features.shape[1]
    # beyond the buffer: dropped
    place = jnp.where(went_on, kept.positions[:, 0] - state.first, width)
    rows = jnp.arange(len(place), dtype=jnp.int32)
    return state.replace(
        features=state.features.at[rows, place].set(kept.features[:, 0], mode="drop")
    )


Move = Callable[[int, Float[Array, "B T D"]], Float[Array, "B T D"]]
"""(turn, outputs of the turn before) -> its outputs at each preceding position."""


def _after(state: RecurrentState) -> Move:
    """Moves outputs one position up, behind those of the position before the pending block."""

    def move(turn: int, outputs: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return jnp.concatenate([state.before[:, turn - 1, None], outputs[:, :-1]], axis=1)

    return move


def _read(
    network: Network,
    cache: KVCache,
    move: Move,
    features: Float[Array, "B T C"],
    embedded: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    depth: int,
) -> tuple[KVCache, list[Float[Array, "B T D"]]]:
    """Reads a block with true features in all turns; returns each turn's outputs."""
    hidden, outputs = network.to_hidden(features), []
    for turn in range(depth):
        if turn > 0:
            hidden = move(turn, hidden)
        # of the last `turn` positions, only the own one is right in its layers
        visible = AttentionMask(turn, positions - turn, positions, depth)
        cache, hidden = _turn(network, turn, cache, hidden, embedded, positions, visible)
        outputs.append(hidden)
    return cache, outputs


def _turn(
    network: Network,
    turn: int,
    cache: KVCache,
    hidden: Float[Array, "B T D"],
    embedded: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    visible: AttentionMask,
) -> tuple[KVCache, Float[Array, "B T D"]]:
    """Runs the layers of one turn; a row's cache is numbered by position."""
    places = locate_block(cache, positions)
    for layer in range(turn * network.stack, (turn + 1) * network.stack):
        heads = network.attention_inputs(layer, hidden, embedded, positions)
        cache = write_block(cache, layer, places, heads.key, heads.value)
        attended = attend_cache(heads.query, cache, layer, visible)
        hidden = network.layer_output(layer, heads.residual, attended)
    return cache, hidden
