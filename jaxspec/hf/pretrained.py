"""Loading and saving of Hugging Face checkpoints.

Checkpoints are checked before any device memory is used. Weights are then read directly into their
final sharding.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.hf.names import (
    REDUNDANT_NAME,
    TensorEntry,
    WeightMapping,
    check_tensor_count,
    leaves_by_path,
    policy_mappings,
    select_mtp_names,
    tensor_entries,
    tensor_slices,
    to_tensor,
    to_weight,
)
from jaxspec.hf.peft import adapter_changes
from jaxspec.hf.policy_config import parse_policy_config
from jaxspec.hf.tensor_files import (
    FLOAT_DTYPES,
    StoredTensor,
    check_tensor_header,
    open_tensors,
    refuse_quantized,
)
from jaxspec.inputs.checked import ConfigError, prefix_errors, require
from jaxspec.inputs.json_keys import join_names, read_json
from jaxspec.inputs.spec import ModelConfig, ModelSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import add_changes
from jaxspec.state import PyTree
from jaxspec.system.files import expand_user_path

CONFIG_FILE = "config.json"
EMBEDDING_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the tensors with one row for each token."""
ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""File names of PEFT."""
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_SAMPLE_BYTES, _SAMPLE_COUNT = 2**12, 2**10
"""Bytes of each sample, and number of samples of a file, in a fingerprint."""


def find_folder(path: str, setting: str) -> Path:
    """Finds the local folder of a checkpoint.

    Downloads the checkpoint into the hub's cache first if `path` is an id on the hub.

    Args:
      path: folder, or id on the hub.
      setting: name of the setting in messages.

    Raises:
      ConfigError: there is no such folder, or it cannot be downloaded.
    """
    folder = expand_user_path(path, setting)
    if folder.is_dir():
        return folder
    # An id has the form OWNER/NAME. A relative path may look alike, so folders were tried first.
    is_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    missing = (
        f"{setting} {path}: no such"
        f" folder{', and no id on the hub such as Qwen/Qwen3-8B' if not is_id else ''}"
    )
    require(is_id, f"{missing}; give the folder of a checkpoint in safetensors")
    try:
        return _download_snapshot(path)
    # The hub's library raises these if it lacks a network, the repository or a permission.
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{missing}, and the download from the hub failed ({reason}); download it elsewhere and"
            " give its folder"
        ) from error


def absolute_path(path: str) -> str:
    """Makes the path of a checkpoint's folder absolute. Returns ids on the hub unchanged."""
    folder = expand_user_path(path, "checkpoint")
    return str(folder) if folder.is_dir() else path


# Cached, so that the whole run reads one revision.
@functools.cache
def _download_snapshot(name: str) -> Path:
    """Downloads a checkpoint and returns its folder."""
    # Imported here, because checkpoints in local folders do not need it.
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))


def make_adapter_merger(path: str, shapes: Decoder) -> Callable[[Decoder], Decoder]:
    """Makes a function that merges PEFT adapters.

    The function takes a policy, whose arrays it consumes, and returns the merged policy.

    Args:
      path: folder of the adapters.
      shapes: shapes of the policy.

    Raises:
      ConfigError: there is no such folder, or its adapters do not fit the policy.
    """
    folder = find_folder(path, "lora.path")
    stored_tensors = open_tensors(folder, ADAPTER_FILE)
    for tensor in stored_tensors.values():
        check_tensor_header(tensor)
    tensors = {name: tensor.read() for name, tensor in stored_tensors.items()}
    with prefix_errors(str(folder)):
        changes = adapter_changes(shapes, tensors, read_json(folder / ADAPTER_CONFIG_FILE))

    def merge(policy: Decoder) -> Decoder:
        # Donation lets the merged weights reuse the policy's memory.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, policy)
        return jax.jit(add_changes, donate_argnums=0, out_shardings=shardings)(policy, changes)

    return merge


def fingerprint_checkpoint(path: str) -> str:
    """Hashes samples of a checkpoint's configs and weights."""
    # Checkpoints have many gigabytes, so only samples are read. They suffice, because training
    # changes numbers everywhere.
    digest, folder = hashlib.sha256(), find_folder(path, "checkpoint")
    for file in sorted(
        file
        for pattern in ("*.safetensors", "*config.json")
        for file in folder.glob(pattern)
        if file.is_file()
    ):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            for offset in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLE_COUNT)):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def load_policy_config(base: ModelConfig) -> ModelSpec:
    """Reads the config of the policy at `base.path`.

    The dtype, the rope factor and other settings come from `base`, as in `parse_policy_config`.

    Raises:
      ConfigError: as `find_folder` and `parse_policy_config` do.
    """
    file = find_folder(base.path, "model.path") / CONFIG_FILE
    with prefix_errors(f"model.path {base.path}"):
        content = read_json(file)
    return parse_policy_config(content, str(file), replace(base, path=absolute_path(base.path)))


def open_policy_checkpoint(
    config: ModelSpec, abstract: PyTree, vocab_rows: int = 0
) -> "HfCheckpoint":
    """Opens and checks the checkpoint at `config.path`.

    Args:
      config: policy in the checkpoint.
      abstract: shapes, dtypes and shardings of the policy.
      vocab_rows: vocabulary rows of the checkpoint, which are padded or cut to those of `config`.
        0 = no change.

    Raises:
      ConfigError: as `find_folder`, `open_tensors` and `HfCheckpoint` do.
    """
    folder = find_folder(config.path, "model.path")
    tensors = open_tensors(folder)
    for name in (EMBEDDING_NAME, HEAD_NAME):
        if name in tensors and tensors[name].shape[:1] == (vocab_rows,):
            tensors[name] = tensors[name].resize_rows(config.vocab)
    # Multi-token-prediction layers are no weights of the policy. Drafts read them separately.
    for name in select_mtp_names(list(tensors), config.layers):
        del tensors[name]
    return HfCheckpoint(folder, tensors, policy_mappings(config), abstract, config.ignore)


class HfCheckpoint:
    """Checkpoint whose tensors have been checked against a network."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, StoredTensor],
        mappings: Sequence[WeightMapping],
        abstract: PyTree,
        ignore: bool,
    ) -> None:
        """Checks the headers of the tensors.

        Args:
          folder: folder of the checkpoint, for messages.
          tensors: tensors of the checkpoint, by name.
          mappings: mappings of the network's weights.
          abstract: shapes, dtypes and shardings of the network.
          ignore: allows unknown tensors.

        Raises:
          ConfigError: tensors are missing, unknown, quantized, not floats, or of another shape. Or
            a stored head differs from the embedding that it is tied to.
        """
        # Comes first. Packed weights also have other shapes, but that error would hide the cause.
        refuse_quantized(folder, tensors)
        self._abstract, self._tensors = abstract, tensors
        leaves = leaves_by_path(abstract)
        # Checked before entries are made. A wrong count in config.json could make billions of them.
        for mapping in mappings:
            check_tensor_count(
                mapping, leaves[mapping.weight_path].shape, len(tensors), str(folder)
            )
        self._entries = {
            mapping.weight_path: tensor_entries(mapping, leaves[mapping.weight_path].shape)
            for mapping in mappings
        }
        _check_tensors(
            folder,
            [entry for entries in self._entries.values() for entry in entries],
            tensors,
            ignore,
        )
        self.bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())

    def load(self, progress: Callable[[int], None]) -> PyTree:
        """Loads the network onto its devices.

        Each process reads only the slices of its own devices.

        Args:
          progress: called after each weight with the number of bytes loaded so far.
        """
        loaded_bytes, weights = 0, {}
        for name, leaf in leaves_by_path(self._abstract).items():
            weights[name] = self._load_weight(self._entries[name], leaf)
            loaded_bytes += math.prod(leaf.shape) * leaf.dtype.itemsize
            progress(loaded_bytes)
        return jax.tree.unflatten(jax.tree.structure(self._abstract), list(weights.values()))

    def _load_weight(self, entries: list[TensorEntry], leaf: Any) -> jax.Array:
        """Loads one weight onto its devices."""
        mapping, tensors = (
            entries[0].mapping,
            {entry.leading_index: self._tensors[entry.name] for entry in entries},
        )
        shards = []
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            shards.append(jax.device_put(_load_slice(mapping, tensors, leaf, index), device))
        # Transfers are asynchronous. Waiting keeps the host copies of at most one weight in memory.
        return jax.block_until_ready(
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
        )


def _load_slice(
    mapping: WeightMapping,
    tensors: Mapping[tuple[int, ...], StoredTensor],
    leaf: Any,
    index: tuple[slice, ...],
) -> np.ndarray:
    """Reads a slice of a weight in its dtype."""
    ranges = [
        range(*axis_slice.indices(size)) for axis_slice, size in zip(index, leaf.shape, strict=True)
    ]
    outer, shape, inner = tensor_slices(
        mapping, index[mapping.leading_ndim :], leaf.shape[mapping.leading_ndim :]
    )
    weight = np.empty([len(axis_range) for axis_range in ranges], leaf.dtype)
    for leading_index in product(*ranges[: mapping.leading_ndim]):
        # Positions in the result count from the start of the slice.
        target = tuple(
            number - axis_range.start
            for number, axis_range in zip(leading_index, ranges, strict=False)
        )
        weight[target] = to_weight(mapping, tensors[leading_index].read(outer), shape)[inner]
    return weight


def _check_tensors(
    folder: Path, entries: list[TensorEntry], tensors: Mapping[str, StoredTensor], ignore: bool
) -> None:
    """Checks the names, dtypes and shapes of tensors."""
    entries_by_name = {entry.name: entry for entry in entries}
    missing = join_names([name for name in entries_by_name if name not in tensors])
    require(
        not missing,
        f"{folder} lacks tensors that its config.json requires: {missing}; download it again, or"
        " correct config.json",
    )
    non_floats = join_names(
        [
            f"{name} ({tensors[name].dtype})"
            for name in entries_by_name
            if tensors[name].dtype not in FLOAT_DTYPES
        ]
    )
    require(
        not non_floats,
        f"{folder} holds weights that are not floats of 16 bits or more: {non_floats}; give weights"
        " that are not quantized",
    )
    mismatches = [
        f"{name} is {list(tensors[name].shape)}, config.json says {list(entry.shape)}"
        for name, entry in entries_by_name.items()
        if tensors[name].shape != entry.shape
    ]
    require(
        not mismatches,
        f"{folder} holds tensors of another shape: {join_names(mismatches, '; ')}; correct"
        " config.json",
    )
    known_names = entries_by_name.keys() | {
        name for name in tensors if REDUNDANT_NAME.fullmatch(name)
    }
    head, embedding = HEAD_NAME, EMBEDDING_NAME
    # Some programs write a tied head, too. It must equal the embedding, or the config is wrong.
    if head in tensors and head not in known_names and embedding in known_names:
        comparable = (
            tensors[head].shape == tensors[embedding].shape and tensors[head].dtype in FLOAT_DTYPES
        )
        is_equal = comparable and np.array_equal(tensors[head].read(), tensors[embedding].read())
        require(
            is_equal,
            f"{folder}: tie_word_embeddings is true, but {head} differs from {embedding}; set the"
            " key to false in config.json",
        )
        known_names |= {head}
    unknown = join_names([name for name in tensors if name not in known_names])
    require(
        ignore or not unknown,
        f"{folder} holds tensors that have no place here: {unknown}; leave them out with"
        " --model.ignore",
    )


def stream_tensors(
    mappings: Sequence[WeightMapping], network: PyTree, dtype: Any
) -> Iterator[tuple[str, int, Callable[[], np.ndarray]]]:
    """Yields the tensors of a network for `tensor_files.write_tensors`.

    Yields:
      The name of a tensor, its bytes in `dtype`, and a function that makes it.
    """
    leaves = leaves_by_path(network)
    for mapping in mappings:
        for entry in tensor_entries(mapping, leaves[mapping.weight_path].shape):
            yield (
                entry.name,
                math.prod(entry.shape) * np.dtype(dtype).itemsize,
                _defer_conversion(entry, leaves[mapping.weight_path], dtype),
            )


def _defer_conversion(entry: TensorEntry, leaf: Any, dtype: Any) -> Callable[[], np.ndarray]:
    """Returns a function that converts one tensor."""
    # A tensor is copied from its device only when it is written, to save host memory.
    return lambda: to_tensor(entry.mapping, np.asarray(leaf[entry.leading_index])).astype(dtype)
