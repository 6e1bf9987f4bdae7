"""The folder of a run is had by one process until its end, and who has it is told."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxspec.host.job import Job, make_job
from jaxspec.inputs.checked import ConfigError
from jaxspec.system import folder_lock
from tests.conftest import answering_config, small_mesh
from tests.host.run_folders import begun, job_of, lock_of, refusal

HOLDER = """
import fcntl, json, os, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
holder = {"pid": os.getpid(), "host": "elsewhere", "since": "2026-01-02T03:04:05+00:00"}
file.write(json.dumps(holder))
file.flush()
print("held", flush=True)
sys.stdin.read()
"""
PROBE = """
import fcntl, sys
fcntl.flock(open(sys.argv[1], "a+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


@pytest.fixture(scope="module")
def job() -> Job:
    return make_job(answering_config(), small_mesh())


class TestLock:
    @pytest.fixture
    def holder(self, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-S", "-c", HOLDER, str(tmp_path / "lock")]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout
            assert process.stdout.readline() == "held\n"
            yield process
            process.kill()

    def test_a_second_run_is_told_who_has_the_folder(
        self, job: Job, tmp_path: Path, holder: subprocess.Popen[str]
    ) -> None:
        begun(tmp_path, None)
        told = refusal(job_of(job, tmp_path))
        assert (
            f"{tmp_path} is in use by another run: process {holder.pid} on elsewhere, since"
            " 2026-01-02T03:04:05+00:00" in told
        )
        assert "another --workdir" in told
        holder.kill()
        holder.wait()
        with lock_of(job_of(job, tmp_path)) as folder:
            assert folder == tmp_path

    def test_the_folder_is_had_until_the_end(self, job: Job, tmp_path: Path) -> None:
        probe = [sys.executable, "-S", "-c", PROBE, str(tmp_path / "lock")]
        with lock_of(job_of(job, tmp_path)):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
            (tmp_path / "checkpoints").mkdir()
            assert subprocess.run(probe, stderr=subprocess.DEVNULL).returncode != 0
        assert subprocess.run(probe).returncode == 0

    def test_the_folder_is_had_without_the_file_of_the_lock_as_well(
        self, job: Job, tmp_path: Path
    ) -> None:
        with lock_of(job_of(job, tmp_path)):
            (tmp_path / "lock").unlink()
            with (
                pytest.raises(ConfigError, match="is in use by another run"),
                lock_of(job_of(job, tmp_path)),
            ):
                pass

    def test_a_lock_that_cannot_be_opened_is_refused(self, job: Job, tmp_path: Path) -> None:
        (tmp_path / "lock").mkdir()
        with (
            pytest.raises(ConfigError, match=r"lock cannot be locked \(Is a directory\)"),
            lock_of(job_of(job, tmp_path)),
        ):
            pass

    def test_a_file_system_without_locks_is_told(
        self, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(path: Path, *, wait: bool) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(folder_lock, "lock_file", fail)
        here = job_of(job, tmp_path)
        with lock_of(here):
            assert "cannot be locked (No locks available)" in here.told[0]
