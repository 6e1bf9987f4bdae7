"""What is wrong with a job of several processes ends all of them at once, and is told."""

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.runs import Process, command, environment


def together(folder: Path, *changes: dict[str, object], **variables: str) -> list[Process]:
    """A process for each of the changes, which have the same coordinator."""
    coordinator = f"127.0.0.1:{free_port()}"
    processes = []
    for number, own in enumerate(changes):
        place = {
            "JAXSPEC_COORDINATOR": coordinator,
            "JAXSPEC_PROCESSES": str(len(changes)),
            "JAXSPEC_PROCESS_ID": str(number),
        }
        arguments = [sys.executable, "-m", "jaxspec.train", *command(folder / "run", **own)]
        given = environment(folder / "cache", 1) | place | variables
        processes.append(Process(arguments, given, folder / f"{number}.log"))
    return processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [{}, {"optimizer__learning_rate": 0.002}],
            "process 1 was not started like process 0: optimizer.learning_rate is 0.001 in process"
            " 0 and 0.002 there",
        ),
        ([{"mesh__data": 3}] * 2, "mesh.data 3"),
    ],
    ids=["another learning rate", "no such mesh"],
)
def test_all_processes_end_at_once_and_say_why(
    tmp_path: Path, changes: list[dict[str, object]], said: str
) -> None:
    began = time.monotonic()
    processes = together(tmp_path, *changes)
    outputs = [process.finish(status=2) for process in processes]
    assert said in outputs[0]
    assert "Traceback" not in "".join(outputs)
    assert time.monotonic() - began < 60
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_one_that_is_killed_while_all_start_ends_the_others(tmp_path: Path) -> None:
    first, second = together(tmp_path, {}, {})
    second.wait_until(lambda: "[Gloo]" in second.log.read_text())
    second.signal(signal.SIGKILL)
    output = first.finish(status=1)
    assert "process 1 of 2 has ended without notice (killed, or out of memory)" in output
    second.handle.wait()


@pytest.mark.slow
def test_a_coordinator_that_is_not_there_is_told_with_its_address(tmp_path: Path) -> None:
    absent, alone = together(tmp_path, {"no_such_setting": 1}, {}, JAXSPEC_WAIT_SECONDS="3")
    absent.finish(status=2)  # before it has come
    said = alone.finish(status=2)
    assert "process 1 of 2 has waited 3 s at 127.0.0.1:" in said
    assert "process 0 has not come (Connection refused)" in said
