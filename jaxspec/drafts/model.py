"""An external draft model (Leviathan et al., arXiv 2211.17192): a smaller decoder of the same
vocabulary with its own cache."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.drafts.base import (
    Context,
    Draft,
    Export,
    Files,
    Kept,
    Kind,
    Learned,
    Proposal,
    Sampler,
    Say,
    Unroll,
    block_positions,
)
from jaxspec.drafts.pieces import Pieces
from jaxspec.hf.draft_tensors import check_vocabulary_padding
from jaxspec.hf.names import policy_mappings
from jaxspec.hf.policy_config import policy_config_json
from jaxspec.hf.pretrained import load_policy_config, open_policy_checkpoint, stream_tensors
from jaxspec.inputs.checked import require
from jaxspec.inputs.spec import DraftSpec, ModelConfig, ModelSpec
from jaxspec.kernels.order import order_after, signal_ready
from jaxspec.mesh import of_any_expert
from jaxspec.models.cache import KVCache
from jaxspec.models.decoder import Decoder, DecoderOutput
from jaxspec.state import Pack, Prompts, Tree, pytree


@pytree
class ModelState(Tree):
    """How far the draft model has read."""

    read: Int[Array, " B"]
    """Positions before this one are in the cache."""


def external(max_draft_length: int) -> Draft:
    """A draft of up to `max_draft_length` tokens a round from a `Decoder` that reads the text
    itself and nothing of the target."""

    def empty_cache(network: Decoder, rows: int, positions: int) -> KVCache:
        return network.empty_cache(rows, positions)

    def catch_up(
        network: Decoder, target: Decoder, state: ModelState, cache: KVCache, context: Context
    ) -> tuple[ModelState, KVCache]:
        return state, cache  # the tokens stay where they are: the next proposal reads them

    def propose(
        network: Decoder,
        target: Decoder,
        state: ModelState,
        cache: KVCache,
        context: Context,
        sample: Sampler,
        length: int,
    ) -> tuple[ModelState, KVCache, Proposal]:
        # The last token is new. So is the one before it where all drafts were kept: the last of
        # them was drawn, but never read. A row of one token starts with it and reads a position
        # ahead, which the next step overwrites.
        first = jnp.maximum(context.lengths - 2, 0)

        def read(start: Int[Array, " B"], count: int, cache: KVCache) -> DecoderOutput:
            positions = block_positions(start, count)
            return network(context.at(positions), positions, cache)

        def read_on(carry: tuple[Int[Array, " B"], KVCache]) -> tuple[Int[Array, " B"], KVCache]:
            start, cache = carry
            return jnp.minimum(start + max_draft_length + 1, first), _cache_of(
                read(start, max_draft_length + 1, cache).cache
            )

        # What rounds without drafts committed.
        start = jnp.minimum(state.read, first)
        start, cache = lax.while_loop(
            lambda carry: of_any_expert(jnp.any(carry[0] < first)), read_on, (start, cache)
        )
        # what tensor peers say now comes after what they said in that loop (`order.py`)
        first = order_after(first, [signal_ready(start)])
        forward = read(first, 2, cache)
        last = (context.lengths - 1)[:, None]
        hidden = jnp.take_along_axis(forward.hidden, (last - first[:, None])[:, :, None], axis=1)
        drafted, drawn_from = [], []
        for offset in range(length):
            logits = network.logits(hidden)[:, 0]
            token = sample(logits, offset)
            drafted.append(token)
            drawn_from.append(logits)
            if offset + 1 < length:
                forward = network(token[:, None], last + 1 + offset, forward.cache)
                hidden = forward.hidden
        count = jnp.full_like(context.lengths, length)
        proposal = Proposal(
            tokens=jnp.stack(drafted, axis=1), logits=jnp.stack(drawn_from, axis=1), offered=count
        )
        return ModelState(read=context.lengths), _cache_of(forward.cache), proposal

    def commit(state: ModelState, kept: Kept) -> ModelState:
        # The drafts that were kept stand in the cache, but for the last one of the block; what was
        # not is overwritten before it is seen.
        drafts = kept.positions.shape[1] - 1
        return state.replace(read=state.read + jnp.clip(kept.length - 1, 0, max(drafts - 1, 0)))

    return Draft(
        length=max_draft_length,
        taps=(),
        draws=True,
        empty_cache=empty_cache,
        start=_start,
        read=_read_along,
        catch_up=catch_up,
        propose=propose,
        commit=commit,
    )


def _start(network: Decoder, target: Decoder, prompts: Prompts) -> ModelState:
    return ModelState(read=jnp.zeros_like(prompts.lengths))


def _read_along(
    network: Decoder,
    target: Decoder,
    state: ModelState,
    cache: KVCache,
    pieces: Pieces,
    features: Float[Array, "N T C"],
) -> tuple[ModelState, KVCache]:
    cache = _cache_of(network(pieces.tokens, pieces.positions, cache).cache)
    return ModelState(read=pieces.put_last(state.read, pieces.positions + 1)), cache


def _cache_of(cache: KVCache | None) -> KVCache:
    assert cache is not None, "a cache that goes in comes back"
    return cache


# ---- the kind


def _decoder(spec: DraftSpec) -> ModelSpec:
    """That of a loaded model, else of the policy's sizes and family."""
    if spec.decoder is not None:
        return spec.decoder
    return replace(spec.policy, path="", layers=spec.layers, ffn=spec.ffn or spec.policy.ffn)


def _check(spec: DraftSpec) -> None:
    own, vocab = _decoder(spec).vocab, spec.policy.vocab
    require(
        own == vocab,
        f"the draft model's vocabulary is {own} and model.vocab {vocab}; choose a draft that shares"
        " the policy's",
    )


def _unrolled(
    network: Decoder, target: Decoder, forward: DecoderOutput, pack: Pack, depths: int
) -> Float[Array, "B T 1 D"]:
    """Its own pass: it reads true tokens only, so it has one depth."""
    return network(pack.tokens, pack.positions, first=pack.first).hidden[:, :, None]


def _resolve(spec: DraftSpec, folder: Path, say: Say) -> DraftSpec:
    """A small model of its own sizes, whose vocabulary is padded or cut to the policy's."""
    own = replace(_published(spec), vocab=spec.policy.vocab)
    return replace(spec, decoder=own, vocab=0, ffn=0)


def _published(spec: DraftSpec) -> ModelSpec:
    """The model as its folder has it."""
    policy = spec.policy
    base = ModelConfig(path=spec.path, ignore=policy.ignore, dtype=policy.dtype, remat=policy.remat)
    return load_policy_config(base)


def _judge(spec: DraftSpec, folder: Path, tokens: int) -> None:
    own, rows = _decoder(spec), _published(spec).vocab
    check_vocabulary_padding(str(folder), rows, spec.policy.vocab, tokens)
    open_policy_checkpoint(own, jax.eval_shape(lambda: Decoder(own, jax.random.key(0))), rows)


def _load(spec: DraftSpec, folder: Path, abstract: Decoder) -> Decoder:
    checkpoint = open_policy_checkpoint(_decoder(spec), abstract, _published(spec).vocab)
    return checkpoint.load(lambda _: None)


def _export(network: Decoder, wanted: Export) -> Files:
    """Like any policy."""
    content = policy_config_json(network.config, wanted.dtype.name, wanted.ids)
    tensors = stream_tensors(policy_mappings(network.config), network, wanted.dtype)
    return Files(content, list(tensors), tokenizer=True)


MODEL = Kind(
    build=lambda spec, stop_ids: external(spec.max_length),
    settings=frozenset({"rollout.draft.layers", "model.ignore"}),
    from_files=frozenset({"rollout.draft.ffn", "rollout.draft.layers"}),
    learned=Learned(
        decoder=_decoder,
        network=lambda spec, key: Decoder(_decoder(spec), key),
        check=_check,
        sizes=lambda network, policy: {"vocabulary": (network.embedding.shape[0], policy.vocab)},
        reads=lambda length: 2,
        unroll=Unroll(
            depths=lambda steps: 1,
            before=lambda depths: jnp.zeros((1,), jnp.int32),
            hidden=_unrolled,
            logits=lambda network, target, hidden: network.logits(hidden),
            vocabulary=lambda network: None,
        ),
        resolve=_resolve,
        judge=_judge,
        load=_load,
        export=_export,
    ),
)
