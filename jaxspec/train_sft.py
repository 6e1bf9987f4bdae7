"""Trains a built-in model's supervised warm start.

`python -m jaxspec.train_sft --config rl_think.py`
"""

import sys

# Runs before the slow imports, so that a signal ends them at once. Nothing needs saving yet.
if __name__ == "__main__":
    from jaxspec.system.begin import prepare_process

    prepare_process()

from functools import partial

from jaxspec.config.unused import POLICY_SETTINGS
from jaxspec.host.job import Job, run_program
from jaxspec.inputs.checked import ConfigError
from jaxspec.preparation.policy import get_or_train_policy
from jaxspec.processes.process_0 import run_in_process_0_first
from jaxspec.system.interrupt import Interrupt


def main(job: Job, interrupt: Interrupt) -> int:
    """Trains the warm start and prints its path.

    A warm start in the cache is not trained again. Returns the exit status.
    """
    if job.config.sft.steps == 0:
        raise ConfigError("sft.steps is 0, so there is nothing to train; set --sft.steps")
    # The other processes read the file that process 0 writes.
    train = partial(get_or_train_policy, job.config, job.step, job.tokenizer, interrupt, job.say)
    job.say(f"policy: {run_in_process_0_first(train)}")
    return 0


if __name__ == "__main__":
    sys.exit(
        run_program(
            "train_sft",
            "Trains the policy's supervised warm start and stores it in the cache.",
            main,
            used_settings=POLICY_SETTINGS,
        )
    )
