"""What stands for a cluster on this machine: a Python that only says what it was started with, and
a real one by that name."""

import json
import os
import shlex
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RECORDER = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
name = os.environ.get("SLURM_PROCID") or os.environ["JAXSPEC_PROCESS_ID"]
told = dict(words=sys.argv[1:], environment=dict(os.environ))
Path(os.environ["STUB_RECORDS"], name).write_text(json.dumps(told))
sys.exit(int(os.environ["STUB_STATUS"]))
"""
"""Python, which only says what it was started with."""

PLAIN = {"PATH": os.environ["PATH"], "HOME": "/root"}


def program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


PYTHON = f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} "$@"\n'


def records(folder: Path) -> Iterator[tuple[int, list[str], dict[str, str]]]:
    for file in sorted(folder.iterdir(), key=lambda file: int(file.name)):
        told = json.loads(file.read_text())
        yield int(file.name), told["words"], told["environment"]


def alone(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Puts this process where another was."""
    for name in [*os.environ]:
        if name.startswith(("JAX", "SLURM", "OMPI", "JOB_COMPLETION")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


TINY = {
    "model__layers": 1,
    "sft__steps": 0,
    "rollout__draft__kind": "none",
    "no_compare_plain": False,
    "batch__prompts": 2,
    "steps": 1,
}
