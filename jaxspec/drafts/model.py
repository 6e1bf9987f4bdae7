"""An external draft model (Leviathan et al., arXiv 2211.17192): a smaller decoder of the same vocabulary with its own cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.drafts.base import Context, Draft, Kept, Proposal, Sampler, block_positions
from jaxspec.models.decoder import Decoder, Forward
from jaxspec.models.kv import KVCache
from jaxspec.state import Prompts, Tree, pytree


@pytree
class ModelState(Tree):
    """How far the draft model has read. Slots of its cache are positions, less those that were never read."""

    read: Int[Array, " B"]
    """Positions before this one are in the cache, or skipped."""
    skipped: Int[Array, " B"]


def external(longest: int) -> Draft:
    """A draft of up to `longest` tokens a round from a `Decoder` that reads the text itself and nothing of the target."""

    def empty_cache(network: Decoder, rows: int, slots: int) -> KVCache:
        return network.empty_cache(rows, slots)

    def prefill(
        network: Decoder, target: Decoder, prompts: Prompts, features: Float[Array, "n P C"], cache: KVCache
    ) -> tuple[ModelState, KVCache]:
        rows, width = prompts.tokens.shape
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
        state = ModelState(read=prompts.lengths, skipped=jnp.zeros_like(prompts.lengths))
        return state, _cache_of(network(prompts.tokens, positions, cache).cache)

    def propose(
        network: Decoder, target: Decoder, state: ModelState, cache: KVCache, context: Context, sample: Sampler, length: int
    ) -> tuple[ModelState, KVCache, Proposal]:
        # The last token is new. So is the one before it where all drafts were kept: the last of them was drawn, but never read.
        # A row of one token starts with it and reads a slot ahead, which the next step overwrites.
        first = jnp.maximum(context.lengths - 2, 0)
        skipped = state.skipped + jnp.maximum(first - state.read, 0)  # in rounds that drafted nothing

        def read(tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: KVCache | None) -> Forward:
            return network(tokens, positions, cache, slots=positions - skipped[:, None])

        positions = block_positions(first, 2)
        forward = read(context.at(positions), positions, cache)
        last = (context.lengths - 1)[:, None]
        hidden = jnp.take_along_axis(forward.hidden, (last - first[:, None])[:, :, None], axis=1)
        drafted, laws = [], []
        for offset in range(length):
            logits = network.logits(hidden)[:, 0]
            token = sample(logits, offset)
            drafted.append(token)
            laws.append(logits)
            if offset + 1 < length:
                forward = read(token[:, None], last + 1 + offset, forward.cache)
                hidden = forward.hidden
        count = jnp.full_like(context.lengths, length)
        proposal = Proposal(tokens=jnp.stack(drafted, axis=1), logits=jnp.stack(laws, axis=1), offered=count)
        return ModelState(read=context.lengths, skipped=skipped), _cache_of(forward.cache), proposal

    def commit(state: ModelState, kept: Kept) -> ModelState:
        if kept.positions.shape[1] == 1:
            return state
        # What was kept of the block stands in the cache; what was not is overwritten before it is seen.
        return state.replace(read=state.read + jnp.maximum(kept.length - 1, 0))

    return Draft(longest, (), True, empty_cache, prefill, propose, commit)


def _cache_of(cache: KVCache | None) -> KVCache:
    assert cache is not None, "a cache that goes in comes back"
    return cache
