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

REDUNDANT = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
"""Tensors of old checkpoints that follow from the config."""

_COUNTS = {"layer": "num_hidden_layers", "expert": "num_experts"}
"""The keys of config.json that say how often a row's tensor is there."""
MIMO_MTP = "model.mtp_layers."
"""Beginning of the names of MiMo's own multi-token-prediction layers."""


class Row(NamedTuple):
    """One of our weights and what holds it in a checkpoint.

    `layout` gives the axes of their tensor, merged ones in parentheses, and those of our weight:
    `(N H) D -> D N H`. Our weight has a leading axis for each placeholder in `theirs` ({layer},
    {expert}), and a leading axis of 1 where `single` says so.
    """

    ours: str
    """Dotted attribute path."""
    theirs: str
    layout: str
    single: bool = False
    first: int = 0
    """The number that our layer 0 has in the checkpoint."""

    @property
    def leading(self) -> int:
        """Leading axes of our weight that are not in the layout."""
        return self.theirs.count("{") + self.single


class Place(NamedTuple):
    """One tensor of a checkpoint: the row it belongs to, its name, its shape, and where it stands
    among our weight's leading axes."""

    row: Row
    name: str
    shape: tuple[int, ...]
    lead: tuple[int, ...]


def policy_rows(config: ModelSpec) -> list[Row]:
    """The table of a policy's weights."""
    head = [] if config.tied else [Row("head", "lm_head.weight", "V D -> D V")]
    embedding = Row("embedding", "model.embed_tokens.weight", "V D -> V D")
    norm = Row("norm", "model.norm.weight", "D -> D")
    return [embedding, *layer_rows("layers.", "model.layers.{layer}.", config), norm, *head]


def layer_rows(
    ours: str, theirs: str, config: ModelSpec, single: bool = False, first: int = 0
) -> list[Row]:
    """The table of a stack of decoder layers (`decoder.Layers`), whose names begin with `ours` and
    `theirs`."""
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
        Row(ours + name, theirs + tensor, layout, single, first)
        for name, tensor, layout, there in table
        if there
    ]


def mtp_names(names: Sequence[str], target_layers: int) -> list[str]:
    """Those of a checkpoint's tensor names that belong to MTP layers: MiMo's, or DeepSeek's, which
    are numbered on from the policy's."""
    beginnings, layer = [MIMO_MTP], target_layers
    while f"model.layers.{layer}.eh_proj.weight" in names:
        beginnings.append(f"model.layers.{layer}.")
        layer += 1
    return [name for name in names if name.startswith(tuple(beginnings))]


def named_leaves(tree: PyTree) -> dict[str, Any]:
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


def check_count(row: Row, shape: tuple[int, ...], tensors: int, source: str) -> None:
    """Raises ConfigError, before any place is made, for a weight that lies in more places than a
    checkpoint has tensors."""
    sizes = dict(
        zip(re.findall(r"{(\w+)}", row.theirs), shape[row.single : row.leading], strict=True)
    )
    numbers = {holder: size + row.first * (holder == "layer") for holder, size in sizes.items()}
    keys = " and ".join(f"{_COUNTS[holder]} {number}" for holder, number in numbers.items())
    asked = (
        f"{source}: {keys} in config.json ask for {math.prod(sizes.values())} tensors {row.theirs}"
    )
    require(
        math.prod(sizes.values()) <= tensors,
        f"{asked}, and there are {tensors} tensors in all; correct config.json",
    )


def places(row: Row, shape: tuple[int, ...]) -> list[Place]:
    """Every tensor of a checkpoint that holds a part of our weight of `shape`."""
    theirs, _ = _axes(row.layout)
    sizes = _sizes(row, shape[row.leading :])
    holders = re.findall(r"{(\w+)}", row.theirs)
    stored = tuple(math.prod(sizes[axis] for axis in group) for group in theirs)
    found = []
    for lead in product(*(range(size) for size in shape[: row.leading])):
        numbers = dict(zip(holders, lead[row.single :], strict=True))
        name = row.theirs.format(**{**numbers, "layer": numbers.get("layer", 0) + row.first})
        found.append(Place(row, name, stored, lead))
    return found


def to_ours(row: Row, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Their tensor in our layout, as a view: `shape` is that of our weight without its leading
    axes."""
    theirs, ours = _axes(row.layout)
    sizes, flat = _sizes(row, shape), [axis for group in theirs for axis in group]
    return tensor.reshape([sizes[axis] for axis in flat]).transpose(
        [flat.index(axis) for axis in ours]
    )


def to_theirs(row: Row, weight: np.ndarray) -> np.ndarray:
    """Our weight, without its leading axes, in their layout."""
    theirs, ours = _axes(row.layout)
    sizes, flat = _sizes(row, weight.shape), [axis for group in theirs for axis in group]
    merged = [math.prod(sizes[axis] for axis in group) for group in theirs]
    return weight.transpose([ours.index(axis) for axis in flat]).reshape(merged)


def their_slices(
    row: Row, index: Sequence[slice], shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[int, ...], tuple[slice, ...]]:
    """What to read of their tensor for a slice of our weight: their slices, our shape of what is
    read, and the slice of that.

    Along merged axes only the first one's slice narrows what is read.
    """
    theirs, ours = _axes(row.layout)
    sizes = _sizes(row, shape)
    wanted = {
        axis: slice(*part.indices(sizes[axis])) for axis, part in zip(ours, index, strict=True)
    }
    outer, narrowed = [], dict.fromkeys(ours, slice(None))
    for first, *rest in theirs:
        inner = math.prod(sizes[axis] for axis in rest)
        outer.append(slice(wanted[first].start * inner, wanted[first].stop * inner))
        sizes[first] = wanted[first].stop - wanted[first].start
        narrowed |= {axis: wanted[axis] for axis in rest}
    return tuple(outer), tuple(sizes[axis] for axis in ours), tuple(narrowed[axis] for axis in ours)


def _sizes(row: Row, shape: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(_axes(row.layout)[1], shape, strict=True))


def _axes(layout: str) -> tuple[list[list[str]], list[str]]:
    """Axes of their tensor, in groups that are merged, and of ours."""
    theirs, ours = layout.split("->")
    return [
        (merged or single).split() for merged, single in re.findall(r"\(([^)]*)\)|(\w+)", theirs)
    ], ours.split()
