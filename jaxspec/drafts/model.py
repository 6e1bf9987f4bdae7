"""An external draft model (Leviathan et al., arXiv 2211.17192): a smaller decoder of the same vocabulary with its own cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.drafts.base import Context, Draft, Kept, Proposal, Sampler, block_positions
from jaxspec.models.decoder import Decoder
from jaxspec.models.kv import KVCache, empty_cache, repeat_rows
from jaxspec.state import Prompts, Tree, pytree


@pytree
class ModelState(Tree):
    """The draft model's cache; slot t holds token t."""

    cache: KVCache


def external(length: int) -> Draft:
    """A draft of `length` tokens a round from a `Decoder` that reads the text itself and nothing of the target."""

    def prefill(network: Decoder, target: Decoder, prompts: Prompts, features: Float[Array, "n P C"], slots: int) -> ModelState:
        config, (rows, width) = network.config, prompts.tokens.shape
        cache = empty_cache(config.layers, rows, slots, config.kv_heads, config.head_size, network.embedding[...].dtype)
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
        return ModelState(cache=_cache_of(network(prompts.tokens, positions, cache).cache))

    def repeat(state: ModelState, times: int) -> ModelState:
        return ModelState(cache=repeat_rows(state.cache, times))

    def propose(network: Decoder, target: Decoder, state: ModelState, context: Context, sample: Sampler) -> tuple[ModelState, Proposal]:
        # The last token is new. So is the one before it where all drafts were kept: the last of them was drawn, but never read.
        # A row of one token starts with it and reads a slot ahead, which the next step overwrites.
        first = jnp.maximum(context.lengths - 2, 0)
        positions = block_positions(first, 2)
        forward = network(jnp.take_along_axis(context.tokens, positions, axis=1), positions, state.cache)
        last = (context.lengths - 1)[:, None]
        hidden = jnp.take_along_axis(forward.hidden, (last - first[:, None])[:, :, None], axis=1)
        drafted, laws = [], []
        for offset in range(length):
            logits = network.logits(hidden)[:, 0]
            token = sample(logits, offset)
            drafted.append(token)
            laws.append(logits)
            if offset + 1 < length:
                forward = network(token[:, None], last + 1 + offset, forward.cache)
                hidden = forward.hidden
        count = jnp.full_like(context.lengths, length)
        proposal = Proposal(tokens=jnp.stack(drafted, axis=1), logits=jnp.stack(laws, axis=1), offered=count)
        return ModelState(cache=_cache_of(forward.cache)), proposal

    def commit(state: ModelState, kept: Kept) -> ModelState:
        return state  # what was kept of the block stands in the cache; what was not is overwritten before it is seen

    return Draft(length, (), True, prefill, repeat, propose, commit)


def _cache_of(cache: KVCache | None) -> KVCache:
    assert cache is not None, "a cache that goes in comes back"
    return cache
