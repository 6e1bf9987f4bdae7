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
from jaxspec.mesh import from_host
from jaxspec.processes.process_0 import require_shared, told_by_process_0
from jaxspec.state import PyTree
from jaxspec.storage.trees import layout, named, require_same
from jaxspec.system.files import (
    ABSENT,
    Damaged,
    digest,
    discard,
    expanded,
    locked,
    reading,
    replacing,
    write_whole,
    writing,
)

_PACKAGE = Path(__file__).parent.parent
SUMS = "sha256.json"
"""Digests of the other files of a cached folder."""
MARK = "process-0.txt"
"""A number in a folder that several processes build, by which they know it."""
_UNREADABLE = (
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
no flipped byte of an array pass. An OSError is what `reading` leaves of them."""


def content_key(*parts: Any) -> str:
    """Returns 16 hexadecimal digits that depend on nothing but the JSON values and dataclasses
    given."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=dataclasses.asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sources(*names: str) -> str:
    """The text of some of the package's own files: part of the key of cached weights, which a
    change of code must not reuse.

    Raises:
      ValueError: a name matches no file, as after a file was renamed.
    """
    found = {name: sorted(_PACKAGE.glob(name)) for name in names}
    if gone := [name for name, files in found.items() if not files]:
        raise ValueError(
            f"no file of {_PACKAGE} matches {', '.join(gone)}; correct the names where the key is"
            " made"
        )

    def named_text(file: Path) -> str:
        name = os.fspath(file.relative_to(_PACKAGE))
        return f"{name}\n{file.read_text(encoding='utf-8')}"

    return "".join(map(named_text, sorted({file for some in found.values() for file in some})))


def cache_folder() -> Path:
    """Returns the folder of the cache: JAXSPEC_CACHE, else XDG_CACHE_HOME/jaxspec, else
    ~/.cache/jaxspec."""
    if given := os.environ.get("JAXSPEC_CACHE"):
        return expanded(given, "JAXSPEC_CACHE")
    return (
        expanded(
            os.environ.get("XDG_CACHE_HOME") or "~/.cache",
            "the folder of the cache (JAXSPEC_CACHE or XDG_CACHE_HOME)",
        )
        / "jaxspec"
    )


def cached(key: str, build: Callable[[Path], None], say: Callable[[str], None] = print) -> Path:
    """Returns the cached folder of `key`; if there is none, `build` fills it first.

    A folder appears complete or not at all, and one whose files do not hold any more what was
    written is made anew, with a word. Of several processes that ask at once one builds, the others
    say that they wait, and reuse; so `build` must not communicate with them, as it may in
    `cached_by_all`.
    Raises ConfigError if the cache cannot be written to.
    """
    cache = cache_folder()
    ready, building = cache / key, cache / f"{key}.building"
    with writing(
        f"cache {cache} cannot be written to", "name another folder with JAXSPEC_CACHE", ConfigError
    ):
        if ready.is_dir() and not _damage(ready):
            return ready
        cache.mkdir(parents=True, exist_ok=True)
        lock = _waited(cache / f"{key}.lock", say)
    with lock:
        if ready.exists() or ready.is_symlink():
            damage = _damage(ready)
            if not damage:
                return ready
            say(f"warning: the cached {ready} is damaged ({damage}); it is discarded and made anew")
            with writing(
                f"the damaged {ready} cannot be removed",
                "remove it, or name another folder with JAXSPEC_CACHE",
                ConfigError,
            ):
                discard(ready)
        try:
            remedy = "free some space or name another folder with JAXSPEC_CACHE"
            with writing(f"cache {building} cannot be written to", remedy):
                discard(building)
                building.mkdir()
            build(building)
            with writing(f"cache {building} cannot be written to", remedy):
                (building / SUMS).write_text(json.dumps(_sums(building)), encoding="utf-8")
                building.rename(ready)
        finally:
            with contextlib.suppress(OSError):
                discard(building)
    return ready


def cached_by_all(key: str, build: Callable[[Path], None], say: Callable[[str], None]) -> Path:
    """As `cached`, for what all processes build together: each is given the folder, and process 0
    fills it.

    Raises ConfigError also where a process does not see that folder, before it is filled.
    """
    if jax.process_count() == 1:
        return cached(key, build, say)
    ready, building, mark = cache_folder() / key, cache_folder() / f"{key}.building", 0

    def build_by_all(folder: Path) -> None:
        nonlocal mark
        mark = 1 + secrets.randbelow(2**30)
        write_whole(folder / MARK, str(mark))
        told_by_process_0(mark)
        build(folder)

    if jax.process_index() == 0:
        cached(key, build_by_all, say)
        if not mark:
            told_by_process_0(0)
    elif mark := told_by_process_0(0):
        file = building / MARK  # of another job's folder, on another disk, it says something else
        seen = file.read_text(encoding="utf-8") if file.is_file() else ""
        require_shared(seen == str(mark), building)
        build(building)
    multihost_utils.sync_global_devices(f"{key} is cached")
    require_shared(ready.is_dir(), ready)
    return ready


def _sums(folder: Path) -> dict[str, str]:
    return {file.name: digest(file) for file in sorted(folder.iterdir()) if file.name != SUMS}


def _damage(folder: Path) -> str:
    """What is wrong with a cached folder; empty if its files are those that were written.

    Raises:
      ConfigError: that cannot be told, because a file must not be read, say; then nothing is to be
        discarded.
    """
    if not folder.is_dir():
        return "it is not a folder"
    sums = folder / SUMS
    try:
        with reading(sums):
            written = parse_json(sums.read_text(encoding="utf-8"))
    except (*ABSENT, ValueError):
        written = None
    if not isinstance(written, dict):
        return f"its {SUMS} cannot be read"
    with reading(folder):
        found = _sums(folder)
    differing = sorted(
        name for name in found.keys() | written.keys() if found.get(name) != written.get(name)
    )
    return f"{', '.join(differing)} not as written" if differing else ""


def _waited(path: Path, say: Callable[[str], None]) -> TextIO:
    lock = locked(path, wait=False)
    if lock is None:
        say(f"another process is making {path.with_suffix('')}; waiting for it")
        lock = locked(path, wait=True)
    assert lock is not None, "a lock that is waited for is had"
    return lock


def save_tree(path: Path, tree: PyTree) -> None:
    """Writes the arrays of a tree to one file, from the calling process; each must be replicated or
    wholly on its devices.

    The file is complete or as it was before. Raises SaveError if it cannot be written.
    """
    leaves = named(tree)
    index = json.dumps([[name, dtype] for name, (_, dtype) in layout(leaves).items()])
    with (
        replacing(path, "free some space or name another folder") as fresh,
        fresh.open("wb") as file,
    ):
        np.savez(file, *(np.asarray(leaf) for leaf in leaves.values()), index=np.asarray(index))


def load_tree(path: Path, abstract: PyTree) -> PyTree:
    """Returns what `save_tree` wrote, as global arrays with the shardings of `abstract`; every
    process reads the file.

    Raises Damaged if the file does not hold any more what was written, ConfigError if names, shapes
    or dtypes differ.
    """
    leaves = named(abstract)
    try:
        with reading(path), np.load(path, allow_pickle=False) as file:
            # NumPy forgets the names of dtypes that are not its own, such as bfloat16.
            arrays = {
                name: file[f"arr_{i}"].view(np.dtype(dtype))
                for i, (name, dtype) in enumerate(parse_json(str(file["index"])))
            }
    except _UNREADABLE as reason:
        told = str(reason).split("\n")[0][:200] or type(reason).__name__
        raise Damaged(
            f"{path} cannot be read ({told})", "remove it, and it is made anew"
        ) from reason
    require_same(str(path), layout(arrays), layout(leaves), "Remove it, and it is made anew")
    return jax.tree.unflatten(
        jax.tree.structure(abstract),
        [from_host(leaf, arrays[name]) for name, leaf in leaves.items()],
    )
