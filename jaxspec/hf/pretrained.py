"""Weights from and to Hugging Face folders: found, checked before any device memory is used, read
straight to their final sharding."""

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
    REDUNDANT,
    Place,
    Row,
    check_count,
    mtp_names,
    named_leaves,
    places,
    policy_rows,
    their_slices,
    to_ours,
    to_theirs,
)
from jaxspec.hf.peft import changes_of
from jaxspec.hf.policy_config import model_config
from jaxspec.hf.tensor_files import (
    FLOATS,
    Stored,
    check_header,
    open_tensors,
    refuse_quantized,
)
from jaxspec.inputs.checked import ConfigError, read_from, require
from jaxspec.inputs.json_keys import listed, read_json
from jaxspec.inputs.spec import ModelConfig, ModelSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import changed
from jaxspec.state import PyTree
from jaxspec.system.files import expanded

CONFIG = "config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Tensors that have a row for each token."""
ADAPTERS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""PEFT's names."""
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_SAMPLE, _SAMPLES = 2**12, 2**10
"""Bytes of a sample, and samples of a file, in a fingerprint."""


def find_folder(path: str, setting: str) -> Path:
    """The local folder of a checkpoint; one on the hub is downloaded into the hub's own cache
    first.

    Raises:
      ConfigError: there is no such folder, or it cannot be downloaded; `setting` is named.
    """
    folder = expanded(path, setting)
    if folder.is_dir():
        return folder
    is_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    missing = (
        f"{setting} {path}: no such"
        f" folder{', and no id on the hub such as Qwen/Qwen3-8B' if not is_id else ''}"
    )
    require(is_id, f"{missing}; give the folder of a checkpoint in safetensors")
    try:
        return _downloaded(path)
    # all that the hub's library raises for want of a network, a repository or a right
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{missing}, and the hub cannot give it ({reason}); download it elsewhere and give its"
            " folder"
        ) from error


def absolute(path: str) -> str:
    """The path from anywhere of a folder that `find_folder` has found; an id on the hub as it
    is."""
    folder = expanded(path, "checkpoint")
    return str(folder) if folder.is_dir() else path


@functools.cache
def _downloaded(name: str) -> Path:
    """The hub is asked once, so that all of a run reads one revision."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))


def merger(path: str, shapes: Decoder) -> Callable[[Decoder], Decoder]:
    """Reads a PEFT folder, and returns what merges its adapters into a policy of these shapes,
    whose arrays it consumes.

    Raises:
      ConfigError: there is no such folder, or its adapters are not for this policy.
    """
    folder = find_folder(path, "lora.path")
    stored = open_tensors(folder, ADAPTERS)
    for tensor in stored.values():
        check_header(tensor)
    tensors = {name: tensor.read() for name, tensor in stored.items()}
    with read_from(str(folder)):
        changes = changes_of(shapes, tensors, read_json(folder / ADAPTER_CONFIG))

    def merge(policy: Decoder) -> Decoder:
        layout = jax.tree.map(lambda leaf: leaf.sharding, policy)
        return jax.jit(changed, donate_argnums=0, out_shardings=layout)(policy, changes)

    return merge


def fingerprint(path: str) -> str:
    """A digest of a checkpoint's settings and of samples of its weights: other weights have another
    one, and nothing is read whole."""
    digest, folder = hashlib.sha256(), find_folder(path, "checkpoint")
    for file in sorted(
        file
        for pattern in ("*.safetensors", "*config.json")
        for file in folder.glob(pattern)
        if file.is_file()
    ):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for place in range(0, size, max(_SAMPLE, size // _SAMPLES)):
                opened.seek(place)
                digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()


def policy_config(base: ModelConfig) -> ModelSpec:
    """The policy that `base.path` describes, in the type and with the stretching of `base`.

    Raises:
      ConfigError: as `find_folder` and `policy_config.model_config` do.
    """
    file = find_folder(base.path, "model.path") / CONFIG
    with read_from(f"model.path {base.path}"):
        content = read_json(file)
    return model_config(content, str(file), replace(base, path=absolute(base.path)))


def policy_checkpoint(config: ModelSpec, abstract: PyTree, rows: int = 0) -> "Checkpoint":
    """The checkpoint of `config.path`, checked against the shapes of `abstract`; MTP layers in it
    are left to drafts.

    Its vocabulary has `rows` rows, which are padded or cut to those of `config`; 0: those.
    """
    folder = find_folder(config.path, "model.path")
    tensors = open_tensors(folder)
    for name in (EMBEDDING, HEAD):
        if name in tensors and tensors[name].shape[:1] == (rows,):
            tensors[name] = tensors[name].with_rows(config.vocab)
    for name in mtp_names(list(tensors), config.layers):
        del tensors[name]
    return Checkpoint(folder, tensors, policy_rows(config), abstract, config.ignore)


class Checkpoint:
    """The tensors of a folder that fill a network by a table of rows; all of them have been
    checked."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Stored],
        rows: Sequence[Row],
        abstract: PyTree,
        ignore: bool,
    ) -> None:
        """Looks at the headers of the files only; `abstract` has the network's shapes, types and
        shardings.

        Raises:
          ConfigError: names the tensors that are missing, have another shape, are not floats, or
            (unless `ignore`) are not known.
        """
        refuse_quantized(folder, tensors)
        self._abstract, self._tensors = abstract, tensors
        leaves = named_leaves(abstract)
        for row in rows:
            check_count(row, leaves[row.ours].shape, len(tensors), str(folder))
        self._places = {row.ours: places(row, leaves[row.ours].shape) for row in rows}
        _check(
            folder, [place for found in self._places.values() for place in found], tensors, ignore
        )
        self.bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())

    def load(self, progress: Callable[[int], None]) -> PyTree:
        """The network on its devices: each process reads the slices that its own devices hold, one
        weight after the other.

        `progress` is told the bytes that are in place.
        """
        done, made = 0, {}
        for name, leaf in named_leaves(self._abstract).items():
            made[name] = self._load_one(self._places[name], leaf)
            done += math.prod(leaf.shape) * leaf.dtype.itemsize
            progress(done)
        return jax.tree.unflatten(jax.tree.structure(self._abstract), list(made.values()))

    def _load_one(self, found: list[Place], leaf: Any) -> jax.Array:
        row, by_lead = found[0].row, {place.lead: self._tensors[place.name] for place in found}
        shards = []
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            shards.append(jax.device_put(_read(row, by_lead, leaf, index), device))
        return jax.block_until_ready(
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
        )


def _read(
    row: Row, by_lead: Mapping[tuple[int, ...], Stored], leaf: Any, index: tuple[slice, ...]
) -> np.ndarray:
    """A slice of our weight in our type, from the tensors that hold parts of it."""
    ranges = [range(*part.indices(size)) for part, size in zip(index, leaf.shape, strict=True)]
    outer, shape, inner = their_slices(row, index[row.leading :], leaf.shape[row.leading :])
    made = np.empty([len(part) for part in ranges], leaf.dtype)
    for lead in product(*ranges[: row.leading]):
        at = tuple(number - part.start for number, part in zip(lead, ranges, strict=False))
        made[at] = to_ours(row, by_lead[lead].read(outer), shape)[inner]
    return made


def _check(folder: Path, wanted: list[Place], tensors: Mapping[str, Stored], ignore: bool) -> None:
    by_name = {place.name: place for place in wanted}
    missing = listed([name for name in by_name if name not in tensors])
    require(
        not missing,
        f"{folder} lacks tensors that its config.json calls for: {missing}; download it again, or"
        " correct config.json",
    )
    narrow = listed(
        [f"{name} ({tensors[name].dtype})" for name in by_name if tensors[name].dtype not in FLOATS]
    )
    require(
        not narrow,
        f"{folder} holds weights that are not floats of 16 bits or more: {narrow}; give weights"
        " that are not quantized",
    )
    wrong = [
        f"{name} is {list(tensors[name].shape)}, config.json says {list(place.shape)}"
        for name, place in by_name.items()
        if tensors[name].shape != place.shape
    ]
    require(
        not wrong,
        f"{folder} holds tensors of another shape: {listed(wrong, '; ')}; correct config.json",
    )
    known = by_name.keys() | {name for name in tensors if REDUNDANT.fullmatch(name)}
    head, embedding = HEAD, EMBEDDING
    # a tied head that was written all the same
    if head in tensors and head not in known and embedding in known:
        alike = tensors[head].shape == tensors[embedding].shape and tensors[head].dtype in FLOATS
        same = alike and np.array_equal(tensors[head].read(), tensors[embedding].read())
        require(
            same,
            f"{folder}: tie_word_embeddings is true, but {head} differs from {embedding}; set the"
            " key to false in config.json",
        )
        known |= {head}
    unknown = listed([name for name in tensors if name not in known])
    require(
        ignore or not unknown,
        f"{folder} holds tensors that have no place here: {unknown}; leave them out with"
        " --model.ignore",
    )


def tensors_of(
    rows: Sequence[Row], network: PyTree, dtype: Any
) -> Iterator[tuple[str, int, Callable[[], np.ndarray]]]:
    """The tensors of a checkpoint, each with its bytes in `dtype` and what makes it, for
    `tensor_files.write_tensors`."""
    leaves = named_leaves(network)
    for row in rows:
        for place in places(row, leaves[row.ours].shape):
            yield (
                place.name,
                math.prod(place.shape) * np.dtype(dtype).itemsize,
                _maker(place, leaves[row.ours], dtype),
            )


def _maker(place: Place, leaf: Any, dtype: Any) -> Callable[[], np.ndarray]:
    return lambda: to_theirs(place.row, np.asarray(leaf[place.lead])).astype(dtype)
