"""Cache of weights for later runs.

It has a folder for each key of content. Each tree of arrays is one file.
"""

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

from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.json_keys import parse_json
from jaxspec.processes import roles
from jaxspec.processes.global_arrays import from_host_values
from jaxspec.processes.process_0 import broadcast_number, require_shared_cache, wait_for_all
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
"""File with the digests of the other files of a cached folder."""
MARK_FILE = "process-0.txt"
"""File with a random number, by which processes recognize a folder that they build together."""
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
"""Errors that NumPy and zipfile were observed to raise for damaged files.

The archive's checksums detect every flipped byte of an array. `explain_read_errors` has already
converted each OSError that is not due to damage.
"""


def content_key(*values: Any) -> str:
    """Hashes JSON values and dataclasses to 16 hexadecimal digits."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), default=dataclasses.asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_sources(*patterns: str) -> str:
    """Reads the package's source files that match patterns.

    Their text is part of the key of cached data, so that data of older code is not reused.

    Raises:
      ValueError: a pattern matches no file, for example after a file was renamed.
    """
    files_by_pattern = {pattern: sorted(_PACKAGE.glob(pattern)) for pattern in patterns}
    if unmatched := [pattern for pattern, files in files_by_pattern.items() if not files]:
        raise ValueError(
            f"no file of {_PACKAGE} matches {', '.join(unmatched)}; correct the patterns given to"
            " read_sources"
        )

    # With its name, so that text moved between files changes the key.
    def format_source(file: Path) -> str:
        name = os.fspath(file.relative_to(_PACKAGE))
        return f"{name}\n{file.read_text(encoding='utf-8')}"

    return "".join(
        map(format_source, sorted({file for files in files_by_pattern.values() for file in files}))
    )


def cache_folder() -> Path:
    """Returns the folder of the cache.

    It is JAXSPEC_CACHE, else XDG_CACHE_HOME/jaxspec, else ~/.cache/jaxspec.
    """
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
    """Returns the cached folder of `key`.

    It is built first if it is absent, and built again with a warning if it is damaged. A folder
    appears complete or not at all. Of several processes, one builds while the others wait.
    So `build` must not communicate with them, unlike in `get_or_build_together`.

    Args:
      key: name of the folder.
      build: fills the empty folder that it is given.
      log: receives warnings and notes.

    Raises:
      ConfigError: the cache cannot be written to, or a cached file cannot be read.
    """
    cache = cache_folder()
    cached_folder, build_folder = cache / key, cache / f"{key}.building"
    with explain_write_errors(
        f"cache {cache} cannot be written to", "name another folder with JAXSPEC_CACHE", ConfigError
    ):
        # An intact folder is used without the lock, which would need permission to write.
        if cached_folder.is_dir() and not _find_damage(cached_folder):
            return cached_folder
        cache.mkdir(parents=True, exist_ok=True)
        lock = _wait_for_lock(cache / f"{key}.lock", log)
    with lock:
        # Another process may have built it while this one waited. A broken link is in the way, too.
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
                # A process that was killed while it built may have left this folder.
                remove_path(build_folder)
                build_folder.mkdir()
            build(build_folder)
            with explain_write_errors(f"cache {build_folder} cannot be written to", remedy):
                (build_folder / DIGESTS_FILE).write_text(
                    json.dumps(_digest_files(build_folder)), encoding="utf-8"
                )
                # Renamed as the last action, so that a folder appears only when it is complete.
                build_folder.rename(cached_folder)
        finally:
            with contextlib.suppress(OSError):
                remove_path(build_folder)
    return cached_folder


def get_or_build_together(
    key: str, build: Callable[[Path], None], log: Callable[[str], None]
) -> Path:
    """Returns a cached folder that all processes build together.

    Does as `get_or_build`, but each process calls `build`, and process 0 fills the folder.

    Raises:
      ConfigError: the cache cannot be written to, or a process does not see the folder of process
        0. The latter is found before the folder is filled.
    """
    if roles.member_count() == 1:
        return get_or_build(key, build, log)
    cached_folder, build_folder, mark = cache_folder() / key, cache_folder() / f"{key}.building", 0

    def build_by_all(folder: Path) -> None:
        nonlocal mark
        # Below 2^31 for `broadcast_number`, and not 0, which stands for an intact folder.
        mark = 1 + secrets.randbelow(2**30)
        write_text_atomic(folder / MARK_FILE, str(mark))
        broadcast_number(mark)
        build(folder)

    if roles.is_first_member():
        get_or_build(key, build_by_all, log)
        # Without a mark `build_by_all` was not called, but the others still wait for a number.
        if not mark:
            broadcast_number(0)
    elif mark := broadcast_number(0):
        # The same path on another disk may be the folder of another job, with another number.
        file = build_folder / MARK_FILE
        mark_text = file.read_text(encoding="utf-8") if file.is_file() else ""
        require_shared_cache(mark_text == str(mark), build_folder)
        build(build_folder)
    wait_for_all()
    require_shared_cache(cached_folder.is_dir(), cached_folder)
    return cached_folder


def _digest_files(folder: Path) -> dict[str, str]:
    return {
        file.name: hash_file(file) for file in sorted(folder.iterdir()) if file.name != DIGESTS_FILE
    }


def _find_damage(folder: Path) -> str:
    """Describes the damage of a cached folder.

    The text is empty if the files are as written.

    Raises:
      ConfigError: a file cannot be checked, for example for lack of permission.
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
    # Lack of access is not reported as damage, since the caller would discard an intact folder.
    with explain_read_errors(folder):
        digests = _digest_files(folder)
    changed_names = sorted(
        name
        for name in digests.keys() | saved_digests.keys()
        if digests.get(name) != saved_digests.get(name)
    )
    return f"{', '.join(changed_names)} not as written" if changed_names else ""


def _wait_for_lock(path: Path, log: Callable[[str], None]) -> TextIO:
    # Tried once without waiting, to know whether to report a wait.
    lock = lock_file(path, wait=False)
    if lock is None:
        log(f"another process is making {path.with_suffix('')}; waiting for it")
        lock = lock_file(path, wait=True)
    assert lock is not None, "a lock that is waited for is acquired"
    return lock


def save_tree(path: Path, tree: PyTree) -> None:
    """Writes a tree of arrays to a file.

    Each array must be replicated, or be entirely on devices of this process. If writing fails, the
    file stays as it was.

    Raises:
      SaveError: the file cannot be written.
    """
    leaves = leaves_by_name(tree)
    index = json.dumps([[name, dtype] for name, (_, dtype) in array_layout(leaves).items()])
    with (
        atomic_replace(path, "free some space or name another folder") as new_file,
        new_file.open("wb") as file,
    ):
        np.savez(file, *(np.asarray(leaf) for leaf in leaves.values()), index=np.asarray(index))


def load_tree(path: Path, abstract: PyTree) -> PyTree:
    """Loads a tree that `save_tree` wrote.

    Returns global arrays with the shardings of `abstract`. Every process reads the file.

    Raises:
      DamagedFileError: the file is missing or is no readable tree.
      ConfigError: the file may not be read, or names, shapes or dtypes differ from those of
        `abstract`.
    """
    leaves = leaves_by_name(abstract)
    try:
        with explain_read_errors(path), np.load(path, allow_pickle=False) as file:
            # NumPy does not save the names of dtypes that are not its own, such as bfloat16.
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
