"""Reading a checkpoint is measured, and takes little more memory than the weights."""

import json
import math
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.bench.__main__ import main
from jaxspec.bench.measure import PeakMemory
from jaxspec.hf.names import leaves_by_path, policy_mappings, tensor_entries
from jaxspec.hf.policy_config import policy_config_json
from jaxspec.hf.tensor_files import write_tensors
from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.decoder import Decoder
from tests.conftest import save_policy, tiny_model
from tests.runs import printed


def test_reading_a_checkpoint_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Onto eight devices; the sizes are those of the weights, worked out by hand, in the type that
    was asked for."""
    model = tiny_model(dtype="float32")
    save_policy(tmp_path, model)
    layer = 16 * 4 * (4 + 2 + 2 + 4) + 3 * 16 * 24 + 2 * 16 + 2 * 4
    elements = 2 * 11 * 16 + 4 * layer + 16
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        assert (
            main(
                ["load", "--model", str(tmp_path), "--data", "4", "--tensor", "2", "--dtype", dtype]
            )
            == 0
        )
        *_, words, last = capsys.readouterr().out.splitlines()
        line = json.loads(last)
        assert (line["bench"], line["dtype"], line["weight_bytes"]) == (
            "load",
            dtype,
            size * elements,
        )
        assert (line["machine"]["mesh"], line["held_bytes"] >= line["weight_bytes"]) == (
            {"data": 4, "expert": 1, "tensor": 2},
            True,
        )
        assert f"{line['peak_over_weights']:.2f} x the weights" in words
    assert main(["load"]) == 2
    assert main(["load", "--model", str(tmp_path / "nothing")]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_reading_needs_little_more_memory_than_the_weights(
    tmp_path: Path, repository: Path
) -> None:
    """0.26 GB onto 8 virtual devices, whose memory is the host's: at most 1.3 times the weights in
    the type that is stored and held."""
    model = ModelSpec(
        vocab=40_000, layers=6, embed=512, heads=8, kv_heads=4, head_size=64, ffn=2048, tied=False
    )
    shapes = leaves_by_path(jax.eval_shape(lambda: Decoder(model, jax.random.key(0))))
    random = np.random.default_rng(0)
    tensors = [
        place
        for row in policy_mappings(model)
        for place in tensor_entries(row, shapes[row.weight_path].shape)
    ]
    made = [
        (
            at.name,
            4 * math.prod(at.shape),
            lambda at=at: random.standard_normal(at.shape, np.float32),
        )
        for at in tensors
    ]
    list(write_tensors(tmp_path, made))
    (tmp_path / "config.json").write_text(json.dumps(policy_config_json(model, "float32", {})))
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository)}
    command = [
        sys.executable,
        "-m",
        "jaxspec.bench",
        "load",
        "--model",
        str(tmp_path),
        "--data",
        "8",
    ]
    told = printed(command, variables, repository, timeout=300)
    line = json.loads(told.splitlines()[-1])
    assert line["weight_bytes"] > 2.5e8
    assert line["machine"]["mesh"] == {"data": 8, "expert": 1, "tensor": 1}
    assert 1 <= line["peak_over_weights"] <= 1.3


def test_peak_memory_counts_what_is_written_and_not_what_is_mapped(tmp_path: Path) -> None:
    size = 64 * 2**20
    with PeakMemory() as memory:
        filled = np.ones(size, np.uint8)
        time.sleep(0.1)
        del filled
    assert 0.9 * size < memory.peak < 1.5 * size
    file = tmp_path / "mapped"
    file.write_bytes(bytes(size))
    with PeakMemory() as memory:
        assert np.memmap(file, np.uint8, "r").sum() == 0
    assert memory.peak < 0.1 * size
