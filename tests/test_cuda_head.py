"""What the learner's loops over chunks of the head move on GPUs that are not there, with the widths
of Qwen3-8B."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest

from jaxspec.build import build_step, default_micro_tokens
from jaxspec.compiled.counts import CostCounter
from jaxspec.compiled.hardware import HARDWARE
from jaxspec.compiled.text import Program
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    LoraConfig,
    RolloutConfig,
)
from jaxspec.host.programs import abstract_arguments
from jaxspec.kernels import chunks
from jaxspec.state import ScoredRollout, TrainState
from tests import cuda
from tests.conftest import tiny_config, tiny_model

pytestmark = [cuda.needs_plugin, pytest.mark.slow]

LAYERS, VOCAB, EMBED, PROMPTS = 4, 151_936, 4096, 16
WIDTHS = {"embed": EMBED, "heads": 32, "kv_heads": 8, "head_size": 128, "ffn": 12_288}
PASSES = 22
"""Bytes moved for each logit of a backward turn: float32 written once and read three times, its
gradient in bfloat16 written once and read twice."""
MOST, BEFORE = 9e9, 35
"""Bytes a turn, and turns of a micro-batch when these were chunks of 441 positions."""


class Backward(NamedTuple):
    """The loop of the backward pass over chunks of the head."""

    positions: int
    """Of a micro-batch."""
    turns: int
    bytes: float
    """Moved in a turn."""
    casts: bool
    """Whether it casts the head."""
    sums: int
    """Kernels that write a gradient of the whole head."""


def backward(rank: int, shards: int, chunk: int) -> Backward:
    """What `Learner.learn` makes of it for H100s; `chunk` 0 leaves its length as it is."""
    if chunk:
        chunks.CHUNK_POSITIONS_GPU = chunk
    model = tiny_model(vocab=VOCAB, layers=LAYERS, dtype="bfloat16", remat=True, **WIDTHS)
    draft = DraftConfig(kind="none")
    config = tiny_config(
        model,
        rollout=RolloutConfig(max_new_tokens=2048, verify="coupled", draft=draft),
        batch=BatchConfig(prompts=PROMPTS, group_size=8),
        data=DataConfig(max_prompt_length=1024),
        lora=LoraConfig(rank=rank),
    )
    mesh = cuda.mesh_of(HARDWARE["h100"], shards)
    step = build_step(config, mesh, (1,), VOCAB)
    state, finished, _ = abstract_arguments(step, PROMPTS)

    def run(state: TrainState, finished: ScoredRollout) -> Any:
        return step.learner.learn(state.learner, step.build_batch(finished))

    program = Program(cuda.compile_for_mesh(run, mesh, state, finished, donate=(0,)).as_text())
    counted = CostCounter(program, dict(mesh.shape))
    (loop,) = [
        each
        for _, each in program.iterate_instructions()
        if each.opcode == "while"
        and each.trip_count not in (None, LAYERS)
        and "transpose" in each.scope
    ]
    body, _ = sorted(program.find_callees(loop), key=lambda name: -len(program.computations[name]))
    wide = [
        each
        for each in program.computations[body]
        if each.opcode not in ("parameter", "get-tuple-element", "tuple", "bitcast")
        and any(sorted(shape.sizes) == [EMBED, VOCAB] for shape in each.results)
    ]
    assert loop.trip_count
    return Backward(
        positions=default_micro_tokens(config, mesh),
        turns=loop.trip_count,
        bytes=counted.count_computation(body).bytes,
        casts=any(each.results[0].dtype == "bf16" for each in wide),
        sums=sum(each.results[0].dtype == "f32" for each in wide),
    )


@pytest.mark.parametrize(
    ("rank", "shards", "chunk"), [(0, 1, 0), (0, 1, 432), (0, 2, 0), (16, 1, 0), (16, 2, 0)]
)
def test_a_chunk_reads_the_head_twice_and_its_gradients_sum_once(
    rank: int, shards: int, chunk: int
) -> None:
    """A frozen head has no gradient at all."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        found = process.submit(backward, rank, shards, chunk).result()
    assert found.positions % 128 == 0
    assert not found.casts
    assert found.sums == (0 if rank else 1)
    logits = PASSES * VOCAB * found.positions / found.turns
    assert found.bytes - logits < (3e9 if rank else 8e9)
    if rank or chunk:
        assert found.bytes < MOST
    if not chunk:  # longer chunks move more logits a turn, and less in all
        assert found.turns * found.bytes < 0.4 * BEFORE * MOST
