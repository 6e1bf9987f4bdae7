"""Kernels that the roofline model counts, against those that a profiler has counted."""

import re
from pathlib import Path

from jaxspec.compiled.roofline import LAYER_KERNELS, count_kernels
from jaxspec.config.presets import QWEN3_8B

MEASURED = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_kernels_are_those_of_the_benchmarks() -> None:
    found = re.search(r"in (\d+) kernels plain, \S+ ms in (\d+) with K 3", MEASURED)
    assert found is not None
    plain, drafted = int(found[1]), int(found[2])
    assert count_kernels(QWEN3_8B.layers, 0) == plain
    # The kernels of three drafts are no multiple of three.
    assert abs(count_kernels(QWEN3_8B.layers, 3) - drafted) <= 1
    assert f"in the layers, {LAYER_KERNELS} each" in MEASURED
