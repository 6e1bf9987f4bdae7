"""What the published files of drafts have in common: tensors are read by a table of rows, which
must fit, and written by it; what a draft leaves out is lent by its policy."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.hf.names import Place, Row, check_count, named_leaves, places, to_ours, to_theirs
from jaxspec.hf.pretrained import find_folder
from jaxspec.hf.tensor_files import WHOLES, Stored, check_header, open_tensors
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import listed
from jaxspec.inputs.spec import DraftSpec
from jaxspec.state import PyTree

Arrays = Mapping[str, np.ndarray]
MODEL_PATH, DRAFT_PATH = "model.path", "rollout.draft.path"


BUFFERS: dict[str, tuple[str, ...]] = {"d2t": WHOLES, "t2d": (*WHOLES, "BOOL")}
"""Tensors of a draft, by their normal names, that are no weights, and the types that they may
have."""


def check_padding(source: str, own: int, vocab: int, tokens: int) -> None:
    """Raises ConfigError if a draft's vocabulary of `own` rows differs from the policy's in more
    than rows without a token, of which published models have some."""
    fits = own == vocab or min(own, vocab) >= tokens
    require(
        fits,
        f"{source}: the draft was made for a vocabulary of {own}, model.vocab is {vocab}, and the"
        f" tokenizer has {tokens} tokens; choose a draft that shares the policy's",
    )


def check_headers(tensors: Mapping[str, Stored]) -> None:
    """Raises ConfigError for a draft's tensors of a type or number of axes that none has."""
    for name, stored in tensors.items():
        if name in BUFFERS:
            check_header(stored, BUFFERS[name], (1,))
        else:
            check_header(stored)


def read_all(tensors: Mapping[str, Stored]) -> dict[str, np.ndarray]:
    """A draft's tensors; their headers are checked before."""
    check_headers(tensors)
    return {name: stored.read() for name, stored in tensors.items()}


def lent(spec: DraftSpec, values: bool) -> dict[str, np.ndarray]:
    """The policy's embedding [V D] and head [D V]; where their values do not matter, something of
    the same shape."""
    model = spec.policy
    if not values or not model.path:
        shape = model.vocab, model.embed
        lacks = (
            f"{DRAFT_PATH} {spec.path} borrows the policy's embedding or head, which"
            f" can only be looked up with --{MODEL_PATH}"
        )
        require(not values, lacks)
        return {
            "embedding": np.broadcast_to(np.float32(math.nan), shape),
            "head": np.broadcast_to(np.float32(math.nan), shape[::-1]),
        }
    tensors = open_tensors(find_folder(model.path, MODEL_PATH))
    names = ["model.embed_tokens.weight", *([] if model.tied else ["lm_head.weight"])]
    for name in names:
        require(
            name in tensors,
            f"{MODEL_PATH} {model.path} lacks the tensor {name}, which the draft borrows; download"
            " the checkpoint again",
        )
        check_header(tensors[name], axes=(2,))
    embedding, *head = (tensors[name].read() for name in names)
    return {"embedding": embedding, "head": (head[0] if head else embedding).T}


def fitting(
    rows: list[Row], tensors: Mapping[str, Stored] | Arrays, network: Any, source: str
) -> dict[str, Place]:
    """Places of a draft's tensors in a network, by name; only their shapes are looked at.

    Raises:
      ConfigError: a row finds no tensor, a tensor no row, or one has another shape.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(network).items()}
    for row in rows:
        check_count(row, shapes[row.ours], len(tensors), source)
    wanted = {place.name: place for row in rows for place in places(row, shapes[row.ours])}
    missing = [name for name in wanted if name not in tensors]
    unknown = sorted(tensors.keys() - wanted.keys())
    require(
        not missing,
        f"{source} lacks {listed(missing)}; it is damaged, or its config.json speaks of another"
        " draft",
    )
    require(
        not unknown, f"{source} has {listed(unknown)}, which a draft of this form has no place for"
    )
    for name, place in wanted.items():
        fits = (
            f"{source}: {name} has shape {list(tensors[name].shape)}; the config asks for"
            f" {list(place.shape)}"
        )
        require(tensors[name].shape == place.shape, fits)
    return wanted


def collected(rows: list[Row], tensors: Arrays, network: Any, source: str) -> dict[str, np.ndarray]:
    """Arrays by attribute path for the shapes of a network; raises as `fitting` does."""
    shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(network).items()}
    found: dict[str, np.ndarray] = {}
    for name, place in fitting(rows, tensors, network, source).items():
        tensor, row, shape = tensors[name], place.row, shapes[place.row.ours]
        found.setdefault(row.ours, np.empty(shape, tensor.dtype))[place.lead] = to_ours(
            row, tensor, shape[row.leading :]
        )
    return found


def filled(network: Any, arrays: Arrays) -> Any:
    """A network, or its shapes, with arrays of the host by attribute path in place of all its
    leaves, in the leaves' own types.

    Raises:
      ConfigError: an array is missing, is foreign, or has another shape.
    """
    leaves = named_leaves(network)
    missing, foreign = sorted(leaves.keys() - arrays.keys()), sorted(arrays.keys() - leaves.keys())
    require(not missing, f"the draft's {listed(missing)} is not among what was loaded")
    require(not foreign, f"the draft has no {listed(foreign)}, which was loaded")
    for name, leaf in leaves.items():
        shapes = (
            f"the draft's {name} has shape {list(leaf.shape)}, and {list(arrays[name].shape)} was"
            " loaded"
        )
        require(arrays[name].shape == leaf.shape, shapes)
    return jax.tree.unflatten(
        jax.tree.structure(network),
        [arrays[name].astype(leaf.dtype) for name, leaf in leaves.items()],
    )


def written(rows: list[Row], network: PyTree) -> dict[str, np.ndarray]:
    """A network's tensors by their published names."""
    leaves = named_leaves(network)
    found = [
        (place, np.asarray(leaves[row.ours][place.lead]))
        for row in rows
        for place in places(row, leaves[row.ours].shape)
    ]
    return {place.name: np.ascontiguousarray(to_theirs(place.row, array)) for place, array in found}


def as_type(tensors: Arrays, dtype: np.dtype) -> list[tuple[str, int, Any]]:
    """Tensors as they are exported, floating ones in another type: name, bytes, what makes it."""
    cast = {
        name: array.astype(dtype) if np.issubdtype(array.dtype, np.floating) else array
        for name, array in tensors.items()
    }
    return [(name, array.nbytes, lambda array=array: array) for name, array in cast.items()]
