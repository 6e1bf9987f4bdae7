"""The whole check of a small run, compiled for GPUs that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import cuda

pytestmark = cuda.needs_plugin
SMALL = (
    "--sft.steps 0 --rollout.draft.kind none --rollout.engine.no_tail --model.dtype bfloat16"
    " --model.layers 2 --model.embed 256 --model.heads 2 --model.kv_heads 2 --model.head_size 128"
    " --model.ffn 512 --mesh.shard_above 0 --mesh.tensor 2"
)


@pytest.fixture(scope="module", params=["h200", pytest.param("gb200", marks=pytest.mark.slow)])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In a process of its own: kernels ask the default device for its generation."""
    folder = tmp_path_factory.mktemp("check")
    words = [
        "--config",
        "rl_think.py",
        "--devices",
        "4",
        "--hardware",
        request.param,
        *SMALL.split(),
    ]
    unset = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    ran = subprocess.run(
        [sys.executable, "-m", "jaxspec.check", "--json", *words],
        env=environment | {"JAXSPEC_CACHE": str(folder)},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "compiled in" in ran.stderr
    return json.loads(ran.stdout)


def test_a_step_is_compiled_for_the_named_gpu(told: dict[str, Any]) -> None:
    assert told["virtual"] is False
    assert told["mesh"] == {"data": 2, "expert": 1, "tensor": 2}
    assert told["sizes"]["page_size"] == 64
    assert told["memory"]["taken"] < told["memory"]["limit"]
    assert told["work"]["a round"]["kernels"] > 10


def test_the_host_has_no_say_within_a_round(told: dict[str, Any]) -> None:
    """A loop inside would cut the round's CUDA graph in parts, and be read back at each turn."""
    assert told["work"]["a round"]["loops_outside_command_buffers"] == 0


def test_collectives_of_a_round_are_between_tensor_peers_and_a_sync_gathers_once(
    told: dict[str, Any],
) -> None:
    inside = told["work"]["a round"]["collectives"]
    assert inside
    assert {tuple(each["axes"]) for each in inside} == {("tensor",)}
    assert told["sync_moves_each_weight"] == pytest.approx(1, rel=0.02)


def test_pages_have_a_kernel_on_hopper_alone(told: dict[str, Any]) -> None:
    gathered = [each for each in told["warnings"] if "no kernel reads pages" in each]
    assert len(gathered) == (told["hardware"] == "gb200")
    assert told["warnings"] == gathered
