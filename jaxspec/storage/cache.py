"""Weights kept for the next run: a cache of folders by what shapes their content, and trees of
arrays in one file."""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.json_keys import parse_json
from jaxspec.processes.global_arrays import from_host_values
from jaxspec.processes.process_0 import broadcast_number, require_shared_cache
from jaxspec.state import PyTree
from jaxspec.storage.trees import array_layout, leaves_by_name, require_same_layout
from jaxspec.system.files import (
    MISSING_FILE_ERRORS,
    DamagedFileError,
    atomic_replace,
    expand_user_path,
    explain_read_errors,
    explain_write_errors,
    hash_file,
    lock_file,
    remove_path,
    write_text_atomic,
)

_PACKAGE = Path(__file__).parent.parent
DIGESTS_FILE = "sha256.json"
"""Digests of the other files of a cached folder."""
MARK_FILE = "process-0.txt"
"""A number in a folder that several processes build, by which they know it."""
_READ_ERRORS = (
    OSError,
    EOFError,
    KeyError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""All that NumPy and zipfile were seen to raise for damaged files; the checksums of the archive let
no flipped byte of an array pass. An OSError is what `explain_read_errors` leaves of them."""


def content_key(*values: Any) -> str:
    """Returns 16 hexadecimal digits that depend on nothing but the JSON values and dataclasses
    given."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), default=dataclasses.asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_sources(*patterns: str) -> str:
    """The text of some of the package's own files: part of the key of cached weights, which a
    change of code must not reuse.

    Raises:
      ValueError: a name matches no file, as after a file was renamed.
    """
    files_by_pattern = {pattern: sorted(_PACKAGE.glob(pattern)) for pattern in patterns}
    if unmatched := [pattern for pattern, files in files_by_pattern.items() if not files]:
        raise ValueError(
            f"no file of {_PACKAGE} matches {', '.join(unmatched)}; correct the names where the key"
            " is made"
        )

    def format_source(file: Path) -> str:
        name = os.fspath(file.relative_to(_PACKAGE))
        return f"{name}\n{file.read_text(encoding='utf-8')}"

    return "".join(
        map(format_source, sorted({file for files in files_by_pattern.values() for file in files}))
    )


def cache_folder() -> Path:
    """Returns the folder of the cache: JAXSPEC_CACHE, else XDG_CACHE_HOME/jaxspec, else
    ~/.cache/jaxspec."""
    if configured := os.environ.get("JAXSPEC_CACHE"):
        return expand_user_path(configured, "JAXSPEC_CACHE")
    return (
        expand_user_path(
            os.environ.get("XDG_CACHE_HOME") or "~/.cache",
            "the folder of the cache (JAXSPEC_CACHE or XDG_CACHE_HOME)",
        )
        / "jaxspec"
    )


def get_or_build(
    key: str, build: Callable[[Path], None], log: Callable[[str], None] = print
) -> Path:
    """Returns the cached folder of `key`; if there is none, `build` fills it first.

    A folder appears complete or not at all, and one whose files do not hold any more what was
    written is made anew, with a word. Of several processes that ask at once one builds, the others
    say that they wait, and reuse; so `build` must not communicate with them, as it may in
    `get_or_build_together`.
    Raises ConfigError if the cache cannot be written to.
    """
    cache = cache_folder()
    cached_folder, build_folder = cache / key, cache / f"{key}.building"
    with explain_write_errors(
        f"cache {cache} cannot be written to", "name another folder with JAXSPEC_CACHE", ConfigError
    ):
        if cached_folder.is_dir() and not _find_damage(cached_folder):
            return cached_folder
        cache.mkdir(parents=True, exist_ok=True)
        lock = _wait_for_lock(cache / f"{key}.lock", log)
    with lock:
        if cached_folder.exists() or cached_folder.is_symlink():
            damage = _find_damage(cached_folder)
            if not damage:
                return cached_folder
            log(
                f"warning: the cached {cached_folder} is damaged ({damage}); it is discarded and"
                " made anew"
            )
            with explain_write_errors(
                f"the damaged {cached_folder} cannot be removed",
                "remove it, or name another folder with JAXSPEC_CACHE",
                ConfigError,
            ):
                remove_path(cached_folder)
        try:
            remedy = "free some space or name another folder with JAXSPEC_CACHE"
            with explain_write_errors(f"cache {build_folder} cannot be written to", remedy):
                remove_path(build_folder)
                build_folder.mkdir()
            build(build_folder)
            with explain_write_errors(f"cache {build_folder} cannot be written to", remedy):
                (build_folder / DIGESTS_FILE).write_text(
                    json.dumps(_digest_files(build_folder)), encoding="utf-8"
                )
                build_folder.rename(cached_folder)
        finally:
            with contextlib.suppress(OSError):
                remove_path(build_folder)
    return cached_folder


def get_or_build_together(
    key: str, build: Callable[[Path], None], log: Callable[[str], None]
) -> Path:
    """As `get_or_build`, for what all processes build together: each is given the folder, and
    process 0 fills it.

    Raises ConfigError also where a process does not see that folder, before it is filled.
    """
    if jax.process_count() == 1:
        return get_or_build(key, build, log)
    cached_folder, build_folder, mark = cache_folder() / key, cache_folder() / f"{key}.building", 0

    def build_by_all(folder: Path) -> None:
        nonlocal mark
        mark = 1 + secrets.randbelow(2**30)
        write_text_atomic(folder / MARK_FILE, str(mark))
        broadcast_number(mark)
        build(folder)

    if jax.process_index() == 0:
        get_or_build(key, build_by_all, log)
        if not mark:
            broadcast_number(0)
    elif mark := broadcast_number(0):
        # of another job's folder, on another disk, it says something else
        file = build_folder / MARK_FILE
        mark_text = file.read_text(encoding="utf-8") if file.is_file() else ""
        require_shared_cache(mark_text == str(mark), build_folder)
        build(build_folder)
    multihost_utils.sync_global_devices(f"{key} is cached")
    require_shared_cache(cached_folder.is_dir(), cached_folder)
    return cached_folder


def _digest_files(folder: Path) -> dict[str, str]:
    return {
        file.name: hash_file(file) for file in sorted(folder.iterdir()) if file.name != DIGESTS_FILE
    }


def _find_damage(folder: Path) -> str:
    """What is wrong with a cached folder; empty if its files are those that were written.

    Raises:
      ConfigError: that cannot be told, because a file must not be read, say; then nothing is to be
        discarded.
    """
    if not folder.is_dir():
        return "it is not a folder"
    digests_file = folder / DIGESTS_FILE
    try:
        with explain_read_errors(digests_file):
            saved_digests = parse_json(digests_file.read_text(encoding="utf-8"))
    except (*MISSING_FILE_ERRORS, ValueError):
        saved_digests = None
    if not isinstance(saved_digests, dict):
        return f"its {DIGESTS_FILE} cannot be read"
    with explain_read_errors(folder):
        digests = _digest_files(folder)
    changed_names = sorted(
        name
        for name in digests.keys() | saved_digests.keys()
        if digests.get(name) != saved_digests.get(name)
    )
    return f"{', '.join(changed_names)} not as written" if changed_names else ""


def _wait_for_lock(path: Path, log: Callable[[str], None]) -> TextIO:
    lock = lock_file(path, wait=False)
    if lock is None:
        log(f"another process is making {path.with_suffix('')}; waiting for it")
        lock = lock_file(path, wait=True)
    assert lock is not None, "a lock that is waited for is had"
    return lock


def save_tree(path: Path, tree: PyTree) -> None:
    """Writes the arrays of a tree to one file, from the calling process; each must be replicated or
    wholly on its devices.

    The file is complete or as it was before. Raises SaveError if it cannot be written.
    """
    leaves = leaves_by_name(tree)
    index = json.dumps([[name, dtype] for name, (_, dtype) in array_layout(leaves).items()])
    with (
        atomic_replace(path, "free some space or name another folder") as new_file,
        new_file.open("wb") as file,
    ):
        np.savez(file, *(np.asarray(leaf) for leaf in leaves.values()), index=np.asarray(index))


def load_tree(path: Path, abstract: PyTree) -> PyTree:
    """Returns what `save_tree` wrote, as global arrays with the shardings of `abstract`; every
    process reads the file.

    Raises DamagedFileError if the file does not hold any more what was written, ConfigError if
    names, shapes or dtypes differ.
    """
    leaves = leaves_by_name(abstract)
    try:
        with explain_read_errors(path), np.load(path, allow_pickle=False) as file:
            # NumPy forgets the names of dtypes that are not its own, such as bfloat16.
            arrays = {
                name: file[f"arr_{i}"].view(np.dtype(dtype))
                for i, (name, dtype) in enumerate(parse_json(str(file["index"])))
            }
    except _READ_ERRORS as error:
        summary = str(error).split("\n")[0][:200] or type(error).__name__
        raise DamagedFileError(
            f"{path} cannot be read ({summary})", "remove it, and it is made anew"
        ) from error
    require_same_layout(
        str(path), array_layout(arrays), array_layout(leaves), "Remove it, and it is made anew"
    )
    return jax.tree.unflatten(
        jax.tree.structure(abstract),
        [from_host_values(leaf, arrays[name]) for name, leaf in leaves.items()],
    )
