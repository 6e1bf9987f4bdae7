"""Native multi-token prediction: the policy's own extra layers as its draft (`models/mtp.py`)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.drafts.base import DEEP, Export, Files, Kind, Learned, Repair, Say, Sizes
from jaxspec.drafts.recurrent import recurrent
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
from jaxspec.mesh import from_host
from jaxspec.models.mtp import Mtp
from jaxspec.state import PyTree


def _decoder(spec: DraftSpec) -> ModelSpec:
    """Layers of the policy's sizes and family."""
    own = spec.decoder or replace(spec.policy, path="", ffn=spec.ffn or spec.policy.ffn)
    return replace(own, layers=spec.layers)


def _check(spec: DraftSpec) -> None:
    own, wide = _decoder(spec), spec.policy.embed
    require(
        own.embed == wide,
        f"the draft's width is {own.embed} and model.embed {wide}; a draft that reads the policy's"
        " hidden states as they are must be as wide",
    )
    training = (
        f"draft_training.ttt_steps {spec.depths} is less than rollout.draft.layers {spec.layers}"
    )
    require(
        spec.depths == 0 or spec.depths >= spec.layers,
        f"{training}: the last MTP layers would never learn; raise the first",
    )


def _sizes(network: Mtp, policy: ModelSpec) -> Sizes:
    return {"hidden size": (network.project.shape[-1], policy.embed)}


# ---- files


def mtp_rows(config: ModelSpec, embedding_first: bool, target_layers: int) -> list[WeightMapping]:
    """The table of MTP layers: MiMo's names for [hidden, embedding], DeepSeek's for [embedding,
    hidden].

    DeepSeek numbers them on from the policy's own `target_layers`.
    """
    mimo = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    tokens, hidden, project, final = (
        ("enorm", "hnorm", "eh_proj", "shared_head.norm") if embedding_first else mimo
    )
    prefix, first = (
        ("model.layers.{layer}.", target_layers)
        if embedding_first
        else (f"{MIMO_MTP_PREFIX}{{layer}}.", 0)
    )
    own = [
        ("embedding_norm", tokens, "D -> D"),
        ("hidden_norm", hidden, "D -> D"),
        ("project", project, "D C -> C D"),
        ("norm", final, "D -> D"),
    ]
    rows = [
        WeightMapping(ours, f"{prefix}{theirs}.weight", layout, first_layer=first)
        for ours, theirs, layout in own
    ]
    return rows + layer_mappings("layers.", prefix, config, first_layer=first)


def mtp_form(names: list[str], target_layers: int) -> tuple[int, bool]:
    """How many MTP layers there are among a checkpoint's tensor names, and whether they take
    [embedding, hidden]."""
    for prefix, first, mark, order in (
        ("model.mtp_layers.", 0, "input_proj", False),
        ("model.layers.", target_layers, "eh_proj", True),
    ):
        count = 0
        while f"{prefix}{first + count}.{mark}.weight" in names:
            count += 1
        if count:
            return count, order
    return 0, True


def mtp_arrays(
    config: ModelSpec,
    embedding_first: bool,
    tensors: NamedArrays,
    target: NamedArrays,
    target_layers: int,
) -> dict[str, np.ndarray]:
    """Our arrays of MTP layers by attribute path, from the tensors that belong to them; `target` as
    in `head_arrays`.

    Raises:
      ConfigError: a copy of the policy's embedding or head that stands among them differs from the
        policy's own.
    """
    weights = dict(tensors)
    copies = {name: weights.pop(name) for name in tensors if name.endswith(_COPIES)}
    _refuse_other_copies(copies, target)
    return _fitted(config, embedding_first, weights, target_layers, assemble_arrays)


_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
"""Ends of the names of tensors that a checkpoint repeats in its MTP layers."""


def _refuse_other_copies(copies: NamedArrays, target: NamedArrays) -> None:
    for name, copy in copies.items():
        ours = target["embedding"] if name.endswith("embed_tokens.weight") else target["head"].T
        require(
            np.array_equal(copy, ours),
            f"{name} is not the policy's own; MTP layers with an embedding or a head of their own"
            " cannot be loaded",
        )


def _fitted(
    config: ModelSpec,
    embedding_first: bool,
    weights: Mapping[str, Any],
    target_layers: int,
    fit: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """The result of `fit`, `match_tensors` or `assemble_arrays`, for the tensors of MTP layers."""
    network = jax.eval_shape(lambda: Mtp(config, jax.random.key(0), config.layers, embedding_first))
    rows = mtp_rows(config, embedding_first, target_layers)
    return fit(rows, weights, network, "the checkpoint's MTP part")


def _resolve(spec: DraftSpec, folder: Path, say: Say) -> DraftSpec:
    """Number, order and width of MTP layers, from the names and shapes of their tensors; their
    family is the policy's."""
    tensors, layers = open_tensors(folder), spec.policy.layers
    count, embedding_first = mtp_form(list(tensors), layers)
    kinds = (
        "model.mtp_layers.0.* as MiMo names them, or DeepSeek's eh_proj behind the policy's last"
        " layer"
    )
    require(count > 0, f"{DRAFT_PATH} {folder} has no MTP layers ({kinds})")
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
    ffn = 0 if widths[0] == spec.policy.ffn else widths[0]
    return replace(spec, layers=count, embedding_first=embedding_first, vocab=0, ffn=ffn)


def _tensors(spec: DraftSpec, folder: Path) -> dict[str, StoredTensor]:
    tensors = open_tensors(folder)
    own = {name: tensors[name] for name in select_mtp_names(list(tensors), spec.policy.layers)}
    refuse_quantized(folder, own)
    return own


def _judge(spec: DraftSpec, folder: Path, tokens: int) -> None:
    own = _tensors(spec, folder)
    check_tensor_headers(own)
    copies = {name: own.pop(name) for name in list(own) if name.endswith(_COPIES)}
    _refuse_other_copies(
        {name: tensor.read() for name, tensor in copies.items()},
        load_policy_embeddings(spec, bool(copies)),
    )
    _fitted(_decoder(spec), spec.embedding_first, own, spec.policy.layers, match_tensors)


def _load(spec: DraftSpec, folder: Path, abstract: PyTree) -> PyTree:
    own, layers = load_tensors(_tensors(spec, folder)), spec.policy.layers
    copies = any(name.endswith(_COPIES) for name in own)
    arrays = mtp_arrays(
        _decoder(spec), spec.embedding_first, own, load_policy_embeddings(spec, copies), layers
    )
    return jax.tree.map(from_host, abstract, replace_leaves(abstract, arrays))


def _export(network: Mtp, wanted: Export) -> Files:
    """A folder of their own, or among a MiMo policy's tensors, where MiMo itself has them."""
    rows = mtp_rows(network.config, network.embedding_first, wanted.policy.layers)
    tensors = cast_tensors(export_tensors(rows, network), wanted.dtype)
    count = {"num_nextn_predict_layers": network.depth}
    if wanted.policy.family.model_type == "mimo" and not network.embedding_first:
        return Files(count, tensors, with_policy=True)
    return Files(policy_config_json(network.config, wanted.dtype.name, count), tensors)


def _repairs(network: Mtp, taps: tuple[int, ...], policy: ModelSpec) -> Iterator[Repair]:
    order, name = (
        ("[hidden, embedding]", "MiMo's")
        if network.embedding_first
        else ("[embedding, hidden]", "DeepSeek's")
    )
    other = jax.tree.map(lambda leaf: leaf, network)
    other.embedding_first = not network.embedding_first
    mend = f"{name} names for its tensors, from which the order follows"
    yield Repair(f"its layers read {order}", mend, other, taps)


MTP = Kind(
    build=lambda spec, stop_ids: recurrent(spec.max_length, depth=spec.layers),
    settings=DEEP | {"rollout.draft.layers", "rollout.draft.embedding_first"},
    from_files=frozenset(
        {"rollout.draft.ffn", "rollout.draft.layers", "rollout.draft.embedding_first"}
    ),
    unused=(
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
        decoder=_decoder,
        network=lambda spec, key: Mtp(_decoder(spec), key, spec.layers, spec.embedding_first),
        check=_check,
        sizes=_sizes,
        reads=lambda length: length + 1,
        unroll=UNROLL,
        resolve=_resolve,
        judge=_judge,
        load=_load,
        export=_export,
        repairs=_repairs,
        native=lambda names, layers: mtp_form(names, layers)[0],
    ),
)
