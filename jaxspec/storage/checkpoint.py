"""Checkpoints of a run (Orbax): saved in the background, restored on any mesh, and checked to hold
what was saved."""

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxspec.inputs.checked import ConfigError
from jaxspec.mesh import from_host
from jaxspec.state import PyTree
from jaxspec.storage.trees import digests, layout, named, require_same
from jaxspec.system.files import Damaged, SaveError, writing

_ARRAYS, _HOST = "arrays", "host"
_KEYS = frozenset({"saved", "arrays", "digest"})
"""Keys of the JSON item: what the caller gave, digests of the arrays, and the digest of both."""
_GONE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_UNREADABLE = (*_GONE, ValueError, KeyError, AttributeError, TypeError, IndexError)
"""All that Orbax and tensorstore were seen to raise for damaged files, beside a bare Exception
around one of these."""
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError)
"""All that Orbax was seen to raise for what a step has about itself."""


class Checkpoints:
    """The newest `keep` checkpoints of a run: saved in the background, complete or absent, and
    checked when they are read.

    With several processes each method is called by all of them, and arrays are global.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        read_only: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        _quieten_orbax()
        self.folder = Path(folder).absolute()
        self._saving: int | None = None
        self._say = say
        # What to do about a checkpoint of another config, and about a damaged one.
        self._remedies = (
            "Use that config again, or another --workdir",
            "put it back from a copy, or name another folder with --workdir",
        )
        if read_only:
            self._remedies = (
                "Set the run's config.json back, or use the jaxspec that wrote it",
                "choose another checkpoint of the run",
            )
        another = "name another folder" if read_only else "name another folder with --workdir"
        with (
            writing(f"checkpoints in {self.folder} cannot be opened", another, ConfigError),
            self._opening(),
        ):
            self._manager = ocp.CheckpointManager(
                self.folder,
                item_handlers={
                    _ARRAYS: ocp.PyTreeCheckpointHandler(),
                    _HOST: ocp.JsonCheckpointHandler(),
                },
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                    # A killed save leaves its half under a temporary name; a reader leaves a live
                    # run's half alone.
                    cleanup_tmp_directories=not read_only,
                    read_only=read_only,
                ),
            )

    def save(self, step: int, arrays: PyTree, host: Mapping[str, Any]) -> None:
        """Starts to save a tree of `jax.Array` and a JSON object; the arrays may be donated as soon
        as it returns.

        A step that is already saved is left alone. Raises SaveError if this save, or the one
        before, cannot be written.
        """
        # Orbax refuses arrays without elements; they hold nothing to save.
        leaves = {name: leaf for name, leaf in named(arrays).items() if leaf.size}
        self.wait()
        if step in self._manager.all_steps():
            return
        self._saving = step
        content: dict[str, Any] = {
            "saved": json.loads(json.dumps(dict(host))),
            "arrays": digests(leaves),
        }
        content["digest"] = _digest(content)
        args = ocp.args.Composite(
            arrays=ocp.args.PyTreeSave(leaves), host=ocp.args.JsonSave(content)
        )
        with self._failing():
            self._manager.save(step, args=args, force=True)

    def latest(self) -> int | None:
        """Returns the newest step that is saved or being saved."""
        return self._manager.latest_step()

    def restore_newest(self, abstract: PyTree) -> tuple[PyTree, dict[str, Any]] | None:
        """Returns the newest step that is not damaged, as `restore` does; None where there is no
        step at all.

        Steps that are damaged are named, and set aside in a folder beside this one, so that they
        can be saved again.
        Raises ConfigError if all are damaged, which are then left where they are, and as `restore`
        does.
        """
        damaged: dict[int, Damaged] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                restored = self.restore(step, abstract)
            except Damaged as reason:
                damaged[step] = reason
                continue
            self._set_aside(damaged, step)
            return restored
        if damaged:
            raise ConfigError("; ".join(str(reason) for reason in damaged.values()))
        return None

    def restore(
        self, step: int, abstract: PyTree, part: bool = False
    ) -> tuple[PyTree, dict[str, Any]]:
        """Returns the arrays and the JSON object of a step.

        `abstract` is the tree that was saved, with leaves that have shape, dtype and the sharding
        wanted now, on any mesh; as a `part`, it may lack some (None), which are not read.
        Raises ConfigError if names, shapes or dtypes differ from the saved ones, or the files
        cannot be read; Damaged if they do not hold what was saved.
        """
        leaves = named(abstract)
        wanted = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in leaves.items()
            if leaf.size
        }
        where = self._name(step)
        self.wait()
        with self._agreeing(f"{where} cannot be read"):
            host, saved = self._read_host(step)
            with self._reading(step):
                stored = layout(self._manager.item_metadata(step)[_ARRAYS].tree)
            if saved.keys() != stored.keys():
                raise Damaged(
                    f"{where} is damaged (it names other arrays than were saved)", self._remedies[1]
                )
            require_same(
                where,
                {name: stored[name] for name in stored if name in wanted or not part},
                layout(wanted),
                self._remedies[0],
            )
            how = ocp.checkpoint_utils.construct_restore_args(wanted)
            args = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=part)
            # Past the manager, whose barrier would keep the other processes when one cannot read
            # its part.
            with self._reading(step):
                arrays = {
                    **ocp.PyTreeCheckpointHandler().restore(
                        self._manager.directory / str(step) / _ARRAYS, args=args
                    )
                }
        differing = [name for name, number in digests(arrays).items() if number != saved[name]]
        if differing:
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise Damaged(
                f"{where} is damaged ({differing[0]}{more} differ from what was saved)",
                self._remedies[1],
            )
        arrays |= {
            name: from_host(leaf, np.zeros(leaf.shape, leaf.dtype))
            for name, leaf in leaves.items()
            if not leaf.size
        }
        return (
            jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in leaves]),
            host,
        )

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

    def _name(self, step: int) -> str:
        return f"checkpoint {self.folder / str(step)}"

    def _read_host(self, step: int) -> tuple[dict[str, Any], dict[str, int]]:
        """The JSON object of a step, and the digests of its arrays."""
        with self._reading(step):
            content = {
                **ocp.JsonCheckpointHandler().restore(self._manager.directory / str(step) / _HOST)
            }
            sound = content.keys() == _KEYS and content.pop("digest") == _digest(content)
        if not sound:
            raise Damaged(
                f"{self._name(step)} is damaged (what it says of the run differs from what was"
                " saved)",
                self._remedies[1],
            )
        return content["saved"], content["arrays"]

    def _set_aside(self, damaged: Mapping[int, Damaged], good: int) -> None:
        """Moves steps out of the way, to where nobody looks for checkpoints, and says so."""
        if not damaged:
            return
        with self._agreeing(f"damaged checkpoints in {self.folder} cannot be moved"):
            for step, reason in damaged.items() if jax.process_index() == 0 else ():
                aside = _unused(self.folder.parent / "damaged-checkpoints" / str(step))
                with writing(
                    f"{self.folder / str(step)} cannot be moved",
                    "move it away, and run the same command again",
                    ConfigError,
                ):
                    aside.parent.mkdir(exist_ok=True)
                    (self.folder / str(step)).rename(aside)
                self._say(
                    f"warning: {reason.what}; it is now {aside}, and checkpoint {good} takes its"
                    " place"
                )
        self._manager.reload()

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            yield
        except _MALFORMED as reason:  # of the small file that each step has about itself
            files = [
                file
                for file in sorted(self.folder.glob("*/_CHECKPOINT_METADATA"))
                if not _is_metadata(file)
            ]
            where = (
                ", ".join(map(str, files))
                or f"the _CHECKPOINT_METADATA of a checkpoint in {self.folder}"
            )
            raise Damaged(
                f"{where} is damaged ({_reason(reason)})",
                "remove that file, which nothing else depends on, and run the same command again",
            ) from reason

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Names what cannot be read: as damage, or, where the operating system will not have it, as
        that."""
        try:
            yield
        except Exception as reason:
            # Orbax raises no better one for arrays
            root = reason.__cause__ if type(reason) is Exception else reason
            # Orbax takes what it may not look at for missing
            refusal = _refusal(self.folder / str(step))
            why = f"{refusal.filename}: {refusal.strerror}" if refusal else _reason(root or reason)
            told = f"{self._name(step)} cannot be read ({why})"
            found = re.search(r"os_error_code='(\w+)'", str(root))
            gone = isinstance(root, _GONE) or (
                found is not None and found[1] in ("ENOENT", "EISDIR", "ENOTDIR")
            )
            if refusal or ((found or isinstance(root, OSError)) and not gone):
                raise ConfigError(f"{told}; see to that and run the same command again") from reason
            if isinstance(root, _UNREADABLE):
                raise Damaged(told, self._remedies[1]) from reason
            raise

    @contextlib.contextmanager
    def _agreeing(self, refused: str) -> Iterator[None]:
        """What one process refuses, all refuse: none goes on alone to where it would wait for the
        others."""
        mine: ConfigError | None = None
        try:
            yield
        except ConfigError as reason:
            mine = reason
        if jax.process_count() > 1:
            severity = np.int32(0 if mine is None else 1 if isinstance(mine, Damaged) else 2)
            worst = int(np.max(multihost_utils.process_allgather(severity)))
            if worst > severity:
                told = f"{refused} by another process"
                mine = Damaged(told, self._remedies[1]) if worst == 1 else ConfigError(told)
        if mine is not None:
            raise mine

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as reason:
            if not isinstance(reason, OSError) and "os_error_code" not in str(reason):
                raise
            raise SaveError(
                f"checkpoint {self._saving} cannot be saved in {self.folder}: {_reason(reason)}; "
                "earlier checkpoints are intact: free some space and run the same command again"
            ) from reason


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _refusal(folder: Path) -> OSError | None:
    """What the operating system says of the first folder or file in a folder that is there and may
    not be opened; None if all may be."""
    found: list[OSError] = []
    for root, _, files in os.walk(folder, onerror=found.append):
        for name in files:
            try:
                os.close(os.open(Path(root, name), os.O_RDONLY | os.O_NONBLOCK))
            except OSError as reason:
                found.append(reason)
    return next((reason for reason in found if not isinstance(reason, _GONE)), None)


def _is_metadata(file: Path) -> bool:
    """Whether Orbax can read what a step has about itself, in this file."""
    try:
        ocp.Checkpointer(ocp.CompositeCheckpointHandler()).metadata(file.parent)
        return isinstance(json.loads(file.read_bytes() or b"{}"), dict)
    except _MALFORMED:
        return False


def _unused(path: Path) -> Path:
    """The path, or with the first number behind it that nothing has."""
    taken, number = path, 1
    while taken.exists():
        number += 1
        taken = path.with_name(f"{path.name}-{number}")
    return taken


@functools.cache
def _quieten_orbax() -> None:
    """Keeps quiet what Orbax tells beside what it raises, which the user reads once, as a
    ConfigError.

    It logs a traceback of each failed save, and leaves what a failed read or save had begun to the
    garbage collector, to asyncio and to the threads of tensorstore, who print theirs.
    """
    logging.getLogger("absl").addFilter(_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_not_abandoned)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    others = sys.unraisablehook

    def tell(told: Any) -> None:
        code = getattr(told.object, "cr_code", None)
        abandoned = code is not None and "orbax" in code.co_filename
        too_late = told.exc_type is RuntimeError and str(told.exc_value) == "Event loop is closed"
        if not abandoned and not too_late:
            others(told)

    sys.unraisablehook = tell


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _not_abandoned(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


def _reason(error: BaseException) -> str:
    """The operating system's words, which tensorstore puts last in a long message; it may add what
    it was writing."""
    found = re.search(r"([^:\[\]]+) \[(?:os_error_code|tensorstore_spec)=", str(error))
    if found:
        return found[1].strip()
    return (
        (error.strerror if isinstance(error, OSError) else None)
        or str(error).split("\n")[0][:200]
        or type(error).__name__
    )
