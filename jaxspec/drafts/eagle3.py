"""EAGLE-3 drafting: every round first re-reads the kept tokens with the target's true taps, then drafts on its own states."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.drafts.base import Draft, Kept, Proposal, Sampler, block_positions
from jaxspec.models.attention import attend, up_to_position
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.kv import KVCache, append, empty_cache, repeat_rows
from jaxspec.state import Tree, pytree


@pytree
class Eagle3State(Tree):
    """The draft's own cache (slot t: taps of position t, token t+1), and the block it has yet to read."""

    cache: KVCache
    taps: Float[Array, "B K1 C"]
    tokens: Int[Array, "B K1"]
    """Token after each pending position."""
    first: Int[Array, " B"]
    """Slot of the first pending position."""
    count: Int[Array, " B"]
    """Pending positions that were kept; at least 1."""


def _extend(
    network: Eagle3, cache: KVCache, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"], positions: Int[Array, "B T"]
) -> tuple[KVCache, Float[Array, "B T D"]]:
    """Reads a block at its slots; returns pre-norm outputs."""
    heads = network.heads(hidden, embedded, positions)
    layer = jnp.zeros((), jnp.int32)
    cache = KVCache(keys=append(cache.keys, layer, positions, heads.key), values=append(cache.values, layer, positions, heads.value))
    attended = attend(heads.query, cache.keys[0], cache.values[0], up_to_position(positions, cache.keys.shape[2]))
    return cache, network.finish(hidden, attended)


def eagle3(length: int) -> Draft:
    """A draft of `length` tokens a round from an `Eagle3` network."""

    def prefill(
        network: Eagle3, target: Decoder, tokens: Int[Array, "n P"], lengths: Int[Array, " n"], taps: Float[Array, "n P C"], slots: int
    ) -> Eagle3State:
        rows, width = tokens.shape
        config = network.config
        cache = empty_cache(1, rows, slots, config.kv_heads, config.head_size, taps.dtype)
        positions = jnp.broadcast_to(jnp.arange(width - 1, dtype=jnp.int32), (rows, width - 1))
        embedded = target.embedding[...][tokens[:, 1:]]
        cache, _ = _extend(network, cache, network.fuse_taps(taps[:, :-1]), embedded, positions)
        # The last whole slot of the prompt (its token is the prompt's last) is read again by the first round, as its pending block.
        first = jnp.maximum(lengths - 2, 0)
        pick = first[:, None]
        pending_taps = jnp.pad(jnp.take_along_axis(taps, pick[:, :, None], axis=1), ((0, 0), (0, length), (0, 0)))
        pending_tokens = jnp.pad(jnp.take_along_axis(tokens, pick + 1, axis=1), ((0, 0), (0, length)))
        return Eagle3State(cache=cache, taps=pending_taps, tokens=pending_tokens, first=first, count=jnp.ones_like(first))

    def repeat(state: Eagle3State, times: int) -> Eagle3State:
        rows = {name: jnp.repeat(getattr(state, name), times, axis=0) for name in ("taps", "tokens", "first", "count")}
        return state.replace(cache=repeat_rows(state.cache, times), **rows)

    def propose(network: Eagle3, target: Decoder, state: Eagle3State, sample: Sampler) -> tuple[Eagle3State, Proposal]:
        embedding = target.embedding[...]
        positions = block_positions(state.first, length + 1)
        cache, outputs = _extend(network, state.cache, network.fuse_taps(state.taps), embedding[state.tokens], positions)
        last = state.count - 1
        hidden = jnp.take_along_axis(outputs, last[:, None, None], axis=1)
        slot = (state.first + last)[:, None]
        drafted, distributions = [], []
        for offset in range(length):
            token, logprobs = sample(network.logits(hidden)[:, 0], offset)
            drafted.append(token)
            distributions.append(logprobs)
            if offset + 1 < length:
                slot = slot + 1
                cache, hidden = _extend(network, cache, hidden, embedding[token][:, None], slot)
        return state.replace(cache=cache), Proposal(jnp.stack(drafted, axis=1), jnp.stack(distributions, axis=1))

    def commit(state: Eagle3State, kept: Kept) -> Eagle3State:
        # A row that kept nothing (it had ended) keeps its pending block too.
        went_on = kept.length > 0
        return state.replace(
            taps=jnp.where(went_on[:, None, None], kept.taps, state.taps),
            tokens=jnp.where(went_on[:, None], kept.tokens, state.tokens),
            first=jnp.where(went_on, kept.positions[:, 0], state.first),
            count=jnp.where(went_on, kept.length, state.count),
        )

    return Draft(length, prefill, repeat, propose, commit)
