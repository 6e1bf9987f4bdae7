"""Lists the programs: `python -m jaxspec`."""

import argparse
import sys
from collections.abc import Sequence

from jaxspec.system.version import DISTRIBUTION, package_version

PROGRAMS = {
    "train": ("--config NAME.py[:SCALE]", "the main job: GRPO with lossless speculative rollouts"),
    "train_sft": (
        "--config NAME.py[:SCALE]",
        "its warm start alone: a fresh small policy on generated problems",
    ),
    "train_draft": (
        "--config NAME.py[:SCALE]",
        "its draft alone: trained on the policy's own responses, or on a text",
    ),
    "evaluate": (
        "--config NAME.py[:SCALE]",
        "a policy, or a run's checkpoint, on named sets of problems: avg@k, pass@k, cons@k",
    ),
    "sample": ("--checkpoint RUN", "answers of a run on the terminal, as they are drafted"),
    "export": ("--checkpoint RUN --out DIR", "a run as Hugging Face folders"),
    "check": (
        "--config NAME.py[:SCALE]",
        "whether it will run on --devices N that are not here: memory, work, collectives",
    ),
    "bench": ("BENCH ...", "measurements: generate, step, drafts, load, roofline"),
}
"""Programs of the package, each with its required arguments and its purpose."""


def main(argv: Sequence[str]) -> int:
    """Lists the programs, or prints the version. Returns the exit status."""
    programs = "\n".join(
        f"  python -m jaxspec.{name:12}{arguments:27}{about}"
        for name, (arguments, about) in PROGRAMS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m jaxspec",
        usage="python -m jaxspec.PROGRAM ...",
        description=(
            "Reinforcement learning of language models in JAX, with lossless speculative"
            f" rollouts.\n\n{programs}\n\nEach has a --help of its own. The first run: python -m"
            " jaxspec.train --config rl_think.py"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"{DISTRIBUTION} {package_version()}"
    )
    parser.parse_args(argv)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
