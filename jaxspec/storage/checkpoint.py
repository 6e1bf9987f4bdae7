"""Saves a run's checkpoints by Orbax, and checks their digests."""

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

from jaxspec.inputs.checked import ConfigError
from jaxspec.processes import roles
from jaxspec.processes.global_arrays import from_host_values, gather_over_processes
from jaxspec.state import PyTree
from jaxspec.storage.orbax_errors import PATH_ERRORS, access_error_in, describe_error, silence_orbax
from jaxspec.storage.orbax_manager import convert_for_saving, open_manager
from jaxspec.storage.trees import array_layout, digest_arrays, leaves_by_name, require_same_layout
from jaxspec.system.files import (
    DamagedFileError,
    SaveError,
    explain_write_errors,
    next_free_path,
)

# The last item is present if the common state has the key `processes` with their number.
_ARRAYS_ITEM, _HOST_ITEM, _PROCESS_ITEM = "arrays", "host", "own"
"""Items of a step: arrays, state common to all processes, and state of each process."""
_HOST_FILE = "metadata"
"""File of the common state. Files of processes are named by their number."""
_READ_ERRORS = (*PATH_ERRORS, ValueError, KeyError, AttributeError, TypeError, IndexError)
"""Errors of Orbax and tensorstore for damaged files, perhaps as the cause of a bare Exception."""
_METADATA_ERRORS = (ValueError, TypeError, KeyError, AttributeError)
"""Errors that Orbax raises for a damaged _CHECKPOINT_METADATA."""


class RestoredCheckpoint(NamedTuple):
    """Content of a checkpoint."""

    arrays: PyTree
    host_state: dict[str, Any]
    """State common to all processes."""
    process_states: list[dict[str, Any]]
    """States of the saving processes whose `successor_process` is this one."""


def successor_process(process_id: int) -> int:
    """Returns the process that takes over the state of a saving process."""
    return process_id % roles.member_count()


class Checkpoints:
    """The newest `keep` checkpoints of a run.

    Each is complete or absent. All processes call each method, and arrays are global.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        read_only: bool = False,
        log: Callable[[str], None] = print,
    ) -> None:
        silence_orbax()
        self.folder = Path(folder).absolute()
        self._saving_step: int | None = None
        self._log = log
        # For a checkpoint of another config, and for a damaged one.
        self._remedies = (
            "Use that config again, or another --workdir",
            "put it back from a copy, or name another folder with --workdir",
        )
        if read_only:
            self._remedies = (
                "Set the run's config.json back, or use the jaxspec that wrote it",
                "choose another checkpoint of the run",
            )
        open_remedy = "name another folder" if read_only else "name another folder with --workdir"
        with (
            explain_write_errors(
                f"checkpoints in {self.folder} cannot be opened", open_remedy, ConfigError
            ),
            self._explain_open_errors(),
        ):
            self._manager = open_manager(
                self.folder,
                {
                    _ARRAYS_ITEM: ocp.PyTreeCheckpointHandler(),
                    _HOST_ITEM: ocp.JsonCheckpointHandler(_HOST_FILE),
                    _PROCESS_ITEM: ocp.JsonCheckpointHandler(
                        str(jax.process_index()),
                        multiprocessing_options=ocp.options.MultiprocessingOptions(
                            primary_host=None  # each process writes its file
                        ),
                    ),
                },
                keep,
                read_only,
            )

    def save(
        self,
        step: int,
        arrays: PyTree,
        host_state: Mapping[str, Any],
        process_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts to save a step. The arrays may be donated as soon as it returns.

        `host_state` and `process_state` are JSON objects, the first equal in all processes. A step
        that is already saved is left as it is.
        Raises SaveError if this save or the previous one cannot be written.
        """
        # Orbax refuses arrays without elements, which have nothing to save.
        leaves = {name: leaf for name, leaf in leaves_by_name(arrays).items() if leaf.size}
        self.wait_until_saved()
        if step in self._manager.all_steps():
            return
        self._saving_step, digests = step, digest_arrays(leaves)
        leaves = convert_for_saving(leaves)
        extra_fields = {} if process_state is None else {"processes": roles.member_count()}
        items = {
            _ARRAYS_ITEM: ocp.args.PyTreeSave(leaves),
            _HOST_ITEM: ocp.args.JsonSave(_add_digest(host_state, arrays=digests, **extra_fields)),
        }
        if process_state is not None:
            owner = [step, jax.process_index()]
            items[_PROCESS_ITEM] = ocp.args.JsonSave(_add_digest(process_state, whose=owner))
        with self._explain_save_errors():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def latest_step(self) -> int | None:
        """Returns the newest step, saved or being saved."""
        return self._manager.latest_step()

    def restore_latest(
        self, describe_arrays: Callable[[dict[str, Any]], PyTree]
    ) -> RestoredCheckpoint | None:
        """Restores the newest intact step. Returns None if there is no step at all.

        `describe_arrays` maps the step's `host_state` to the `abstract` of `restore`. Damaged steps
        are moved to another folder with a warning, so that they can be saved again.
        Raises ConfigError if all are damaged, and moves none then. Else it raises as `restore`.
        """
        damaged: dict[int, DamagedFileError] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                restored = self._restore_step(step, describe_arrays)
            except DamagedFileError as error:
                damaged[step] = error
                continue
            self._move_damaged(damaged, step)
            return restored
        if damaged:
            raise ConfigError("; ".join(str(error) for error in damaged.values()))
        return None

    def restore(self, step: int, abstract: PyTree, partial: bool = False) -> RestoredCheckpoint:
        """Restores a step.

        `abstract` is the saved tree, with leaves that have shape, dtype and the new sharding, on
        any mesh. If `partial`, it may lack some (None), which are not read, and neither are
        process states.
        Raises ConfigError if names, shapes or dtypes differ, or the files cannot be read.
        Raises DamagedFileError if their content has changed.
        """
        return self._restore_step(step, lambda _: abstract, partial)

    def _restore_step(
        self, step: int, describe_arrays: Callable[[dict[str, Any]], PyTree], partial: bool = False
    ) -> RestoredCheckpoint:
        step_name = self._step_name(step)
        self.wait_until_saved()
        with self._share_errors(f"{step_name} cannot be read"):
            host_state, digests, process_states = self._load_states(step, partial)
            abstract = describe_arrays(host_state)
            leaves = leaves_by_name(abstract)
            specs = {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
                for name, leaf in leaves.items()
                if leaf.size
            }
            with self._explain_read_errors(step):
                stored = array_layout(self._manager.item_metadata(step)[_ARRAYS_ITEM].tree)
            if digests.keys() != stored.keys():
                raise DamagedFileError(
                    f"{step_name} is damaged (it names other arrays than were saved)",
                    self._remedies[1],
                )
            require_same_layout(
                step_name,
                {name: stored[name] for name in stored if name in specs or not partial},
                array_layout(specs),
                self._remedies[0],
            )
            leaf_args = ocp.checkpoint_utils.construct_restore_args(specs)
            args = ocp.args.PyTreeRestore(specs, restore_args=leaf_args, partial_restore=partial)
            # Not by the manager: if one process cannot read its part, the others would wait at the
            # manager's barrier.
            with self._explain_read_errors(step):
                arrays = {
                    **ocp.PyTreeCheckpointHandler().restore(
                        self._manager.directory / str(step) / _ARRAYS_ITEM, args=args
                    )
                }
        # Outside `_share_errors`, since the digests are the same in all processes.
        changed = [name for name, value in digest_arrays(arrays).items() if value != digests[name]]
        if changed:
            suffix = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise DamagedFileError(
                f"{step_name} is damaged ({changed[0]}{suffix} differ from what was saved)",
                self._remedies[1],
            )
        arrays |= {
            name: from_host_values(leaf, np.zeros(leaf.shape, leaf.dtype))
            for name, leaf in leaves.items()
            if not leaf.size
        }
        tree = jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in leaves])
        return RestoredCheckpoint(tree, host_state, process_states)

    def wait_until_saved(self) -> None:
        """Waits for the current save. Raises SaveError if it failed."""
        with self._explain_save_errors():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the current save, and frees the threads."""
        try:
            self.wait_until_saved()
        finally:
            self._manager.close()

    def _step_name(self, step: int) -> str:
        return f"checkpoint {self.folder / str(step)}"

    def _load_states(
        self, step: int, partial: bool
    ) -> tuple[dict[str, Any], dict[str, int], list[dict[str, Any]]]:
        """Loads a step's common state, digests, and (unless `partial`) states for this process."""
        content = self._load_json(step, _HOST_FILE)
        process_count = 0 if partial else content.get("processes", 0)
        process_states = [
            self._load_json(step, str(process_id), [step, process_id])["saved"]
            for process_id in range(process_count)
            if successor_process(process_id) == jax.process_index()
        ]
        return content["saved"], content["arrays"], process_states

    def _load_json(self, step: int, name: str, owner: list[int] | None = None) -> dict[str, Any]:
        """Loads a JSON file. Checks its digest and owner (step and process)."""
        handler, item = ocp.JsonCheckpointHandler(name), _PROCESS_ITEM if owner else _HOST_ITEM
        with self._explain_read_errors(step):
            content = {**handler.restore(self._manager.directory / str(step) / item)}
            is_intact = content.pop("digest", None) == _digest_json(content)
        # A file copied from another step or process has a valid digest.
        if not is_intact or content.get("whose") != owner:
            raise DamagedFileError(
                f"{self._step_name(step)} is damaged (the state of the run differs from what was"
                " saved)",
                self._remedies[1],
            )
        return content

    def _move_damaged(self, damaged: Mapping[int, DamagedFileError], intact_step: int) -> None:
        """Moves damaged steps to `damaged-checkpoints` with a warning."""
        if not damaged:
            return
        with self._share_errors(f"damaged checkpoints in {self.folder} cannot be moved"):
            for step, error in damaged.items() if jax.process_index() == 0 else ():
                new_path = next_free_path(self.folder.parent / "damaged-checkpoints" / str(step))
                with explain_write_errors(
                    f"{self.folder / str(step)} cannot be moved",
                    "move it away, and run the same command again",
                    ConfigError,
                ):
                    new_path.parent.mkdir(exist_ok=True)
                    (self.folder / str(step)).rename(new_path)
                self._log(
                    f"warning: {error.problem}; it is now {new_path}, and checkpoint {intact_step}"
                    " takes its place"
                )
        # The manager caches the list of steps.
        self._manager.reload()

    @contextlib.contextmanager
    def _explain_open_errors(self) -> Iterator[None]:
        try:
            yield
        except _METADATA_ERRORS as error:
            files = [
                file
                for file in sorted(self.folder.glob("*/_CHECKPOINT_METADATA"))
                if not _is_readable_metadata(file)
            ]
            location = (
                ", ".join(map(str, files))
                or f"the _CHECKPOINT_METADATA of a checkpoint in {self.folder}"
            )
            raise DamagedFileError(
                f"{location} is damaged ({describe_error(error)})",
                "remove that file, which nothing else depends on, and run the same command again",
            ) from error

    @contextlib.contextmanager
    def _explain_read_errors(self, step: int) -> Iterator[None]:
        """Explains errors of reading. Lack of access is a ConfigError, not a DamagedFileError."""
        try:
            yield
        except Exception as error:
            # For arrays Orbax raises a bare Exception with the reason as its cause.
            root = error.__cause__ if type(error) is Exception else error
            # Orbax reports files without permission as missing.
            denial = access_error_in(self.folder / str(step))
            cause = (
                f"{denial.filename}: {denial.strerror}" if denial else describe_error(root or error)
            )
            fault = f"{self._step_name(step)} cannot be read ({cause})"
            # tensorstore's errors have the code of the operating system in their text only.
            code_match = re.search(r"os_error_code='(\w+)'", str(root))
            is_missing = isinstance(root, PATH_ERRORS) or (
                code_match is not None and code_match[1] in ("ENOENT", "EISDIR", "ENOTDIR")
            )
            if denial or ((code_match or isinstance(root, OSError)) and not is_missing):
                raise ConfigError(f"{fault}; see to that and run the same command again") from error
            if isinstance(root, _READ_ERRORS):
                raise DamagedFileError(fault, self._remedies[1]) from error
            raise

    @contextlib.contextmanager
    def _share_errors(self, failure: str) -> Iterator[None]:
        """Raises one process's ConfigError in all processes."""
        # A process that went on would wait for the others in its next collective.
        fault: ConfigError | None = None
        try:
            yield
        except ConfigError as error:
            fault = error
        if roles.member_count() > 1:
            # A ConfigError of any process outweighs damage, so that no step is moved away.
            severity = 0 if fault is None else 1 if isinstance(fault, DamagedFileError) else 2
            worst = int(gather_over_processes(severity).max())
            if worst > severity:
                text = f"{failure} by another process"
                fault = (
                    DamagedFileError(text, self._remedies[1]) if worst == 1 else ConfigError(text)
                )
        if fault is not None:
            raise fault

    @contextlib.contextmanager
    def _explain_save_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            # tensorstore raises ValueError for failures of the operating system.
            if not isinstance(error, OSError) and "os_error_code" not in str(error):
                raise
            raise SaveError(
                f"checkpoint {self._saving_step} cannot be saved in {self.folder}:"
                f" {describe_error(error)}; earlier checkpoints are intact: free some space and run"
                " the same command again"
            ) from error


def _add_digest(saved: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Builds the content of a JSON file, with its digest, for `_load_json`."""
    # Through JSON, so that the digest is of values as they are read back.
    content = {"saved": json.loads(json.dumps(dict(saved))), **fields}
    return content | {"digest": _digest_json(content)}


def _digest_json(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_readable_metadata(file: Path) -> bool:
    """Returns whether Orbax can read a file _CHECKPOINT_METADATA."""
    try:
        ocp.Checkpointer(ocp.CompositeCheckpointHandler()).metadata(file.parent)
        return isinstance(json.loads(file.read_bytes() or b"{}"), dict)
    except _METADATA_ERRORS:
        return False
