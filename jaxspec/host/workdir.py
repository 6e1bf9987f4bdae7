"""Folder of a run: its lock, its config, and its sizes."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.config.as_json import (
    flatten_settings,
    list_changed_settings,
    require_same_version,
)
from jaxspec.host.job import Job
from jaxspec.host.starts import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    list_steps,
    read_starts,
    require_same_data,
)
from jaxspec.inputs.checked import INT32, ConfigError, prefix_errors, require
from jaxspec.inputs.json_keys import parse_json
from jaxspec.mesh import row_shard_count
from jaxspec.processes.process_0 import check_in_process_0
from jaxspec.rollout.pages import smallest_pool
from jaxspec.step import Sizes
from jaxspec.system.files import (
    expand_user_path,
    explain_write_errors,
    utc_timestamp,
    write_text_atomic,
)
from jaxspec.system.folder_lock import lock_folder
from jaxspec.system.metrics import read_metrics

SAVED = "saved"


@contextlib.contextmanager
def lock_workdir(job: Job, check: Callable[[Job, Path], None] | None = None) -> Iterator[Path]:
    """The run's folder, made if it is not there, which no other run can have until this is left or
    its process dies.

    Of several processes of a job, process 0 has it for all, and judges it by `check`: by
    default, whether it is this training run's.

    Raises:
      ConfigError: the folder cannot be written, another run has it, it belongs to another config or
        other data, or what it holds would be lost; what and where is named.
    """
    judge = check or _require_same_run
    folder = prepare_workdir(job.config.workdir)
    with contextlib.ExitStack() as stack:

        def enter_folder() -> None:
            stack.enter_context(lock_folder(folder, job.say))
            judge(job, folder)

        check_in_process_0(enter_folder)
        yield folder


def prepare_workdir(path: Path | str) -> Path:
    """Creates the folder of a run, proves that it can be written to, and returns its absolute path.

    Raises ConfigError if it is read-only or not a folder, or if less than 1 MiB is free.
    """
    folder = expand_user_path(path, "--workdir")
    require_outside_runs(folder, "workdir", "choose another --workdir")
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
                file.flush()
                os.fsync(file.fileno())
        finally:
            trial.unlink(missing_ok=True)
    return folder


def require_outside_runs(path: Path, name: str, remedy: str) -> None:
    """Refuses a path among the checkpoints of a run, which removes old ones with all that is in
    them."""
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
    """What config.json of a run holds.

    Raises:
      ConfigError: the file is missing, damaged or no object.
    """
    file = folder / CONFIG
    try:
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
    return saved


def _require_same_run(job: Job, folder: Path) -> None:
    """Refuses a folder of another config or other data, and one in which a run that starts over
    would erase what it does not know."""
    exists, steps, count = (folder / CONFIG).exists(), list_steps(folder), len(read_metrics(folder))
    if exists:
        saved_config = read_saved_config(folder)
        with prefix_errors(str(folder / CONFIG)):
            require_same_version(saved_config, "use that version, or choose another --workdir")
        changed_settings = list_changed_settings(saved_config, job.config)
        other_config = (
            f"{folder} belongs to another config: {'; '.join(changed_settings)}. Choose"
            " another --workdir, or set these keys back"
        )
        require(not changed_settings, other_config)
    if steps:
        missing_config = (
            f"{folder} holds checkpoints but no {CONFIG}, which says what they are of; put it back"
            " from a copy"
        )
        require(exists, f"{missing_config}, or choose another --workdir")
        require_same_data(job, folder)
    else:
        _require_nothing_to_lose(job, folder, count)


def restore_sizes(job: Job, folder: Path) -> Job:
    """The job with what its run chose by itself when it began, where it is to choose again: a
    resumed run adds up in the same order.

    On another kind of device it would not, so there all is chosen anew.
    """
    saved_sizes = np.full((len(Sizes._fields),), -1, np.int32)
    is_resumed = jax.process_index() == 0 and list_steps(folder)
    if is_resumed and _last_backend(folder) == jax.default_backend():
        values = flatten_settings(read_saved_config(folder))
        names = ("batch.micro_tokens", *(f"rollout.engine.{name}" for name in Sizes._fields[1:]))
        for index, number in enumerate(map(values.get, names)):
            if type(number) is int and 0 <= number <= INT32:
                saved_sizes[index] = number
    if jax.process_count() > 1:
        saved_sizes = multihost_utils.broadcast_one_to_all(saved_sizes)
    restored_sizes = _select_sizes(job, Sizes(*np.asarray(saved_sizes).tolist()))
    return job.with_sizes(**restored_sizes) if restored_sizes else job


def _last_backend(folder: Path) -> Any:
    """The kind of device that a run had when it was started last."""
    records = read_starts(folder)
    machine_record = records[-1].get("machine") if records else None
    return machine_record.get("backend") if isinstance(machine_record, dict) else None


def _select_sizes(job: Job, saved_sizes: Sizes) -> dict[str, int]:
    """Of the sizes that a run has saved (-1: it has not), those that the config leaves open and
    that do here."""
    config, generator = job.config, job.step.generator
    engine, prompts = config.rollout.engine, config.batch.prompts // row_shard_count(job.mesh)
    restored_sizes: dict[str, int] = {}
    if config.batch.micro_tokens == 0 and saved_sizes.tokens >= generator.row_length - 1:
        restored_sizes["tokens"] = saved_sizes.tokens
    if engine.slots == "auto" and saved_sizes.slots > 0:
        restored_sizes["slots"] = saved_sizes.slots
    if engine.page_size == "auto" and saved_sizes.page_size >= 0:
        restored_sizes["page_size"] = saved_sizes.page_size
    size = restored_sizes.get("page_size", job.step.sizes.page_size)
    if engine.pages == 0 and size == saved_sizes.page_size > 0:
        row = config.data.max_prompt_length, config.rollout.max_new_tokens, generator.draft_length
        # those of other shards can be too few for the prompts of these
        if saved_sizes.pages >= smallest_pool(prompts, *row, size):
            restored_sizes["pages"] = saved_sizes.pages
    return restored_sizes


def mark_saved(folder: Path) -> None:
    """Notes in the folder that a checkpoint has been saved, once there is one: if none is there
    later, they were taken away."""
    if jax.process_index() == 0 and not (folder / SAVED).exists() and (steps := list_steps(folder)):
        write_text_atomic(folder / SAVED, f"checkpoint {steps[0]} was saved at {utc_timestamp()}\n")


def _require_nothing_to_lose(job: Job, folder: Path, batch_count: int) -> None:
    """A run of which nothing was ever saved starts over, for all its `batch_count` metrics; one
    whose checkpoints were taken away does not."""
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
    job.say(f"{status} and no checkpoint was saved yet: starting over")


def require_no_checkpoints(folder: Path) -> None:
    """Refuses, in all processes, to start over beside checkpoints in which nothing was found to go
    on from."""

    def check_checkpoints() -> None:
        steps = list_steps(folder)
        message = (
            f"{folder / CHECKPOINTS} has {', '.join(map(str, steps))}, which cannot be read as"
            " checkpoints"
        )
        require(not steps, f"{message}; put them right, or choose another --workdir")

    check_in_process_0(check_checkpoints)
