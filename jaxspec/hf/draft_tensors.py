"""Conversion of tensors of published drafts.

A table of `WeightMapping` entries describes a draft, and the tensors of a file must match it
exactly. A draft may borrow its embedding and head from the policy.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.hf.names import (
    TensorEntry,
    WeightMapping,
    check_tensor_count,
    leaves_by_path,
    tensor_entries,
    to_tensor,
    to_weight,
)
from jaxspec.hf.pretrained import find_folder
from jaxspec.hf.tensor_files import INTEGER_DTYPES, StoredTensor, check_tensor_header, open_tensors
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import join_names
from jaxspec.inputs.spec import ModelSpec
from jaxspec.state import PyTree

NamedArrays = Mapping[str, np.ndarray]
MODEL_PATH, DRAFT_PATH = "model.path", "rollout.draft.path"


BUFFER_DTYPES: dict[str, tuple[str, ...]] = {
    "d2t": INTEGER_DTYPES,
    "t2d": (*INTEGER_DTYPES, "BOOL"),
}
"""Allowed dtypes of vocabulary buffers, by normalized name. Buffers are not weights."""


def check_vocabulary_padding(source: str, draft_vocab: int, vocab: int, token_count: int) -> None:
    """Checks that a draft's vocabulary matches the policy's.

    Args:
      source: file that messages name.
      draft_vocab: vocabulary rows of the draft.
      vocab: vocabulary rows of the policy.
      token_count: tokens of the tokenizer.

    Raises:
      ConfigError: the sizes differ, and one of them is below `token_count`.
    """
    # Rows beyond the tokens are padding, which published models add to different sizes.
    fits = draft_vocab == vocab or min(draft_vocab, vocab) >= token_count
    require(
        fits,
        f"{source}: the draft was made for a vocabulary of {draft_vocab}, model.vocab is {vocab},"
        f" and the tokenizer has {token_count} tokens; choose a draft with the policy's vocabulary",
    )


def check_tensor_headers(tensors: Mapping[str, StoredTensor]) -> None:
    """Checks the headers of a draft's tensors.

    Raises:
      ConfigError: a tensor has a dtype or a number of axes that no draft has.
    """
    for name, stored in tensors.items():
        if name in BUFFER_DTYPES:
            check_tensor_header(stored, BUFFER_DTYPES[name], (1,))
        else:
            check_tensor_header(stored)


def load_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, np.ndarray]:
    """Checks and reads a draft's tensors.

    Raises:
      ConfigError: as `check_tensor_headers`, or values are not finite.
    """
    # All headers come first, so that a bad one is reported before gigabytes are read.
    check_tensor_headers(tensors)
    return {name: stored.read() for name, stored in tensors.items()}


def load_policy_embeddings(
    model: ModelSpec, draft_path: str, with_values: bool
) -> dict[str, np.ndarray]:
    """Reads the policy's embedding [V D] and head [D V].

    The draft of `draft_path` borrows them. Without `with_values`, returns NaN in these shapes and
    reads no file.

    Raises:
      ConfigError: values are needed, and the policy has no checkpoint or one that lacks them.
    """
    if not with_values or not model.path:
        shape = model.vocab, model.embed
        message = (
            f"{DRAFT_PATH} {draft_path} borrows the policy's embedding or head, which"
            f" can only be looked up with --{MODEL_PATH}"
        )
        require(not with_values, message)
        return {
            # One number, broadcast, takes no memory. NaN would show in any result that used it.
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
        check_tensor_header(tensors[name], ranks=(2,))
    # A tied head is the embedding itself. Both are stored as [V D].
    embedding, *head = (tensors[name].read() for name in names)
    return {"embedding": embedding, "head": (head[0] if head else embedding).T}


def match_tensors(
    mappings: list[WeightMapping],
    tensors: Mapping[str, StoredTensor] | NamedArrays,
    network: Any,
    source: str,
) -> dict[str, TensorEntry]:
    """Matches a draft's tensors to a network's weights.

    Compares names and shapes only.

    Returns:
      The entry of each tensor, by tensor name.

    Raises:
      ConfigError: a tensor is missing, unknown, or of another shape.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves_by_path(network).items()}
    for mapping in mappings:
        # Checked before entries are made. A wrong count in config.json could make billions of them.
        check_tensor_count(mapping, shapes[mapping.weight_path], len(tensors), source)
    entries = {
        entry.name: entry
        for mapping in mappings
        for entry in tensor_entries(mapping, shapes[mapping.weight_path])
    }
    missing = [name for name in entries if name not in tensors]
    unknown = sorted(tensors.keys() - entries.keys())
    require(
        not missing,
        f"{source} lacks {join_names(missing)}; the file is damaged, or its config.json describes"
        " another draft",
    )
    require(
        not unknown,
        f"{source} has {join_names(unknown)}, which a draft of this form has no place for",
    )
    for name, entry in entries.items():
        message = (
            f"{source}: {name} has shape {list(tensors[name].shape)}; the config asks for"
            f" {list(entry.shape)}"
        )
        require(tensors[name].shape == entry.shape, message)
    return entries


def assemble_arrays(
    mappings: list[WeightMapping], tensors: NamedArrays, network: Any, source: str
) -> dict[str, np.ndarray]:
    """Assembles a network's arrays from tensors.

    Returns:
      Arrays by attribute path.

    Raises:
      ConfigError: as `match_tensors` does.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in leaves_by_path(network).items()}
    arrays: dict[str, np.ndarray] = {}
    for name, entry in match_tensors(mappings, tensors, network, source).items():
        tensor, mapping, shape = tensors[name], entry.mapping, shapes[entry.mapping.weight_path]
        # The tensors of all layers fill one stacked array.
        arrays.setdefault(mapping.weight_path, np.empty(shape, tensor.dtype))[
            entry.leading_index
        ] = to_weight(mapping, tensor, shape[mapping.leading_ndim :])
    return arrays


def replace_leaves(network: Any, arrays: NamedArrays) -> Any:
    """Replaces a network's leaves by host arrays.

    Args:
      network: a network or its shapes. Its leaves set the dtypes of the result.
      arrays: arrays by attribute path.

    Raises:
      ConfigError: an array is missing, unknown, or of another shape.
    """
    leaves = leaves_by_path(network)
    missing, foreign = sorted(leaves.keys() - arrays.keys()), sorted(arrays.keys() - leaves.keys())
    require(not missing, f"the draft's {join_names(missing)} is not among what was loaded")
    require(not foreign, f"the draft has no {join_names(foreign)}, which was loaded")
    for name, leaf in leaves.items():
        message = (
            f"the draft's {name} has shape {list(leaf.shape)}, and {list(arrays[name].shape)} was"
            " loaded"
        )
        require(arrays[name].shape == leaf.shape, message)
    return jax.tree.unflatten(
        jax.tree.structure(network),
        [arrays[name].astype(leaf.dtype) for name, leaf in leaves.items()],
    )


def export_tensors(mappings: list[WeightMapping], network: PyTree) -> dict[str, np.ndarray]:
    """Converts a network to tensors by published name."""
    leaves = leaves_by_path(network)
    entries = [
        (entry, np.asarray(leaves[mapping.weight_path][entry.leading_index]))
        for mapping in mappings
        for entry in tensor_entries(mapping, leaves[mapping.weight_path].shape)
    ]
    return {
        entry.name: np.ascontiguousarray(to_tensor(entry.mapping, array))
        for entry, array in entries
    }


def cast_tensors(tensors: NamedArrays, dtype: np.dtype) -> list[tuple[str, int, Any]]:
    """Casts floating-point tensors for export.

    Returns:
      For each tensor its name, its bytes, and a function that returns it, for `write_tensors`.
    """
    # Vocabulary buffers stay integers or booleans.
    cast_arrays = {
        name: array.astype(dtype) if np.issubdtype(array.dtype, np.floating) else array
        for name, array in tensors.items()
    }
    # The default argument binds each array now. A plain closure would see the last one.
    return [(name, array.nbytes, lambda array=array: array) for name, array in cast_arrays.items()]
