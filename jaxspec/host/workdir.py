"""Folder of a run: its lock, its config, and its sizes."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.config.as_json import (
    flatten_settings,
    list_changed_settings,
    rename_settings,
    require_same_version,
)
from jaxspec.config.settings import ResolvedConfig
from jaxspec.host.job import Job
from jaxspec.host.starts import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    list_checkpoints,
    read_starts,
    require_same_data,
)
from jaxspec.inputs.checked import INT32, ConfigError, prefix_errors, require
from jaxspec.inputs.json_keys import parse_json
from jaxspec.mesh import row_shard_count
from jaxspec.metrics.files import read_metrics
from jaxspec.processes.process_0 import broadcast_table, check_in_process_0
from jaxspec.rollout.pages import min_pool_size
from jaxspec.step import Sizes, Step
from jaxspec.system.files import (
    expand_user_path,
    explain_write_errors,
    utc_timestamp,
    write_text_atomic,
)
from jaxspec.system.folder_lock import lock_folder
from jaxspec.system.terminal import LinePrinter

SAVED = "saved"
"""File that exists once the run has saved a checkpoint."""


@contextlib.contextmanager
def lock_workdir(
    config: ResolvedConfig, say: LinePrinter, check: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """Creates the run's folder, and locks it until the context ends.

    Process 0 holds the lock for all processes of a job, and runs `check` on the folder. The default
    check refuses folders of other runs, and those with results that the run would erase.

    Raises:
      ConfigError: The folder cannot be written, lies among a run's checkpoints, or is locked by
        another run. Or `check` refuses it.
    """
    check_folder = check or partial(_require_same_run, config, say)
    folder = prepare_workdir(config.workdir)
    with contextlib.ExitStack() as stack:

        def lock_and_check() -> None:
            # The lock comes first: until then another run may still change the folder.
            stack.enter_context(lock_folder(folder, say))
            check_folder(folder)

        check_in_process_0(lock_and_check)
        yield folder


def prepare_workdir(path: Path | str) -> Path:
    """Creates a folder, unless it exists, and tries to write to it.

    Returns its absolute path.

    Raises:
      ConfigError: It is read-only or not a folder, or less than 1 MiB is free. Or it lies among a
        run's checkpoints.
    """
    folder = expand_user_path(path, "--workdir")
    require_outside_checkpoints(folder, "workdir", "choose another --workdir")
    # Several runs may try one folder at once, even from other machines, so the name is unique.
    trial = folder / f".trial-{os.uname().nodename}-{os.getpid()}"
    with explain_write_errors(
        f"workdir {folder} cannot be written to",
        "free some space or name another folder with --workdir",
        ConfigError,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with trial.open("wb") as file:
                file.write(bytes(1 << 20))
                # Full disks and quotas may be reported only when data reaches the disk.
                file.flush()
                os.fsync(file.fileno())
        finally:
            trial.unlink(missing_ok=True)
    return folder


def require_outside_checkpoints(path: Path, name: str, remedy: str) -> None:
    """Checks that a path does not lie among the checkpoints of a run.

    `name` and `remedy` are parts of the message.

    Raises:
      ConfigError: The path lies there.
    """
    # Old checkpoints are removed with everything inside them.
    for folder in (path, *path.parents):
        inside = folder.name in (CHECKPOINTS, BEST) and (folder.parent / CONFIG).is_file()
        require(
            not inside,
            f"{name} {path} lies among the checkpoints of the run in {folder.parent}, which removes"
            f" old ones; {remedy}",
        )


def read_saved_config(
    folder: Path, remedy: str = "put it back from a copy, or choose another --workdir"
) -> dict[str, Any]:
    """Reads the config.json of a run.

    Settings of earlier versions get their present names.

    Raises:
      ConfigError: The file cannot be read, or is not a JSON object.
    """
    file = folder / CONFIG
    try:
        # Reading a named pipe would block.
        require(not file.exists() or file.is_file(), f"{file} is not a regular file; {remedy}")
        saved = parse_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; {remedy}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); {remedy}") from error
    require(
        isinstance(saved, dict),
        f"{file} holds a {type(saved).__name__} instead of an object; {remedy}",
    )
    return rename_settings(saved)


def _require_same_run(config: ResolvedConfig, say: LinePrinter, folder: Path) -> None:
    """Checks that the folder is new or this run's.

    Raises:
      ConfigError: It is another run's, or this run would erase results in it.
    """
    exists, steps, count = (
        (folder / CONFIG).exists(),
        list_checkpoints(folder),
        len(read_metrics(folder)),
    )
    if exists:
        saved_config = read_saved_config(folder)
        # The version comes first: another version may name settings differently.
        with prefix_errors(str(folder / CONFIG)):
            require_same_version(saved_config, "use that version, or choose another --workdir")
        changed_settings = list_changed_settings(saved_config, config)
        other_config = (
            f"{folder} belongs to another config: {'; '.join(changed_settings)}. Choose"
            " another --workdir, or set these keys back"
        )
        require(not changed_settings, other_config)
    if steps:
        missing_config = (
            f"{folder} holds checkpoints but no {CONFIG}, which tells their config; put it back"
            " from a copy"
        )
        require(exists, f"{missing_config}, or choose another --workdir")
        require_same_data(config, folder, say)
    else:
        _require_nothing_to_lose(folder, count, say)


def restore_sizes(job: Job, folder: Path) -> Job:
    """Restores the automatic sizes of a resumed run.

    Only sizes that the config leaves open, and that work on this mesh, are restored. On another
    kind of device all are chosen again.
    """
    # With equal sizes a resumed run sums in the same order. Another backend has an order of its
    # own, whatever the sizes are.
    saved_sizes = np.full((len(Sizes._fields),), -1, np.int32)
    is_resumed = jax.process_index() == 0 and list_checkpoints(folder)
    if is_resumed and _last_backend(folder) == jax.default_backend():
        values = flatten_settings(read_saved_config(folder))
        names = ("batch.micro_tokens", *(f"rollout.engine.{name}" for name in Sizes._fields[1:]))
        # A damaged value is ignored, and its size chosen again.
        for index, number in enumerate(map(values.get, names)):
            if type(number) is int and 0 <= number <= INT32:
                saved_sizes[index] = number
    saved_sizes = broadcast_table(np.asarray(saved_sizes)).tolist()
    restored_sizes = _select_sizes(job.config, job.step, Sizes(*saved_sizes))
    return job.with_sizes(**restored_sizes) if restored_sizes else job


def _last_backend(folder: Path) -> Any:
    """Returns the backend of the run's last start, or None if it is unknown."""
    records = read_starts(folder)
    machine_record = records[-1].get("machine") if records else None
    return machine_record.get("backend") if isinstance(machine_record, dict) else None


def _select_sizes(config: ResolvedConfig, step: Step, saved_sizes: Sizes) -> dict[str, int]:
    """Selects the saved sizes to restore.

    These are sizes that the config leaves open and that work on this mesh. A size of -1 was not
    saved.
    """
    engine, generator = config.rollout.engine, step.generator
    prompts = config.batch.prompts // row_shard_count(generator.mesh)
    restored_sizes: dict[str, int] = {}
    if config.batch.micro_tokens == 0 and saved_sizes.tokens >= generator.row_length - 1:
        restored_sizes["tokens"] = saved_sizes.tokens
    if engine.slots == "auto" and saved_sizes.slots > 0:
        restored_sizes["slots"] = saved_sizes.slots
    if engine.page_size == "auto" and saved_sizes.page_size >= 0:
        restored_sizes["page_size"] = saved_sizes.page_size
    size = restored_sizes.get("page_size", step.sizes.page_size)
    if engine.pages == 0 and size == saved_sizes.page_size > 0:
        row = config.data.max_prompt_length, config.rollout.max_new_tokens, generator.draft_length
        # The run may have had more data shards, each with fewer prompts and pages.
        if saved_sizes.pages >= min_pool_size(prompts, *row, size):
            restored_sizes["pages"] = saved_sizes.pages
    return restored_sizes


def mark_checkpoint_saved(folder: Path) -> None:
    """Writes the file `SAVED`, once the run has a checkpoint."""
    # If the checkpoints are gone later, the file shows that someone removed them.
    if (
        jax.process_index() == 0
        and not (folder / SAVED).exists()
        and (steps := list_checkpoints(folder))
    ):
        write_text_atomic(folder / SAVED, f"checkpoint {steps[0]} was saved at {utc_timestamp()}\n")


def _require_nothing_to_lose(folder: Path, batch_count: int, say: LinePrinter) -> None:
    """Checks that a run without checkpoints may start over.

    It may if it has no metrics, or has not saved a checkpoint yet. `batch_count` is the number of
    batches that have metrics.

    Raises:
      ConfigError: Someone has removed its checkpoints.
    """
    if not batch_count:
        return
    status, checkpoints = f"{folder} has metrics of {batch_count} batches", folder / CHECKPOINTS
    remedy = "put them back, choose another --workdir, or remove the folder yourself to start over"
    require(
        checkpoints.is_dir(),
        f"{status}, but {checkpoints} is missing, and starting over would erase them; {remedy}",
    )
    message = (
        f"{status}, but the checkpoints that were saved in {checkpoints} are gone, and starting"
        f" over would erase them; {remedy}"
    )
    require(not (folder / SAVED).exists(), message)
    say(f"{status} and no checkpoint was saved yet: starting over")


def require_no_checkpoints(folder: Path) -> None:
    """Checks that the run has no checkpoints. Call it when none could be restored.

    Raises:
      ConfigError: There are checkpoints. All processes raise it.
    """
    # A run that starts over would overwrite checkpoints that it cannot read.

    def require_none() -> None:
        steps = list_checkpoints(folder)
        message = (
            f"{folder / CHECKPOINTS} has {', '.join(map(str, steps))}, which cannot be read as"
            " checkpoints"
        )
        require(not steps, f"{message}; repair them, or choose another --workdir")

    check_in_process_0(require_none)
