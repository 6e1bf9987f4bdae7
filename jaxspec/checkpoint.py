"""What stays on disk: checkpoints of a run (Orbax), and weights kept for the next run (a content-addressed cache)."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.config import ConfigError
from jaxspec.mesh import from_host
from jaxspec.state import PyTree

_SHOWN_DIFFERENCES = 5

_Layout = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each array, by name."""


class SaveError(ConfigError):
    """Something could not be written to disk; what was saved before is intact."""


@contextlib.contextmanager
def _writing(what: str, remedy: str, error: type[ConfigError] = SaveError) -> Iterator[None]:
    try:
        yield
    except OSError as reason:
        raise error(f"{what}: {reason.strerror or reason}; {remedy}") from reason


def prepare_workdir(path: Path | str) -> Path:
    """Creates the folder of a run, proves that it can be written to, and returns its absolute path.

    Raises ConfigError if it is read-only or not a folder, or if less than 1 MiB is free.
    """
    folder = Path(path).expanduser().absolute()
    probe = folder / f".probe-{os.uname().nodename}-{os.getpid()}"
    with _writing(f"workdir {folder} cannot be written to", "free some space or name another folder with --workdir", ConfigError):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("wb") as file:
                file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    return folder


def _named(tree: PyTree) -> dict[str, Any]:
    """Leaves by dotted path, so that files depend on no Python class; None is no leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError(f"{len(leaves)} arrays share {len(named)} names; keys with dots in them clash with nested ones")
    return named


def _layout(named: Mapping[str, Any]) -> _Layout:
    return {name: (tuple(leaf.shape), np.dtype(leaf.dtype).name) for name, leaf in named.items()}


def _require_same(where: str, stored: _Layout, wanted: _Layout, remedy: str = "Use that config again, or another --workdir") -> None:
    """Raises ConfigError that names the arrays in which two layouts differ."""
    differences = [f"{name} is missing" for name in sorted(wanted.keys() - stored.keys())]
    differences += [f"{name} is not part of this run" for name in sorted(stored.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        if stored[name] != wanted[name]:
            (shape, dtype), (wanted_shape, wanted_dtype) = stored[name], wanted[name]
            differences.append(f"{name} is {dtype}{list(shape)}, this run needs {wanted_dtype}{list(wanted_shape)}")
    if differences:
        more = differences[_SHOWN_DIFFERENCES:]
        shown = "; ".join(differences[:_SHOWN_DIFFERENCES]) + (f"; and {len(more)} more" if more else "")
        raise ConfigError(f"{where} was written by another config: {shown}. {remedy}")


class Checkpoints:
    """The newest `keep` checkpoints of a run: saved in the background, complete or absent.

    With several processes each method is called by all of them, and arrays are global.
    """

    def __init__(self, folder: Path, keep: int = 2, read_only: bool = False) -> None:
        # Orbax logs a traceback of each failed save and raises it too; the user reads it once, as SaveError.
        logging.getLogger("absl").addFilter(_not_from_orbax)
        self._folder = Path(folder).absolute()
        self._saving: int | None = None
        # What to do about a checkpoint of another config, and about a damaged one.
        self._remedies = "Use that config again, or another --workdir", "delete that folder to go on from an earlier one"
        if read_only:
            self._remedies = "Set the run's config.json back, or use the jaxspec that wrote it", "choose another checkpoint of the run"
        another = "name another folder" if read_only else "name another folder with --workdir"
        with _writing(f"checkpoints in {self._folder} cannot be opened", another, ConfigError):
            self._manager = ocp.CheckpointManager(
                self._folder,
                item_handlers={"arrays": ocp.PyTreeCheckpointHandler(), "host": ocp.JsonCheckpointHandler()},
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                    # A killed save leaves its half under a temporary name; a reader leaves a live run's half alone.
                    cleanup_tmp_directories=not read_only,
                    read_only=read_only,
                ),
            )

    def save(self, step: int, arrays: PyTree, host: Mapping[str, Any]) -> None:
        """Starts to save a tree of `jax.Array` and a JSON object; the arrays may be donated as soon as it returns.

        A step that is already saved is left alone. Raises SaveError if this save, or the one before, cannot be written.
        """
        # Orbax refuses arrays without elements; they hold nothing to save.
        named = {name: leaf for name, leaf in _named(arrays).items() if leaf.size}
        self.wait()
        if step in self._manager.all_steps():
            return
        self._saving = step
        args = ocp.args.Composite(arrays=ocp.args.PyTreeSave(named), host=ocp.args.JsonSave(dict(host)))
        with self._failing():
            self._manager.save(step, args=args, force=True)

    def latest(self) -> int | None:
        """Returns the newest step that is saved or being saved."""
        return self._manager.latest_step()

    def restore(self, step: int, abstract: PyTree, whole: bool = True) -> tuple[PyTree, dict[str, Any]]:
        """Returns the arrays and the JSON object of a step.

        `abstract` is the tree that was saved, with leaves that have shape, dtype and the sharding wanted now, on any mesh; unless `whole`,
        a part of that tree: what it lacks (None) is not read.
        Raises ConfigError if names, shapes or dtypes differ from the saved ones, or if the files are damaged.
        """
        named = _named(abstract)
        wanted = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in named.items() if leaf.size}
        where = f"checkpoint {self._folder / str(step)}"
        self.wait()
        try:
            stored = _layout(self._manager.item_metadata(step)["arrays"].tree)
            _require_same(where, {name: stored[name] for name in stored if whole or name in wanted}, _layout(wanted), self._remedies[0])
            how = ocp.checkpoint_utils.construct_restore_args(wanted)
            arrays = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=not whole)
            args = ocp.args.Composite(arrays=arrays, host=ocp.args.JsonRestore())
            restored = self._manager.restore(step, args=args)
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, AttributeError) as reason:
            raise ConfigError(f"{where} cannot be read ({_reason(reason)}); {self._remedies[1]}") from reason
        arrays = {**restored["arrays"]}
        arrays |= {name: from_host(leaf, np.zeros(leaf.shape, leaf.dtype)) for name, leaf in named.items() if not leaf.size}
        return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in named]), restored["host"]

    def wait(self) -> None:
        """Returns when the save under way is complete; raises SaveError if it failed."""
        with self._failing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, as `wait` does, and frees the threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as reason:
            if not isinstance(reason, OSError) and "os_error_code" not in str(reason):
                raise
            raise SaveError(
                f"checkpoint {self._saving} cannot be saved in {self._folder}: {_reason(reason)}; "
                "earlier checkpoints are intact: free some space and run the same command again"
            ) from reason


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _reason(error: Exception) -> str:
    """The operating system's words, which tensorstore puts last in a long message."""
    found = re.search(r"([^:\[\]]+) \[os_error_code", str(error))
    if found:
        return found[1].strip()
    return (error.strerror if isinstance(error, OSError) else None) or str(error).split("\n")[0][:200] or type(error).__name__


def content_key(*parts: Any) -> str:
    """Returns 16 hexadecimal digits that depend on nothing but the JSON values and dataclasses given."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=dataclasses.asdict)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Returns the folder of the cache: JAXSPEC_CACHE, else XDG_CACHE_HOME/jaxspec, else ~/.cache/jaxspec."""
    named = os.environ.get("JAXSPEC_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxspec"
    return Path(named).expanduser().absolute()


def cached(key: str, build: Callable[[Path], None], say: Callable[[str], None] = print) -> Path:
    """Returns the cached folder of `key`; if there is none, `build` fills it first.

    A folder appears complete or not at all. Of several processes that ask at once one builds, the others say that they wait, and reuse;
    so `build` must not communicate with them.
    Raises ConfigError if the cache cannot be written to.
    """
    cache = cache_folder()
    ready, building = cache / key, cache / f"{key}.building"
    if ready.is_dir():
        return ready
    with _writing(f"cache {cache} cannot be written to", "name another folder with JAXSPEC_CACHE", ConfigError):
        cache.mkdir(parents=True, exist_ok=True)
        lock = _locked(cache / f"{key}.lock", say)
    with lock:
        if ready.is_dir():
            return ready
        shutil.rmtree(building, ignore_errors=True)
        try:
            with _writing(f"cache {building} cannot be written to", "free some space or name another folder with JAXSPEC_CACHE"):
                building.mkdir()
            build(building)
            building.rename(ready)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return ready


def _locked(path: Path, say: Callable[[str], None]) -> TextIO:
    """Opens a file and locks it; closing it, or the death of the process, unlocks."""
    file = path.open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"another process is making {path.with_suffix('')}; waiting for it")
        fcntl.lockf(file, fcntl.LOCK_EX)
    return file


def save_tree(path: Path, tree: PyTree) -> None:
    """Writes the arrays of a tree to one file, from the calling process; each must be replicated or wholly on its devices.

    Raises SaveError if the file cannot be written.
    """
    named = _named(tree)
    index = json.dumps([[name, dtype] for name, (_, dtype) in _layout(named).items()])
    with _writing(f"{path} cannot be written", "free some space or name another folder"), path.open("wb") as file:
        np.savez(file, *(np.asarray(leaf) for leaf in named.values()), index=np.asarray(index))


def load_tree(path: Path, abstract: PyTree) -> PyTree:
    """Returns what `save_tree` wrote, as global arrays with the shardings of `abstract`; every process reads the file.

    Raises ConfigError if names, shapes or dtypes differ.
    """
    named = _named(abstract)
    with np.load(path) as file:
        # NumPy forgets the names of dtypes that are not its own, such as bfloat16.
        arrays = {name: file[f"arr_{i}"].view(np.dtype(dtype)) for i, (name, dtype) in enumerate(json.loads(str(file["index"])))}
    _require_same(str(path), _layout(arrays), _layout(named))
    return jax.tree.unflatten(jax.tree.structure(abstract), [from_host(leaf, arrays[name]) for name, leaf in named.items()])
