"""Reading and writing of safetensors files.

Files are checked before any tensor is read, and parts of a tensor are read without the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import format_name, format_value, join_names, load_json_object

WEIGHTS_FILE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""Largest size of one file. Larger checkpoints are split and get an index."""
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


# For F64, the bits of the smallest number that is infinite in float32.
_INFINITY_BITS = {"F64": 0x47EFFFFFF << 28, "F32": 0x7F80 << 16, "F16": 0x7C00, "BF16": 0x7F80}
"""Bits of infinity, by dtype."""


def _is_finite(array: np.ndarray, dtype: str) -> bool:
    """Returns whether a tensor is finite in float32.

    Returns True for dtypes other than floats of 16 bits or more.
    """
    infinity, bits = _INFINITY_BITS.get(dtype), 8 * array.dtype.itemsize
    if infinity is None or not array.size:
        return True
    # As integers, the bits of a float ascend with its magnitude, and NaN is above infinity. The
    # signed maximum finds the largest positive number, the unsigned one the largest negative. For
    # 16-bit floats NumPy is ten times as fast this way as with `isfinite`, and needs no memory.
    signed_max, unsigned_max = (
        array.view(f"i{bits // 8}").max(),
        array.view(f"u{bits // 8}").max(),
    )
    return bool(signed_max < infinity and unsigned_max < infinity + (1 << bits - 1))


class StoredTensor(NamedTuple):
    """Tensor in an open file, not yet read."""

    file: Path
    reader: Any
    name: str
    dtype: str
    """Dtype as safetensors spells it, such as BF16 or F32."""
    shape: tuple[int, ...]

    def resize_rows(self, rows: int) -> StoredTensor:
        """Pads the tensor with zero rows, or cuts it."""
        # Only the shape changes here. `read` sees the difference from the file and pads or cuts.
        return self._replace(shape=(rows, *self.shape[1:]))

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads the part of the tensor at `index`, and nothing else.

        Raises:
          ConfigError: the part has NaN, or numbers that are infinite in float32.
        """
        stored_slice = self.reader.get_slice(self.name)
        if tuple(stored_slice.get_shape()) != self.shape:
            return self._read_rows(stored_slice.get_shape()[0], index or (slice(None),))
        values = stored_slice[index] if index else self.reader.get_tensor(self.name)
        return self._require_finite(values)

    def _read_rows(self, stored_rows: int, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a padded or cut tensor."""
        start, stop, _ = index[0].indices(self.shape[0])
        # Stays within the stored rows. A range in the padding reads the last stored row, for its
        # dtype and other axes, and drops it.
        stored_range = slice(
            min(start, stored_rows - 1), max(min(stop, stored_rows), min(start, stored_rows - 1))
        )
        values = self.reader.get_slice(self.name)[(stored_range, *index[1:])]
        values = self._require_finite(values)[: max(0, min(stop, stored_rows) - start)]
        padded = np.zeros((stop - start, *values.shape[1:]), values.dtype)
        padded[: len(values)] = values
        return padded

    def _require_finite(self, values: np.ndarray) -> np.ndarray:
        """Raises ConfigError if values are not finite."""
        message = (
            f"{self.file}: the tensor {format_name(self.name)} has values that are not finite"
            " (NaN, or infinity in float32)"
        )
        require(
            _is_finite(values, self.dtype),
            f"{message}; download the file again, or give a checkpoint whose training did not"
            " diverge",
        )
        return values


FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Supported dtypes of weights."""
INTEGER_DTYPES = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")


def check_tensor_header(
    tensor: StoredTensor, dtypes: tuple[str, ...] = FLOAT_DTYPES, ranks: tuple[int, ...] = (1, 2)
) -> None:
    """Checks a tensor's dtype and shape.

    Raises:
      ConfigError: the tensor has another dtype, another number of axes, or no elements.
    """
    name = f"{tensor.file}: the tensor {format_name(tensor.name)}"
    remedy = (
        "give weights that are not quantized"
        if dtypes == FLOAT_DTYPES
        else "give the file as it was published"
    )
    require(
        tensor.dtype in dtypes,
        f"{name} is of type {tensor.dtype}; it must be one of {', '.join(dtypes)}, so {remedy}",
    )
    rank_text = " or ".join(map(str, ranks))
    fits = len(tensor.shape) in ranks and all(tensor.shape)
    require(
        fits,
        f"{name} has shape {list(tensor.shape)}; it must have {rank_text} axes, none of them of"
        " size 0; download the file again",
    )


_PACKED_NAME = re.compile(
    r".*\.(qweight|qzeros|weight_packed|weight_scale\w*|SCB|weight\.(absmax|quant_map|quant_state.*))"
)
"""Names of tensors of quantized weights.

They are those of GPTQ, AWQ, compressed-tensors, FP8, modelopt and bitsandbytes.
"""


def refuse_quantized(folder: Path, names: Iterable[str]) -> None:
    """Checks that weights are not quantized.

    Raises:
      ConfigError: a file or tensor name shows that the weights are quantized.
    """
    remedy = "give weights that are not quantized"
    file = folder / "hf_quant_config.json"
    if file.is_file():
        algorithm = load_json_object(file).get_object("quantization").content.get("quant_algo")
        require(algorithm is None, f"{file}: quant_algo is {format_value(algorithm)}; {remedy}")
    packed = join_names([name for name in names if _PACKED_NAME.fullmatch(name)])
    require(not packed, f"{folder} holds tensors of quantized weights: {packed}; {remedy}")


def open_tensors(folder: Path, name: str = WEIGHTS_FILE) -> dict[str, StoredTensor]:
    """Opens the tensors of a folder.

    Reads the files that an index lists, or the file `name` if there is no index.

    Raises:
      ConfigError: a file is missing, damaged or a pickle, or there are two sets of weights.
    """
    index_file = folder / f"{name}.index.json"
    if index_file.is_file():
        return _open_indexed_tensors(folder, index_file)
    file = folder / name
    if not file.is_file():
        # Loading a pickle can run any code, so these files are named but never read.
        pickles = sorted(
            pickle_file.name for pattern in _PICKLE_PATTERNS for pickle_file in folder.glob(pattern)
        )
        message = (
            f"{folder} holds pickle files ({', '.join(pickles[:3])}), which can run code when they"
            f" are read, and no {name}"
        )
        require(
            not pickles,
            f"{message}; convert them to safetensors first (transformers: save_pretrained)",
        )
        raise ConfigError(
            f"{folder} has neither {name} nor {index_file.name}; give the folder of a checkpoint in"
            " safetensors"
        )
    _refuse_second_set(folder, name, {name})
    return _read_header(file)


def _refuse_second_set(folder: Path, name: str, read_files: set[str]) -> None:
    """Checks for a second set of weights.

    Raises:
      ConfigError: there are files called `name`, or its shards, besides `read_files`.
    """
    # Libraries differ in the set that they prefer, and either may be out of date.
    stem = re.escape(name.removesuffix(".safetensors"))
    shard = re.compile(rf"{stem}-\d+-of-\d+\.safetensors")
    other_files = sorted(
        file.name
        for file in folder.glob("*.safetensors")
        if (file.name == name or shard.fullmatch(file.name)) and file.name not in read_files
    )
    index_name = f"{name}.index.json"
    description = (
        name if read_files == {name} else f"{index_name} names {join_names(sorted(read_files))}"
    )
    remedy = "leave the set that is meant, and move the files of the other to another folder"
    if other_files == [name]:
        remedy = f"leave the set that is meant, and move {name} or {index_name} to another folder"
    require(
        not other_files,
        f"{folder} holds two sets of weights ({description}; and {join_names(other_files)}), and"
        f" one may be from another training: {remedy}",
    )


_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "consolidated*.pth")
_WEIGHT_PATTERNS += ("*.gguf", "tf_model*.h5", "flax_model*.msgpack")
"""Patterns of weight files in the formats of all libraries. Trainer states do not match."""


def list_unread_weights(folder: Path, name: str = WEIGHTS_FILE) -> list[str]:
    """Lists weight files that `open_tensors` does not read."""
    read_files = {tensor.file.name for tensor in open_tensors(folder, name).values()}
    weight_files = {file.name for pattern in _WEIGHT_PATTERNS for file in folder.glob(pattern)}
    return sorted(weight_files - read_files)


def _open_indexed_tensors(folder: Path, index_file: Path) -> dict[str, StoredTensor]:
    """Opens the tensors that an index lists."""
    shards_by_tensor = load_json_object(index_file).get_object("weight_map").content
    require(
        bool(shards_by_tensor),
        f"{index_file}: no key 'weight_map' that maps tensors to files; download it again",
    )
    for tensor, shard in shards_by_tensor.items():
        # A path in a downloaded index could lead to any file on this machine.
        entry_message = (
            f"weight_map has {format_value(tensor)} in {format_value(shard)}, which is not the"
            " plain name of a file beside it"
        )
        require(_is_plain_name(shard), f"{index_file}: {entry_message}; download it again")
    shards = sorted(set(shards_by_tensor.values()))
    _refuse_second_set(folder, index_file.name.removesuffix(".index.json"), {*shards})
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    message = (
        f"{folder} lacks {len(missing)} of the {len(shards)} files that {index_file.name} names:"
        f" {', '.join(missing[:5])}"
    )
    require(not missing, f"{message}; download them again")
    headers = {shard: _read_header(folder / shard) for shard in shards}
    for tensor, shard in shards_by_tensor.items():
        require(
            tensor in headers[shard],
            f"{folder / shard} lacks the tensor {format_name(tensor)}, which {index_file.name}"
            " places there; download it again",
        )
    # Two copies of a tensor may differ, for example if shards of two checkpoints were mixed.
    for shard, header in headers.items():
        for tensor in header:
            listed_shard = shards_by_tensor.get(tensor, shard)
            require(
                listed_shard == shard,
                f"{folder / shard} and {listed_shard} both hold the tensor {format_name(tensor)},"
                f" which {index_file.name} places in the second; download both again",
            )
    return {tensor: headers[shard][tensor] for tensor, shard in shards_by_tensor.items()}


def _is_plain_name(name: Any) -> bool:
    """Returns whether a name refers to a file in the same folder."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and not {"/", "\\"} & set(name)
        and name not in ("", ".", "..")
        # Most file systems refuse names of more than 255 bytes.
        and len(name) < 200
    )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Opens one file and reads its header."""
    try:
        reader = safe_open(str(file), "np")
        slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118  # no dict
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file}: truncated or damaged, or not a safetensors file ({format_name(str(error))});"
            " download it again"
        ) from error
    return {
        name: StoredTensor(
            file, reader, name, tensor_slice.get_dtype(), tuple(tensor_slice.get_shape())
        )
        for name, tensor_slice in slices.items()
    }


def write_tensors(
    folder: Path,
    tensors: Iterable[tuple[str, int, Callable[[], np.ndarray]]],
    name: str = WEIGHTS_FILE,
) -> Iterator[str]:
    """Writes tensors and yields their names.

    A file has at most `SHARD_BYTES`, but a larger tensor has a file of its own. A single file is
    called `name`. Several files get numbers and an index. At most one file's tensors are in memory
    at a time.

    Args:
      folder: folder to write to.
      tensors: name and bytes of each tensor, and a function that makes it.
      name: file name.

    Yields:
      The name of each tensor once it is made.
    """
    shards: list[list[tuple[str, Callable[[], np.ndarray]]]] = [[]]
    shard_bytes = total = 0
    for tensor, size, make_array in tensors:
        if shards[-1] and shard_bytes + size > SHARD_BYTES:
            shards, shard_bytes = [*shards, []], 0
        shards[-1].append((tensor, make_array))
        shard_bytes, total = shard_bytes + size, total + size
    stem, suffix = name.removesuffix(".safetensors"), ".safetensors"
    files_by_tensor: dict[str, str] = {}
    # File names contain the number of files, so sizes are planned before any tensor is made.
    for number, shard in enumerate(shards, start=1):
        file = name if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        arrays: dict[str, np.ndarray] = {}
        for tensor, make_array in shard:
            arrays[tensor], files_by_tensor[tensor] = np.ascontiguousarray(make_array()), file
            yield tensor
        # Transformers refuses files that do not state a format in their metadata.
        save_file(arrays, folder / file, {"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files_by_tensor}
        (folder / f"{name}.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
