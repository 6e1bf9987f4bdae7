"""The folder of a run: one process at a time, one config, the data it began with; and on what
machine and with what versions it ran."""

import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.config.as_json import (
    flatten_settings,
    list_changed_settings,
    require_same_version,
    to_json,
)
from jaxspec.config.settings import ResolvedConfig
from jaxspec.data.files import data_digest
from jaxspec.hf.pretrained import fingerprint_checkpoint
from jaxspec.host.job import Job, code_version
from jaxspec.inputs.checked import INT32, ConfigError, prefix_errors, require
from jaxspec.inputs.json_keys import parse_json
from jaxspec.mesh import machine, row_shards
from jaxspec.processes.process_0 import check_in_process_0
from jaxspec.rollout.pages import smallest_pool
from jaxspec.step import Sizes
from jaxspec.system.files import (
    expand_user_path,
    explain_write_errors,
    hash_file,
    utc_timestamp,
    write_text_atomic,
)
from jaxspec.system.folder_lock import lock_folder
from jaxspec.system.metrics import read_metrics
from jaxspec.tokens.tokenizer import TOKENIZER_FILES

CONFIG, CHECKPOINTS, BEST = "config.json", "checkpoints", "best"
STARTS, SAVED = "starts.jsonl", "saved"


@contextlib.contextmanager
def held(job: Job, look_into: Callable[[Job, Path], None] | None = None) -> Iterator[Path]:
    """The run's folder, made if it is not there, which no other run can have until this is left or
    its process dies.

    Of several processes of a job, process 0 has it for all, and judges it by `look_into`: by
    default, whether it is this training run's.

    Raises:
      ConfigError: the folder cannot be written, another run has it, it belongs to another config or
        other data, or what it holds would be lost; what and where is named.
    """
    judge = look_into or _require_own
    folder = prepare_workdir(job.config.workdir)
    with contextlib.ExitStack() as stack:

        def look() -> None:
            stack.enter_context(lock_folder(folder, job.say))
            judge(job, folder)

        check_in_process_0(look)
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


def saved_config(
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


def _require_own(job: Job, folder: Path) -> None:
    """Refuses a folder of another config or other data, and one in which a run that starts over
    would erase what it does not know."""
    begun, saved, batches = (folder / CONFIG).exists(), steps(folder), len(read_metrics(folder))
    if begun:
        written = saved_config(folder)
        with prefix_errors(str(folder / CONFIG)):
            require_same_version(written, "use that version, or choose another --workdir")
        differing = list_changed_settings(written, job.config)
        belongs = (
            f"{folder} belongs to another config: {'; '.join(differing)}. Choose another --workdir,"
            " or set these keys back"
        )
        require(not differing, belongs)
    if saved:
        unknown = (
            f"{folder} holds checkpoints but no {CONFIG}, which says what they are of; put it back"
            " from a copy"
        )
        require(begun, f"{unknown}, or choose another --workdir")
        _require_same_data(job, folder)
    else:
        _require_nothing_to_lose(job, folder, batches)


def as_begun(job: Job, folder: Path) -> Job:
    """The job with what its run chose by itself when it began, where it is to choose again: a
    resumed run adds up in the same order.

    On another kind of device it would not, so there all is chosen anew.
    """
    saved = np.full((len(Sizes._fields),), -1, np.int32)
    looks = jax.process_index() == 0 and steps(folder)
    if looks and _last_backend(folder) == jax.default_backend():
        values = flatten_settings(saved_config(folder))
        names = ("batch.micro_tokens", *(f"rollout.engine.{name}" for name in Sizes._fields[1:]))
        for place, number in enumerate(map(values.get, names)):
            if type(number) is int and 0 <= number <= INT32:
                saved[place] = number
    if jax.process_count() > 1:
        saved = multihost_utils.broadcast_one_to_all(saved)
    taken = _to_take(job, Sizes(*np.asarray(saved).tolist()))
    return job.with_sizes(**taken) if taken else job


def _last_backend(folder: Path) -> Any:
    """The kind of device that a run had when it was started last."""
    starts = read_starts(folder)
    found = starts[-1].get("machine") if starts else None
    return found.get("backend") if isinstance(found, dict) else None


def _to_take(job: Job, saved: Sizes) -> dict[str, int]:
    """Of the sizes that a run has saved (-1: it has not), those that the config leaves open and
    that do here."""
    config, generator = job.config, job.step.generator
    engine, prompts = config.rollout.engine, config.batch.prompts // row_shards(job.mesh)
    taken: dict[str, int] = {}
    if config.batch.micro_tokens == 0 and saved.tokens >= generator.row_length - 1:
        taken["tokens"] = saved.tokens
    if engine.slots == "auto" and saved.slots > 0:
        taken["slots"] = saved.slots
    if engine.page_size == "auto" and saved.page_size >= 0:
        taken["page_size"] = saved.page_size
    size = taken.get("page_size", job.step.sizes.page_size)
    if engine.pages == 0 and size == saved.page_size > 0:
        row = config.data.max_prompt_length, config.rollout.max_new_tokens, generator.draft_length
        # those of other shards can be too few for the prompts of these
        if saved.pages >= smallest_pool(prompts, *row, size):
            taken["pages"] = saved.pages
    return taken


def steps(folder: Path, kept: str = CHECKPOINTS) -> list[int]:
    """Numbers of a run's checkpoints, ascending.

    Raises:
      ConfigError: where they should be is something else.
    """
    checkpoints = folder / kept
    exists = checkpoints.exists() or checkpoints.is_symlink()
    move = "move it away if it is not needed, or choose another --workdir"
    require(
        not exists or checkpoints.is_dir(),
        f"{checkpoints} is not a folder, so no checkpoint can be read or saved; {move}",
    )
    found = [entry for entry in checkpoints.iterdir() if entry.name.isdigit()] if exists else []
    for entry in found:
        name = entry.name
        good = name.isascii() and name == str(int(name)) and entry.is_dir()
        require(good, f"{entry} is called like a checkpoint and is no folder of one; {move}")
    return sorted(int(entry.name) for entry in found)


def note_saved(folder: Path) -> None:
    """Notes in the folder that a checkpoint has been saved, once there is one: if none is there
    later, they were taken away."""
    if jax.process_index() == 0 and not (folder / SAVED).exists() and (found := steps(folder)):
        write_text_atomic(folder / SAVED, f"checkpoint {found[0]} was saved at {utc_timestamp()}\n")


def _require_nothing_to_lose(job: Job, folder: Path, written: int) -> None:
    """A run of which nothing was ever saved starts over, for all its `written` metrics; one whose
    checkpoints were taken away does not."""
    if not written:
        return
    where, checkpoints = f"{folder} has metrics of {written} batches", folder / CHECKPOINTS
    remedy = "put them back, choose another --workdir, or remove the folder yourself to start over"
    require(
        checkpoints.is_dir(),
        f"{where}, but {checkpoints} is missing, and starting over would erase them; {remedy}",
    )
    taken = (
        f"{where}, but the checkpoints that were saved in {checkpoints} are gone, and starting over"
        f" would erase them; {remedy}"
    )
    require(not (folder / SAVED).exists(), taken)
    job.say(f"{where} and no checkpoint was saved yet: starting over")


def require_no_checkpoints(folder: Path) -> None:
    """Refuses, in all processes, to start over beside checkpoints in which nothing was found to go
    on from."""

    def look() -> None:
        found = steps(folder)
        told = (
            f"{folder / CHECKPOINTS} has {', '.join(map(str, found))}, which cannot be read as"
            " checkpoints"
        )
        require(not found, f"{told}; put them right, or choose another --workdir")

    check_in_process_0(look)


def data_digests(config: ResolvedConfig) -> dict[str, str]:
    """Digests of the data files to train and to evaluate on, and of the tokenizer's files; by
    setting and file."""
    sets = {where: each.data for where, each in config.sets_by_prefix.items()}
    paths = {f"{where}data.path": data.path for where, data in sets.items()}
    paths |= {f"{where}data.eval_path": data.eval_path for where, data in sets.items() if data.path}
    found = {f"{name} {path}": data_digest(path, name) for name, path in paths.items() if path}
    folder = config.data.tokenizer
    for name in TOKENIZER_FILES if folder else ():
        file = Path(folder) / name
        found[f"data.tokenizer {name} {file}"] = hash_file(file)
    return found


def _require_same_data(job: Job, folder: Path) -> None:
    """Refuses data that differs from what the run began with; a data file that is gone is named
    where it is read."""
    starts, current = read_starts(folder), data_digests(job.config)
    before = starts[0].get("data") if starts else None
    before = before if isinstance(before, dict) else {}
    found = {
        name: value
        for name, value in current.items()
        if value != "-" or name.startswith("data.tokenizer")
    }
    if unknown := ", ".join(sorted(found.keys() - before.keys())):
        job.say(
            f"warning: {folder / STARTS} has no record of {unknown} as the run began with, so that"
            " cannot be compared"
        )
    differing = ", ".join(name for name, value in found.items() if before.get(name, value) != value)
    told = (
        f"{differing} holds other data than the run in {folder} began with, at"
        f" {starts[0].get('time') if starts else ''}"
    )
    require(
        not differing, f"{told}; put that data back, or choose another --workdir for a run on this"
    )


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """What each start of a run has told of itself, oldest first.

    Raises:
      ConfigError: a line is damaged.
    """
    file = folder / STARTS
    remedy = "put the file back from a copy, or remove it"
    require(not file.exists() or file.is_file(), f"{file} is not a regular file; {remedy}")
    starts = []
    for number, line in enumerate(file.read_bytes().splitlines() if file.exists() else [], start=1):
        try:
            start = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number} is not JSON ({error}); {remedy}") from error
        require(isinstance(start, dict), f"{file}, line {number} is no JSON object; {remedy}")
        starts.append(start)
    return starts


def announced(job: Job, folder: Path) -> dict[str, Any]:
    """What this start has to tell of itself: time, versions, machine, data, and the checkpoints
    that it was given.

    Says it in a line, and in what versions and checkpoints it differs from the run's last start, if
    there was one. Process 0 alone has it, as it alone writes it down.

    Raises:
      ConfigError: one of these files cannot be read.
    """
    start: dict[str, Any] = {}

    def look() -> None:
        start.update(_start(job))
        versions, where = start["versions"], start["machine"]
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        job.say(
            f"{start['time']}  {shown}  {where['backend']} ({where['device']}) on {where['host']},"
            f" {where['platform']}"
        )
        before = read_starts(folder)[-1:] if steps(folder) else []
        for kind in ("versions", "checkpoints") if before else ():
            was = before[0].get(kind)
            was = was if isinstance(was, dict) else {}
            for name, value in start[kind].items():
                if was.get(name, value) == value:
                    continue
                more = "; the run goes on with the weights that it has saved"
                if kind == "versions":
                    more = f": {was[name]} -> {value}"
                job.say(f"warning: since the run's last start, {name} is another{more}")

    check_in_process_0(look)
    return start


def _start(job: Job) -> dict[str, Any]:
    """What `announced` returns."""
    paths = {
        "model.path": job.config.model.path,
        "lora.path": job.config.lora.path,
        "rollout.draft.path": job.config.rollout.draft.path,
    }
    given = {f"{name} {path}": fingerprint_checkpoint(path) for name, path in paths.items() if path}
    versions = {
        "jaxspec": code_version(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
    }
    where = {
        "host": platform.node(),
        "platform": platform.platform(),
        "processes": jax.process_count(),
        "backend": jax.default_backend(),
        **machine(job.mesh),
    }
    return {
        "time": utc_timestamp(),
        "versions": versions,
        "machine": where,
        "data": data_digests(job.config),
        "checkpoints": given,
    }


def claim(job: Job, folder: Path, start: Mapping[str, Any]) -> None:
    """Writes config.json and adds the start to the others, each file whole or not at all; only once
    the config has proved to be good.

    The starts of a run from which nothing was saved are forgotten.
    """
    if jax.process_index() == 0:
        earlier = read_starts(folder) if steps(folder) else []
        write_text_atomic(
            folder / STARTS, "".join(json.dumps(each) + "\n" for each in (*earlier, start))
        )
        write_text_atomic(folder / CONFIG, json.dumps(to_json(job.config), indent=2) + "\n")
