"""Names and layouts of Hugging Face checkpoints.

One table of `WeightMapping` entries serves both import and export.
"""

import math
import re
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.inputs.checked import require
from jaxspec.inputs.spec import ModelSpec
from jaxspec.state import PyTree

REDUNDANT_NAME = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
"""Tensors of old checkpoints that the config determines."""

_COUNT_KEYS = {"layer": "num_hidden_layers", "expert": "num_experts"}
"""Key of config.json with the number of tensors, by placeholder."""
MIMO_MTP_PREFIX = "model.mtp_layers."
"""Name prefix of MiMo's multi-token-prediction layers."""


class WeightMapping(NamedTuple):
    """Correspondence between a weight and its checkpoint tensors.

    The weight has leading axes that are not in `layout`: one of size 1 if `unit_axis` is true, then
    one for each placeholder in `tensor_name` ({layer}, {expert}).
    """

    weight_path: str
    """Dotted attribute path in the network."""
    tensor_name: str
    layout: str
    """Axes of the tensor and of the weight: `(N H) D -> D N H`. Parentheses mark merged axes."""
    unit_axis: bool = False
    first_layer: int = 0
    """Number of the weight's layer 0 in the checkpoint."""

    @property
    def leading_ndim(self) -> int:
        """Number of leading axes of the weight."""
        return self.tensor_name.count("{") + self.unit_axis


class TensorEntry(NamedTuple):
    """One checkpoint tensor and its place in a weight."""

    mapping: WeightMapping
    name: str
    shape: tuple[int, ...]
    leading_index: tuple[int, ...]
    """Index along the leading axes of the weight."""


def policy_mappings(config: ModelSpec) -> list[WeightMapping]:
    """Returns the mappings of a policy's weights."""
    # A tied head is the embedding, and has no tensor.
    head = [] if config.tied else [WeightMapping("head", "lm_head.weight", "V D -> D V")]
    embedding = WeightMapping("embedding", "model.embed_tokens.weight", "V D -> V D")
    norm = WeightMapping("norm", "model.norm.weight", "D -> D")
    return [embedding, *layer_mappings("layers.", "model.layers.{layer}.", config), norm, *head]


def layer_mappings(
    path_prefix: str,
    name_prefix: str,
    config: ModelSpec,
    unit_axis: bool = False,
    first_layer: int = 0,
) -> list[WeightMapping]:
    """Returns the mappings of a stack of decoder layers (`decoder.Layers`).

    Args:
      path_prefix: prefix of the weight paths.
      name_prefix: prefix of the tensor names.
      config: decides which weights the layers have.
      unit_axis: as in `WeightMapping`.
      first_layer: as in `WeightMapping`.
    """
    family = config.family
    table = [
        ("attention_norm", "input_layernorm.weight", "D -> D", True),
        ("query", "self_attn.q_proj.weight", "(N H) D -> D N H", True),
        ("key", "self_attn.k_proj.weight", "(M H) D -> D M H", True),
        ("value", "self_attn.v_proj.weight", "(M H) D -> D M H", True),
        ("output", "self_attn.o_proj.weight", "D (N H) -> N H D", True),
        ("query_norm", "self_attn.q_norm.weight", "H -> H", family.query_key_norm),
        ("key_norm", "self_attn.k_norm.weight", "H -> H", family.query_key_norm),
        ("query_bias", "self_attn.q_proj.bias", "(N H) -> N H", family.attention_bias),
        ("key_bias", "self_attn.k_proj.bias", "(M H) -> M H", family.attention_bias),
        ("value_bias", "self_attn.v_proj.bias", "(M H) -> M H", family.attention_bias),
        ("output_bias", "self_attn.o_proj.bias", "D -> D", family.output_bias),
        ("ffn_norm", "post_attention_layernorm.weight", "D -> D", True),
        ("gate", "mlp.gate_proj.weight", "F D -> D F", not family.experts),
        ("up", "mlp.up_proj.weight", "F D -> D F", not family.experts),
        ("down", "mlp.down_proj.weight", "D F -> F D", not family.experts),
        ("router", "mlp.gate.weight", "E D -> D E", family.experts),
        ("expert_gate", "mlp.experts.{expert}.gate_proj.weight", "F D -> D F", family.experts),
        ("expert_up", "mlp.experts.{expert}.up_proj.weight", "F D -> D F", family.experts),
        ("expert_down", "mlp.experts.{expert}.down_proj.weight", "D F -> F D", family.experts),
    ]
    return [
        WeightMapping(path_prefix + name, name_prefix + tensor_name, layout, unit_axis, first_layer)
        for name, tensor_name, layout, present in table
        if present
    ]


def select_mtp_names(names: Sequence[str], target_layers: int) -> list[str]:
    """Selects the tensor names of multi-token-prediction layers."""
    # MiMo has a prefix for them. DeepSeek numbers them after the policy's layers.
    prefixes, layer = [MIMO_MTP_PREFIX], target_layers
    while f"model.layers.{layer}.eh_proj.weight" in names:
        prefixes.append(f"model.layers.{layer}.")
        layer += 1
    return [name for name in names if name.startswith(tuple(prefixes))]


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Returns leaves by dotted attribute path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = [
        [key.name if isinstance(key, jax.tree_util.GetAttrKey) else str(key.key) for key in path]
        for path, _ in leaves
    ]
    # The path to a Flax variable ends with `value`. Only the last key is dropped, because the
    # attention weight `value` has the same name.
    return {
        ".".join(path[:-1] if path[-1] == "value" else path): leaf
        for path, (_, leaf) in zip(paths, leaves, strict=True)
    }


def check_tensor_count(
    mapping: WeightMapping, shape: tuple[int, ...], tensor_count: int, source: str
) -> None:
    """Checks that a checkpoint has enough tensors for a weight.

    Raises:
      ConfigError: the weight needs more than the `tensor_count` tensors of the checkpoint.
    """
    sizes = dict(
        zip(
            re.findall(r"{(\w+)}", mapping.tensor_name),
            shape[mapping.unit_axis : mapping.leading_ndim],
            strict=True,
        )
    )
    # config.json also counts the layers before `first_layer`.
    counts = {
        placeholder: size + mapping.first_layer * (placeholder == "layer")
        for placeholder, size in sizes.items()
    }
    keys = " and ".join(
        f"{_COUNT_KEYS[placeholder]} {count}" for placeholder, count in counts.items()
    )
    request = (
        f"{source}: {keys} in config.json ask for {math.prod(sizes.values())} tensors"
        f" {mapping.tensor_name}"
    )
    require(
        math.prod(sizes.values()) <= tensor_count,
        f"{request}, and there are {tensor_count} tensors in all; correct config.json",
    )


def tensor_entries(mapping: WeightMapping, shape: tuple[int, ...]) -> list[TensorEntry]:
    """Lists the checkpoint tensors of a weight of `shape`."""
    tensor_axes, _ = _parse_layout(mapping.layout)
    sizes = _axis_sizes(mapping, shape[mapping.leading_ndim :])
    placeholders = re.findall(r"{(\w+)}", mapping.tensor_name)
    tensor_shape = tuple(math.prod(sizes[axis] for axis in group) for group in tensor_axes)
    entries = []
    for index in product(*(range(size) for size in shape[: mapping.leading_ndim])):
        numbers = dict(zip(placeholders, index[mapping.unit_axis :], strict=True))
        name = mapping.tensor_name.format(
            **{**numbers, "layer": numbers.get("layer", 0) + mapping.first_layer}
        )
        entries.append(TensorEntry(mapping, name, tensor_shape, index))
    return entries


def to_weight(mapping: WeightMapping, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Views a tensor in the layout of a weight.

    `shape` is the shape of the weight without its leading axes.
    """
    tensor_axes, weight_axes = _parse_layout(mapping.layout)
    sizes, axes = (_axis_sizes(mapping, shape), [axis for group in tensor_axes for axis in group])
    return tensor.reshape([sizes[axis] for axis in axes]).transpose(
        [axes.index(axis) for axis in weight_axes]
    )


def to_tensor(mapping: WeightMapping, weight: np.ndarray) -> np.ndarray:
    """Converts a weight without leading axes to the layout of a tensor."""
    tensor_axes, weight_axes = _parse_layout(mapping.layout)
    sizes, axes = (
        _axis_sizes(mapping, weight.shape),
        [axis for group in tensor_axes for axis in group],
    )
    merged_shape = [math.prod(sizes[axis] for axis in group) for group in tensor_axes]
    return weight.transpose([weight_axes.index(axis) for axis in axes]).reshape(merged_shape)


def tensor_slices(
    mapping: WeightMapping, index: Sequence[slice], shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[int, ...], tuple[slice, ...]]:
    """Computes which slices of a tensor to read.

    The slices cover the requested part of the weight.

    Args:
      mapping: mapping of the weight.
      index: slices of the weight without leading axes.
      shape: shape of the weight without leading axes.

    Returns:
      Slices of the tensor, their shape in the weight's layout, and slices of that to keep.
    """
    tensor_axes, weight_axes = _parse_layout(mapping.layout)
    sizes = _axis_sizes(mapping, shape)
    requested = {
        axis: slice(*axis_slice.indices(sizes[axis]))
        for axis, axis_slice in zip(weight_axes, index, strict=True)
    }
    outer_slices, inner_slices = [], dict.fromkeys(weight_axes, slice(None))
    for outer_axis, *inner_axes in tensor_axes:
        inner_size = math.prod(sizes[axis] for axis in inner_axes)
        # A range of the first of merged axes is contiguous in the tensor. Ranges of the others are
        # not, so they are read in full and cut afterwards.
        outer_slices.append(
            slice(requested[outer_axis].start * inner_size, requested[outer_axis].stop * inner_size)
        )
        sizes[outer_axis] = requested[outer_axis].stop - requested[outer_axis].start
        inner_slices |= {axis: requested[axis] for axis in inner_axes}
    return (
        tuple(outer_slices),
        tuple(sizes[axis] for axis in weight_axes),
        tuple(inner_slices[axis] for axis in weight_axes),
    )


def _axis_sizes(mapping: WeightMapping, shape: tuple[int, ...]) -> dict[str, int]:
    """Returns axis sizes by the letters of a layout."""
    return dict(zip(_parse_layout(mapping.layout)[1], shape, strict=True))


def _parse_layout(layout: str) -> tuple[list[list[str]], list[str]]:
    """Returns a tensor's axis groups and a weight's axes."""
    tensor_side, weight_side = layout.split("->")
    return [
        (group or single).split() for group, single in re.findall(r"\(([^)]*)\)|(\w+)", tensor_side)
    ], weight_side.split()
