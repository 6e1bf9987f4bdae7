"""Folders of serialized compiled programs.

A manifest records the versions, card, code and sizes that the programs were compiled for. Programs
for anything else, and damaged files, are refused with the reason.
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
"""Name of the manifest in a folder of programs."""
_FORMAT = 1
# XLA does not promise that a serialized program loads in another version.
_DISTRIBUTIONS = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
)
_DAMAGED = (EOFError, OSError, ValueError, TypeError, KeyError, IndexError, AttributeError)
# Exceptions that were observed while damaged programs were unpacked and loaded.
_UNREADABLE = (
    *_DAMAGED,
    pickle.UnpicklingError,
    lzma.LZMAError,
    ImportError,
    jax.errors.JaxRuntimeError,
)


class UnusableProgramError(Exception):
    """A folder or its program cannot be used. The message says why."""


class ProgramTarget(NamedTuple):
    """Everything that a compiled program depends on."""

    versions: dict[str, str]
    """Versions of JAX and its compiler, by distribution."""
    card: str
    """JAX's `device_kind`."""
    code: str
    """Digest of this package's code."""
    sizes: dict[str, Any]
    """Sizes of model and prompts, by option."""

    def list_differences(self, local_target: "ProgramTarget") -> list[str]:
        """Describes each difference from `local_target`."""
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
    """Returns versions of JAX and its installed CUDA plugins."""
    versions = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def serialize_program(program: Any) -> bytes:
    """Serializes a compiled program."""
    components = serialize_executable.serialize(program)
    # The repeated code of layers is too far apart for zlib's window. Files of zlib are four times
    # as large.
    return lzma.compress(pickle.dumps(components), preset=1)


def deserialize_program(content: bytes, devices: Sequence[Any]) -> Any:
    """Loads a serialized program onto devices.

    Unpickling executes code from the file. Load only programs that you trust.
    """
    payload, inputs, outputs = pickle.loads(lzma.decompress(content))
    return serialize_executable.deserialize_and_load(
        payload, inputs, outputs, backend=devices[0].client, execution_devices=list(devices)
    )


class _Entry(NamedTuple):
    """Entry of the manifest for one program."""

    file: str
    sha256: str
    bytes: int
    seconds: float
    """Seconds of compilation."""


class ProgramFolder:
    """Folder of serialized programs for one target."""

    def __init__(self, folder: Path, target: ProgramTarget, entries: Mapping[str, _Entry]) -> None:
        """Takes the entries of a folder. Use `open_existing` or `open_writable` instead."""
        self.folder, self.target = folder, target
        self._entries = dict(entries)
        self._lock = threading.Lock()

    @classmethod
    def open_existing(cls, folder: Path, local_target: ProgramTarget) -> "ProgramFolder":
        """Opens a folder of programs.

        Raises:
          UnusableProgramError: the manifest is missing or damaged, or the programs are for another
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
        """Opens a folder to write to.

        Programs for the same target are kept. Others are dropped from the manifest at the first
        `save_program`.
        """
        with contextlib.suppress(UnusableProgramError):
            return cls.open_existing(folder, target)
        return cls(folder, target, {})

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def total_bytes(self) -> int:
        """Total size of all programs."""
        return sum(entry.bytes for entry in self._entries.values())

    def load_program(self, name: str, devices: Sequence[Any]) -> Any:
        """Loads a program onto devices.

        Raises:
          UnusableProgramError: its file is missing or damaged, or the runtime refuses it.
        """
        return self._read_entry(name, lambda content: deserialize_program(content, devices))

    def is_intact(self, name: str) -> bool:
        """Returns whether the folder has a program, with an undamaged file."""
        if name not in self:
            return False
        try:
            self._read_entry(name, lambda content: None)
        except UnusableProgramError:
            return False
        return True

    def save_program(self, name: str, program: Any, seconds: float) -> int:
        """Writes a program and the manifest. Returns the size of the program."""
        content = serialize_program(program)
        file = self.folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.program"
        with atomic_replace(file) as temporary_file:
            temporary_file.write_bytes(content)
        entry = _Entry(file.name, hashlib.sha256(content).hexdigest(), len(content), seconds)
        # Several threads compile and save programs.
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
        # Checked before unpickling, which executes code from the file.
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise UnusableProgramError(
                f"{file} is damaged ({len(content):,} bytes; the manifest lists {entry.bytes:,}"
                f" bytes with another digest): {_FALLBACK}"
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
        # A manifest must not make the program read, and execute, a file of another folder.
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
    """Creates a folder and checks that it is writable.

    Raises:
      SaveError: the operating system refuses, with its reason.
    """
    # Compiling takes minutes, so a folder that cannot be written to is reported first.
    with explain_write_errors(f"--prepare {folder} cannot be written to", "name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        test_file = folder / ".trial"
        test_file.write_bytes(b"")
        test_file.unlink()
