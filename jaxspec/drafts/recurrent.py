"""EAGLE-3 and MTP drafting: every round first re-reads the kept tokens with the target's true features, then drafts on its own states."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafts.base import Context, Draft, Kept, Proposal, Sampler, block_positions
from jaxspec.kernels.sight import Sight
from jaxspec.models.attention import attend_cache
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.kv import KVCache, empty_cache, extend
from jaxspec.models.mtp import Mtp
from jaxspec.state import Prompts, Tree, pytree

Network = Eagle3 | Mtp


@pytree
class RecurrentState(Tree):
    """The block that the draft has yet to read.

    In its cache, slot t of turn 0 reads the features of a position and the token after it; of turn k, the output of turn k-1 at slot t-1
    and that token. Slots are positions, less those that were never read: after many rounds in which nothing was drafted, it reads the last
    few.
    """

    features: Float[Array, "B K1 C"]
    """The target's, at the pending positions: from `first` to the last whose next token is committed."""
    first: Int[Array, " B"]
    skipped: Int[Array, " B"]
    """Positions before `first` that were not read."""
    before: Float[Array, "B N1 D"]
    """Outputs of all turns but the last at the slot before `first`; zeros where there is none."""
    ends: Float[Array, "B N1 D"]
    """The same at the last slot that was read: `before` of the next block."""


def recurrent(longest: int, taps: tuple[int, ...] = (), depth: int = 1) -> Draft:
    """A draft of up to `longest` tokens a round from a network that runs a stack of layers in each of `depth` turns (drafters.md 1.9, 3.2).

    Token i+1 of a block comes from turn i mod `depth`. A slot attends to what it saw in training: in turn k, the true slots up to k
    before its own and its own; when drafting, the true slots and those that the same turn has drafted. EAGLE-3 has one turn, MTP a turn
    for each of its layers.
    """

    def empty(network: Network, rows: int, slots: int) -> KVCache:
        config = network.config
        return empty_cache(depth * network.stack, rows, slots, config.kv_heads, config.head_size, network.norm[...].dtype)

    def prefill(
        network: Network, target: Decoder, prompts: Prompts, features: Float[Array, "n P C"], cache: KVCache
    ) -> tuple[RecurrentState, KVCache]:
        config, (rows, width) = network.config, prompts.tokens.shape
        positions = jnp.broadcast_to(jnp.arange(width - 1, dtype=jnp.int32), (rows, width - 1))
        nothing = jnp.zeros((rows, depth - 1, config.embed), features.dtype)
        embedded = network.embed(target, prompts.tokens[:, 1:])
        cache, outputs = _read(network, cache, nothing, features[:, :-1], embedded, positions, positions, depth)
        # The last whole slot of the prompt (its token is the prompt's last) is read again by the first round, as its pending block.
        first = jnp.maximum(prompts.lengths - 2, 0)
        before = [jnp.take_along_axis(_next_slot(nothing[:, k], outputs[k]), first[:, None, None], axis=1) for k in range(depth - 1)]
        before = jnp.concatenate([nothing[:, :0], *before], axis=1)
        pending = jnp.pad(jnp.take_along_axis(features, first[:, None, None], axis=1), ((0, 0), (0, longest), (0, 0)))
        return RecurrentState(features=pending, first=first, skipped=jnp.zeros_like(first), before=before, ends=before), cache

    def propose(
        network: Network, target: Decoder, state: RecurrentState, cache: KVCache, context: Context, sample: Sampler, length: int
    ) -> tuple[RecurrentState, KVCache, Proposal]:
        state = _latest(state, context.lengths, length + 1)
        positions = block_positions(state.first, length + 1)
        slots, tokens = positions - state.skipped[:, None], context.at(positions + 1)
        block = state.features[:, : length + 1]
        cache, outputs = _read(network, cache, state.before, block, network.embed(target, tokens), positions, slots, depth)
        pending = context.lengths - 1 - state.first  # none in a row of one token: it has nothing to draft from
        last = jnp.maximum(pending - 1, 0)
        at_last = [jnp.take_along_axis(output, last[:, None, None], axis=1) for output in outputs]
        ends = jnp.where((pending > 0)[:, None, None], jnp.concatenate([state.ends[:, :0], *at_last[:-1]], axis=1), state.ends)
        hidden, last_position = at_last[0], (state.first + last)[:, None]
        last_slot = last_position - state.skipped[:, None]
        drafted, laws = [], []
        for offset in range(length):
            logits = network.logits(target, hidden)[:, 0]
            token = sample(logits, offset)
            drafted.append(token)
            laws.append(logits)
            if offset + 1 < length:
                step = offset + 1
                sight = Sight(step % depth, last_slot, last_slot + step, depth)  # what other turns drafted is stale in its layers
                embedded, position = network.embed(target, token[:, None]), last_position + step
                cache, hidden = _turn(network, step % depth, cache, hidden, embedded, position, last_slot + step, sight)
        count = jnp.where(pending > 0, length, 0).astype(jnp.int32)
        proposal = Proposal(tokens=jnp.stack(drafted, axis=1), logits=jnp.stack(laws, axis=1), offered=count)
        return state.replace(ends=ends), cache, proposal

    def commit(state: RecurrentState, kept: Kept) -> RecurrentState:
        went_on = kept.length > 0  # a row that kept nothing (it had ended) keeps its pending block too
        if kept.positions.shape[1] == 1:
            return _appended(state, kept, went_on)
        spare = longest + 1 - kept.positions.shape[1]
        return state.replace(
            features=jnp.where(went_on[:, None, None], jnp.pad(kept.features, ((0, 0), (0, spare), (0, 0))), state.features),
            first=jnp.where(went_on, kept.positions[:, 0], state.first),
            before=jnp.where(went_on[:, None, None], state.ends, state.before),
        )

    return Draft(longest, taps, True, empty, prefill, propose, commit)


def _moved_on(state: RecurrentState, count: Int[Array, " B"]) -> RecurrentState:
    """The state without the first `count` pending positions, which are never read."""
    features = state.features
    places = jnp.minimum(block_positions(count, features.shape[1]), features.shape[1] - 1)
    features = jnp.take_along_axis(features, places[:, :, None], axis=1)
    return state.replace(features=features, first=state.first + count, skipped=state.skipped + count)


def _latest(state: RecurrentState, lengths: Int[Array, " B"], count: int) -> RecurrentState:
    """The state with at most `count` pending positions: the last ones."""
    if count == state.features.shape[1]:
        return state
    return _moved_on(state, jnp.maximum(lengths - 1 - state.first - count, 0))


def _appended(state: RecurrentState, kept: Kept, went_on: Bool[Array, " B"]) -> RecurrentState:
    """The state with one position more to read; the first one makes room where there is none."""
    width, new = state.features.shape[1], kept.positions[:, 0]
    state = _moved_on(state, jnp.where(went_on & (new - state.first >= width), 1, 0))
    place = jnp.where(went_on, new - state.first, width)  # beyond the buffer: dropped
    rows = jnp.arange(len(place), dtype=jnp.int32)
    return state.replace(features=state.features.at[rows, place].set(kept.features[:, 0], mode="drop"))


def _read(
    network: Network,
    cache: KVCache,
    before: Float[Array, "B N1 D"],
    features: Float[Array, "B T C"],
    embedded: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    slots: Int[Array, "B T"],
    depth: int,
) -> tuple[KVCache, list[Float[Array, "B T D"]]]:
    """Reads a block with true features in all turns; returns each turn's outputs."""
    hidden, outputs = network.read(features), []
    for turn in range(depth):
        if turn > 0:
            hidden = _next_slot(before[:, turn - 1], hidden)[:, :-1]
        sight = Sight(turn, slots - turn, slots, depth)  # of the last `turn` slots, only the own one is right in its layers
        cache, hidden = _turn(network, turn, cache, hidden, embedded, positions, slots, sight)
        outputs.append(hidden)
    return cache, outputs


def _next_slot(before: Float[Array, "B D"], outputs: Float[Array, "B T D"]) -> Float[Array, "B T1 D"]:
    """Outputs moved one slot up: what the next turn reads."""
    return jnp.concatenate([before[:, None], outputs], axis=1)


def _turn(
    network: Network,
    turn: int,
    cache: KVCache,
    hidden: Float[Array, "B T D"],
    embedded: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    slots: Int[Array, "B T"],
    sight: Sight,
) -> tuple[KVCache, Float[Array, "B T D"]]:
    """Runs the layers of one turn at their slots of the cache."""
    for layer in range(turn * network.stack, (turn + 1) * network.stack):
        heads = network.heads(layer, hidden, embedded, positions)
        cache = extend(cache, layer, slots, heads.key, heads.value)
        attended = attend_cache(heads.query, cache, layer, sight)
        hidden = network.finish(layer, heads.residual, attended)
    return cache, hidden
