"""Folders that runs leave, and jobs whose lines are kept, for the tests of a run's folder."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.as_json import to_json
from jaxspec.config.settings import ResolvedConfig
from jaxspec.host import workdir
from jaxspec.host.job import Job
from jaxspec.inputs.checked import ConfigError


@dataclasses.dataclass(frozen=True)
class Listening(Job):
    """A job whose lines are kept."""

    told: list[str]

    def say(self, message: str) -> None:
        self.told.append(message)


def job_of(job: Job, folder: Path, **changes: Any) -> Listening:
    config = dataclasses.replace(job.config, workdir=str(folder), save_every=4, **changes)
    return Listening(config=config, tokenizer=job.tokenizer, mesh=job.mesh, step=job.step, told=[])


def begun(
    folder: Path,
    config: ResolvedConfig | None,
    batches: int = 0,
    checkpoints: tuple[int, ...] | None = (),
) -> None:
    """What a run leaves: config.json, metrics and samples of some batches, folders of
    checkpoints."""
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(to_json(config)))
    for name in ("metrics.jsonl", "samples.jsonl"):
        (folder / name).write_text("".join(f'{{"step": {step}}}\n' for step in range(batches)))
    if checkpoints is not None:
        (folder / "checkpoints").mkdir()
        for number in checkpoints:
            (folder / "checkpoints" / str(number)).mkdir()


def lock_of(job: Job) -> contextlib.AbstractContextManager[Path]:
    """Locks the folder of a job."""
    return workdir.lock_workdir(job.config, job.say)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "lock"
    }


def refusal(job: Job) -> str:
    """What holding the folder is refused with; nothing in it may have changed."""
    before = content(Path(job.config.workdir))
    with pytest.raises(ConfigError) as refused, lock_of(job):
        pass
    assert content(Path(job.config.workdir)) == before
    assert "\n" not in str(refused.value)
    return str(refused.value)
