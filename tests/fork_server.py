"""Runs pytest for each line that it reads, in a fork of itself, which has imported what no change
of this tree changes.

A line is JSON: the `arguments` of pytest, the file for the `output`, and `seconds` after which the
run is killed. The answer is a line with the exit code, which is negative for a signal.
"""

import json
import os
import signal
import sys

import flax.nnx
import grain
import jax
import optax
import orbax.checkpoint
import pytest
import scipy.stats
import tensorboardX
import tyro

IMPORTED = flax.nnx, grain, jax, optax, orbax.checkpoint, scipy.stats, tensorboardX, tyro
"""Of which none starts a thread or reads the environment for good: conftest.py still sets it."""


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            signal.alarm(asked["seconds"])
            code = pytest.main(asked["arguments"])
            sys.stdout.flush()
            os._exit(int(code))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
