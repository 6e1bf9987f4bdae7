"""EAGLE-3 as a draft kind.

Reads and writes published files. The network is in `models/eagle3.py`.
"""

import dataclasses
from dataclasses import replace
from pathlib import Path

import jax

from jaxspec.drafts.base import (
    MULTI_DEPTH_SETTINGS,
    DraftFiles,
    ExportSpec,
    FileFacts,
    Kind,
    Learned,
    Log,
    SizePairs,
)
from jaxspec.drafts.eagle3.repairs import list_repairs
from jaxspec.drafts.eagle3.settings import (
    LARGE_VOCAB,
    PUBLISHED_VOCAB,
    Eagle3Config,
    Eagle3Spec,
)
from jaxspec.drafts.recurrent import recurrent_draft
from jaxspec.drafts.unroll import UNROLL
from jaxspec.hf.draft_tensors import (
    cast_tensors,
    check_vocabulary_padding,
    load_policy_embeddings,
    load_tensors,
    replace_leaves,
)
from jaxspec.hf.eagle3_config import parse_head_config, vocabulary_size
from jaxspec.hf.eagle3_json import HeadFormat, head_config_json
from jaxspec.hf.eagle3_tensors import (
    check_head_tensors,
    head_arrays,
    head_tensors,
    normalize_names,
    reconcile_with_tensors,
)
from jaxspec.hf.eagle3_vocabulary import resize_vocabulary
from jaxspec.hf.pretrained import CONFIG_FILE
from jaxspec.hf.tensor_files import StoredTensor, open_tensors, refuse_quantized
from jaxspec.inputs.checked import Unused, require
from jaxspec.inputs.json_keys import read_json
from jaxspec.inputs.spec import HeadConfig, HeadSpec, ModelSpec
from jaxspec.models.decoder import tap_boundaries
from jaxspec.models.eagle3 import Eagle3, llama_head_spec, tap_count, with_vocabulary
from jaxspec.processes.global_arrays import from_host_values
from jaxspec.state import PyTree


def head_taps(head: HeadSpec, layers: int) -> tuple[int, ...]:
    """Returns the layer boundaries that a head reads.

    The policy has `layers` layers. The result is empty for a head that reads the final-norm hidden
    states.
    """
    return (head.taps or tap_boundaries(layers)) if head.use_taps else ()


def _decoder_spec(spec: Eagle3Spec) -> ModelSpec:
    """Returns the spec of the head's decoder.

    Without a loaded head it is one Llama layer of the policy's sizes.
    """
    return spec.decoder or llama_head_spec(spec.policy, spec.settings.ffn)


def _check_spec(spec: Eagle3Spec) -> None:
    """Checks that head and vocabulary fit the policy."""
    _check_head(spec)
    _check_vocabulary(spec)


def _check_head(spec: Eagle3Spec) -> None:
    head, decoder, policy = spec.head, spec.decoder, spec.policy
    require(
        not head.use_taps or bool(head.taps) or policy.layers >= 4,
        f"model.layers is {policy.layers}; the three taps of eagle3 need at least 4: choose another"
        " rollout.draft.kind",
    )
    invalid_taps = [tap for tap in head.taps if not 0 <= tap <= policy.layers]
    require(
        not invalid_taps,
        f"head.taps {list(head.taps)} has {invalid_taps}; give numbers from 0 to model.layers"
        f" {policy.layers}, or none",
    )
    if decoder is None:
        return
    mismatch = f"the draft's width is {decoder.embed} and model.embed {policy.embed}"
    require(
        head.use_taps or decoder.embed == policy.embed,
        f"{mismatch}; a draft that reads the policy's hidden states as they are must be as wide",
    )
    require(
        decoder.embed == policy.embed or head.own_embedding,
        f"{mismatch}, so it cannot share the policy's embedding, and head.own_embedding is off",
    )


def _check_vocabulary(spec: Eagle3Spec) -> None:
    vocab, policy_vocab, banned_count = spec.vocab, spec.policy.vocab, spec.banned_count
    if vocab == 0:
        return
    message = f"rollout.draft.eagle3.vocab {vocab}"
    require(
        vocab <= policy_vocab,
        f"{message} is larger than the policy's model.vocab {policy_vocab}; give at most that, or"
        " 0 for all of it",
    )
    remedy = "set --offline.steps 300 or so, or --rollout.draft.eagle3.vocab 0"
    require(
        spec.trains_offline or bool(spec.path),
        f"{message} is chosen by offline training, and offline.steps is 0; {remedy}",
    )
    # 8 is room for the end tokens, which are always selected.
    require(
        vocab > banned_count + 8,
        f"{message} has almost no room besides {banned_count} banned ids and the end tokens; raise"
        " it",
    )


def _resolve_settings(spec: Eagle3Spec) -> Eagle3Config:
    """Resolves the size of the draft's own vocabulary."""
    if spec.settings.vocab != "auto":
        return spec.settings
    policy_vocab = spec.policy.vocab
    # Offline training selects the tokens, so without it there is no such vocabulary.
    is_large = spec.trains_offline and policy_vocab > LARGE_VOCAB
    # A multiple of 128 can be sharded over `tensor`.
    vocab = min(policy_vocab // 512 * 128, PUBLISHED_VOCAB) if is_large else 0
    return replace(spec.settings, vocab=vocab)


def _size_pairs(network: Eagle3, policy: ModelSpec) -> SizePairs:
    pairs, taps = {}, tap_count(network.form)
    if network.embedding is None or network.fuse is None:
        pairs["hidden size"] = network.config.embed, policy.embed
    if network.fuse is not None:
        pairs[f"width of {taps} taps"] = network.fuse.shape[0], taps * policy.embed
    vocab_size = network.config.vocab if network.vocabulary is not None else network.head.shape[-1]
    pairs["vocabulary"] = vocab_size, policy.vocab
    if network.embedding is not None:
        pairs["embedding table"] = network.embedding.shape[0], policy.vocab
    return pairs


# ---- files


def _read_facts(spec: Eagle3Spec, folder: Path, log: Log) -> FileFacts:
    """Reads a head's sizes and form from its files."""
    policy, source = spec.policy, str(folder / CONFIG_FILE)
    decoder, head, vocab = parse_head_config(
        read_json(folder / CONFIG_FILE), source, spec.settings.tap_convention, policy, log
    )
    if spec.head.taps:  # the file's layer numbers are ambiguous, the user's are not
        head = replace(head, taps=spec.head.taps)
    tensors = load_tensors(_open_head_tensors(folder, policy.vocab)[0])
    has_both_embeddings = "embed_tokens.weight" in tensors and bool(policy.path)
    # The policy's table is needed only to see whether the head's copy of it differs.
    embedding = load_policy_embeddings(policy, spec.path, has_both_embeddings)["embedding"]
    decoder, head = reconcile_with_tensors(decoder, head, tensors, embedding, log)
    if "lm_head.weight" in tensors:  # config.json may be wrong or silent about it
        head_rows = tensors["lm_head.weight"].shape[0]
        vocab = 0 if head_rows == policy.vocab else head_rows
    if 0 < decoder.rope.context < spec.row_length:
        log(
            f"{source}: the head was trained on {decoder.rope.context} positions, rows take up to"
            f" {spec.row_length}: it may accept less beyond"
        )
    return FileFacts(replace(spec.settings, vocab=vocab, ffn=0), decoder, head)


def _open_head_tensors(folder: Path, vocab: int) -> tuple[dict[str, StoredTensor], int]:
    """Opens a head's tensors, resized to `vocab` rows.

    Also returns the stored vocabulary size.
    """
    content = read_json(folder / CONFIG_FILE)
    stored_vocab = vocabulary_size(content, str(folder / CONFIG_FILE)) or vocab
    tensors = normalize_names(open_tensors(folder), str(folder))
    refuse_quantized(folder, tensors)
    # Head and policy may have padded the same vocabulary to different sizes.
    return (
        tensors if stored_vocab == vocab else resize_vocabulary(tensors, stored_vocab, vocab)
    ), stored_vocab


def _check_files(spec: Eagle3Spec, folder: Path, token_count: int) -> None:
    tensors, stored_vocab = _open_head_tensors(folder, spec.policy.vocab)
    check_vocabulary_padding(str(folder), stored_vocab, spec.policy.vocab, token_count)
    check_head_tensors(_decoder_spec(spec), spec.head, tensors, spec.policy, str(folder))


def _load_network(spec: Eagle3Spec, folder: Path, abstract: PyTree) -> PyTree:
    tensors = load_tensors(_open_head_tensors(folder, spec.policy.vocab)[0])
    policy = load_policy_embeddings(spec.policy, spec.path, "lm_head.weight" not in tensors)
    arrays = head_arrays(_decoder_spec(spec), spec.head, tensors, policy, str(folder))
    return jax.tree.map(from_host_values, abstract, replace_leaves(abstract, arrays))


def _export_files(network: Eagle3, export: ExportSpec) -> DraftFiles:
    head_format: HeadFormat = "speculators" if export.format == "speculators" else "raw"
    vocab = 0 if network.vocabulary is None else network.head.shape[-1]
    content = head_config_json(
        network.config, network.form, export.policy, head_format, vocab, export.draft_length
    )
    content["torch_dtype"] = export.dtype.name
    return DraftFiles(content, cast_tensors(head_tensors(network, head_format), export.dtype))


_HEAD_SETTINGS = frozenset(f"head.{item.name}" for item in dataclasses.fields(HeadConfig)) - {
    "head.taps"
}
EAGLE3 = Kind(
    make_spec=Eagle3Spec.from_run,
    build=lambda spec, stop_ids: recurrent_draft(
        spec.max_length, head_taps(spec.head, spec.policy.layers)
    ),
    shared_settings=MULTI_DEPTH_SETTINGS | {"head."},
    file_settings=_HEAD_SETTINGS | {"rollout.draft.eagle3.ffn", "rollout.draft.eagle3.vocab"},
    unused_rules=(
        Unused(
            "rollout.draft.eagle3.tap_convention",
            "no rollout.draft.path",
            lambda c: not c.rollout.draft.path,
        ),
    ),
    learned=Learned(
        decoder_spec=_decoder_spec,
        init_network=lambda spec, key: Eagle3(
            _decoder_spec(spec), spec.head, spec.policy, key, spec.vocab
        ),
        check_spec=_check_spec,
        size_pairs=_size_pairs,
        block_size=lambda length: length + 1,
        unroll=UNROLL,
        read_facts=_read_facts,
        check_files=_check_files,
        load_network=_load_network,
        export_files=_export_files,
        resolve_settings=_resolve_settings,
        export_formats=("raw", "speculators"),
        list_repairs=list_repairs,
        with_vocabulary=with_vocabulary,
    ),
)
