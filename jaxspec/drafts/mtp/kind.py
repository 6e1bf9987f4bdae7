"""Native multi-token prediction (MTP) as a draft kind.

The draft consists of extra layers of the policy. The network is in `models/mtp.py`.
"""

from collections.abc import Iterator
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
    Repair,
    SizePairs,
)
from jaxspec.drafts.mtp.files import (
    COPY_SUFFIXES,
    assemble_mtp_arrays,
    check_copies,
    find_mtp_layers,
    match_mtp_tensors,
    mtp_mappings,
)
from jaxspec.drafts.mtp.settings import MtpConfig, MtpSpec
from jaxspec.drafts.recurrent import recurrent_draft
from jaxspec.drafts.unroll import UNROLL
from jaxspec.hf.draft_tensors import (
    DRAFT_PATH,
    cast_tensors,
    check_tensor_headers,
    export_tensors,
    load_policy_embeddings,
    load_tensors,
    match_tensors,
    replace_leaves,
)
from jaxspec.hf.names import select_mtp_names
from jaxspec.hf.policy_config import policy_config_json
from jaxspec.hf.tensor_files import (
    StoredTensor,
    check_tensor_header,
    open_tensors,
    refuse_quantized,
)
from jaxspec.inputs.checked import Unused, require
from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.mtp import Mtp
from jaxspec.processes.global_arrays import from_host_values
from jaxspec.state import PyTree


def _decoder_spec(spec: MtpSpec) -> ModelSpec:
    """Returns the spec of the MTP layers.

    They have the policy's sizes and family.
    """
    sizes, policy = spec.settings, spec.policy
    decoder = spec.decoder or replace(policy, path="", ffn=sizes.ffn or policy.ffn)
    return replace(decoder, layers=sizes.layers)


def _check_spec(spec: MtpSpec) -> None:
    decoder, policy_width = _decoder_spec(spec), spec.policy.embed
    require(
        decoder.embed == policy_width,
        f"the draft's width is {decoder.embed} and model.embed {policy_width}; a draft that reads"
        " the policy's hidden states as they are must be as wide",
    )
    layers = spec.settings.layers
    mismatch = (
        f"draft_training.ttt_steps {spec.depths} is less than rollout.draft.mtp.layers {layers}"
    )
    # 0 depths: the draft is not trained, so none of its layers has to learn.
    require(
        spec.depths == 0 or spec.depths >= layers,
        f"{mismatch}: the last MTP layers would never learn; raise the first",
    )


def _size_pairs(network: Mtp, policy: ModelSpec) -> SizePairs:
    return {"hidden size": (network.project.shape[-1], policy.embed)}


# ---- files


def _read_facts(spec: MtpSpec, folder: Path, log: Log) -> FileFacts:
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
    settings = MtpConfig(layers=count, ffn=ffn, embedding_first=embedding_first)
    return FileFacts(settings, spec.decoder)


def _open_mtp_tensors(spec: MtpSpec, folder: Path) -> dict[str, StoredTensor]:
    tensors = open_tensors(folder)
    mtp_tensors = {
        name: tensors[name] for name in select_mtp_names(list(tensors), spec.policy.layers)
    }
    refuse_quantized(folder, mtp_tensors)
    return mtp_tensors


def _check_files(spec: MtpSpec, folder: Path, token_count: int) -> None:
    tensors = _open_mtp_tensors(spec, folder)
    check_tensor_headers(tensors)
    copies = {name: tensors.pop(name) for name in list(tensors) if name.endswith(COPY_SUFFIXES)}
    # Copies are compared by value, so these few are read. Of all others headers suffice.
    check_copies(
        {name: tensor.read() for name, tensor in copies.items()},
        load_policy_embeddings(spec.policy, spec.path, bool(copies)),
    )
    embedding_first, layers = spec.settings.embedding_first, spec.policy.layers
    match_mtp_tensors(_decoder_spec(spec), embedding_first, tensors, layers, match_tensors)


def _load_network(spec: MtpSpec, folder: Path, abstract: PyTree) -> PyTree:
    tensors, layers = load_tensors(_open_mtp_tensors(spec, folder)), spec.policy.layers
    has_copies = any(name.endswith(COPY_SUFFIXES) for name in tensors)
    arrays = assemble_mtp_arrays(
        _decoder_spec(spec),
        spec.settings.embedding_first,
        tensors,
        load_policy_embeddings(spec.policy, spec.path, has_copies),
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
    make_spec=MtpSpec.from_run,
    build=lambda spec, stop_ids: recurrent_draft(spec.max_length, depth=spec.settings.layers),
    shared_settings=MULTI_DEPTH_SETTINGS,
    file_settings=frozenset({"rollout.draft.mtp."}),
    unused_rules=(
        Unused(
            "rollout.draft.mtp.layers",
            "rollout.draft.draft_length {c.rollout.draft.draft_length}, whose tokens the first"
            " layers draft,",
            lambda c: (
                not c.rollout.draft.path
                and c.rollout.draft.mtp.layers > c.rollout.draft.max_draft_length
            ),
        ),
    ),
    learned=Learned(
        decoder_spec=_decoder_spec,
        init_network=lambda spec, key: Mtp(
            _decoder_spec(spec), key, spec.settings.layers, spec.settings.embedding_first
        ),
        check_spec=_check_spec,
        size_pairs=_size_pairs,
        block_size=lambda length: length + 1,
        unroll=UNROLL,
        read_facts=_read_facts,
        check_files=_check_files,
        load_network=_load_network,
        export_files=_export_files,
        list_repairs=_list_repairs,
        count_native_layers=lambda names, layers: find_mtp_layers(names, layers)[0],
    ),
)
