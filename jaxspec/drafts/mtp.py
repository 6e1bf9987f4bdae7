"""Native multi-token prediction (MTP) as a draft kind.

The draft consists of extra layers of the policy. The network is in `models/mtp.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.drafts.base import (
    MULTI_DEPTH_SETTINGS,
    DraftFiles,
    ExportSpec,
    Kind,
    Learned,
    Log,
    Repair,
    SizePairs,
)
from jaxspec.drafts.recurrent import recurrent_draft
from jaxspec.drafts.unroll import UNROLL
from jaxspec.hf.draft_tensors import (
    DRAFT_PATH,
    NamedArrays,
    assemble_arrays,
    cast_tensors,
    check_tensor_headers,
    export_tensors,
    load_policy_embeddings,
    load_tensors,
    match_tensors,
    replace_leaves,
)
from jaxspec.hf.names import MIMO_MTP_PREFIX, WeightMapping, layer_mappings, select_mtp_names
from jaxspec.hf.policy_config import policy_config_json
from jaxspec.hf.tensor_files import (
    StoredTensor,
    check_tensor_header,
    open_tensors,
    refuse_quantized,
)
from jaxspec.inputs.checked import Unused, require
from jaxspec.inputs.spec import DraftSpec, ModelSpec
from jaxspec.models.mtp import Mtp
from jaxspec.processes.global_arrays import from_host_values
from jaxspec.state import PyTree


def _decoder_spec(spec: DraftSpec) -> ModelSpec:
    """Returns the spec of the MTP layers.

    They have the policy's sizes and family.
    """
    decoder = spec.decoder or replace(spec.policy, path="", ffn=spec.ffn or spec.policy.ffn)
    return replace(decoder, layers=spec.layers)


def _check_spec(spec: DraftSpec) -> None:
    decoder, policy_width = _decoder_spec(spec), spec.policy.embed
    require(
        decoder.embed == policy_width,
        f"the draft's width is {decoder.embed} and model.embed {policy_width}; a draft that reads"
        " the policy's hidden states as they are must be as wide",
    )
    mismatch = (
        f"draft_training.ttt_steps {spec.depths} is less than rollout.draft.layers {spec.layers}"
    )
    # 0 depths: the draft is not trained, so none of its layers has to learn.
    require(
        spec.depths == 0 or spec.depths >= spec.layers,
        f"{mismatch}: the last MTP layers would never learn; raise the first",
    )


def _size_pairs(network: Mtp, policy: ModelSpec) -> SizePairs:
    return {"hidden size": (network.project.shape[-1], policy.embed)}


# ---- files


def mtp_mappings(
    config: ModelSpec, embedding_first: bool, target_layers: int
) -> list[WeightMapping]:
    """Maps MTP layers to tensor names.

    Names follow MiMo or DeepSeek. DeepSeek's layers take [embedding, hidden], MiMo's take [hidden,
    embedding]. DeepSeek numbers MTP layers from `target_layers`, after the policy's own.
    """
    mimo_names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    token_norm, hidden_norm, projection, final_norm = (
        ("enorm", "hnorm", "eh_proj", "shared_head.norm") if embedding_first else mimo_names
    )
    prefix, first_layer = (
        ("model.layers.{layer}.", target_layers)
        if embedding_first
        else (f"{MIMO_MTP_PREFIX}{{layer}}.", 0)
    )
    fields = [
        ("embedding_norm", token_norm, "D -> D"),
        ("hidden_norm", hidden_norm, "D -> D"),
        ("project", projection, "D C -> C D"),
        ("norm", final_norm, "D -> D"),
    ]
    mappings = [
        WeightMapping(attribute, f"{prefix}{tensor_name}.weight", layout, first_layer=first_layer)
        for attribute, tensor_name, layout in fields
    ]
    return mappings + layer_mappings("layers.", prefix, config, first_layer=first_layer)


def find_mtp_layers(names: list[str], target_layers: int) -> tuple[int, bool]:
    """Counts MTP layers in a checkpoint's tensor names.

    Also returns whether they take [embedding, hidden].
    """
    for prefix, first_layer, projection, embedding_first in (
        ("model.mtp_layers.", 0, "input_proj", False),
        ("model.layers.", target_layers, "eh_proj", True),
    ):
        count = 0
        while f"{prefix}{first_layer + count}.{projection}.weight" in names:
            count += 1
        if count:
            return count, embedding_first
    return 0, True


def mtp_arrays(
    config: ModelSpec,
    embedding_first: bool,
    tensors: NamedArrays,
    target: NamedArrays,
    target_layers: int,
) -> dict[str, np.ndarray]:
    """Assembles the network's arrays from MTP tensors.

    Keys are attribute paths. `target` is as in `head_arrays`.

    Raises:
      ConfigError: A stored copy of the policy's embedding or head differs from the policy's.
    """
    weights = dict(tensors)
    copies = {name: weights.pop(name) for name in tensors if name.endswith(_COPY_SUFFIXES)}
    _check_copies(copies, target)
    return _fit_tensors(config, embedding_first, weights, target_layers, assemble_arrays)


_COPY_SUFFIXES = (".embed_tokens.weight", ".shared_head.head.weight")
"""Name endings of policy tensors that a checkpoint repeats in its MTP layers."""


def _check_copies(copies: NamedArrays, target: NamedArrays) -> None:
    for name, stored_copy in copies.items():
        # The network uses the policy's embedding and head, so a differing copy would be ignored.
        policy_array = (
            target["embedding"] if name.endswith("embed_tokens.weight") else target["head"].T
        )
        require(
            np.array_equal(stored_copy, policy_array),
            f"{name} is not the policy's own; MTP layers with an embedding or a head of their own"
            " cannot be loaded",
        )


def _fit_tensors(
    config: ModelSpec,
    embedding_first: bool,
    weights: Mapping[str, Any],
    target_layers: int,
    matcher: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """Applies `matcher` to the tensors of MTP layers.

    `matcher` is `match_tensors` or `assemble_arrays`.
    """
    # Only names and shapes are needed, so no weights are allocated.
    network = jax.eval_shape(lambda: Mtp(config, jax.random.key(0), config.layers, embedding_first))
    mappings = mtp_mappings(config, embedding_first, target_layers)
    return matcher(mappings, weights, network, "the checkpoint's MTP part")


def _resolve_spec(spec: DraftSpec, folder: Path, log: Log) -> DraftSpec:
    """Reads number, order and width of MTP layers.

    They follow from tensor names and shapes. The family is the policy's.
    """
    tensors, layers = open_tensors(folder), spec.policy.layers
    count, embedding_first = find_mtp_layers(list(tensors), layers)
    supported = (
        "model.mtp_layers.0.* as MiMo names them, or DeepSeek's eh_proj behind the policy's last"
        " layer"
    )
    require(count > 0, f"{DRAFT_PATH} {folder} has no MTP layers ({supported})")
    names = select_mtp_names(list(tensors), layers)
    gates = [tensors[name] for name in names if name.endswith(".gate_proj.weight")]
    for gate in gates:
        check_tensor_header(gate)
    widths = [gate.shape[0] for gate in gates]
    require(
        bool(widths),
        f"{DRAFT_PATH} {folder}: its MTP layers have no mlp.gate_proj; only SwiGLU layers, dense or"
        " of experts, can be read",
    )
    # In this setting, 0 means the policy's own width.
    ffn = 0 if widths[0] == spec.policy.ffn else widths[0]
    return replace(spec, layers=count, embedding_first=embedding_first, vocab=0, ffn=ffn)


def _open_mtp_tensors(spec: DraftSpec, folder: Path) -> dict[str, StoredTensor]:
    tensors = open_tensors(folder)
    mtp_tensors = {
        name: tensors[name] for name in select_mtp_names(list(tensors), spec.policy.layers)
    }
    refuse_quantized(folder, mtp_tensors)
    return mtp_tensors


def _check_files(spec: DraftSpec, folder: Path, token_count: int) -> None:
    tensors = _open_mtp_tensors(spec, folder)
    check_tensor_headers(tensors)
    copies = {name: tensors.pop(name) for name in list(tensors) if name.endswith(_COPY_SUFFIXES)}
    # Copies are compared by value, so these few are read. Of all others headers suffice.
    _check_copies(
        {name: tensor.read() for name, tensor in copies.items()},
        load_policy_embeddings(spec, bool(copies)),
    )
    _fit_tensors(
        _decoder_spec(spec), spec.embedding_first, tensors, spec.policy.layers, match_tensors
    )


def _load_network(spec: DraftSpec, folder: Path, abstract: PyTree) -> PyTree:
    tensors, layers = load_tensors(_open_mtp_tensors(spec, folder)), spec.policy.layers
    has_copies = any(name.endswith(_COPY_SUFFIXES) for name in tensors)
    arrays = mtp_arrays(
        _decoder_spec(spec),
        spec.embedding_first,
        tensors,
        load_policy_embeddings(spec, has_copies),
        layers,
    )
    return jax.tree.map(from_host_values, abstract, replace_leaves(abstract, arrays))


def _export_files(network: Mtp, export: ExportSpec) -> DraftFiles:
    """Exports MTP layers.

    They get a folder of their own, or are merged into a MiMo policy's files.
    """
    mappings = mtp_mappings(network.config, network.embedding_first, export.policy.layers)
    tensors = cast_tensors(export_tensors(mappings, network), export.dtype)
    mtp_config = {"num_nextn_predict_layers": network.depth}
    # MiMo publishes its MTP layers in the policy's own checkpoint.
    if export.policy.family.model_type == "mimo" and not network.embedding_first:
        return DraftFiles(mtp_config, tensors, merge_with_policy=True)
    return DraftFiles(policy_config_json(network.config, export.dtype.name, mtp_config), tensors)


def _list_repairs(network: Mtp, taps: tuple[int, ...], policy: ModelSpec) -> Iterator[Repair]:
    order, owner = (
        ("[hidden, embedding]", "MiMo's")
        if network.embedding_first
        else ("[embedding, hidden]", "DeepSeek's")
    )
    # Both orders have the same shapes, so a wrong one loads without an error.
    variant = jax.tree.map(lambda leaf: leaf, network)
    variant.embedding_first = not network.embedding_first
    remedy = f"{owner} names for its tensors, from which the order follows"
    yield Repair(f"its layers read {order}", remedy, variant, taps)


MTP = Kind(
    build=lambda spec, stop_ids: recurrent_draft(spec.max_length, depth=spec.layers),
    settings=MULTI_DEPTH_SETTINGS | {"rollout.draft.layers", "rollout.draft.embedding_first"},
    file_settings=frozenset(
        {"rollout.draft.ffn", "rollout.draft.layers", "rollout.draft.embedding_first"}
    ),
    unused_rules=(
        Unused(
            "rollout.draft.layers",
            "rollout.draft.draft_length {c.rollout.draft.draft_length}, whose tokens the first"
            " layers draft,",
            lambda c: (
                c.rollout.draft.kind == "mtp"
                and not c.rollout.draft.path
                and c.rollout.draft.layers > c.rollout.draft.max_draft_length
            ),
        ),
    ),
    learned=Learned(
        decoder_spec=_decoder_spec,
        init_network=lambda spec, key: Mtp(
            _decoder_spec(spec), key, spec.layers, spec.embedding_first
        ),
        check_spec=_check_spec,
        size_pairs=_size_pairs,
        block_size=lambda length: length + 1,
        unroll=UNROLL,
        resolve_spec=_resolve_spec,
        check_files=_check_files,
        load_network=_load_network,
        export_files=_export_files,
        list_repairs=_list_repairs,
        count_native_layers=lambda names, layers: find_mtp_layers(names, layers)[0],
    ),
)
