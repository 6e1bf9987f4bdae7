"""The tensors of published EAGLE-3 heads: names, vocabulary buffers, and what decides where they
and config.json differ."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxspec.hf.draft_tensors import BUFFERS, Arrays, check_headers, collected, fitting, written
from jaxspec.hf.eagle3_config import Form
from jaxspec.hf.names import Row, layer_rows
from jaxspec.hf.tensor_files import Stored
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import named
from jaxspec.inputs.spec import HeadSpec, ModelSpec
from jaxspec.models.eagle3 import Eagle3


def head_rows(config: ModelSpec, head: HeadSpec, form: Form) -> list[Row]:
    """The table of an EAGLE-3 head but for its vocabulary buffers: by the names that
    SafeAILab, SpecForge and AngelSlim write (raw), or those of speculators."""
    first, last = "midlayer." if form == "raw" else "layers.0.", "layers.{layer}."
    entry = [
        row
        for row in layer_rows("first.", first, config, single=True)
        if row.ours != "first.attention_norm"
    ]
    optional = [
        (Row("fuse", "fc.weight", "D C -> C D"), head.use_taps),
        (Row("taps_norm", "input_norm.weight", "C -> C"), head.norm_before_fuse),
        (Row("tap_norms", "fc_norm.{layer}.weight", "E -> E"), head.fuse_norms),
        (Row("embedding", "embed_tokens.weight", "V D -> V D"), head.own_embedding),
    ]
    return [
        *[row for row, there in optional if there],
        Row("first.embedding_norm", f"{first}input_layernorm.weight", "D -> D", single=True),
        Row("first.hidden_norm", f"{first}hidden_norm.weight", "D -> D", single=True),
        *entry,
        *(layer_rows("layers.", last, config, first=1) if config.layers > 1 else []),
        Row("norm", "norm.weight", "D -> D"),
        Row("head", "lm_head.weight", "W D -> D W"),
    ]


_PREFIXES = ("model.", "draft_model.", "module.", "_orig_mod.")
_RENAMED = {
    **{
        f"aux_norm_{name}.weight": f"fc_norm.{number}.weight"
        for number, name in enumerate(("low", "mid", "high"))
    },
    "draft_id_to_target_id": "d2t",
}
_LAYER = re.compile(r"layers\.([0-9]{1,9})\.self_attn\.q_proj\.weight")
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


Tensor = TypeVar("Tensor")


def normal_names(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The tensors of an EAGLE-3 head by the names of the speculators form, without prefixes and
    rotary tables.

    Raises:
      ConfigError: two tensors come to the same name, or they are those of another kind of draft.
    """
    found: dict[str, Tensor] = {}
    for name, array in tensors.items():
        short = name
        while short.startswith(_PREFIXES):
            short = short.split(".", 1)[1]
        short = _RENAMED.get(short, short)
        short = (
            short.replace("midlayer.", "layers.0.", 1) if short.startswith("midlayer.") else short
        )
        require(short not in found, f"{source} has {named(short)} twice, once as {named(name)}")
        if not short.endswith(_BUFFERS):
            found[short] = array
    require(
        "mask_hidden" not in found,
        f"{source} is a P-EAGLE draft (it has mask_hidden); only EAGLE-3 heads can be loaded",
    )
    old = "fc.weight" in found and "layers.0.hidden_norm.weight" not in found
    require(
        not old,
        f"{source} is an EAGLE-1 or EAGLE-2 head (it has no hidden_norm); only EAGLE-3 heads can be"
        " loaded",
    )
    return found


def settle(
    config: ModelSpec,
    head: HeadSpec,
    tensors: Arrays,
    target_embedding: np.ndarray,
    say: Callable[[str], Any],
) -> tuple[ModelSpec, HeadSpec]:
    """Config and form as the tensors (by `normal_names`) have them, where config.json is wrong or
    silent: they decide.

    An embedding table that is the target's in every bit is shared; one that differs is the head's
    own.
    """
    rows = tensors.get("layers.0.self_attn.q_proj.weight", np.zeros((0, 0))).shape[0]
    if rows and rows != config.heads * config.head_size and rows % config.heads == 0:
        say(
            f"head_dim is {rows // config.heads} by the tensors, not {config.head_size} as"
            " config.json has it"
        )
        config = dataclasses.replace(config, head_size=rows // config.heads)
    family = {
        "query_key_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "output_bias": "layers.0.self_attn.o_proj.bias" in tensors,
    }
    config = dataclasses.replace(config, family=dataclasses.replace(config.family, **family))
    numbers = {int(found[1]) for name in tensors if (found := _LAYER.match(name))}
    # SafeAILab's head of the policy's 40 layers has one, whatever its config.json says
    if numbers == set(range(len(numbers))) and len(numbers) not in (0, config.layers):
        say(
            f"num_hidden_layers is {len(numbers)} by the tensors, not {config.layers} as"
            " config.json has it"
        )
        config = dataclasses.replace(config, layers=len(numbers))
    table = tensors.get("embed_tokens.weight")
    own = table is not None and not (
        table.shape == target_embedding.shape and np.array_equal(table, target_embedding)
    )
    return config, dataclasses.replace(head, own_embedding=own)


def with_vocabulary_rows(tensors: Mapping[str, Stored], own: int, vocab: int) -> dict[str, Stored]:
    """A head's tensors (by `normal_names`) for a vocabulary of `vocab` rows in place of `own`:
    padded or cut."""
    whole = tensors.get("lm_head.weight")
    # a vocabulary of its own is said by d2t, whose ids stay as they are
    names = {"embed_tokens.weight", "t2d"}
    if whole is not None and whole.shape[:1] == (own,):
        names |= {"lm_head.weight", "d2t"}
    return {
        name: tensor.with_rows(vocab) if name in names and tensor.shape[:1] == (own,) else tensor
        for name, tensor in tensors.items()
    }


def vocabulary_ids(tensors: Arrays, rows: int, vocab: int, source: str) -> np.ndarray | None:
    """Ids of the tokens that a head of `rows` rows speaks of, from the buffers d2t (offsets) and
    t2d (a mask); None: all, in order.

    Raises:
      ConfigError: the ids do not ascend inside the target's `vocab`, or the two buffers disagree.
    """
    offsets, mask = tensors.get("d2t"), tensors.get("t2d")
    for name, buffer, size, kinds in (("d2t", offsets, rows, "iu"), ("t2d", mask, vocab, "biu")):
        if buffer is not None:
            require(
                buffer.dtype.kind in kinds,
                f"{source}: {name} is of type {buffer.dtype}; it must hold whole numbers, or t2d a"
                " mask",
            )
            has = f"{source}: {name} has shape {list(buffer.shape)}, and"
            wanted = f"the head {rows} rows" if name == "d2t" else f"the vocabulary {vocab} tokens"
            require(
                buffer.shape == (size,),
                f"{has} {wanted}",
            )
    if rows == vocab and (offsets is None or not offsets.any()):
        return None
    require(
        offsets is not None or mask is not None,
        f"{source} has {rows} rows for a vocabulary of {vocab}, and neither d2t nor t2d to say"
        " which",
    )
    ids = np.zeros(0, int) if mask is None else np.flatnonzero(mask)
    if offsets is not None:
        ids = np.arange(rows) + offsets.astype(np.int64)
        fits = bool((np.diff(ids) > 0).all() and ids[0] >= 0 and ids[-1] < vocab)
        absolute = bool((np.diff(offsets) > 0).all() and offsets[0] >= 0 and offsets[-1] < vocab)
        hint = (
            "; it looks like the ids themselves, but must hold target id - draft id"
            if absolute
            else ""
        )
        require(
            fits,
            f"{source}: ids i + d2t[i] run from {ids.min()} to {ids.max()}; they must ascend inside"
            f" 0..{vocab - 1}{hint}",
        )
    if mask is not None:
        said = np.flatnonzero(mask)
        require(
            np.array_equal(ids, said),
            f"{source}: d2t names {ids.size} tokens and t2d {said.size}, and not the same ones",
        )
    require(
        ids.size == rows, f"{source}: t2d names {ids.size} tokens, and the head has {rows} rows"
    )
    return ids.astype(np.int32)


class _Form(NamedTuple):
    """A head's network, and which tensors fill it."""

    ids: np.ndarray | None
    """Tokens of its own vocabulary; None: all."""
    network: Eagle3
    """Shapes only."""
    rows: list[Row]

    @property
    def names(self) -> set[str]:
        """Tensors that are no weights of it, or are lent by the policy."""
        return {*BUFFERS, *(() if self.network.form.own_embedding else ("embed_tokens.weight",))}


def _form(
    config: ModelSpec,
    head: HeadSpec,
    tensors: Mapping[str, Stored] | Arrays,
    sizes: tuple[int, int],
    source: str,
) -> _Form:
    """The form of a head for a policy of `sizes` (vocabulary, width), from shapes and buffers."""
    vocab, width = sizes
    unsaid = tensors["d2t"].shape[0] if "d2t" in tensors else vocab
    rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else unsaid
    buffers = {
        name: tensor.read() if isinstance(tensor, Stored) else tensor
        for name, tensor in tensors.items()
        if name in BUFFERS
    }
    ids = vocabulary_ids(buffers, rows, vocab, source)
    policy = dataclasses.replace(config, embed=width, vocab=vocab)
    network = jax.eval_shape(
        lambda: Eagle3(config, head, policy, jax.random.key(0), 0 if ids is None else rows)
    )
    return _Form(ids, network, head_rows(config, head, "speculators"))


def check_head(
    config: ModelSpec,
    head: HeadSpec,
    tensors: Mapping[str, Stored],
    policy: ModelSpec,
    source: str,
) -> None:
    """Raises ConfigError for tensors of a head (by `normal_names`) that `head_arrays` would refuse;
    of weights only the headers are read."""
    check_headers(tensors)
    form = _form(config, head, tensors, (policy.vocab, policy.embed), source)
    weights = {name: tensor for name, tensor in tensors.items() if name not in form.names}
    # a missing head is lent by the policy
    rows = [row for row in form.rows if row.ours != "head" or row.theirs in weights]
    fitting(rows, weights, form.network, source)


def head_arrays(
    config: ModelSpec, head: HeadSpec, tensors: Arrays, target: Arrays, source: str
) -> dict[str, np.ndarray]:
    """Our arrays of an EAGLE-3 head by attribute path, from `normal_names` and what `settle` made
    of config and form.

    `target` has the policy's `embedding` [V D] and `head` [D V], from which a missing lm_head is
    taken. `vocabulary` is there if it is not the whole.
    """
    form = _form(config, head, tensors, target["embedding"].shape, source)
    ids = form.ids
    weights = {name: array for name, array in tensors.items() if name not in form.names}
    if "lm_head.weight" not in weights:
        columns = target["head"] if ids is None else target["head"][:, ids]
        weights["lm_head.weight"] = np.ascontiguousarray(columns.T)
    arrays = collected(form.rows, weights, form.network, source)
    return arrays if ids is None else {**arrays, "vocabulary": ids}


def head_tensors(network: Eagle3, form: Form) -> dict[str, np.ndarray]:
    """A head's tensors by their published names, with the buffers of its vocabulary."""
    tensors = written(head_rows(network.config, network.form, form), network)
    if network.vocabulary is not None:
        ids = np.asarray(network.vocabulary[...]).astype(np.int64)
        tensors["d2t"] = ids - np.arange(ids.size)
        tensors["t2d"] = np.isin(np.arange(network.config.vocab), ids)
    return tensors
