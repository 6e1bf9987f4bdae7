"""Tensors of published drafts: one table of names and layouts, which is read in both directions."""

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import HeadConfig, ModelConfig, require
from jaxspec.models.eagle3 import Eagle3, tap_count
from jaxspec.models.hf_draft_config import Form
from jaxspec.models.mtp import Mtp

Arrays = Mapping[str, np.ndarray]


class Row(NamedTuple):
    """One weight: where it stands here and there, and how its axes are laid out."""

    ours: str
    """Dotted attribute path."""
    theirs: str
    """Name in the file; `{layer}` stands for the number of a layer."""
    layout: str
    """Axes of theirs -> axes of ours without the leading layer axis; parentheses join axes."""
    stacked: bool = False
    """Whether ours has a leading layer axis."""


class Place(NamedTuple):
    """One tensor of a file: its row, its name, and its layer in our stack (None: not stacked)."""

    row: Row
    name: str
    layer: int | None


def _groups(layout: str) -> tuple[list[list[str]], list[str]]:
    """Axes of theirs, joined ones together, and axes of ours."""
    left, right = layout.split(" -> ")
    return [(joined or alone).split() for joined, alone in re.findall(r"\(([^)]*)\)|(\S+)", left)], right.split()


def to_ours(row: Row, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """Their array in our layout; `sizes` are those of the axes.

    Raises:
      ConfigError: the array has other axes or sizes.
    """
    groups, order = _groups(row.layout)
    wanted = tuple(math.prod(sizes[name] for name in group) for group in groups)
    require(array.shape == wanted, f"{row.theirs} has shape {list(array.shape)}; the config asks for {list(wanted)}")
    names = [name for group in groups for name in group]
    return array.reshape([sizes[name] for name in names]).transpose([names.index(name) for name in order])


def to_theirs(row: Row, array: np.ndarray) -> np.ndarray:
    """Our array, without the layer axis, in their layout."""
    groups, order = _groups(row.layout)
    names = [name for group in groups for name in group]
    sizes = dict(zip(order, array.shape, strict=True))
    return array.transpose([order.index(name) for name in names]).reshape([math.prod(sizes[name] for name in group) for group in groups])


# ---- the table


def _layer_rows(ours: str, theirs: str, config: ModelConfig, wide: str) -> Iterator[Row]:
    """Rows of what all dense layers have; `wide` is the axis that heads are projected from."""
    family = config.family
    yield Row(f"{ours}.query", f"{theirs}.self_attn.q_proj.weight", f"(N H) {wide} -> {wide} N H", True)
    yield Row(f"{ours}.key", f"{theirs}.self_attn.k_proj.weight", f"(M H) {wide} -> {wide} M H", True)
    yield Row(f"{ours}.value", f"{theirs}.self_attn.v_proj.weight", f"(M H) {wide} -> {wide} M H", True)
    if family.query_key_norm:
        yield Row(f"{ours}.query_norm", f"{theirs}.self_attn.q_norm.weight", "H -> H", True)
        yield Row(f"{ours}.key_norm", f"{theirs}.self_attn.k_norm.weight", "H -> H", True)
    if family.attention_bias:
        yield Row(f"{ours}.query_bias", f"{theirs}.self_attn.q_proj.bias", "(N H) -> N H", True)
        yield Row(f"{ours}.key_bias", f"{theirs}.self_attn.k_proj.bias", "(M H) -> M H", True)
        yield Row(f"{ours}.value_bias", f"{theirs}.self_attn.v_proj.bias", "(M H) -> M H", True)
    yield Row(f"{ours}.output", f"{theirs}.self_attn.o_proj.weight", "D (N H) -> N H D", True)
    if family.output_bias:
        yield Row(f"{ours}.output_bias", f"{theirs}.self_attn.o_proj.bias", "D -> D", True)
    yield Row(f"{ours}.ffn_norm", f"{theirs}.post_attention_layernorm.weight", "D -> D", True)
    yield Row(f"{ours}.gate", f"{theirs}.mlp.gate_proj.weight", "F D -> D F", True)
    yield Row(f"{ours}.up", f"{theirs}.mlp.up_proj.weight", "F D -> D F", True)
    yield Row(f"{ours}.down", f"{theirs}.mlp.down_proj.weight", "D F -> F D", True)


def _places(rows: Iterator[Row] | list[Row], count: int, first: int = 0) -> list[Place]:
    """Tensors of stacked rows, whose layers are `first`, first + 1, ... in the file."""
    return [Place(row, row.theirs.format(layer=first + index), index) for row in rows for index in range(count)]


def head_layout(config: ModelConfig, head: HeadConfig, form: Form) -> list[Place]:
    """Every tensor of an EAGLE-3 head but its vocabulary buffers (drafters.md 1.6)."""
    first = "midlayer" if form == "raw" else "layers.0"
    whole = [Row("norm", "norm.weight", "D -> D"), Row("head", "lm_head.weight", "W D -> D W")]
    if head.use_taps:
        whole.append(Row("fuse", "fc.weight", "D C -> C D"))
    if head.norm_before_fuse:
        whole.append(Row("taps_norm", "input_norm.weight", "C -> C"))
    if head.own_embedding:
        whole.append(Row("embedding", "embed_tokens.weight", "V D -> V D"))
    entry = [
        Row("first.embedding_norm", f"{first}.input_layernorm.weight", "D -> D", True),
        Row("first.hidden_norm", f"{first}.hidden_norm.weight", "D -> D", True),
        *_layer_rows("first", first, config, "I"),
    ]
    deeper = [
        Row("layers.attention_norm", "layers.{layer}.input_layernorm.weight", "D -> D", True),
        *_layer_rows("layers", "layers.{layer}", config, "D"),
    ]
    norms = [Row("tap_norms", "fc_norm.{layer}.weight", "E -> E", True)] if head.fuse_norms else []
    places = [Place(row, row.theirs, None) for row in whole]
    return [*places, *_places(norms, tap_count(head)), *_places(entry, 1), *_places(deeper, config.layers - 1, 1)]


def mtp_layout(config: ModelConfig, embedding_first: bool, target_layers: int) -> list[Place]:
    """Every tensor of MTP layers: MiMo's names for [hidden, embedding], DeepSeek's for [embedding, hidden] (drafters.md 3.1).

    DeepSeek numbers them on from the policy's own `target_layers`.
    """
    dense = f"MTP layers of {config.family.experts} experts cannot be read or written yet; those of dense models can"
    require(config.family.experts == 0, dense)
    mimo = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    tokens, hidden, project, final = ("enorm", "hnorm", "eh_proj", "shared_head.norm") if embedding_first else mimo
    prefix, first = ("model.layers.{layer}", target_layers) if embedding_first else ("model.mtp_layers.{layer}", 0)
    rows = [
        Row("embedding_norm", f"{prefix}.{tokens}.weight", "D -> D", True),
        Row("hidden_norm", f"{prefix}.{hidden}.weight", "D -> D", True),
        Row("project", f"{prefix}.{project}.weight", "D I -> I D", True),
        Row("layers.attention_norm", f"{prefix}.input_layernorm.weight", "D -> D", True),
        *_layer_rows("layers", prefix, config, "D"),
        Row("norm", f"{prefix}.{final}.weight", "D -> D", True),
    ]
    return _places(rows, config.layers, first)


def _sizes(config: ModelConfig, **more: int) -> dict[str, int]:
    d = config.embed
    return {"D": d, "I": 2 * d, "N": config.heads, "M": config.kv_heads, "H": config.head_size, "F": config.ffn, **more}


def _collected(places: list[Place], tensors: Arrays, sizes: Mapping[str, int], source: str) -> dict[str, np.ndarray]:
    """Our arrays by attribute path; every tensor must have a place and every place a tensor."""
    missing = [place.name for place in places if place.name not in tensors]
    unknown = sorted(set(tensors) - {place.name for place in places})
    require(not missing, f"{source} lacks {_some(missing)}; it is damaged, or its config.json speaks of another draft")
    require(not unknown, f"{source} has {_some(unknown)}, which a draft of this form has no place for")
    found: dict[str, list[np.ndarray]] = {}
    for place in places:
        found.setdefault(place.row.ours, []).append(to_ours(place.row._replace(theirs=place.name), tensors[place.name], sizes))
    stacked = {place.row.ours for place in places if place.layer is not None}
    return {name: np.stack(parts) if name in stacked else parts[0] for name, parts in found.items()}


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# ---- reading

_PREFIXES = ("model.", "draft_model.", "module.", "_orig_mod.")
_RENAMED = {
    **{f"aux_norm_{name}.weight": f"fc_norm.{number}.weight" for number, name in enumerate(("low", "mid", "high"))},
    "draft_id_to_target_id": "d2t",
}
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def normal_names(tensors: Arrays, source: str) -> dict[str, np.ndarray]:
    """The tensors of an EAGLE-3 head by the names of the speculators form, without prefixes and rotary tables.

    Raises:
      ConfigError: two tensors come to the same name, or they are those of another kind of draft.
    """
    found: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        short = name
        while short.startswith(_PREFIXES):
            short = short.split(".", 1)[1]
        short = _RENAMED.get(short, short)
        short = short.replace("midlayer.", "layers.0.", 1) if short.startswith("midlayer.") else short
        require(short not in found, f"{source} has {short} twice, once as {name}")
        if not short.endswith(_BUFFERS):
            found[short] = array
    require("mask_hidden" not in found, f"{source} is a P-EAGLE draft (it has mask_hidden); only EAGLE-3 heads can be loaded")
    old = "fc.weight" in found and "layers.0.hidden_norm.weight" not in found
    require(not old, f"{source} is an EAGLE-1 or EAGLE-2 head (it has no hidden_norm); only EAGLE-3 heads can be loaded")
    return found


def settle(
    config: ModelConfig, head: HeadConfig, tensors: Arrays, target_embedding: np.ndarray, say: Callable[[str], Any]
) -> tuple[ModelConfig, HeadConfig]:
    """Config and form as the tensors (by `normal_names`) have them, where config.json is wrong or silent: they decide.

    An embedding table that is the target's in every bit is shared; one that differs is the head's own.
    """
    rows = tensors.get("layers.0.self_attn.q_proj.weight", np.zeros((0, 0))).shape[0]
    if rows and rows != config.heads * config.head_size and rows % config.heads == 0:
        say(f"head_dim is {rows // config.heads} by the tensors, not {config.head_size} as config.json has it")
        config = dataclasses.replace(config, head_size=rows // config.heads)
    family = {
        "query_key_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "output_bias": "layers.0.self_attn.o_proj.bias" in tensors,
    }
    config = dataclasses.replace(config, family=dataclasses.replace(config.family, **family))
    table = tensors.get("embed_tokens.weight")
    own = table is not None and not (table.shape == target_embedding.shape and np.array_equal(table, target_embedding))
    return config, dataclasses.replace(head, own_embedding=own)


def vocabulary_ids(tensors: Arrays, rows: int, vocab: int, source: str) -> np.ndarray | None:
    """Ids of the tokens that a head of `rows` rows speaks of, from the buffers d2t (offsets) and t2d (a mask); None: all, in order.

    Raises:
      ConfigError: the ids do not ascend inside the target's `vocab`, or the two buffers disagree.
    """
    offsets, mask = tensors.get("d2t"), tensors.get("t2d")
    if rows == vocab and (offsets is None or not offsets.any()):
        return None
    require(
        offsets is not None or mask is not None,
        f"{source} has {rows} rows for a vocabulary of {vocab}, and neither d2t nor t2d to say which",
    )
    ids = np.zeros(0, int) if mask is None else np.flatnonzero(mask)
    if offsets is not None:
        require(offsets.shape == (rows,), f"{source}: d2t has shape {list(offsets.shape)}, and the head {rows} rows")
        ids = np.arange(rows) + offsets.astype(np.int64)
        fits = bool((np.diff(ids) > 0).all() and ids[0] >= 0 and ids[-1] < vocab)
        absolute = bool((np.diff(offsets) > 0).all() and offsets[0] >= 0 and offsets[-1] < vocab)
        hint = "; it looks like the ids themselves, but must hold target id - draft id" if absolute else ""
        require(fits, f"{source}: ids i + d2t[i] run from {ids.min()} to {ids.max()}; they must ascend inside 0..{vocab - 1}{hint}")
    if mask is not None:
        said = np.flatnonzero(mask)
        require(np.array_equal(ids, said), f"{source}: d2t names {ids.size} tokens and t2d {said.size}, and not the same ones")
    require(ids.size == rows, f"{source}: t2d names {ids.size} tokens, and the head has {rows} rows")
    return ids.astype(np.int32)


def head_arrays(config: ModelConfig, head: HeadConfig, tensors: Arrays, target: Arrays, source: str) -> dict[str, np.ndarray]:
    """Our arrays of an EAGLE-3 head by attribute path, from `normal_names` and what `settle` made of config and form.

    `target` has the policy's `embedding` [V D] and `head` [D V], from which a missing lm_head is taken. `vocabulary` is there if it is not
    the whole.
    """
    layout = head_layout(config, head, "speculators")
    vocab = target["embedding"].shape[0]
    unsaid = tensors["d2t"].shape[0] if "d2t" in tensors else vocab
    rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else unsaid
    ids = vocabulary_ids(tensors, rows, vocab, source)
    weights = {name: array for name, array in tensors.items() if name not in ("d2t", "t2d")}
    if not head.own_embedding:
        weights.pop("embed_tokens.weight", None)
    if "lm_head.weight" not in weights:
        columns = target["head"] if ids is None else target["head"][:, ids]
        weights["lm_head.weight"] = np.ascontiguousarray(columns.T)
    width = target["embedding"].shape[1]
    arrays = _collected(layout, weights, _sizes(config, W=rows, V=vocab, E=width, C=tap_count(head) * width), source)
    return arrays if ids is None else {**arrays, "vocabulary": ids}


def mtp_form(names: list[str], target_layers: int) -> tuple[int, bool]:
    """How many MTP layers there are among a checkpoint's tensor names, and whether they take [embedding, hidden]."""
    for prefix, first, mark, order in (("model.mtp_layers.", 0, "input_proj", False), ("model.layers.", target_layers, "eh_proj", True)):
        count = 0
        while f"{prefix}{first + count}.{mark}.weight" in names:
            count += 1
        if count:
            return count, order
    return 0, True


def mtp_arrays(config: ModelConfig, embedding_first: bool, tensors: Arrays, target: Arrays, target_layers: int) -> dict[str, np.ndarray]:
    """Our arrays of MTP layers by attribute path, from the tensors that belong to them; `target` as in `head_arrays`.

    Raises:
      ConfigError: a copy of the policy's embedding or head that stands among them differs from the policy's own.
    """
    weights = dict(tensors)
    for name in [name for name in weights if name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))]:
        ours = target["embedding"] if name.endswith("embed_tokens.weight") else target["head"].T
        same = np.array_equal(weights.pop(name), ours)
        require(same, f"{name} is not the policy's own; MTP layers with an embedding or a head of their own cannot be loaded")
    places = mtp_layout(config, embedding_first, target_layers)
    return _collected(places, weights, _sizes(config), "the checkpoint's MTP part")


def filled(network: Any, arrays: Arrays) -> Any:
    """A network, or its shapes, with arrays by attribute path in place of all its leaves, in the leaves' own types.

    Raises:
      ConfigError: an array is missing, is foreign, or has another shape.
    """
    left = dict(arrays)

    def one(path: Any, leaf: Any) -> jax.Array:
        name = ".".join(key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)).removesuffix(".value")
        require(name in left, f"the draft's {name} is not among what was loaded")
        array = left.pop(name)
        require(array.shape == leaf.shape, f"the draft's {name} has shape {list(leaf.shape)}, and {list(array.shape)} was loaded")
        return jnp.asarray(array.astype(leaf.dtype))

    network = jax.tree_util.tree_map_with_path(one, network)
    require(not left, f"the draft has no {_some(sorted(left))}, which was loaded")
    return network


# ---- writing


def draft_tensors(network: Eagle3 | Mtp, form: Form, target_layers: int = 0) -> dict[str, np.ndarray]:
    """A draft's tensors by their published names; MTP layers have one form only, and are numbered on from `target_layers`."""
    if isinstance(network, Mtp):
        places = mtp_layout(network.config, network.embedding_first, target_layers)
    else:
        places = head_layout(network.config, network.form, form)

    def array(place: Place) -> np.ndarray:
        ours = np.asarray(operator.attrgetter(place.row.ours)(network)[...])
        return np.ascontiguousarray(to_theirs(place.row, ours if place.layer is None else ours[place.layer]))

    tensors = {place.name: array(place) for place in places}
    if isinstance(network, Eagle3) and network.vocabulary is not None:
        ids = np.asarray(network.vocabulary[...]).astype(np.int64)
        tensors["d2t"] = ids - np.arange(ids.size)
        tensors["t2d"] = np.isin(np.arange(network.config.vocab), ids)
    return tensors
