"""Compiled programs in a folder, for a machine that has no time to compile them.

A manifest beside them says what they were made for. Programs of other versions, or for another
card, are refused by name; so are files that do not hold any more what was written.
"""

import contextlib
import hashlib
import json
import lzma
import pickle
import re
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

from jaxspec.inputs.checked import first_line
from jaxspec.system.files import replacing, write_whole, writing

MANIFEST = "programs.json"
_FORMAT = 1
_DISTRIBUTIONS = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
)
_DAMAGED = (EOFError, OSError, ValueError, TypeError, KeyError, IndexError, AttributeError)
_UNREADABLE = (
    *_DAMAGED,
    pickle.UnpicklingError,
    lzma.LZMAError,
    ImportError,
    jax.errors.JaxRuntimeError,
)
"""All that unpacking and loading of a program was seen to raise."""


class Unusable(Exception):
    """A folder or a program in it cannot be used; the message names it, and why."""


class Target(NamedTuple):
    """All that a compiled program depends on, beside its name."""

    versions: dict[str, str]
    """Of JAX, and of its compiler's parts."""
    card: str
    """Kind of device, as JAX calls it."""
    code: str
    """Digest of this package's code."""
    sizes: dict[str, Any]
    """Of model and prompts."""

    def differences(self, here: "Target") -> list[str]:
        """Compares with what is `here`: each difference in words."""
        found = []
        for name in sorted({*self.versions, *here.versions}):
            made, have = self.versions.get(name), here.versions.get(name)
            if made != have:
                found.append(f"{name} {made or 'absent'} (here: {have or 'absent'})")
        if self.card != here.card:
            found.append(f"a {self.card} (here: {here.card})")
        if self.code != here.code:
            found.append(f"the code {self.code} (here: {here.code})")
        for name in sorted({*self.sizes, *here.sizes}):
            made, have = self.sizes.get(name), here.sizes.get(name)
            if made != have:
                found.append(f"--{name} {made} (here: {have})")
        return found


def compiler_versions() -> dict[str, str]:
    """Versions of JAX and its CUDA plugins, as far as they are installed."""
    found = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def pack(program: Any) -> bytes:
    """Serializes a compiled program."""
    parts = serialize_executable.serialize(program)
    # layers that repeat lie too far apart for zlib, whose files are four times as large
    return lzma.compress(pickle.dumps(parts), preset=1)


def unpack(content: bytes, devices: Sequence[Any]) -> Any:
    """Loads a serialized program onto devices, so that it can be called.

    Unpickling runs code of the file, as calling a program does: load only what is your own.
    """
    payload, inputs, outputs = pickle.loads(lzma.decompress(content))
    return serialize_executable.deserialize_and_load(
        payload, inputs, outputs, backend=devices[0].client, execution_devices=list(devices)
    )


class _Entry(NamedTuple):
    """A program of the manifest."""

    file: str
    sha256: str
    bytes: int
    seconds: float
    """It took to compile."""


class ProgramFolder:
    """Serialized programs by name, for one target."""

    def __init__(self, folder: Path, target: Target, entries: Mapping[str, _Entry]) -> None:
        """Holds the `entries` of a folder; `opened` and `begun` make them."""
        self.folder, self.target = folder, target
        self._entries = dict(entries)
        self._lock = threading.Lock()

    @classmethod
    def opened(cls, folder: Path, here: Target) -> "ProgramFolder":
        """Opens a folder of programs.

        Raises:
          Unusable: its manifest is missing or damaged, or it was made for another target.
        """
        target, entries = _read_manifest(folder / MANIFEST)
        if different := target.differences(here):
            raise Unusable(
                f"the programs of {folder} were made for {'; '.join(different)}: they are compiled"
                " here instead"
            )
        return cls(folder, target, entries)

    @classmethod
    def begun(cls, folder: Path, target: Target) -> "ProgramFolder":
        """Opens a folder to write to; keeps programs that were made for the same target."""
        with contextlib.suppress(Unusable):
            return cls.opened(folder, target)
        return cls(folder, target, {})

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all programs."""
        return sum(entry.bytes for entry in self._entries.values())

    def load(self, name: str, devices: Sequence[Any]) -> Any:
        """Loads a program onto devices.

        Raises:
          Unusable: its file is missing, damaged, or is refused by the runtime.
        """
        return self._attempt(name, lambda content: unpack(content, devices))

    def intact(self, name: str) -> bool:
        """Whether the program's file holds what was written."""
        if name not in self:
            return False
        try:
            self._attempt(name, lambda content: None)
        except Unusable:
            return False
        return True

    def save(self, name: str, program: Any, seconds: float) -> int:
        """Writes a program and the manifest; returns the program's bytes."""
        content = pack(program)
        file = self.folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.program"
        with replacing(file) as fresh:
            fresh.write_bytes(content)
        entry = _Entry(file.name, hashlib.sha256(content).hexdigest(), len(content), seconds)
        # programs are compiled by several threads
        with self._lock:
            self._entries[name] = entry
            listed = {name: entry._asdict() for name, entry in self._entries.items()}
            about = {"format": _FORMAT, **self.target._asdict(), "programs": listed}
            write_whole(self.folder / MANIFEST, json.dumps(about, indent=1, sort_keys=True))
        return len(content)

    def _attempt(self, name: str, use: Any) -> Any:
        entry = self._entries[name]
        file = self.folder / entry.file
        try:
            content = file.read_bytes()
        except OSError as error:
            raise Unusable(f"{file} cannot be read ({error.strerror}): {_COMPILED}") from error
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise Unusable(
                f"{file} is damaged ({len(content):,} bytes whose digest is not the manifest's,"
                f" of {entry.bytes:,} bytes): {_COMPILED}"
            )
        try:
            return use(content)
        except _UNREADABLE as error:
            raise Unusable(f"{file} cannot be loaded ({first_line(error)}): {_COMPILED}") from error


_COMPILED = "its program is compiled here instead"


def _read_manifest(file: Path) -> tuple[Target, dict[str, _Entry]]:
    whole = "all programs are compiled here instead; --prepare makes a folder"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unusable(f"{file} cannot be read ({error.strerror}): {whole}") from error
    except ValueError as error:
        raise Unusable(f"{file} is damaged ({first_line(error)}): {whole}") from error
    try:
        if content["format"] != _FORMAT:
            raise Unusable(f"{file} has format {content['format']}, not {_FORMAT}: {whole}")
        target = Target(**{name: content[name] for name in Target._fields})
        entries = {
            name: _Entry(**{field: entry[field] for field in _Entry._fields})
            for name, entry in content["programs"].items()
        }
        outside = [entry.file for entry in entries.values() if Path(entry.file).name != entry.file]
        if outside or not all(isinstance(part, dict) for part in (target.versions, target.sizes)):
            raise ValueError(f"unexpected content {outside or ''}".strip())
    except _DAMAGED as error:
        raise Unusable(
            f"{file} is damaged ({type(error).__name__}: {first_line(error)}): {whole}"
        ) from error
    return target, entries


def require_writable(folder: Path) -> None:
    """Makes a folder and checks that files can be written to it.

    Raises:
      SaveError: the operating system refuses, with its reason.
    """
    with writing(f"--prepare {folder} cannot be written to", "name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / ".trial"
        trial.write_bytes(b"")
        trial.unlink()
