"""Safetensors files: what is in a folder, checked before anything is read; slices of tensors
without a copy; and writing them."""

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
from jaxspec.inputs.json_keys import listed, named, read_keys, shown

WEIGHTS = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""Larger weights are written as several files with an index."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


_INFINITY = {"F64": 0x47EFFFFFF << 28, "F32": 0x7F80 << 16, "F16": 0x7C00, "BF16": 0x7F80}
"""The bits of infinity by type; those of NaN are above it, those of every finite number that is not
negative below. Of 64 bits, those of the least number that is infinite in float32."""


def _finite(array: np.ndarray, dtype: str) -> bool:
    """Whether a tensor of that type has neither NaN nor infinity in float32; only floats of 16 bits
    or more are looked at.

    The maxima of its bits read with a sign, for numbers that are not negative, and without one, for
    the others, tell. NumPy finds those of 16 bits ten times as fast as it asks each number, and
    they take no memory.
    """
    infinity, bits = _INFINITY.get(dtype), 8 * array.dtype.itemsize
    if infinity is None or not array.size:
        return True
    positive, negative = array.view(f"i{bits // 8}").max(), array.view(f"u{bits // 8}").max()
    return bool(positive < infinity and negative < infinity + (1 << bits - 1))


class Stored(NamedTuple):
    """A tensor in an open file, of which only the header has been read."""

    file: Path
    opened: Any
    name: str
    dtype: str
    """As safetensors spells it: BF16, F32, ..."""
    shape: tuple[int, ...]

    def with_rows(self, rows: int) -> Stored:
        """The tensor with so many rows: zeros are added at the end, or rows left out there."""
        return self._replace(shape=(rows, *self.shape[1:]))

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The part of the tensor at `index`; nothing else is read.

        Raises:
          ConfigError: it has NaN, or what is infinite in float32; file and tensor are named.
        """
        held = self.opened.get_slice(self.name)
        if tuple(held.get_shape()) != self.shape:
            return self._read_rows(held.get_shape()[0], index or (slice(None),))
        part = held[index] if index else self.opened.get_tensor(self.name)
        return self._require_finite(part)

    def _read_rows(self, held: int, index: tuple[slice, ...]) -> np.ndarray:
        """The part of a tensor whose file holds another number of rows."""
        start, stop, _ = index[0].indices(self.shape[0])
        # an empty slice has the type and the other axes
        inside = slice(min(start, held - 1), max(min(stop, held), min(start, held - 1)))
        part = self.opened.get_slice(self.name)[(inside, *index[1:])]
        part = self._require_finite(part)[: max(0, min(stop, held) - start)]
        made = np.zeros((stop - start, *part.shape[1:]), part.dtype)
        made[: len(part)] = part
        return made

    def _require_finite(self, part: np.ndarray) -> np.ndarray:
        damaged = (
            f"{self.file}: the tensor {named(self.name)} has values that are not finite (NaN, or"
            " infinity in float32)"
        )
        require(
            _finite(part, self.dtype),
            f"{damaged}; download the file again, or give a checkpoint whose training did not"
            " diverge",
        )
        return part


FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of weights that can be read."""
WHOLES = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")


def check_header(
    stored: Stored, kinds: tuple[str, ...] = FLOATS, axes: tuple[int, ...] = (1, 2)
) -> None:
    """Raises ConfigError for a tensor of another type or number of axes, or of no numbers at all;
    only its header is looked at."""
    name = f"{stored.file}: the tensor {named(stored.name)}"
    remedy = (
        "give weights that are not quantized"
        if kinds == FLOATS
        else "give the file as it was published"
    )
    require(
        stored.dtype in kinds,
        f"{name} is of type {stored.dtype}; it must be one of {', '.join(kinds)}, so {remedy}",
    )
    counts = " or ".join(map(str, axes))
    fits = len(stored.shape) in axes and all(stored.shape)
    require(
        fits,
        f"{name} has shape {list(stored.shape)}; it must have {counts} axes, none of them of size"
        " 0; download the file again",
    )


_PACKED = re.compile(
    r".*\.(qweight|qzeros|weight_packed|weight_scale\w*|SCB|weight\.(absmax|quant_map|quant_state.*))"
)
"""Tensors that packed weights have: of GPTQ and AWQ, compressed-tensors, FP8, modelopt,
bitsandbytes."""


def refuse_quantized(folder: Path, names: Iterable[str]) -> None:
    """Raises ConfigError if the files or tensors of a folder say that its weights are quantized.

    Packed weights have other shapes too, so this comes before shapes are looked at.
    """
    remedy = "give weights that are not quantized"
    file = folder / "hf_quant_config.json"
    if file.is_file():
        kind = read_keys(file).part("quantization").content.get("quant_algo")
        require(kind is None, f"{file}: quant_algo is {shown(kind)}; {remedy}")
    packed = listed([name for name in names if _PACKED.fullmatch(name)])
    require(not packed, f"{folder} holds what goes with quantized weights: {packed}; {remedy}")


def open_tensors(folder: Path, name: str = WEIGHTS) -> dict[str, Stored]:
    """Looks up every tensor of a folder: those of its index, or of the file `name`.

    Raises:
      ConfigError: names the file that is missing, truncated, damaged or a pickle, or the files of
        two sets of weights, and what to do.
    """
    index = folder / f"{name}.index.json"
    if index.is_file():
        return _indexed(folder, index)
    file = folder / name
    if not file.is_file():
        pickles = sorted(found.name for pattern in _PICKLES for found in folder.glob(pattern))
        unsafe = (
            f"{folder} holds pickle files ({', '.join(pickles[:3])}), which can run code when they"
            f" are read, and no {name}"
        )
        require(
            not pickles,
            f"{unsafe}; convert them to safetensors first (transformers: save_pretrained)",
        )
        raise ConfigError(
            f"{folder} has neither {name} nor {index.name}; give the folder of a checkpoint in"
            " safetensors"
        )
    _refuse_second_set(folder, name, {name})
    return _header(file)


def _refuse_second_set(folder: Path, name: str, read: set[str]) -> None:
    """Raises ConfigError if a folder holds files of `name` beside those that would be read.

    Readers differ in which of two sets they take, and either may be the older one.
    """
    stem = re.escape(name.removesuffix(".safetensors"))
    shard = re.compile(rf"{stem}-\d+-of-\d+\.safetensors")
    others = sorted(
        file.name
        for file in folder.glob("*.safetensors")
        if (file.name == name or shard.fullmatch(file.name)) and file.name not in read
    )
    index = f"{name}.index.json"
    chosen = name if read == {name} else f"{index} names {listed(sorted(read))}"
    remedy = "leave the set that is meant, and move the files of the other to another folder"
    if others == [name]:
        remedy = f"leave the set that is meant, and move {name} or {index} to another folder"
    require(
        not others,
        f"{folder} holds two sets of weights ({chosen}; and {listed(others)}), of which one may be"
        f" of another training: {remedy}",
    )


_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "consolidated*.pth")
_OTHER_WEIGHTS += ("*.gguf", "tf_model*.h5", "flax_model*.msgpack")
"""Files of weights in a folder, in the forms of all libraries; the state of a trainer is none."""


def unread_weights(folder: Path, name: str = WEIGHTS) -> list[str]:
    """Names the files of weights in a folder that `open_tensors` does not read."""
    read = {stored.file.name for stored in open_tensors(folder, name).values()}
    found = {file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern)}
    return sorted(found - read)


def _indexed(folder: Path, index: Path) -> dict[str, Stored]:
    places = read_keys(index).part("weight_map").content
    require(
        bool(places), f"{index}: no key 'weight_map' that maps tensors to files; download it again"
    )
    for tensor, shard in places.items():
        known = (
            f"weight_map has {shown(tensor)} in {shown(shard)}, which is not the plain name of a"
            " file beside it"
        )
        require(_is_plain(shard), f"{index}: {known}; download it again")
    shards = sorted(set(places.values()))
    _refuse_second_set(folder, index.name.removesuffix(".index.json"), {*shards})
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    some = (
        f"{folder} lacks {len(missing)} of the {len(shards)} files that {index.name} names:"
        f" {', '.join(missing[:5])}"
    )
    require(not missing, f"{some}; download them again")
    headers = {shard: _header(folder / shard) for shard in shards}
    for tensor, shard in places.items():
        require(
            tensor in headers[shard],
            f"{folder / shard} lacks the tensor {named(tensor)}, which {index.name} places there;"
            " download it again",
        )
    for shard, header in headers.items():
        for tensor in header:
            place = places.get(tensor, shard)
            require(
                place == shard,
                f"{folder / shard} and {place} both hold the tensor {named(tensor)}, which"
                f" {index.name} places in the second; download both again",
            )
    return {tensor: headers[shard][tensor] for tensor, shard in places.items()}


def _is_plain(name: Any) -> bool:
    """Whether a name that a file states can only be that of a file in the same folder."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and not {"/", "\\"} & set(name)
        and name not in ("", ".", "..")
        and len(name) < 200
    )


def _header(file: Path) -> dict[str, Stored]:
    """The tensors of one file."""
    try:
        opened = safe_open(str(file), "np")
        parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # no dict
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file}: truncated or damaged, or no safetensors file ({named(str(error))}); download"
            " it again"
        ) from error
    return {
        name: Stored(file, opened, name, part.get_dtype(), tuple(part.get_shape()))
        for name, part in parts.items()
    }


def write_tensors(
    folder: Path, tensors: Iterable[tuple[str, int, Callable[[], np.ndarray]]], name: str = WEIGHTS
) -> Iterator[str]:
    """Writes tensors (name, bytes, what makes it), in files of at most `SHARD_BYTES` or one tensor
    each; yields the names as they are made.

    No more than one file's tensors are in memory at a time. A single file is called `name`; several
    get numbers and an index.
    """
    shards: list[list[tuple[str, Callable[[], np.ndarray]]]] = [[]]
    filled = total = 0
    for tensor, size, make in tensors:
        if shards[-1] and filled + size > SHARD_BYTES:
            shards, filled = [*shards, []], 0
        shards[-1].append((tensor, make))
        filled, total = filled + size, total + size
    stem, suffix = name.removesuffix(".safetensors"), ".safetensors"
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = name if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        made: dict[str, np.ndarray] = {}
        for tensor, make in shard:
            made[tensor], places[tensor] = np.ascontiguousarray(make()), file
            yield tensor
        save_file(made, folder / file, {"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / f"{name}.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
