"""The launcher of several processes, with short-lived stand-ins for them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import ROOT

STAND_IN = f"""#!{sys.executable}
import os, signal, sys, time
from pathlib import Path

if sys.argv[1] == "-c":  # the launcher asks for a free port
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
me = os.environ["JAXSPEC_PROCESS_ID"]
log = Path(sys.argv[3])
seconds = float(sys.argv[4])

def note(text):
    with log.open("a") as file:
        file.write(f"{{me}} {{text}}\\n")

def stop(number, frame):
    note(signal.Signals(number).name)
    time.sleep(seconds)
    note("saved")
    os._exit(128 + number)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, stop)
with log.with_name("groups").open("a") as file:
    file.write(f"{{os.getpgid(0)}}\\n")
note("ready")
while not (me == "1" and log.with_name("fail").exists()):
    time.sleep(0.01)
sys.exit(3)
"""
"""Saves for some seconds when it is told to stop; process 1 fails with 3 when it finds a file
`fail`."""


FROM_A_TERMINAL = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a command with no signal ignored, whatever runs the tests."""


class Launched:
    """Two stand-ins under the launcher."""

    def __init__(self, folder: Path, saving: float, **variables: str) -> None:
        script, python = folder / "launch/multiprocess_cpu.sh", folder / ".venv/bin/python"
        script.parent.mkdir()
        python.parent.mkdir(parents=True)
        shutil.copy(ROOT / "launch/multiprocess_cpu.sh", script)
        python.write_text(STAND_IN)
        python.chmod(0o755)
        self.log, self.groups = folder / "log", folder / "groups"
        command = [
            sys.executable,
            "-c",
            FROM_A_TERMINAL,
            "bash",
            str(script),
            "2",
            str(self.log),
            str(saving),
        ]
        self.handle = subprocess.Popen(command, env=os.environ | variables, start_new_session=True)

    def __enter__(self) -> "Launched":
        self.wait_until(lambda: sorted(self.noted()) == ["0 ready", "1 ready"])
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the launcher and its stand-ins, which have groups of their own, also where a test
        has failed."""
        for group in (
            self.handle.pid,
            *map(int, self.groups.read_text().split() if self.groups.exists() else ()),
        ):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self.handle.wait()

    def noted(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.noted()
            time.sleep(0.01)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_is_passed_on_and_the_processes_save(tmp_path: Path, name: str) -> None:
    number = signal.Signals[name]
    with Launched(tmp_path, 0.1) as launched:
        launched.handle.send_signal(number)
        assert launched.handle.wait(timeout=20) == 128 + number
    for process in "01":
        noted = [line for line in launched.noted() if line[0] == process]
        assert noted[:3] == [f"{process} ready", f"{process} {name}", f"{process} saved"]


def test_who_does_not_save_in_time_is_ended(tmp_path: Path) -> None:
    with Launched(tmp_path, 600, SAVE_SECONDS="0") as launched:
        (tmp_path / "fail").touch()
        assert launched.handle.wait(timeout=20) == 3
    assert [line for line in launched.noted() if line[0] == "0"] == ["0 ready", "0 SIGTERM"]


def test_a_test_that_fails_leaves_nothing_running(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="stands for a failed one"),
        Launched(tmp_path, 600) as launched,
    ):
        raise AssertionError("stands for a failed one")
    for group in launched.groups.read_text().split():
        launched.wait_until(
            lambda group=group: (
                not Path("/proc", group).exists()
                or ") Z" in Path("/proc", group, "stat").read_text()
            )
        )


@pytest.mark.slow
def test_the_others_have_time_to_save_when_one_fails(tmp_path: Path) -> None:
    with Launched(tmp_path, 14) as launched:
        (tmp_path / "fail").touch()
        assert launched.handle.wait(timeout=60) == 3
    assert launched.noted()[-1] == "0 saved"
