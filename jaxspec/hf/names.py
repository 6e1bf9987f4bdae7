"""Names and layouts of Hugging Face checkpoints: one table of rows, read forwards to import and
backwards to export."""

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
"""Tensors of old checkpoints that follow from the config."""

_COUNT_KEYS = {"layer": "num_hidden_layers", "expert": "num_experts"}
"""The keys of config.json that say how often a row's tensor is there."""
MIMO_MTP_PREFIX = "model.mtp_layers."
"""Beginning of the names of MiMo's own multi-token-prediction layers."""


class WeightMapping(NamedTuple):
    """One of our weights and what holds it in a checkpoint.

    `layout` gives the axes of their tensor, merged ones in parentheses, and those of our weight:
    `(N H) D -> D N H`. Our weight has a leading axis for each placeholder in `tensor_name`
    ({layer}, {expert}), and a leading axis of 1 where `unit_axis` says so.
    """

    weight_path: str
    """Dotted attribute path."""
    tensor_name: str
    layout: str
    unit_axis: bool = False
    first_layer: int = 0
    """The number that our layer 0 has in the checkpoint."""

    @property
    def leading_ndim(self) -> int:
        """Leading axes of our weight that are not in the layout."""
        return self.tensor_name.count("{") + self.unit_axis


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint: the row it belongs to, its name, its shape, and where it stands
    among our weight's leading axes."""

    mapping: WeightMapping
    name: str
    shape: tuple[int, ...]
    leading_index: tuple[int, ...]


def policy_mappings(config: ModelSpec) -> list[WeightMapping]:
    """The table of a policy's weights."""
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
    """The table of a stack of decoder layers (`decoder.Layers`), whose names begin with
    `path_prefix` and `name_prefix`."""
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
    """Those of a checkpoint's tensor names that belong to MTP layers: MiMo's, or DeepSeek's, which
    are numbered on from the policy's."""
    prefixes, layer = [MIMO_MTP_PREFIX], target_layers
    while f"model.layers.{layer}.eh_proj.weight" in names:
        prefixes.append(f"model.layers.{layer}.")
        layer += 1
    return [name for name in names if name.startswith(tuple(prefixes))]


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """Leaves by dotted attribute path, as rows name them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = [
        [key.name if isinstance(key, jax.tree_util.GetAttrKey) else str(key.key) for key in path]
        for path, _ in leaves
    ]
    # A flax variable holds its array as `value`, which is also what one of our weights is called.
    return {
        ".".join(path[:-1] if path[-1] == "value" else path): leaf
        for path, (_, leaf) in zip(paths, leaves, strict=True)
    }


def check_tensor_count(
    mapping: WeightMapping, shape: tuple[int, ...], tensor_count: int, source: str
) -> None:
    """Raises ConfigError, before any place is made, for a weight that lies in more places than a
    checkpoint has tensors."""
    sizes = dict(
        zip(
            re.findall(r"{(\w+)}", mapping.tensor_name),
            shape[mapping.unit_axis : mapping.leading_ndim],
            strict=True,
        )
    )
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
    """Every tensor of a checkpoint that holds a part of our weight of `shape`."""
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
    """Their tensor in our layout, as a view: `shape` is that of our weight without its leading
    axes."""
    tensor_axes, weight_axes = _parse_layout(mapping.layout)
    sizes, axes = (_axis_sizes(mapping, shape), [axis for group in tensor_axes for axis in group])
    return tensor.reshape([sizes[axis] for axis in axes]).transpose(
        [axes.index(axis) for axis in weight_axes]
    )


def to_tensor(mapping: WeightMapping, weight: np.ndarray) -> np.ndarray:
    """Our weight, without its leading axes, in their layout."""
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
    """What to read of their tensor for a slice of our weight: their slices, our shape of what is
    read, and the slice of that.

    Along merged axes only the first one's slice narrows what is read.
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
    return dict(zip(_parse_layout(mapping.layout)[1], shape, strict=True))


def _parse_layout(layout: str) -> tuple[list[list[str]], list[str]]:
    """Axes of their tensor, in groups that are merged, and of ours."""
    tensor_side, weight_side = layout.split("->")
    return [
        (group or single).split() for group, single in re.findall(r"\(([^)]*)\)|(\w+)", tensor_side)
    ], weight_side.split()
