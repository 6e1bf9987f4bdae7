"""EAGLE-3 and MTP drafting: every round first re-reads the kept tokens with the target's true features, then drafts on its own states."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafts.base import Context, Draft, Kept, Proposal, Sampler, block_positions
from jaxspec.models.attention import attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.kv import KVCache, empty_cache, extend, repeat_rows
from jaxspec.models.mtp import Mtp
from jaxspec.state import Prompts, Tree, pytree

Network = Eagle3 | Mtp


@pytree
class RecurrentState(Tree):
    """The draft's own cache, a layer for each of the network's, and the block it has yet to read.

    Slot t of turn 0 reads the features of position t and token t+1; of turn k, the output of turn k-1 at slot t-1 and token t+1.
    """

    cache: KVCache
    features: Float[Array, "B K1 C"]
    """The target's, at the pending positions: from `first` to the last whose next token is committed."""
    first: Int[Array, " B"]
    before: Float[Array, "B N1 D"]
    """Outputs of all turns but the last at the slot before `first`; zeros where there is none."""
    ends: Float[Array, "B N1 D"]
    """The same at the last slot that was read: `before` of the next block."""


def recurrent(length: int, taps: tuple[int, ...] = (), depth: int = 1) -> Draft:
    """A draft of `length` tokens a round from a network that runs a stack of layers in each of `depth` turns (drafters.md 1.9, 3.2).

    Token i+1 of a block comes from turn i mod `depth`. A slot attends to what it saw in training: in turn k, the true slots up to k
    before its own and its own; when drafting, the true slots and those that the same turn has drafted. EAGLE-3 has one turn, MTP a turn
    for each of its layers.
    """

    def prefill(network: Network, target: Decoder, prompts: Prompts, features: Float[Array, "n P C"], slots: int) -> RecurrentState:
        config, (rows, width) = network.config, prompts.tokens.shape
        cache = empty_cache(depth * network.stack, rows, slots, config.kv_heads, config.head_size, features.dtype)
        positions = jnp.broadcast_to(jnp.arange(width - 1, dtype=jnp.int32), (rows, width - 1))
        nothing = jnp.zeros((rows, depth - 1, config.embed), features.dtype)
        embedded = network.embed(target, prompts.tokens[:, 1:])
        cache, outputs = _read(network, cache, nothing, features[:, :-1], embedded, positions, depth)
        # The last whole slot of the prompt (its token is the prompt's last) is read again by the first round, as its pending block.
        first = jnp.maximum(prompts.lengths - 2, 0)
        before = [jnp.take_along_axis(_next_slot(nothing[:, k], outputs[k]), first[:, None, None], axis=1) for k in range(depth - 1)]
        before = jnp.concatenate([nothing[:, :0], *before], axis=1)
        pending = jnp.take_along_axis(features, first[:, None, None], axis=1)
        return RecurrentState(
            cache=cache, features=jnp.pad(pending, ((0, 0), (0, length), (0, 0))), first=first, before=before, ends=before
        )

    def repeat(state: RecurrentState, times: int) -> RecurrentState:
        rows = {name: jnp.repeat(getattr(state, name), times, axis=0) for name in ("features", "first", "before", "ends")}
        return state.replace(cache=repeat_rows(state.cache, times), **rows)

    def propose(
        network: Network, target: Decoder, state: RecurrentState, context: Context, sample: Sampler
    ) -> tuple[RecurrentState, Proposal]:
        positions = block_positions(state.first, length + 1)
        tokens = jnp.take_along_axis(context.tokens, positions + 1, axis=1, mode="clip")
        cache, outputs = _read(network, state.cache, state.before, state.features, network.embed(target, tokens), positions, depth)
        pending = context.lengths - 1 - state.first  # none in a row of one token: it has nothing to draft from
        last = jnp.maximum(pending - 1, 0)
        at_last = [jnp.take_along_axis(output, last[:, None, None], axis=1) for output in outputs]
        ends = jnp.where((pending > 0)[:, None, None], jnp.concatenate([state.ends[:, :0], *at_last[:-1]], axis=1), state.ends)
        hidden, last_slot = at_last[0], state.first + last
        drafted, laws = [], []
        for offset in range(length):
            logits = network.logits(target, hidden)[:, 0]
            token = sample(logits, offset)
            drafted.append(token)
            laws.append(logits)
            if offset + 1 < length:
                step = offset + 1
                mask = _true_or_own(last_slot, step, depth, cache.keys.shape[2])
                slot = (last_slot + step)[:, None]
                cache, hidden = _turn(network, step % depth, cache, hidden, network.embed(target, token[:, None]), slot, mask)
        count = jnp.where(pending > 0, length, 0).astype(jnp.int32)
        proposal = Proposal(tokens=jnp.stack(drafted, axis=1), logits=jnp.stack(laws, axis=1), offered=count)
        return state.replace(cache=cache, ends=ends), proposal

    def commit(state: RecurrentState, kept: Kept) -> RecurrentState:
        # A row that kept nothing (it had ended) keeps its pending block too.
        went_on = kept.length > 0
        return state.replace(
            features=jnp.where(went_on[:, None, None], kept.features, state.features),
            first=jnp.where(went_on, kept.positions[:, 0], state.first),
            before=jnp.where(went_on[:, None, None], state.ends, state.before),
        )

    return Draft(length, taps, True, prefill, repeat, propose, commit)


def _read(
    network: Network,
    cache: KVCache,
    before: Float[Array, "B N1 D"],
    features: Float[Array, "B T C"],
    embedded: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    depth: int,
) -> tuple[KVCache, list[Float[Array, "B T D"]]]:
    """Reads a block with true features in all turns; returns each turn's outputs."""
    slots = jnp.arange(cache.keys.shape[2], dtype=jnp.int32)
    hidden, outputs = network.read(features), []
    for turn in range(depth):
        if turn > 0:
            hidden = _next_slot(before[:, turn - 1], hidden)[:, :-1]
        mask = ((slots >= turn) & (slots <= positions[:, :, None] - turn)) | (slots == positions[:, :, None])
        cache, hidden = _turn(network, turn, cache, hidden, embedded, positions, mask)
        outputs.append(hidden)
    return cache, outputs


def _next_slot(before: Float[Array, "B D"], outputs: Float[Array, "B T D"]) -> Float[Array, "B T1 D"]:
    """Outputs moved one slot up: what the next turn reads."""
    return jnp.concatenate([before[:, None], outputs], axis=1)


def _true_or_own(last: Int[Array, " B"], step: int, depth: int, slots: int) -> Bool[Array, "B 1 S"]:
    """What a step of a chain sees: slots up to the last true one, and those of its own turn's steps; others are stale in its layers."""
    steps = jnp.arange(slots, dtype=jnp.int32) - last[:, None, None]
    true = (steps <= 0) & (jnp.arange(slots, dtype=jnp.int32) >= step % depth)
    return true | ((steps > 0) & (steps <= step) & ((step - steps) % depth == 0))


def _turn(
    network: Network,
    turn: int,
    cache: KVCache,
    hidden: Float[Array, "B T D"],
    embedded: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    mask: Bool[Array, "B T S"],
) -> tuple[KVCache, Float[Array, "B T D"]]:
    """Runs the layers of one turn at their slots of the cache."""
    for layer in range(turn * network.stack, (turn + 1) * network.stack):
        heads = network.heads(layer, hidden, embedded, positions)
        cache = extend(cache, jnp.asarray(layer, jnp.int32), positions, heads.key, heads.value)
        attended = attend(heads.query, cache.keys[layer], cache.values[layer], mask)
        hidden = network.finish(layer, heads.residual, attended)
    return cache, hidden
