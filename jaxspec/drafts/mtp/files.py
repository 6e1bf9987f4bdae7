"""Tensors of MTP layers, by the names of MiMo and DeepSeek."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.hf.draft_tensors import NamedArrays, assemble_arrays
from jaxspec.hf.names import MIMO_MTP_PREFIX, WeightMapping, layer_mappings
from jaxspec.inputs.checked import require
from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.mtp import Mtp


def mtp_mappings(
    config: ModelSpec, embedding_first: bool, target_layers: int
) -> list[WeightMapping]:
    """Maps MTP layers to tensor names.

    Names follow MiMo or DeepSeek. DeepSeek's layers take [embedding, hidden], MiMo's take [hidden,
    embedding]. DeepSeek numbers MTP layers from `target_layers`, after the policy's own.
    """
    mimo_names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    token_norm, hidden_norm, projection, final_norm = (
        ("enorm", "hnorm", "eh_proj", "shared_head.norm") if embedding_first else mimo_names
    )
    prefix, first_layer = (
        ("model.layers.{layer}.", target_layers)
        if embedding_first
        else (f"{MIMO_MTP_PREFIX}{{layer}}.", 0)
    )
    fields = [
        ("embedding_norm", token_norm, "D -> D"),
        ("hidden_norm", hidden_norm, "D -> D"),
        ("project", projection, "D C -> C D"),
        ("norm", final_norm, "D -> D"),
    ]
    mappings = [
        WeightMapping(attribute, f"{prefix}{tensor_name}.weight", layout, first_layer=first_layer)
        for attribute, tensor_name, layout in fields
    ]
    return mappings + layer_mappings("layers.", prefix, config, first_layer=first_layer)


def find_mtp_layers(names: list[str], target_layers: int) -> tuple[int, bool]:
    """Counts MTP layers in a checkpoint's tensor names.

    Also returns whether they take [embedding, hidden].
    """
    for prefix, first_layer, projection, embedding_first in (
        ("model.mtp_layers.", 0, "input_proj", False),
        ("model.layers.", target_layers, "eh_proj", True),
    ):
        count = 0
        while f"{prefix}{first_layer + count}.{projection}.weight" in names:
            count += 1
        if count:
            return count, embedding_first
    return 0, True


def assemble_mtp_arrays(
    config: ModelSpec,
    embedding_first: bool,
    tensors: NamedArrays,
    target: NamedArrays,
    target_layers: int,
) -> dict[str, np.ndarray]:
    """Assembles the network's arrays from MTP tensors.

    Keys are attribute paths. `target` is as in `head_arrays`.

    Raises:
      ConfigError: A stored copy of the policy's embedding or head differs from the policy's.
    """
    weights = dict(tensors)
    copies = {name: weights.pop(name) for name in tensors if name.endswith(COPY_SUFFIXES)}
    check_copies(copies, target)
    return match_mtp_tensors(config, embedding_first, weights, target_layers, assemble_arrays)


COPY_SUFFIXES = (".embed_tokens.weight", ".shared_head.head.weight")
"""Name endings of policy tensors that a checkpoint repeats in its MTP layers."""


def check_copies(copies: NamedArrays, target: NamedArrays) -> None:
    """Checks that stored copies equal the policy's embedding and head.

    Raises:
      ConfigError: A copy differs.
    """
    for name, stored_copy in copies.items():
        # The network uses the policy's embedding and head, so a differing copy would be ignored.
        policy_array = (
            target["embedding"] if name.endswith("embed_tokens.weight") else target["head"].T
        )
        require(
            np.array_equal(stored_copy, policy_array),
            f"{name} is not the policy's own; MTP layers with an embedding or a head of their own"
            " cannot be loaded",
        )


def match_mtp_tensors(
    config: ModelSpec,
    embedding_first: bool,
    weights: Mapping[str, Any],
    target_layers: int,
    matcher: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """Applies `matcher` to the tensors of MTP layers.

    `matcher` is `match_tensors` or `assemble_arrays`.
    """
    # Only names and shapes are needed, so no weights are allocated.
    network = jax.eval_shape(lambda: Mtp(config, jax.random.key(0), config.layers, embedding_first))
    mappings = mtp_mappings(config, embedding_first, target_layers)
    return matcher(mappings, weights, network, "the checkpoint's MTP part")
