"""Executes a program twice in a separate process.

In some versions of XLA, the second execution of loops in command buffers ends the process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench.gpu.options import GpuOptions
from jaxspec.bench.gpu.programs import Programs
from jaxspec.bench.gpu.run import GpuPlan
from jaxspec.bench.gpu.sections import greedy
from jaxspec.bench.gpu.starting import open_plan, open_program_folder
from jaxspec.system.terminal import print_line

_ROOT = Path(__file__).resolve().parents[4]
_LAST_LINES = 3
"""Number of lines of a crash that are reported."""
MAX_SECONDS = 240.0
"""Maximum seconds of the process."""


def execute_in_process(plan: GpuPlan, name: str, seconds: float) -> dict[str, Any]:
    """Executes a variant twice in another process.

    Returns the record that `main` prints. After a crash, or without an answer in time, `crashed` of
    the result has the reason.

    Args:
      plan: plan whose options the process gets.
      name: name of the variant.
      seconds: time limit, at most `MAX_SECONDS`.
    """
    options = plan.options
    # Sizes and --programs determine the plan and its folder of programs. The other options do not
    # matter in that process.
    option_values = options.program_sizes | options.table_sizes | {"programs": options.programs}
    command = [
        sys.executable,
        "-m",
        "jaxspec.bench.gpu.sections.alone",
        json.dumps(option_values),
        name,
    ]
    environment = {
        # This process has reserved most of the device's memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # The package may not be installed: `PYTHONPATH=CHECKOUT` is enough to run the benchmark.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", "")))),
    }
    try:
        process = subprocess.run(
            command,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=max(1.0, min(seconds, MAX_SECONDS)),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return {"crashed": f"no answer within {error.timeout:.0f} s"}
    if process.returncode:
        last_lines = process.stderr.strip().splitlines()[-_LAST_LINES:]
        # The process prints a line per execution, which tells whether the second one crashed.
        executions = process.stdout.count("executed")
        return {
            "crashed": f"exit status {process.returncode} after {executions} of 2 executions",
            "last_lines": last_lines,
        }
    # Other lines of the output come before the record.
    return json.loads(process.stdout.splitlines()[-1])


def main(argv: list[str]) -> int:
    """Executes a variant twice, and prints a record with its tokens. Returns the exit status.

    `argv` has the options as JSON, and the name of the variant.
    """
    option_values = json.loads(argv[0])
    # JSON has lists for the options that are tuples.
    tuples = {
        name: tuple(value) for name, value in option_values.items() if isinstance(value, list)
    }
    options = GpuOptions(**option_values | tuples)
    plan, _ = open_plan(options)
    variant = greedy.greedy_variants(plan)[argv[1]]
    # Nothing is logged, since the first process has already reported faults of the folder.
    folder = open_program_folder(plan, lambda message: None)
    programs = Programs(plan.mesh, folder, 2, lambda message: None)
    program_names = (variant.layout_name, variant.program_name)
    programs.queue_recipes(
        [recipe for recipe in greedy.greedy_recipes(plan) if recipe.name in program_names]
    )
    layout, program = (programs.get_program(name, MAX_SECONDS) for name in program_names)
    inputs, tokens = greedy.make_inputs(plan), []
    for _ in range(2):
        tokens.append(greedy.generate_answers(layout.program, program.program, variant, inputs))
        print_line("executed")
    programs.close()
    are_equal = bool(np.array_equal(*tokens))
    print(
        json.dumps(
            {
                "executions_equal": are_equal,
                "loaded": program.is_loaded,
                "tokens": tokens[-1].tolist(),
            }
        ),
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
