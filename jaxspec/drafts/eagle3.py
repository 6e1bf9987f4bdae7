"""EAGLE-3 as a kind of draft: the head of `models/eagle3.py`, its published files, and what goes
wrong when they are read."""

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.drafts.base import DEEP, Export, Files, Kind, Learned, Repair, Say, Sizes
from jaxspec.drafts.recurrent import recurrent
from jaxspec.drafts.unroll import UNROLL
from jaxspec.hf.draft_tensors import (
    cast_tensors,
    check_vocabulary_padding,
    load_policy_embeddings,
    load_tensors,
    replace_leaves,
)
from jaxspec.hf.eagle3_config import (
    HeadFormat,
    head_config_json,
    parse_head_config,
    vocabulary_size,
)
from jaxspec.hf.eagle3_tensors import (
    check_head_tensors,
    head_arrays,
    head_tensors,
    normalize_names,
    reconcile_with_tensors,
    resize_vocabulary,
)
from jaxspec.hf.pretrained import CONFIG_FILE
from jaxspec.hf.tensor_files import StoredTensor, open_tensors, refuse_quantized
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import read_json
from jaxspec.inputs.spec import DraftSpec, HeadConfig, HeadSpec, ModelSpec
from jaxspec.mesh import from_host
from jaxspec.models.decoder import tap_boundaries
from jaxspec.models.eagle3 import Eagle3, llama_head_spec, tap_count, with_vocabulary
from jaxspec.state import PyTree


def taps_of(head: HeadSpec, layers: int) -> tuple[int, ...]:
    """Boundaries at which a head reads a policy of `layers` layers; none: it reads the final-norm
    hidden states."""
    return (head.taps or tap_boundaries(layers)) if head.use_taps else ()


def _decoder(spec: DraftSpec) -> ModelSpec:
    """That of a loaded head, else one Llama layer of the policy's sizes."""
    return spec.decoder or llama_head_spec(spec.policy, spec.ffn)


def _check(spec: DraftSpec) -> None:
    """Whether its taps and its own decoder, loaded or not, go with the policy."""
    head, own, policy = spec.head, spec.decoder, spec.policy
    require(
        not head.use_taps or bool(head.taps) or policy.layers >= 4,
        f"model.layers is {policy.layers}; the three taps of eagle3 need at least 4: choose another"
        " rollout.draft.kind",
    )
    beyond = [tap for tap in head.taps if not 0 <= tap <= policy.layers]
    require(
        not beyond,
        f"head.taps {list(head.taps)} has {beyond}; give numbers from 0 to model.layers"
        f" {policy.layers}, or none",
    )
    if own is None:
        return
    width = f"the draft's width is {own.embed} and model.embed {policy.embed}"
    require(
        head.use_taps or own.embed == policy.embed,
        f"{width}; a draft that reads the policy's hidden states as they are must be as wide",
    )
    require(
        own.embed == policy.embed or head.own_embedding,
        f"{width}, so it cannot share the policy's embedding, and head.own_embedding is off",
    )


def _sizes(network: Eagle3, policy: ModelSpec) -> Sizes:
    sizes, taps = {}, tap_count(network.form)
    if network.embedding is None or network.fuse is None:
        sizes["hidden size"] = network.config.embed, policy.embed
    if network.fuse is not None:
        sizes[f"width of {taps} taps"] = network.fuse.shape[0], taps * policy.embed
    whole = network.config.vocab if network.vocabulary is not None else network.head.shape[-1]
    sizes["vocabulary"] = whole, policy.vocab
    if network.embedding is not None:
        sizes["embedding table"] = network.embedding.shape[0], policy.vocab
    return sizes


# ---- files


def _resolve(spec: DraftSpec, folder: Path, say: Say) -> DraftSpec:
    """Sizes and form of a head, from its config.json and its tensors."""
    policy, source = spec.policy, str(folder / CONFIG_FILE)
    model, head, vocab = parse_head_config(
        read_json(folder / CONFIG_FILE), source, spec.tap_convention, policy, say
    )
    if spec.head.taps:  # who names them knows better
        head = replace(head, taps=spec.head.taps)
    tensors = load_tensors(_tensors(folder, policy.vocab)[0])
    comparable = "embed_tokens.weight" in tensors and bool(policy.path)
    model, head = reconcile_with_tensors(
        model, head, tensors, load_policy_embeddings(spec, comparable)["embedding"], say
    )
    if "lm_head.weight" in tensors:  # the tensors have the last word
        rows = tensors["lm_head.weight"].shape[0]
        vocab = 0 if rows == policy.vocab else rows
    if 0 < model.rope.context < spec.row_length:
        say(
            f"{source}: the head was trained on {model.rope.context} positions, rows take up to"
            f" {spec.row_length}: it may accept less beyond"
        )
    return replace(spec, decoder=model, head=head, vocab=vocab, ffn=0)


def _tensors(folder: Path, vocab: int) -> tuple[dict[str, StoredTensor], int]:
    """A head's tensors, for a vocabulary of `vocab` rows; and how many it was made for."""
    content = read_json(folder / CONFIG_FILE)
    own = vocabulary_size(content, str(folder / CONFIG_FILE)) or vocab
    tensors = normalize_names(open_tensors(folder), str(folder))
    refuse_quantized(folder, tensors)
    return (tensors if own == vocab else resize_vocabulary(tensors, own, vocab)), own


def _judge(spec: DraftSpec, folder: Path, tokens: int) -> None:
    tensors, own = _tensors(folder, spec.policy.vocab)
    check_vocabulary_padding(str(folder), own, spec.policy.vocab, tokens)
    check_head_tensors(_decoder(spec), spec.head, tensors, spec.policy, str(folder))


def _load(spec: DraftSpec, folder: Path, abstract: PyTree) -> PyTree:
    tensors = load_tensors(_tensors(folder, spec.policy.vocab)[0])
    policy = load_policy_embeddings(spec, "lm_head.weight" not in tensors)
    arrays = head_arrays(_decoder(spec), spec.head, tensors, policy, str(folder))
    return jax.tree.map(from_host, abstract, replace_leaves(abstract, arrays))


def _export(network: Eagle3, wanted: Export) -> Files:
    form: HeadFormat = "speculators" if wanted.form == "speculators" else "raw"
    vocab = 0 if network.vocabulary is None else network.head.shape[-1]
    content = head_config_json(
        network.config, network.form, wanted.policy, form, vocab, wanted.length
    )
    content["torch_dtype"] = wanted.dtype.name
    return Files(content, cast_tensors(head_tensors(network, form), wanted.dtype))


# ---- repairs


def _repairs(network: Eagle3, taps: tuple[int, ...], policy: ModelSpec) -> Iterator[Repair]:
    yield from _shifted(network, taps, policy.layers)
    for flag in ("norm_before_residual", "norm_output"):
        value = not getattr(network.form, flag)
        changed = _with(network, form=replace(network.form, **{flag: value}))
        mend = f'"{flag}": {str(value).lower()} in the draft\'s config.json'
        yield Repair(f"{flag} is {value}", mend, changed, taps)
    yield from _ids(network, taps)
    for whose, theta in {"the policy's": policy.rope_theta, "the default": 1e4}.items():
        if theta != network.config.rope_theta:
            changed = _with(network, config=replace(network.config, rope_theta=theta))
            mend = f'"rope_theta": {theta:g} in the draft\'s config.json'
            yield Repair(f"rope_theta is {whose} {theta:g}", mend, changed, taps)


def _shifted(network: Eagle3, taps: tuple[int, ...], layers: int) -> Iterator[Repair]:
    for by in (1, -1):
        moved = tuple(tap + by for tap in taps)
        if moved and moved[0] >= 0 and moved[-1] <= layers:
            said = (
                f"it reads one layer {'later' if by > 0 else 'earlier'}, after"
                f" {', '.join(map(str, moved))}"
            )
            yield Repair(said, f"--head.taps {' '.join(map(str, moved))}", network, moved)


def _ids(network: Eagle3, taps: tuple[int, ...]) -> Iterator[Repair]:
    if network.vocabulary is None:
        return
    stored = np.asarray(jax.device_get(network.vocabulary[...]))
    ids = stored - np.arange(stored.size, dtype=np.int32)
    if (np.diff(ids) > 0).all() and (ids != stored).any():
        yield Repair(
            "its d2t holds token ids, not offsets",
            "d2t - arange(len(d2t)) in the draft's file",
            with_vocabulary(network, ids),
            taps,
        )


def _with(network: Any, **settings: Any) -> Any:
    """A network of the same weights with other settings."""
    other = jax.tree.map(lambda leaf: leaf, network)
    for name, value in settings.items():
        setattr(other, name, value)
    return other


_FORM = frozenset(f"head.{item.name}" for item in dataclasses.fields(HeadConfig)) - {"head.taps"}
EAGLE3 = Kind(
    build=lambda spec, stop_ids: recurrent(spec.max_length, taps_of(spec.head, spec.policy.layers)),
    settings=DEEP | {"rollout.draft.vocab", "rollout.draft.tap_convention", "head."},
    from_files=_FORM | {"rollout.draft.ffn", "rollout.draft.vocab"},
    learned=Learned(
        decoder=_decoder,
        network=lambda spec, key: Eagle3(_decoder(spec), spec.head, spec.policy, key, spec.vocab),
        check=_check,
        sizes=_sizes,
        reads=lambda length: length + 1,
        unroll=UNROLL,
        resolve=_resolve,
        judge=_judge,
        load=_load,
        export=_export,
        forms=("raw", "speculators"),
        repairs=_repairs,
        with_vocabulary=with_vocabulary,
    ),
)
