"""Checkpoints of a run (Orbax): saved in the background, restored on any mesh, and checked to hold
what was saved."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxspec.inputs.checked import ConfigError
from jaxspec.mesh import from_host
from jaxspec.state import PyTree
from jaxspec.storage.orbax_errors import GONE, quieten_orbax, reason_of, refusal_in
from jaxspec.storage.trees import digests, layout, named, require_same
from jaxspec.system.files import Damaged, SaveError, writing

_ARRAYS, _HOST, _OWN = "arrays", "host", "own"
"""Items of a step: the arrays, a file of what all processes have alike, and, where that says of how
many `processes`, a file of what each has by itself."""
_ALIKE = "metadata"
"""Name of the file of what all have alike; others have the number of the process."""
_UNREADABLE = (*GONE, ValueError, KeyError, AttributeError, TypeError, IndexError)
"""All that Orbax and tensorstore were seen to raise for damaged files, beside a bare Exception
around one of these."""
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError)
"""All that Orbax was seen to raise for what a step has about itself."""


class Restored(NamedTuple):
    """A checkpoint that was read."""

    arrays: PyTree
    host: dict[str, Any]
    """What all processes had saved alike."""
    own: list[dict[str, Any]]
    """What some processes had saved by themselves: those whose `heir` this one is."""


def heir(process: int) -> int:
    """The process that takes over what a process of the saving run had by itself."""
    return process % jax.process_count()


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
        quieten_orbax()
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
                    _HOST: ocp.JsonCheckpointHandler(_ALIKE),
                    _OWN: ocp.JsonCheckpointHandler(
                        str(jax.process_index()),
                        multiprocessing_options=ocp.options.MultiprocessingOptions(
                            primary_host=None  # each process writes its file
                        ),
                    ),
                },
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                    # A killed save leaves its half under a temporary name; a reader leaves a live
                    # run's half alone.
                    cleanup_tmp_directories=not read_only,
                    read_only=read_only,
                ),
            )

    def save(
        self,
        step: int,
        arrays: PyTree,
        host: Mapping[str, Any],
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts to save a tree of `jax.Array`, and JSON objects: one that all processes have
        alike, and what each has by itself; the arrays may be donated as soon as it returns.

        A step that is already saved is left alone. Raises SaveError if this save, or the one
        before, cannot be written.
        """
        # Orbax refuses arrays without elements; they hold nothing to save.
        leaves = {name: leaf for name, leaf in named(arrays).items() if leaf.size}
        self.wait()
        if step in self._manager.all_steps():
            return
        self._saving = step
        more = {} if own is None else {"processes": jax.process_count()}
        items = {
            _ARRAYS: ocp.args.PyTreeSave(leaves),
            _HOST: ocp.args.JsonSave(_with_digest(host, arrays=digests(leaves), **more)),
        }
        if own is not None:
            whose = [step, jax.process_index()]
            items[_OWN] = ocp.args.JsonSave(_with_digest(own, whose=whose))
        with self._failing():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def latest(self) -> int | None:
        """Returns the newest step that is saved or being saved."""
        return self._manager.latest_step()

    def restore_newest(self, abstract: PyTree) -> Restored | None:
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

    def restore(self, step: int, abstract: PyTree, part: bool = False) -> Restored:
        """Returns what was saved of a step.

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
            host, saved, own = self._read_json(step, part)
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
        tree = jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in leaves])
        return Restored(tree, host, own)

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

    def _read_json(
        self, step: int, part: bool
    ) -> tuple[dict[str, Any], dict[str, int], list[dict[str, Any]]]:
        """The JSON object of a step, the digests of its arrays, and what is this process's of the
        objects that each process saved; as a `part`, none of these."""
        host = self._read_file(step, _ALIKE)
        processes = 0 if part else host.get("processes", 0)
        own = [
            self._read_file(step, str(process), [step, process])["saved"]
            for process in range(processes)
            if heir(process) == jax.process_index()
        ]
        return host["saved"], host["arrays"], own

    def _read_file(self, step: int, name: str, whose: list[int] | None = None) -> dict[str, Any]:
        """A file of JSON of a step, which was saved `_with_digest`; of whose step and process."""
        handler, item = ocp.JsonCheckpointHandler(name), _OWN if whose else _HOST
        with self._reading(step):
            content = {**handler.restore(self._manager.directory / str(step) / item)}
            sound = content.pop("digest", None) == _digest(content)
        if not sound or content.get("whose") != whose:
            raise Damaged(
                f"{self._name(step)} is damaged (what it says of the run differs from what was"
                " saved)",
                self._remedies[1],
            )
        return content

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
                f"{where} is damaged ({reason_of(reason)})",
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
            refusal = refusal_in(self.folder / str(step))
            why = (
                f"{refusal.filename}: {refusal.strerror}" if refusal else reason_of(root or reason)
            )
            told = f"{self._name(step)} cannot be read ({why})"
            found = re.search(r"os_error_code='(\w+)'", str(root))
            gone = isinstance(root, GONE) or (
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
                f"checkpoint {self._saving} cannot be saved in {self.folder}: {reason_of(reason)}; "
                "earlier checkpoints are intact: free some space and run the same command again"
            ) from reason


def _with_digest(saved: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The content of a file of JSON, as `_read_file` reads it."""
    content = {"saved": json.loads(json.dumps(dict(saved))), **more}
    return content | {"digest": _digest(content)}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
