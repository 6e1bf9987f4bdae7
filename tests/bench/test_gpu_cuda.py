"""Programs of `bench gpu`, compiled and written for a GPU that is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.compiled.hardware import HARDWARE
from jaxspec.compiled.serialized import MANIFEST
from tests import cuda
from tests.runs import ROOT

pytestmark = cuda.needs_plugin
SMALL = (
    "--size tiny --dtype bfloat16 --layers 4 --embed 128 --head_size 64 --kv_heads 2 --page_size 64"
    " --rows 2 --few 2 --prompt 64"
)


def prepared(sections: str, folder: Path) -> dict[str, dict[str, float]]:
    """Programs of sections by name, in a process of their own: kernels ask the default device for
    its generation."""
    unset = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    words = f"gpu {SMALL} --sections {sections} --prepare {folder} --hardware h100"
    ran = subprocess.run(
        [sys.executable, "-m", "jaxspec.bench", *words.split()],
        env=variables | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["card"] == HARDWARE["h100"].kind
    assert {"jax", "jaxlib"} < manifest["versions"].keys(), "and the plugin"
    assert all((folder / entry["file"]).stat().st_size for entry in manifest["programs"].values())
    return manifest["programs"]


def test_rounds_are_compiled_without_a_device(tmp_path: Path) -> None:
    programs = prepared("2", tmp_path)
    assert programs.keys() == {
        f"{part} of 2 rows, {draft}, answers of 32"
        for part in ("prefill", "rounds")
        for draft in ("plain", "K=3")
    }


@pytest.mark.slow
def test_all_programs_are_compiled_without_a_device(tmp_path: Path) -> None:
    """Kernels, other layouts, command buffers, and learning as well."""
    programs = prepared("0,1,2,3,4,5,6,7", tmp_path)
    names = " | ".join(programs)
    for words in (
        "attention to pages",
        "attention to texts, plain twin",
        "layers stacked",
        "command buffers",
        "full draft vocabulary",
        "learn of a speculative GRPO step",
    ):
        assert words in names, words
