"""A smaller decoder as a draft kind.

It has its own cache and shares the policy's vocabulary. Source: Leviathan et al., arXiv 2211.17192.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.drafts.base import (
    Committed,
    Context,
    Draft,
    DraftFiles,
    DrawnProposal,
    ExportSpec,
    Kind,
    Learned,
    Log,
    Sampler,
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
from jaxspec.mesh import max_over_experts
from jaxspec.models.cache import KVCache
from jaxspec.models.decoder import Decoder, DecoderOutput
from jaxspec.state import Pack, Prompts, Tree, pytree


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
        pending_start = order_after(pending_start, [signal_ready(cached_length)])
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


# ---- the kind


def _decoder_spec(spec: DraftSpec) -> ModelSpec:
    """Returns the spec of the draft's decoder.

    Without a loaded model it has layers of the policy's sizes and family.
    """
    if spec.decoder is not None:
        return spec.decoder
    return replace(spec.policy, path="", layers=spec.layers, ffn=spec.ffn or spec.policy.ffn)


def _check_spec(spec: DraftSpec) -> None:
    draft_vocab, policy_vocab = _decoder_spec(spec).vocab, spec.policy.vocab
    require(
        draft_vocab == policy_vocab,
        f"the draft model's vocabulary is {draft_vocab} and model.vocab {policy_vocab}; choose a"
        " draft that shares the policy's",
    )


def _unroll_hidden(
    network: Decoder, target: Decoder, forward: DecoderOutput, pack: Pack, depths: int
) -> Float[Array, "B T 1 D"]:
    """Runs the draft model over the pack."""
    # It reads true tokens only, never its own outputs, so there is one depth.
    return network(pack.tokens, pack.positions, first=pack.text_start).hidden[:, :, None]


def _resolve_spec(spec: DraftSpec, folder: Path, log: Log) -> DraftSpec:
    """Reads the model's sizes from its folder."""
    # Models of one family pad the same vocabulary differently, so loading pads or cuts the rows.
    decoder = replace(_stored_spec(spec), vocab=spec.policy.vocab)
    return replace(spec, decoder=decoder, vocab=0, ffn=0)


def _stored_spec(spec: DraftSpec) -> ModelSpec:
    """Returns the model's spec as stored in its folder."""
    policy = spec.policy
    base = ModelConfig(path=spec.path, ignore=policy.ignore, dtype=policy.dtype, remat=policy.remat)
    return load_policy_config(base)


def _check_files(spec: DraftSpec, folder: Path, token_count: int) -> None:
    decoder, stored_rows = _decoder_spec(spec), _stored_spec(spec).vocab
    check_vocabulary_padding(str(folder), stored_rows, spec.policy.vocab, token_count)
    open_policy_checkpoint(
        decoder, jax.eval_shape(lambda: Decoder(decoder, jax.random.key(0))), stored_rows
    )


def _load_network(spec: DraftSpec, folder: Path, abstract: Decoder) -> Decoder:
    checkpoint = open_policy_checkpoint(_decoder_spec(spec), abstract, _stored_spec(spec).vocab)
    return checkpoint.load(lambda _: None)


def _export_files(network: Decoder, export: ExportSpec) -> DraftFiles:
    """Exports the draft as a policy is exported."""
    config = policy_config_json(network.config, export.dtype.name, export.special_tokens)
    tensors = stream_tensors(policy_mappings(network.config), network, export.dtype)
    return DraftFiles(config, list(tensors), needs_tokenizer=True)


MODEL = Kind(
    build=lambda spec, stop_ids: model_draft(spec.max_length),
    settings=frozenset({"rollout.draft.layers", "model.ignore"}),
    file_settings=frozenset({"rollout.draft.ffn", "rollout.draft.layers"}),
    learned=Learned(
        decoder_spec=_decoder_spec,
        init_network=lambda spec, key: Decoder(_decoder_spec(spec), key),
        check_spec=_check_spec,
        size_pairs=lambda network, policy: {
            "vocabulary": (network.embedding.shape[0], policy.vocab)
        },
        # the two positions that `propose` reads
        block_size=lambda length: 2,
        unroll=Unroll(
            depth_count=lambda steps: 1,
            min_context=lambda depths: jnp.zeros((1,), jnp.int32),
            hidden_states=_unroll_hidden,
            logits=lambda network, target, hidden: network.logits(hidden),
            vocabulary=lambda network: None,
        ),
        resolve_spec=_resolve_spec,
        check_files=_check_files,
        load_network=_load_network,
        export_files=_export_files,
    ),
)
