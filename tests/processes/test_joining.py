"""How a job is told of its processes, and how they meet."""

import os
import subprocess
import sys
import textwrap
from typing import Any

import jax
import pytest

from jaxspec.inputs.checked import ConfigError
from jaxspec.processes import joining, places
from jaxspec.processes.joining import join_job
from jaxspec.processes.places import JobMember
from tests.conftest import free_port
from tests.fork_server import Program


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `jax.distributed.initialize` was called with; the environment is that of a lone
    process."""
    for name in list(os.environ):
        if name.startswith(
            ("JAXSPEC_", "SLURM_", "OMPI_", "JOB_COMPLETION", *places._JAX_VARIABLES)
        ):
            monkeypatch.delenv(name)
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *arguments, **_: calls.append(arguments)
    )
    return calls


def test_a_lone_process_starts_nothing(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    join_job({})
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    join_job({})
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.delenv("SLURM_STEP_ID")  # inside an allocation, but not started by srun
    join_job({})
    assert started == []


def test_explicit_processes(
    started: list[tuple[Any, ...]], met: list[JobMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXSPEC_COORDINATOR", "host:1234")
    monkeypatch.setenv("JAXSPEC_PROCESSES", "4")
    with pytest.raises(
        ConfigError, match="JAXSPEC_COORDINATOR, JAXSPEC_PROCESSES set but not JAXSPEC_PROCESS_ID"
    ):
        join_job({})
    monkeypatch.setenv("JAXSPEC_PROCESS_ID", "2")
    join_job({})
    assert started == [("host:1234", 4, 2)]
    assert met == started


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_schedulers_that_jax_does_not_know_are_left_to_it(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    join_job({})
    assert started == [(None, None, None)]


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[JobMember]:
    """The places of processes that would have met."""
    calls: list[JobMember] = []
    monkeypatch.setattr(joining, "meet_processes", lambda place, *_: calls.append(place) or {})
    return calls


def test_a_scheduler_that_jax_knows_says_where_to_meet(
    started: list[tuple[Any, ...]], met: list[JobMember], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = {
        "NTASKS": "3",
        "PROCID": "1",
        "LOCALID": "1",
        "STEP_ID": "0",
        "JOB_ID": "70000",
        "STEP_NODELIST": "node[07-09]",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    join_job({})
    assert started == met
    ((coordinator, count, process),) = met
    assert (coordinator.partition(":")[0], count, process) == ("node07", 3, 1)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"JAXSPEC_PROCESSES": "two"},
            "JAXSPEC_PROCESSES is 'two'; give a whole number, 1 or more",
        ),
        ({"JAXSPEC_PROCESSES": "-2"}, "JAXSPEC_PROCESSES is '-2'"),
        ({"JAXSPEC_PROCESSES": "0"}, "JAXSPEC_PROCESSES is '0'"),
        ({"JAXSPEC_PROCESS_ID": "x"}, "JAXSPEC_PROCESS_ID is 'x'; give a whole number, 0 or more"),
        (
            {"JAXSPEC_PROCESS_ID": "2"},
            "JAXSPEC_PROCESS_ID is 2, but JAXSPEC_PROCESSES is 2: ids go from 0 to 1",
        ),
        ({"JAXSPEC_WAIT_SECONDS": "soon"}, "JAXSPEC_WAIT_SECONDS is 'soon'"),
        ({"JAXSPEC_COORDINATOR": "here"}, "coordinator 'here' is not HOST:PORT"),
        ({"JAXSPEC_COORDINATOR": "here:http"}, "coordinator 'here:http' is not HOST:PORT"),
        ({"JAXSPEC_COORDINATOR": "here:70000"}, "coordinator 'here:70000' is not HOST:PORT"),
        (
            {"JAXSPEC_COORDINATOR": f"here:{'1' * 5000}"},
            "is not HOST:PORT .* set JAXSPEC_COORDINATOR to",
        ),
        (
            {"JAXSPEC_COORDINATOR": "a..b:23462"},
            "coordinator 'a..b:23462' has no valid name of a host .* set JAXSPEC_COORDINATOR to",
        ),
        (
            {"JAXSPEC_COORDINATOR": f"{'a' * 100}:23462"},
            "has no valid name of a host .* set JAXSPEC_COORDINATOR to",
        ),
        (
            {"JAXSPEC_PROCESSES": " "},
            "JAXSPEC_COORDINATOR, JAXSPEC_PROCESS_ID set but not JAXSPEC_PROCESSES",
        ),
        (
            {"JAXSPEC_WAIT_SECONDS": "9" * 20},
            (
                "JAXSPEC_WAIT_SECONDS is '9{20}'; give a whole number, 1 or more and at most"
                " 2147483647"
            ),
        ),
        (
            {"JAXSPEC_WAIT_SECONDS": "9" * 5000},
            "JAXSPEC_WAIT_SECONDS is '9{59}[.]{3}; give a whole number",
        ),
    ],
)
def test_what_cannot_be_read_is_named(
    started: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    said: str,
) -> None:
    told = {
        "JAXSPEC_COORDINATOR": "127.0.0.1:1234",
        "JAXSPEC_PROCESSES": "2",
        "JAXSPEC_PROCESS_ID": "1",
    }
    for name, value in (told | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        join_job({})
    assert started == []


def test_what_other_programs_on_jax_are_told_by_is_refused(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process would train alone, all of them in one folder; a scheduler's job, and a lone
    process, may have them."""
    for name, value in {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }.items():
        monkeypatch.setenv(name, value)
        with pytest.raises(
            ConfigError,
            match=(
                rf"{name} set, which jaxspec does not read, .* Set {', '.join(places.VARIABLES)}"
                r" for each"
            ),
        ):
            join_job({})
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    join_job({})
    assert started == []
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    join_job({})
    assert started == [(None, None, None)]


@pytest.mark.parametrize(
    "environment", [{"SLURM_NTASKS": "two", "SLURM_STEP_ID": "0"}, {"OMPI_COMM_WORLD_SIZE": "two"}]
)
def test_a_schedulers_number_that_cannot_be_read_is_named(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{next(iter(environment))} is 'two'"):
        join_job({})


def test_what_jax_cannot_do_is_one_line(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("UNKNOWN: Failed to start RPC server\nand a page more")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"^JAX cannot join .*: UNKNOWN: Failed to start RPC server\. Set [^\n]*$"
    ):
        join_job({})


@pytest.mark.slow
def test_python_that_is_held_up_is_not_taken_for_dead() -> None:
    """Heartbeats come from C++: also while no thread of Python can run, for longer than the
    others wait."""
    script = """
        import ctypes, sys, time
        import jax
        process = int(sys.argv[2])
        jax.distributed.initialize(
            f"127.0.0.1:{sys.argv[1]}", 2, process, heartbeat_timeout_seconds=3
        )
        held = ctypes.PyDLL(None) if process else time  # PyDLL keeps Python's lock
        held.sleep(8)
        jax.distributed.shutdown()
    """
    port = str(free_port())
    runs = [
        Program(
            [sys.executable, "-c", textwrap.dedent(script), port, str(process)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    for run in runs:
        _, told = run.communicate(timeout=60)
        assert run.returncode == 0, told
