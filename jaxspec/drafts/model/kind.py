"""A smaller decoder as a draft kind. It shares the policy's vocabulary."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.drafts.base import DraftFiles, ExportSpec, FileFacts, Kind, Learned, Log, Unroll
from jaxspec.drafts.model.drafting import model_draft
from jaxspec.drafts.model.settings import DraftModelSpec
from jaxspec.hf.draft_tensors import check_vocabulary_padding
from jaxspec.hf.names import policy_mappings
from jaxspec.hf.policy_config import policy_config_json
from jaxspec.hf.pretrained import load_policy_config, open_policy_checkpoint, stream_tensors
from jaxspec.inputs.checked import require
from jaxspec.inputs.spec import ModelConfig, ModelSpec
from jaxspec.models.decoder import Decoder, DecoderOutput
from jaxspec.state import Pack


def _decoder_spec(spec: DraftModelSpec) -> ModelSpec:
    """Returns the spec of the draft's decoder.

    Without a loaded model it has layers of the policy's sizes and family.
    """
    if spec.decoder is not None:
        return spec.decoder
    sizes = spec.settings
    return replace(spec.policy, path="", layers=sizes.layers, ffn=sizes.ffn or spec.policy.ffn)


def _check_spec(spec: DraftModelSpec) -> None:
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


def _read_facts(spec: DraftModelSpec, folder: Path, log: Log) -> FileFacts:
    """Reads the model's sizes from its folder."""
    # Models of one family pad the same vocabulary differently, so loading pads or cuts the rows.
    decoder = replace(_stored_spec(spec), vocab=spec.policy.vocab)
    return FileFacts(replace(spec.settings, ffn=0), decoder)


def _stored_spec(spec: DraftModelSpec) -> ModelSpec:
    """Returns the model's spec as stored in its folder."""
    policy = spec.policy
    base = ModelConfig(path=spec.path, ignore=policy.ignore, dtype=policy.dtype, remat=policy.remat)
    return load_policy_config(base)


def _check_files(spec: DraftModelSpec, folder: Path, token_count: int) -> None:
    decoder, stored_rows = _decoder_spec(spec), _stored_spec(spec).vocab
    check_vocabulary_padding(str(folder), stored_rows, spec.policy.vocab, token_count)
    open_policy_checkpoint(
        decoder, jax.eval_shape(lambda: Decoder(decoder, jax.random.key(0))), stored_rows
    )


def _load_network(spec: DraftModelSpec, folder: Path, abstract: Decoder) -> Decoder:
    checkpoint = open_policy_checkpoint(_decoder_spec(spec), abstract, _stored_spec(spec).vocab)
    return checkpoint.load(lambda _: None)


def _export_files(network: Decoder, export: ExportSpec) -> DraftFiles:
    """Exports the draft as a policy is exported."""
    config = policy_config_json(network.config, export.dtype.name, export.special_tokens)
    tensors = stream_tensors(policy_mappings(network.config), network, export.dtype)
    return DraftFiles(config, list(tensors), needs_tokenizer=True)


MODEL = Kind(
    make_spec=DraftModelSpec.from_run,
    build=lambda spec, stop_ids: model_draft(spec.max_length),
    shared_settings=frozenset({"model.ignore"}),
    file_settings=frozenset({"rollout.draft.model."}),
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
        read_facts=_read_facts,
        check_files=_check_files,
        load_network=_load_network,
        export_files=_export_files,
    ),
)
