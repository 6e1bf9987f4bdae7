"""Two executions of one program in a process of its own: in some versions of XLA, the second
execution with loops in command buffers ends the process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench.gpu.options import GpuOptions
from jaxspec.bench.gpu.programs import Programs
from jaxspec.bench.gpu.run import Plan
from jaxspec.bench.gpu.sections import greedy
from jaxspec.bench.gpu.starting import open_plan, opened_folder
from jaxspec.system.terminal import say

_ROOT = Path(__file__).resolve().parents[4]
_LAST_LINES = 3
LONGEST = 240.0
"""Seconds that the process may take."""


def executed_alone(plan: Plan, name: str, seconds: float) -> dict[str, Any]:
    """Runs a variant twice in another process; a crash is a result."""
    options = plan.options
    words = options.sizes | options.measured | {"programs": options.programs}
    command = [sys.executable, "-m", "jaxspec.bench.gpu.sections.alone", json.dumps(words), name]
    variables = {
        # this process has reserved most of the device's memory
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", "")))),
    }
    try:
        ended = subprocess.run(
            command,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=max(1.0, min(seconds, LONGEST)),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return {"crashed": f"no answer within {error.timeout:.0f} s"}
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-_LAST_LINES:]
        done = ended.stdout.count("executed")
        return {
            "crashed": f"exit status {ended.returncode} after {done} of 2 executions",
            "last_lines": last,
        }
    return json.loads(ended.stdout.splitlines()[-1])


def main(words: list[str]) -> int:
    """Executes the named variant twice, and prints its tokens."""
    given = json.loads(words[0])
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    options = GpuOptions(**given | lists)
    plan, _ = open_plan(options)
    variant = greedy.variants(plan)[words[1]]
    folder = opened_folder(plan, lambda message: None)
    programs = Programs(plan.mesh, folder, 2, lambda message: None)
    wanted = (variant.layout, variant.program)
    programs.expect([each for each in greedy.greedy_recipes(plan) if each.name in wanted])
    layout, program = (programs.get(name, LONGEST) for name in wanted)
    inputs, found = greedy.greedy_inputs(plan), []
    for _ in range(2):
        found.append(greedy.answers(layout.program, program.program, variant, inputs))
        say("executed")
    programs.close()
    same = bool(np.array_equal(*found))
    print(
        json.dumps(
            {"executions_equal": same, "loaded": program.loaded, "tokens": found[-1].tolist()}
        ),
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
