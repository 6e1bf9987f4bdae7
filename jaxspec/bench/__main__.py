"""Runs the benchmark named by the first argument."""

import sys

# Runs before the slow imports, so that a signal ends them at once. Nothing needs saving yet.
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
        "tokens per second and round costs of one checkpoint, with or without a draft",
    ),
    "gpu": (gpu.main, "", "speculation on a GPU with random weights, in ten minutes"),
    "step": (step.main, "--model DIR", "a GRPO step of one checkpoint: generate, score, learn"),
    "drafts": (drafts.main, "--config NAME.py[:SCALE]", "every kind of draft on one policy"),
    "load": (load.main, "--model DIR", "reading a checkpoint"),
    "roofline": (roofline.main, "", "bandwidth and peak operations per second of this machine"),
}


def main(argv: Sequence[str]) -> int:
    """Runs a benchmark and returns its exit status."""
    bench_list = "\n".join(
        f"  {name:9}{arguments:25}{description}"
        for name, (_, arguments, description) in BENCHES.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m jaxspec.bench",
        usage=f"%(prog)s {{{','.join(BENCHES)}}} ...",
        description=f"benchmarks:\n{bench_list}\nEach benchmark has its own --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"{DISTRIBUTION} {package_version()}"
    )
    parser.add_argument(
        "bench", choices=tuple(BENCHES), metavar="BENCH", help="one of the benchmarks above"
    )
    # The other arguments belong to the benchmark, which has a parser of its own.
    run_bench = BENCHES[
        parser.parse_args(["--version"] if "--version" in argv else argv[:1]).bench
    ][0]
    return run_without_saving("measuring", lambda _: run_bench(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
