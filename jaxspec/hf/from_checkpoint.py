"""What the checkpoints that a config names say of it, and the draft that one of them holds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config.json_keys import read_json
from jaxspec.config.settings import Config, ModelConfig, require
from jaxspec.drafts.build import draft_model
from jaxspec.hf.draft_config import head_config
from jaxspec.hf.drafts import filled, head_arrays, mtp_arrays, mtp_form, normal_names, settle
from jaxspec.hf.names import mtp_names
from jaxspec.hf.pretrained import CONFIG, absolute, find_folder, policy_checkpoint, policy_config
from jaxspec.hf.tensor_files import WHOLES, Stored, check_header, open_tensors
from jaxspec.mesh import from_host
from jaxspec.state import PyTree
from jaxspec.system.files import expanded

Say = Callable[[str], Any]
_MODEL, _DRAFT = "model.path", "rollout.draft.path"


def resolved(config: Config, say: Say) -> Config:
    """The config with what its checkpoints say in place of what it says of them; without any, as it
    is.

    A policy with MTP layers of its own lends them to a draft of kind `mtp`. `say` is told how what
    is ambiguous was read.

    Raises:
      ConfigError: a folder, a file or a key is missing, or a checkpoint is of a kind that is not
        supported.
    """
    config = _from_home(config)
    stretched = config.model.rope_factor != 1
    if config.model.path:
        model = policy_config(config.model)
        tokenizer = config.data.tokenizer or str(find_folder(model.path, _MODEL))
        config = replace(config, model=model, data=replace(config.data, tokenizer=tokenizer))
    if config.lora.path:
        # what is wrong is named before anything else reads it
        find_folder(config.lora.path, "lora.path")
        config = replace(config, lora=replace(config.lora, path=absolute(config.lora.path)))
    draft = config.rollout.draft
    if not draft.path and (native := _native_mtp(config.model)):
        if draft.kind == "mtp":
            draft = replace(draft, path=config.model.path)
        else:
            say(
                f"{config.model.path} has {native} MTP layers of its own, which are left out;"
                " --rollout.draft.kind mtp drafts with them"
            )
    if not draft.path:
        return config
    require(
        draft.learned,
        f"{_DRAFT} {draft.path} is for drafts of kind eagle3, mtp and model; rollout.draft.kind is"
        f" {draft.kind}",
    )
    folder = find_folder(draft.path, _DRAFT)
    draft = replace(draft, path=absolute(draft.path))
    config = replace(config, rollout=replace(config.rollout, draft=draft))
    read = {"eagle3": _with_head, "mtp": _with_mtp, "model": _with_model}[draft.kind]
    config = read(config, folder, say)
    if stretched and config.draft_model is not None:  # a draft's positions follow the policy's
        model = replace(
            config.draft_model, rope_factor=config.model.rope_factor, rope=config.model.rope
        )
        config = replace(config, draft_model=model)
    return config


def _from_home(config: Config) -> Config:
    """The config with home directories for `~` in the names of its data, whoever reads or digests
    them."""

    def whole(text: str, name: str) -> str:
        return str(expanded(text, name)) if text.startswith("~") else text

    paths = {
        name: whole(getattr(config.data, name), f"data.{name}")
        for name in ("path", "eval_path", "tokenizer")
    }
    offline = replace(config.offline, text=whole(config.offline.text, "offline.text"))
    return replace(config, data=replace(config.data, **paths), offline=offline)


def _native_mtp(model: ModelConfig) -> int:
    """MTP layers in the policy's own checkpoint."""
    return (
        mtp_form(list(open_tensors(find_folder(model.path, _MODEL))), model.layers)[0]
        if model.path
        else 0
    )


def _with_head(config: Config, folder: Path, say: Say) -> Config:
    """Sizes and form of an EAGLE-3 head, from its config.json and its tensors."""
    draft, source = config.rollout.draft, str(folder / CONFIG)
    model, head, vocab = head_config(
        read_json(folder / CONFIG), source, draft.tap_convention, config.model, say
    )
    if config.head.taps:  # who names them knows better
        head = replace(head, taps=config.head.taps)
    tensors = _read_all(normal_names(open_tensors(folder), str(folder)))
    comparable = "embed_tokens.weight" in tensors and bool(config.model.path)
    model, head = settle(model, head, tensors, _lent(config, comparable)["embedding"], say)
    if "lm_head.weight" in tensors:  # the tensors have the last word
        rows = tensors["lm_head.weight"].shape[0]
        vocab = 0 if rows == config.model.vocab else rows
    longest = config.data.max_prompt_length + config.rollout.max_new_tokens
    if 0 < model.rope.context < longest:
        say(
            f"{source}: the head was trained on {model.rope.context} positions, rows take up to"
            f" {longest}: it may accept less beyond"
        )
    draft = replace(draft, vocab=vocab, ffn=0)
    return replace(
        config, draft_model=model, head=head, rollout=replace(config.rollout, draft=draft)
    )


def _with_mtp(config: Config, folder: Path, _: Say) -> Config:
    """Number, order and width of MTP layers, from the names and shapes of their tensors; their
    family is the policy's."""
    tensors, layers = open_tensors(folder), config.model.layers
    count, embedding_first = mtp_form(list(tensors), layers)
    kinds = (
        "model.mtp_layers.0.* as MiMo names them, or DeepSeek's eh_proj behind the policy's last"
        " layer"
    )
    require(count > 0, f"{_DRAFT} {folder} has no MTP layers ({kinds})")
    gates = [
        tensors[name]
        for name in mtp_names(list(tensors), layers)
        if name.endswith(".gate_proj.weight")
    ]
    for gate in gates:
        check_header(gate)
    widths = [gate.shape[0] for gate in gates]
    require(
        bool(widths),
        f"{_DRAFT} {folder}: its MTP layers have no mlp.gate_proj; only SwiGLU layers, dense or of"
        " experts, can be read",
    )
    ffn = 0 if widths[0] == config.model.ffn else widths[0]
    draft = replace(
        config.rollout.draft, layers=count, embedding_first=embedding_first, vocab=0, ffn=ffn
    )
    return replace(config, rollout=replace(config.rollout, draft=draft))


def _with_model(config: Config, _: Path, __: Say) -> Config:
    """A small model of its own sizes."""
    draft = replace(config.rollout.draft, vocab=0, ffn=0)
    base = ModelConfig(
        path=draft.path,
        ignore=config.model.ignore,
        dtype=config.model.dtype,
        remat=config.model.remat,
    )
    return replace(
        config, draft_model=policy_config(base), rollout=replace(config.rollout, draft=draft)
    )


def read_draft(config: Config, abstract: PyTree) -> PyTree:
    """The draft's network of `rollout.draft.path`, in the shapes, types and shardings of
    `abstract`; the config has been resolved.

    Raises:
      ConfigError: tensors are missing, foreign, or of another shape.
    """
    draft = config.rollout.draft
    folder = find_folder(draft.path, _DRAFT)
    if draft.kind == "model":
        return policy_checkpoint(draft_model(config), abstract).load(lambda _: None)
    tensors, layers = open_tensors(folder), config.model.layers
    if draft.kind == "mtp":
        own = _read_all({name: tensors[name] for name in mtp_names(list(tensors), layers)})
        copies = any(
            name.endswith((".embed_tokens.weight", ".shared_head.head.weight")) for name in own
        )
        sizes = replace(draft_model(config), layers=draft.layers)
        arrays = mtp_arrays(sizes, draft.embedding_first, own, _lent(config, copies), layers)
    else:
        named = _read_all(normal_names(tensors, str(folder)))
        lent = _lent(config, "lm_head.weight" not in named)
        arrays = head_arrays(draft_model(config), config.head, named, lent, str(folder))
    return jax.tree.map(from_host, abstract, filled(abstract, arrays))


_BUFFERS: dict[str, tuple[str, ...]] = {"d2t": WHOLES, "t2d": (*WHOLES, "BOOL")}
"""Tensors of a draft, by their normal names, that are no weights, and the types that they may
have."""


def _read_all(tensors: Mapping[str, Stored]) -> dict[str, np.ndarray]:
    """A draft's tensors; their headers are checked before."""
    for name, stored in tensors.items():
        if name in _BUFFERS:
            check_header(stored, _BUFFERS[name], (1,))
        else:
            check_header(stored)
    return {name: stored.read() for name, stored in tensors.items()}


def _lent(config: Config, values: bool) -> dict[str, np.ndarray]:
    """The policy's embedding [V D] and head [D V]; where their values do not matter, something of
    the same shape."""
    model = config.model
    if not values or not model.path:
        shape = model.vocab, model.embed
        lacks = (
            f"{_DRAFT} {config.rollout.draft.path} borrows the policy's embedding or head, which"
            f" can only be looked up with --{_MODEL}"
        )
        require(not values, lacks)
        return {
            "embedding": np.broadcast_to(np.float32(math.nan), shape),
            "head": np.broadcast_to(np.float32(math.nan), shape[::-1]),
        }
    tensors = open_tensors(find_folder(model.path, _MODEL))
    names = ["model.embed_tokens.weight", *([] if model.tied else ["lm_head.weight"])]
    for name in names:
        require(
            name in tensors,
            f"{_MODEL} {model.path} lacks the tensor {name}, which the draft borrows; download the"
            " checkpoint again",
        )
        check_header(tensors[name], axes=(2,))
    embedding, *head = (tensors[name].read() for name in names)
    return {"embedding": embedding, "head": (head[0] if head else embedding).T}
