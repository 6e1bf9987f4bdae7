"""Whole runs of a small model in processes of their own, and what they leave, read without the
package."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests import fork_server
from tests.fork_server import ROOT, Program

SMALL = {
    "model.layers": 4,
    "model.embed": 32,
    "model.heads": 4,
    "model.kv_heads": 4,
    "model.head_size": 8,
    "model.ffn": 64,
    "model.vocab": 24,
    "model.dtype": "float64",
    "sft.steps": 100,
    "sft.rows": 32,
    "offline.steps": 0,
    "data.digits": 1,
    "data.max_prompt_length": 6,
    "data.eval_prompts": 6,
    "rollout.max_new_tokens": 16,
    "rollout.verify": "coupled",
    "rollout.engine.no_tail": True,  # a loop instead of three compiles faster
    "batch.prompts": 8,
    "batch.group_size": 4,
    "optimizer.learning_rate": 0.001,
    "steps": 8,
    "save_every": 2,
    "eval.every": 4,
    "no_compare_plain": True,
}


def command(workdir: Path, **changes: object) -> list[str]:
    """Arguments of a small run; of flags, True names one, and False leaves one of `SMALL` out."""
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    idle = {"sft.rows"} if changed.get("sft.steps") == 0 else set()  # refused where they do nothing
    idle |= {"data.digits"} if changed.get("data.path") else set()
    settings = {name: value for name, value in SMALL.items() if name not in idle} | changed
    flags = [
        part
        for name, value in settings.items()
        for part in (f"--{name}", str(value))
        if not isinstance(value, bool)
    ]
    flags += [f"--{name}" for name, value in settings.items() if value is True]
    return ["--config", str(ROOT / "configs" / "rl_think.py"), "--workdir", str(workdir), *flags]


def environment(cache: Path, devices: int) -> dict[str, str]:
    """That of the tests, XLA's flags included: such runs compile for longer than they train."""
    return os.environ | {
        "JAXSPEC_CACHE": str(cache),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(ROOT),
    }


def in_background(
    arguments: list[str],
    variables: dict[str, str],
    log: Path,
    start: Callable[..., subprocess.Popen] = Program,
) -> subprocess.Popen:
    """A program in a session of its own, which prints into a file."""
    with log.open("w") as file:
        return start(
            arguments,
            env=variables,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


class Process:
    """A run in the background, with what it has printed so far."""

    def __init__(self, arguments: list[str], variables: dict[str, str], log: Path):
        self.log, self.handle = log, in_background(arguments, variables, log)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not condition() and self.handle.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        os.killpg(self.handle.pid, number)

    def finish(self, status: int = 0) -> str:
        self.handle.wait(timeout=400)
        output = self.log.read_text()
        assert self.handle.returncode == status, output
        return output


def printed(arguments: list[str], variables: dict[str, str], folder: Path, timeout: int) -> str:
    """What a program prints that must end well."""
    # A script is no program of Python.
    run = fork_server.run if arguments[0] == sys.executable else subprocess.run
    done = run(
        arguments,
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TRAIN = ("-m", "jaxspec.train")


def launch(
    cache: Path,
    workdir: Path,
    devices: int = 2,
    program: Any = TRAIN,
    **changes: object,
) -> Process:
    arguments = [sys.executable, *program, *command(workdir, **changes)]
    return Process(arguments, environment(cache, devices), cache / f"{time.monotonic_ns()}.log")


def launch_job(
    cache: Path,
    workdir: Path,
    processes: int,
    devices: int = 1,
    program: Any = TRAIN,
    **changes: object,
) -> list[Process]:
    """A run of several processes of so many devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = [sys.executable, *program, *command(workdir, **changes)]
    started = []
    for number in range(processes):
        place = {
            "JAXSPEC_COORDINATOR": coordinator,
            "JAXSPEC_PROCESSES": str(processes),
            "JAXSPEC_PROCESS_ID": str(number),
        }
        log = cache / f"{time.monotonic_ns()}.log"
        started.append(Process(arguments, environment(cache, devices) | place, log))
    return started


def run_members(script: str, count: int, port: int) -> None:
    """Runs a script in several processes, with the number of each and a port. All must end well."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    members = [
        Program([*command, str(number), str(port)], stderr=subprocess.PIPE, text=True)
        for number in range(count)
    ]
    for member in members:
        _, told = member.communicate(timeout=120)
        assert member.returncode == 0, told


def lines(workdir: Path) -> list[dict]:
    file = workdir / "metrics.jsonl"
    return (
        [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        if file.exists()
        else []
    )


def final_arrays(workdir: Path) -> dict[str, np.ndarray]:
    """What the newest checkpoint holds, read without the package."""
    newest = max(
        (folder for folder in (workdir / "checkpoints").iterdir() if folder.name.isdigit()),
        key=lambda folder: int(folder.name),
    )
    with ocp.StandardCheckpointer() as reader:
        path = (newest / "arrays").absolute()
        # whatever mesh it was saved from
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        stored = reader.metadata(path).item_metadata.tree
        target = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
            for name, leaf in stored.items()
        }
        restored = reader.restore(path, target)
    return {name: np.asarray(value) for name, value in restored.items()}


def weights(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in arrays.items() if ".network." in name}


def assert_same(arrays: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == others.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(value, others[name], err_msg=name)
