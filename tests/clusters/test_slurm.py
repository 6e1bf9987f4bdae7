"""The batch script: what each process gets from it, how it ends, and real processes of it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.processes import places
from tests.clusters.stand_ins import PLAIN, PYTHON, RECORDER, TINY, alone, program, records
from tests.compile_cache import compiled_programs
from tests.runs import ROOT, command, environment, lines

SRUN = f"""#!{sys.executable}
import json, os, subprocess, sys
words = sys.argv[1:]
program = words[words.index("python"):]
nodes, each = json.loads(os.environ["STUB_NODES"]), int(os.environ["STUB_TASKS_PER_NODE"])
tasks = []
for number in range(len(nodes) * each):
    place = {{
        "SLURM_NTASKS": len(nodes) * each,
        "SLURM_PROCID": number,
        "SLURM_LOCALID": number % each,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NODELIST": os.environ["STUB_NODELIST"],
    }}
    variables = os.environ | {{name: str(value) for name, value in place.items()}}
    tasks.append(subprocess.Popen(program, env=variables))
sys.exit(max(task.wait() for task in tasks))
"""
"""SLURM's `srun`, as far as it says to each task where it is: all tasks are on this machine."""

SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*"
"""


def as_batch(
    folder: Path, python: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs the batch script in a checkout whose SLURM and Python are these."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": python}.items():
        program(folder / ".venv/bin" / name, text)
    script = ["bash", str(ROOT / "launch/slurm.sbatch"), *arguments]
    given = PLAIN | {"SLURM_JOB_ID": "4711"} | variables
    return subprocess.run(
        script, cwd=folder, env=given, capture_output=True, text=True, timeout=400, check=False
    )


def wanted(text: str) -> dict[str, str]:
    """What a batch script asks SLURM for."""
    asked = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    words = (word.removeprefix("--").partition("=") for word in asked)
    return {name: value for name, _, value in words}


def test_slurm_gives_each_gpu_a_process_that_knows_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = wanted((ROOT / "launch/slurm.sbatch").read_text())
    nodes, each = int(asked["nodes"]), int(asked["ntasks-per-node"])
    assert each == int(asked["gpus-per-node"]) == 4
    assert nodes % int(asked["segment"]) == 0
    assert int(asked["segment"]) <= 18
    (tmp_path / "records").mkdir()
    ended = as_batch(
        tmp_path,
        RECORDER,
        *("--config", "a name.py", "--steps", "1"),
        STUB_NODES=json.dumps([f"node{number:02}" for number in range(nodes)]),
        STUB_NODELIST=f"node[00-{nodes - 1:02}]",
        STUB_TASKS_PER_NODE=str(each),
        STUB_RECORDS=str(tmp_path / "records"),
        STUB_STATUS="0",
        XLA_FLAGS="--xla_dump_to=/tmp/mine",
    )
    assert ended.returncode == 0, ended.stderr
    found = list(records(tmp_path / "records"))
    assert [number for number, *_ in found] == list(range(nodes * each))
    shell = {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
    for number, words, variables in found:
        assert words == ["-m", "jaxspec.train", "--config", "a name.py", "--steps", "1"]
        ours = {
            name: value
            for name, value in variables.items()
            if not name.startswith("STUB_") and name not in shell
        }
        assert ours == PLAIN | {
            "SRUN_CPUS_PER_TASK": "36",
            "PATH": f"{tmp_path}/.venv/bin:{os.environ['PATH']}",
            "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true --xla_dump_to=/tmp/mine",
            "NCCL_DEBUG": "WARN",
            "SLURM_JOB_ID": "4711",
            "SLURM_NTASKS": "32",
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number % 4),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "node[00-07]",
        }
        with monkeypatch.context() as there:
            alone(there, variables)
            assert places.member_from_variables() is None
            assert places.is_multiprocess_scheduler_job()
            place = places.detect_member(1)
        assert place is not None
        assert (place.coordinator.partition(":")[0], *place[1:]) == ("node00", 32, number)


@pytest.mark.parametrize(
    ("status", "ends", "said"),
    [("0", 0, ""), ("143", 0, "scontrol requeue 4711\n"), ("2", 2, ""), ("1", 1, "")],
)
def test_a_job_that_was_stopped_and_saved_goes_back_to_the_queue(
    tmp_path: Path, status: str, ends: int, said: str
) -> None:
    (tmp_path / "records").mkdir()
    ended = as_batch(
        tmp_path,
        RECORDER,
        STUB_NODES='["here"]',
        STUB_NODELIST="here",
        STUB_TASKS_PER_NODE="1",
        STUB_RECORDS=str(tmp_path / "records"),
        STUB_STATUS=status,
    )
    assert (ended.returncode, ended.stdout) == (ends, said), ended.stderr


def test_scripts_pass_shellcheck() -> None:
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip("shellcheck is not installed (extra lint)")
    files = [*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch"), ROOT / ".ci/run"]
    ended = subprocess.run([checker, *map(str, files)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def test_all_launch_files_end_in_the_same_command() -> None:
    same = 'python -m jaxspec.train "$@"'
    for name in ("slurm.sbatch", "kubernetes.yaml"):
        assert (ROOT / "launch" / name).read_text().count(same) == 1, name
    for name in ("local.sh", "multiprocess_cpu.sh"):
        assert '-m jaxspec.train "$@"' in (ROOT / "launch" / name).read_text(), name


@pytest.mark.slow
def test_processes_that_slurm_starts_train_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled_programs()))
    arguments = command(tmp_path / "run", **TINY)
    ended = as_batch(
        tmp_path,
        PYTHON,
        *arguments,
        STUB_NODES='["localhost"]',
        STUB_NODELIST="localhost",
        STUB_TASKS_PER_NODE="2",
        **{**environment(tmp_path / "cache", 1), "PATH": os.environ["PATH"]},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(lines(tmp_path / "run")) == 1
    assert "for {'data': 2, 'expert': 1, 'tensor': 1} devices" in ended.stdout
