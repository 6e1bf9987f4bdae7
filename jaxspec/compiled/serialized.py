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
from jaxspec.system.files import atomic_replace, explain_write_errors, write_text_atomic

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


class UnusableProgramError(Exception):
    """A folder or a program in it cannot be used; the message names it, and why."""


class ProgramTarget(NamedTuple):
    """All that a compiled program depends on, beside its name."""

    versions: dict[str, str]
    """Of JAX, and of its compiler's parts."""
    card: str
    """Kind of device, as JAX calls it."""
    code: str
    """Digest of this package's code."""
    sizes: dict[str, Any]
    """Of model and prompts."""

    def list_differences(self, local_target: "ProgramTarget") -> list[str]:
        """Compares with `local_target`: each difference in words."""
        differences = []
        for name in sorted({*self.versions, *local_target.versions}):
            target_value, local_value = self.versions.get(name), local_target.versions.get(name)
            if target_value != local_value:
                differences.append(
                    f"{name} {target_value or 'absent'} (here: {local_value or 'absent'})"
                )
        if self.card != local_target.card:
            differences.append(f"a {self.card} (here: {local_target.card})")
        if self.code != local_target.code:
            differences.append(f"the code {self.code} (here: {local_target.code})")
        for name in sorted({*self.sizes, *local_target.sizes}):
            target_value, local_value = self.sizes.get(name), local_target.sizes.get(name)
            if target_value != local_value:
                differences.append(f"--{name} {target_value} (here: {local_value})")
        return differences


def compiler_versions() -> dict[str, str]:
    """Versions of JAX and its CUDA plugins, as far as they are installed."""
    versions = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def serialize_program(program: Any) -> bytes:
    """Serializes a compiled program."""
    components = serialize_executable.serialize(program)
    # layers that repeat lie too far apart for zlib, whose files are four times as large
    return lzma.compress(pickle.dumps(components), preset=1)


def deserialize_program(content: bytes, devices: Sequence[Any]) -> Any:
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

    def __init__(self, folder: Path, target: ProgramTarget, entries: Mapping[str, _Entry]) -> None:
        """Holds the `entries` of a folder; `open_existing` and `open_writable` make them."""
        self.folder, self.target = folder, target
        self._entries = dict(entries)
        self._lock = threading.Lock()

    @classmethod
    def open_existing(cls, folder: Path, local_target: ProgramTarget) -> "ProgramFolder":
        """Opens a folder of programs.

        Raises:
          UnusableProgramError: its manifest is missing or damaged, or it was made for another
            target.
        """
        target, entries = _read_manifest(folder / MANIFEST)
        if differences := target.list_differences(local_target):
            raise UnusableProgramError(
                f"the programs of {folder} were made for {'; '.join(differences)}: they are"
                " compiled here instead"
            )
        return cls(folder, target, entries)

    @classmethod
    def open_writable(cls, folder: Path, target: ProgramTarget) -> "ProgramFolder":
        """Opens a folder to write to; keeps programs that were made for the same target."""
        with contextlib.suppress(UnusableProgramError):
            return cls.open_existing(folder, target)
        return cls(folder, target, {})

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def total_bytes(self) -> int:
        """Bytes of all programs."""
        return sum(entry.bytes for entry in self._entries.values())

    def load_program(self, name: str, devices: Sequence[Any]) -> Any:
        """Loads a program onto devices.

        Raises:
          UnusableProgramError: its file is missing, damaged, or is refused by the runtime.
        """
        return self._read_entry(name, lambda content: deserialize_program(content, devices))

    def is_intact(self, name: str) -> bool:
        """Whether the program's file holds what was written."""
        if name not in self:
            return False
        try:
            self._read_entry(name, lambda content: None)
        except UnusableProgramError:
            return False
        return True

    def save_program(self, name: str, program: Any, seconds: float) -> int:
        """Writes a program and the manifest; returns the program's bytes."""
        content = serialize_program(program)
        file = self.folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.program"
        with atomic_replace(file) as temporary_file:
            temporary_file.write_bytes(content)
        entry = _Entry(file.name, hashlib.sha256(content).hexdigest(), len(content), seconds)
        # programs are compiled by several threads
        with self._lock:
            self._entries[name] = entry
            programs = {name: entry._asdict() for name, entry in self._entries.items()}
            manifest = {"format": _FORMAT, **self.target._asdict(), "programs": programs}
            write_text_atomic(
                self.folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True)
            )
        return len(content)

    def _read_entry(self, name: str, load_content: Any) -> Any:
        entry = self._entries[name]
        file = self.folder / entry.file
        try:
            content = file.read_bytes()
        except OSError as error:
            raise UnusableProgramError(
                f"{file} cannot be read ({error.strerror}): {_FALLBACK}"
            ) from error
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise UnusableProgramError(
                f"{file} is damaged ({len(content):,} bytes whose digest is not the manifest's,"
                f" of {entry.bytes:,} bytes): {_FALLBACK}"
            )
        try:
            return load_content(content)
        except _UNREADABLE as error:
            raise UnusableProgramError(
                f"{file} cannot be loaded ({first_line(error)}): {_FALLBACK}"
            ) from error


_FALLBACK = "its program is compiled here instead"


def _read_manifest(file: Path) -> tuple[ProgramTarget, dict[str, _Entry]]:
    fallback = "all programs are compiled here instead; --prepare makes a folder"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnusableProgramError(
            f"{file} cannot be read ({error.strerror}): {fallback}"
        ) from error
    except ValueError as error:
        raise UnusableProgramError(
            f"{file} is damaged ({first_line(error)}): {fallback}"
        ) from error
    try:
        if content["format"] != _FORMAT:
            raise UnusableProgramError(
                f"{file} has format {content['format']}, not {_FORMAT}: {fallback}"
            )
        target = ProgramTarget(**{name: content[name] for name in ProgramTarget._fields})
        entries = {
            name: _Entry(**{field: entry[field] for field in _Entry._fields})
            for name, entry in content["programs"].items()
        }
        foreign_files = [
            entry.file for entry in entries.values() if Path(entry.file).name != entry.file
        ]
        if foreign_files or not all(
            isinstance(mapping, dict) for mapping in (target.versions, target.sizes)
        ):
            raise ValueError(f"unexpected content {foreign_files or ''}".strip())
    except _DAMAGED as error:
        raise UnusableProgramError(
            f"{file} is damaged ({type(error).__name__}: {first_line(error)}): {fallback}"
        ) from error
    return target, entries


def require_writable(folder: Path) -> None:
    """Makes a folder and checks that files can be written to it.

    Raises:
      SaveError: the operating system refuses, with its reason.
    """
    with explain_write_errors(f"--prepare {folder} cannot be written to", "name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        test_file = folder / ".trial"
        test_file.write_bytes(b"")
        test_file.unlink()
