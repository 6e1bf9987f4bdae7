"""Runs the benchmark that the first word names."""

import sys

# a stop while the rest is imported, which takes seconds, has nothing to save
if __name__ == "__main__":
    from jaxspec.system.begin import prepare_process

    prepare_process()

import argparse
from collections.abc import Sequence

from jaxspec.bench import drafts, generate, load, roofline, step
from jaxspec.bench.gpu import command as gpu
from jaxspec.host.job import run_without_saving
from jaxspec.system.version import DISTRIBUTION, package_version

BENCHES = {
    "generate": (
        generate.main,
        "--model DIR",
        "tokens a second of one checkpoint, plain or with a draft, and what a round costs",
    ),
    "gpu": (gpu.main, "", "speculation on a GPU, in ten minutes, with random weights"),
    "step": (step.main, "--model DIR", "a GRPO step of one checkpoint: generate, score, learn"),
    "drafts": (drafts.main, "--config NAME.py[:SCALE]", "every kind of draft on one policy"),
    "load": (load.main, "--model DIR", "reading a checkpoint"),
    "roofline": (roofline.main, "", "what this machine can do: bandwidth and products a second"),
}


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    bench_list = "\n".join(
        f"  {name:9}{arguments:25}{description}"
        for name, (_, arguments, description) in BENCHES.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m jaxspec.bench",
        usage=f"%(prog)s {{{','.join(BENCHES)}}} ...",
        description=f"benchmarks:\n{bench_list}\nEach has a --help of its own.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"{DISTRIBUTION} {package_version()}"
    )
    parser.add_argument(
        "bench", choices=tuple(BENCHES), metavar="BENCH", help="one of the benchmarks above"
    )
    run_bench = BENCHES[
        parser.parse_args(["--version"] if "--version" in argv else argv[:1]).bench
    ][0]
    return run_without_saving("measuring", lambda _: run_bench(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
