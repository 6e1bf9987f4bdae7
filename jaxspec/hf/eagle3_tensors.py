"""Conversion of the tensors of EAGLE-3 heads.

Covers their names, and corrections of config.json by the tensors.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxspec.hf.draft_tensors import (
    BUFFER_DTYPES,
    NamedArrays,
    assemble_arrays,
    check_tensor_headers,
    export_tensors,
    match_tensors,
)
from jaxspec.hf.eagle3_json import HeadFormat
from jaxspec.hf.eagle3_vocabulary import vocabulary_buffers, vocabulary_ids
from jaxspec.hf.names import WeightMapping, layer_mappings
from jaxspec.hf.tensor_files import StoredTensor
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import format_name
from jaxspec.inputs.spec import HeadSpec, ModelSpec
from jaxspec.models.eagle3 import Eagle3


def head_mappings(
    config: ModelSpec, head: HeadSpec, head_format: HeadFormat
) -> list[WeightMapping]:
    """Returns the mappings of a head's weights. Vocabulary buffers have none."""
    first_prefix, layer_prefix = (
        "midlayer." if head_format == "raw" else "layers.0.",
        "layers.{layer}.",
    )
    # The first layer has two norms, of embedding and hidden states, in place of one.
    first_layer = [
        mapping
        for mapping in layer_mappings("first.", first_prefix, config, unit_axis=True)
        if mapping.weight_path != "first.attention_norm"
    ]
    optional = [
        (WeightMapping("fuse", "fc.weight", "D C -> C D"), head.use_taps),
        (WeightMapping("taps_norm", "input_norm.weight", "C -> C"), head.norm_before_fuse),
        (WeightMapping("tap_norms", "fc_norm.{layer}.weight", "E -> E"), head.fuse_norms),
        (WeightMapping("embedding", "embed_tokens.weight", "V D -> V D"), head.own_embedding),
    ]
    return [
        *[mapping for mapping, enabled in optional if enabled],
        WeightMapping(
            "first.embedding_norm",
            f"{first_prefix}input_layernorm.weight",
            "D -> D",
            unit_axis=True,
        ),
        WeightMapping(
            "first.hidden_norm", f"{first_prefix}hidden_norm.weight", "D -> D", unit_axis=True
        ),
        *first_layer,
        *(
            layer_mappings("layers.", layer_prefix, config, first_layer=1)
            if config.layers > 1
            else []
        ),
        WeightMapping("norm", "norm.weight", "D -> D"),
        WeightMapping("head", "lm_head.weight", "W D -> D W"),
    ]


# Wrappers such as DataParallel and torch.compile add prefixes to names.
_WRAPPER_PREFIXES = ("model.", "draft_model.", "module.", "_orig_mod.")
_RENAMED_TENSORS = {
    **{
        f"aux_norm_{name}.weight": f"fc_norm.{number}.weight"
        for number, name in enumerate(("low", "mid", "high"))
    },
    "draft_id_to_target_id": "d2t",
}
_LAYER_QUERY = re.compile(r"layers\.([0-9]{1,9})\.self_attn\.q_proj\.weight")
_ROTARY_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


Tensor = TypeVar("Tensor")


def normalize_names(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Renames a head's tensors as in the speculators format.

    Drops wrapper prefixes and rotary tables.

    Raises:
      ConfigError: two tensors get the same name, or they belong to another kind of draft.
    """
    normalized: dict[str, Tensor] = {}
    for name, array in tensors.items():
        short_name = name
        # Wrappers may be nested.
        while short_name.startswith(_WRAPPER_PREFIXES):
            short_name = short_name.split(".", 1)[1]
        short_name = _RENAMED_TENSORS.get(short_name, short_name)
        short_name = (
            short_name.replace("midlayer.", "layers.0.", 1)
            if short_name.startswith("midlayer.")
            else short_name
        )
        require(
            short_name not in normalized,
            f"{source} has {format_name(short_name)} twice, once as {format_name(name)}",
        )
        # The config determines rotary tables.
        if not short_name.endswith(_ROTARY_SUFFIXES):
            normalized[short_name] = array
    require(
        "mask_hidden" not in normalized,
        f"{source} is a P-EAGLE draft (it has mask_hidden); only EAGLE-3 heads can be loaded",
    )
    # Earlier heads also fuse with `fc`, but do not normalize the hidden states separately.
    is_older = "fc.weight" in normalized and "layers.0.hidden_norm.weight" not in normalized
    require(
        not is_older,
        f"{source} is an EAGLE-1 or EAGLE-2 head (it has no hidden_norm); only EAGLE-3 heads can be"
        " loaded",
    )
    return normalized


def reconcile_with_tensors(
    config: ModelSpec,
    head: HeadSpec,
    tensors: NamedArrays,
    target_embedding: np.ndarray,
    log: Callable[[str], Any],
) -> tuple[ModelSpec, HeadSpec]:
    """Corrects a head's config and form by its tensors.

    An embedding table equal to the target's is shared. Any other one belongs to the head.

    Args:
      config: decoder of the head, from config.json.
      head: form of the head, from config.json.
      tensors: tensors of the head, as `normalize_names` returns them.
      target_embedding: embedding of the policy.
      log: receives a message for each corrected size.
    """
    q_size = tensors.get("layers.0.self_attn.q_proj.weight", np.zeros((0, 0))).shape[0]
    if q_size and q_size != config.heads * config.head_size and q_size % config.heads == 0:
        log(
            f"head_dim is {q_size // config.heads} by the tensors, not {config.head_size} as"
            " config.json has it"
        )
        config = dataclasses.replace(config, head_size=q_size // config.heads)
    # config.json may leave these out or be wrong, while a weight is present or not.
    family_flags = {
        "query_key_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "output_bias": "layers.0.self_attn.o_proj.bias" in tensors,
    }
    config = dataclasses.replace(config, family=dataclasses.replace(config.family, **family_flags))
    layer_ids = {int(match[1]) for name in tensors if (match := _LAYER_QUERY.match(name))}
    # Some files of SafeAILab state the policy's 40 layers for a head of one layer.
    if layer_ids == set(range(len(layer_ids))) and len(layer_ids) not in (0, config.layers):
        log(
            f"num_hidden_layers is {len(layer_ids)} by the tensors, not {config.layers} as"
            " config.json has it"
        )
        config = dataclasses.replace(config, layers=len(layer_ids))
    embedding = tensors.get("embed_tokens.weight")
    has_embedding = embedding is not None and not (
        embedding.shape == target_embedding.shape and np.array_equal(embedding, target_embedding)
    )
    return config, dataclasses.replace(head, own_embedding=has_embedding)


class _HeadTemplate(NamedTuple):
    """Network of a head and its weight mappings."""

    ids: np.ndarray | None
    """Token ids of the head's own vocabulary. None = all tokens."""
    network: Eagle3
    """Network with shapes in place of arrays."""
    mappings: list[WeightMapping]

    @property
    def skipped_names(self) -> set[str]:
        """Names of tensors that fill no weight.

        They are buffers, or weights that the head borrows from the policy.
        """
        return {
            *BUFFER_DTYPES,
            *(() if self.network.form.own_embedding else ("embed_tokens.weight",)),
        }


def _build_head_template(
    config: ModelSpec,
    head: HeadSpec,
    tensors: Mapping[str, StoredTensor] | NamedArrays,
    target_shape: tuple[int, int],
    source: str,
) -> _HeadTemplate:
    """Builds the shapes of a head's network.

    Args:
      config: decoder of the head.
      head: form of the head.
      tensors: tensors of the head. Only buffers are read.
      target_shape: vocabulary rows and width of the policy.
      source: name of the file in messages.
    """
    # The rows of lm_head decide the vocabulary. A head without one borrows rows of the policy's.
    vocab, width = target_shape
    default_rows = tensors["d2t"].shape[0] if "d2t" in tensors else vocab
    row_count = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else default_rows
    buffers = {
        name: tensor.read() if isinstance(tensor, StoredTensor) else tensor
        for name, tensor in tensors.items()
        if name in BUFFER_DTYPES
    }
    ids = vocabulary_ids(buffers, row_count, vocab, source)
    policy = dataclasses.replace(config, embed=width, vocab=vocab)
    # Evaluates shapes only, so that a wrong config cannot exhaust memory.
    network = jax.eval_shape(
        lambda: Eagle3(config, head, policy, jax.random.key(0), 0 if ids is None else row_count)
    )
    return _HeadTemplate(ids, network, head_mappings(config, head, "speculators"))


def check_head_tensors(
    config: ModelSpec,
    head: HeadSpec,
    tensors: Mapping[str, StoredTensor],
    policy: ModelSpec,
    source: str,
) -> None:
    """Checks the headers of a head's tensors.

    Args:
      config: decoder of the head.
      head: form of the head.
      tensors: tensors of the head, as `normalize_names` returns them.
      policy: the policy.
      source: name of the file in messages.

    Raises:
      ConfigError: `head_arrays` would refuse the tensors.
    """
    check_tensor_headers(tensors)
    template = _build_head_template(config, head, tensors, (policy.vocab, policy.embed), source)
    weights = {
        name: tensor for name, tensor in tensors.items() if name not in template.skipped_names
    }
    # A missing lm_head is borrowed from the policy.
    mappings = [
        mapping
        for mapping in template.mappings
        if mapping.weight_path != "head" or mapping.tensor_name in weights
    ]
    match_tensors(mappings, weights, template.network, source)


def head_arrays(
    config: ModelSpec, head: HeadSpec, tensors: NamedArrays, target: NamedArrays, source: str
) -> dict[str, np.ndarray]:
    """Converts a head's tensors to its network's arrays.

    Args:
      config: decoder of the head, after `reconcile_with_tensors`.
      head: form of the head, after `reconcile_with_tensors`.
      tensors: tensors of the head, as `normalize_names` returns them.
      target: the policy's `embedding` [V D] and `head` [D V], which replaces a missing lm_head.
      source: name of the file in messages.

    Returns:
      Arrays by attribute path, with `vocabulary` if the head has a vocabulary of its own.
    """
    template = _build_head_template(config, head, tensors, target["embedding"].shape, source)
    ids = template.ids
    weights = {name: array for name, array in tensors.items() if name not in template.skipped_names}
    if "lm_head.weight" not in weights:
        columns = target["head"] if ids is None else target["head"][:, ids]
        weights["lm_head.weight"] = np.ascontiguousarray(columns.T)
    arrays = assemble_arrays(template.mappings, weights, template.network, source)
    return arrays if ids is None else {**arrays, "vocabulary": ids}


def head_tensors(network: Eagle3, head_format: HeadFormat) -> dict[str, np.ndarray]:
    """Returns a head's tensors by published name, with its vocabulary buffers."""
    tensors = export_tensors(head_mappings(network.config, network.form, head_format), network)
    if network.vocabulary is not None:
        ids = np.asarray(network.vocabulary[...]).astype(np.int64)
        tensors |= vocabulary_buffers(ids, network.config.vocab)
    return tensors
