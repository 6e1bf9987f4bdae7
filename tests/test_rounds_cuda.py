"""Rounds of Qwen3-8B's layers, compiled for GPUs that are not there: nothing large is copied, and
the host has no say within a round."""

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxspec.build import build_step
from jaxspec.compiled.counts import CostCounter, DynamicLoop
from jaxspec.compiled.text import Instruction, Program
from jaxspec.config.presets import QWEN3_8B, spec_without_checkpoint
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    EngineConfig,
    MeshConfig,
    RolloutConfig,
)
from jaxspec.drafts.eagle3.settings import Eagle3Config
from jaxspec.host.programs import abstract_arguments, abstract_leaf
from jaxspec.inputs.spec import LoraConfig
from tests import cuda
from tests.conftest import tiny_config

pytestmark = cuda.needs_plugin

LAYERS, SLOTS, PAGES, LENGTH = 4, 64, 600, 3
KERNELS_OUTSIDE = {1: 191, 4: 360}
"""Of a round, outside the policy's layers, by the size of `tensor`: a vocabulary that is split is
verified by the plain form. One of them writes the origins of the tokens."""


class Rounds(NamedTuple):
    program: Program
    round: DynamicLoop
    smallest: int
    """Bytes of a device's part of the smallest product's weight but keys' and values'."""
    cache: int
    """Bytes of a device's part of a layer's keys."""


@functools.cache
def rounds(lora: int, tensor: int) -> Rounds:
    model = spec_without_checkpoint(replace(QWEN3_8B, layers=LAYERS, dtype="bfloat16", remat=True))
    config = tiny_config(
        model,
        lora=LoraConfig(rank=lora),
        rollout=RolloutConfig(
            max_new_tokens=1024,
            draft=DraftConfig(draft_length=LENGTH, eagle3=Eagle3Config(vocab=32_000)),
            engine=EngineConfig(tail=False, slots=SLOTS, page_size=64, pages=PAGES),
        ),
        batch=BatchConfig(prompts=16, group_size=4),
        data=DataConfig(max_prompt_length=1024),
        mesh=MeshConfig(tensor=tensor),
    )
    mesh = cuda.mesh_of(cuda.H200, tensor=tensor)
    step = build_step(config, mesh, (1,), model.vocab)
    state, _, prompts = abstract_arguments(step, 16)
    generator = step.generator
    synced = cuda.compile_for_mesh(step.sync, mesh, state)
    with jax.numpy_dtype_promotion("standard"):
        shapes = jax.eval_shape(step.sync, state)
    ready = jax.tree.map(abstract_leaf, shapes, synced.output_shardings)
    made = cuda.compile_for_mesh(generator.generate, mesh, ready, prompts)
    program = Program(made.as_text())
    parts = CostCounter(program, dict(mesh.shape)).split_by_phase({"generate": 1.0}, {"generate"})
    found = parts.largest_loop("generate", "rounds")
    assert found is not None
    size = jnp.dtype(model.dtype).itemsize
    return Rounds(
        program,
        found,
        model.embed * model.heads * model.head_size * size // tensor,
        PAGES * 64 * model.kv_heads * model.head_size * size // tensor,
    )


def copies(found: Rounds) -> Iterator[Instruction]:
    """Kernels of a round that do nothing but copy."""
    computations = found.program.computations
    for name in found.round.computations:
        for each in computations[name]:
            roots = [
                inner.opcode
                for called in (found.program.find_callees(each) if each.opcode == "fusion" else [])
                for inner in computations[called]
                if inner.is_root
            ]
            if {each.opcode, *roots} & {"copy", "transpose", "copy-start"}:
                yield each


CASES = pytest.mark.parametrize(
    ("lora", "tensor"), [(0, 1), (16, 1), (0, 4)], ids=["full", "lora", "tensor 4"]
)


@CASES
def test_no_weight_and_no_cache_is_copied(lora: int, tensor: int) -> None:
    found = rounds(lora, tensor)
    large = min(found.smallest, found.cache)
    vocab = QWEN3_8B.vocab, QWEN3_8B.vocab // tensor
    copied = [
        shape.sizes
        for each in copies(found)
        for shape in each.results
        # logits are not meant
        if shape.byte_count >= large and shape.sizes[-1] not in vocab
    ]
    assert copied == []
    assert found.cache >= found.smallest


@CASES
def test_a_round_has_no_loop_and_few_kernels(lora: int, tensor: int) -> None:
    found = rounds(lora, tensor)
    assert found.round.cost.loops == 0
    within = [
        each
        for name in found.round.computations
        for each in found.program.computations[name]
        if re.search(r"jit\(run_layer\)", each.scope)
    ]
    assert within
    of_layers = 15 * LAYERS if tensor == 1 else 20 * LAYERS
    assert 10 * LAYERS < found.round.cost.kernels < of_layers + KERNELS_OUTSIDE[tensor]
