"""What the compiler makes of the learner's attention on GPUs that are not there: which kernels, and
how much memory."""

import functools
import importlib.util
import multiprocessing
import os
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.build import build_step
from jaxspec.compiled.hardware import Card
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    EngineConfig,
    MeshConfig,
    RolloutConfig,
)
from jaxspec.host.programs import abstract_arguments
from jaxspec.kernels.segment_attention import attend_segments
from jaxspec.mesh import DATA
from jaxspec.state import Prompts, ScoredRollout, TrainState
from tests import cuda
from tests.conftest import tiny_config, tiny_model

pytestmark = cuda.needs_plugin

HEADS, KV_HEADS = 8, 2
LENGTHS = 4096, 8192
KERNELS = importlib.util.find_spec("tokamax") is not None
"""Without them it is the plain twin that is compiled, whose memory is linear too."""


class Found(NamedTuple):
    """What is read of a compiled program."""

    temporaries: int
    mosaic: int
    """Calls of a kernel of Mosaic's."""
    triton: int
    shapes: frozenset[tuple[int, ...]]


def _found(program: Any) -> Found:
    text = program.as_text()
    mosaic = text.count('custom_call_target="mosaic_gpu')
    triton = text.count('custom_call_target="__gpu$xla.gpu.triton')
    return Found(cuda.temporaries(program), mosaic, triton, frozenset(cuda.shapes(program)))


def attention(card: Card, length: int, size: int = 128, tensor: int = 1) -> Found:
    """Forward and backward, a row of packed texts for each of two shards."""
    mesh = cuda.mesh_of(card, 2, tensor)

    def shard(
        query: jax.Array, key: jax.Array, value: jax.Array, first: jax.Array, cotangent: jax.Array
    ) -> Any:
        output, pull = jax.vjp(
            lambda query, key, value: attend_segments(query, key, value, first), query, key, value
        )
        return output, pull(cotangent)

    run = jax.shard_map(
        shard, mesh=mesh, in_specs=P(DATA), out_specs=P(DATA), axis_names={DATA}, check_vma=False
    )
    by_head = NamedSharding(mesh, P(DATA, None, "tensor"))
    query, key = (
        jax.ShapeDtypeStruct((2, length, heads, size), jnp.bfloat16, sharding=by_head)
        for heads in (HEADS, KV_HEADS)
    )
    first = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=NamedSharding(mesh, P(DATA)))
    return _found(cuda.compile_for_mesh(run, mesh, query, key, key, first, query))


@functools.cache
def learn(card: Card, tokens: int, draft: DraftConfig) -> Found:
    """What `Learner.learn` makes of a rollout, with a narrow policy of two layers, on two
    shards."""
    sizes = {"layers": 2, "embed": 256, "heads": 2, "kv_heads": 1, "head_size": 128, "ffn": 512}
    vocab, prompts, group, longest = 512, 64, 2, 512
    config = tiny_config(
        tiny_model(vocab=vocab, **sizes, dtype="bfloat16", remat=True),
        rollout=RolloutConfig(max_new_tokens=longest - 63, verify="coupled", draft=draft),
        batch=BatchConfig(prompts=prompts, group_size=group, micro_tokens=tokens),
        data=DataConfig(max_prompt_length=64),
        mesh=MeshConfig(shard_above=0),
        draft_training=DraftTrainingConfig(ttt_steps=2),
    )
    mesh = cuda.mesh_of(card, 2)
    step = build_step(config, mesh, (1,), vocab)
    state, finished, _ = abstract_arguments(step, prompts)

    def run(state: TrainState, finished: ScoredRollout) -> Any:
        return step.learner.learn(state.learner, step.build_batch(finished))

    return _found(cuda.compile_for_mesh(run, mesh, state, finished))


def loops(card: cuda.Card, draft: DraftConfig, command_buffers: bool) -> tuple[int, int]:
    """How many loops generation has, and how many of them the host goes through, as what it does
    in turn says (XLA's thunks)."""
    engine = EngineConfig(tail=False, command_buffers=command_buffers)
    config = tiny_config(
        tiny_model(vocab=512, embed=256, head_size=64, dtype="bfloat16"),
        rollout=RolloutConfig(max_new_tokens=32, draft=draft, engine=engine),
        data=DataConfig(max_prompt_length=32),
    )
    mesh = cuda.mesh_of(card)
    step = build_step(config, mesh, (1,), 512)
    state, _, prompts = abstract_arguments(step, config.batch.prompts)

    def run(state: TrainState, prompts: Prompts) -> Any:
        return step.generator.generate(step.sync(state), prompts)

    with tempfile.TemporaryDirectory() as folder:
        options = step.generator.compiler_options | {"xla_dump_to": folder}
        cuda.compile_for_mesh(run, mesh, state, prompts, options=options)
        *_, last = sorted(Path(folder).glob("*.thunk_sequence*.txt"), key=os.path.getmtime)
        lines = last.read_text().splitlines()
    # a line stands deeper than what it is a part of
    found = [match for line in lines if (match := re.match(r"( *)\d+: (k\w+)", line))]
    around: list[tuple[int, str]] = []
    everywhere = outside = 0
    for match in found:
        depth, kind = len(match[1]), match[2]
        around = [above for above in around if above[0] < depth]
        if kind == "kWhile":
            everywhere += 1
            outside += all(name != "kCommandBuffer" for _, name in around)
        around.append((depth, kind))
    return everywhere, outside


@pytest.fixture(scope="module", params=[cuda.H200, cuda.GB200], ids=str)
def card(request: pytest.FixtureRequest) -> Any:
    """A GPU, and a process of its own to compile for it: code for another kind would be taken from
    where traces are kept."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield lambda function, *arguments: process.submit(
            function, request.param, *arguments
        ).result()


def square(found: Found, length: int) -> set[tuple[int, ...]]:
    """Arrays with two axes of positions."""
    return {
        shape for shape in found.shapes if sum(length <= size < length + 256 for size in shape) > 1
    }


@pytest.mark.parametrize(
    ("card", "draft"),
    [
        (cuda.H200, DraftConfig(kind="none")),
        pytest.param(cuda.GB200, DraftConfig(draft_length=2), marks=pytest.mark.slow),
    ],
    ids=str,
    indirect=["card"],
)
def test_a_setting_puts_all_loops_of_generation_into_command_buffers(
    card: Any, draft: DraftConfig
) -> None:
    everywhere, outside = card(loops, draft, False)
    assert everywhere == outside > 0
    everywhere, outside = card(loops, draft, True)
    assert everywhere > 0
    assert outside == 0


def test_attention_is_a_kernel_and_linear_in_the_length(card: Any) -> None:
    short, long = (card(attention, length) for length in LENGTHS)
    assert (short.mosaic >= 2) == (long.mosaic >= 2) == KERNELS, "forward and backward"
    assert not short.triton + long.triton
    assert 0 < long.temporaries <= 2.2 * short.temporaries
    assert not square(short, LENGTHS[0]) | square(long, LENGTHS[1])


@pytest.mark.skipif(not KERNELS, reason="needs tokamax")
@pytest.mark.parametrize(("length", "size", "tensor"), [(1000, 96, 1), (1001, 64, 2)])
def test_kernels_take_any_length_and_the_heads_of_all_families(
    card: Any, length: int, size: int, tensor: int
) -> None:
    found = card(attention, length, size, tensor)
    assert found.mosaic >= 2
    assert not square(found, length)


def test_the_learner_attends_by_kernels(card: Any) -> None:
    found = card(learn, LENGTHS[0], DraftConfig(kind="none"))
    assert (found.mosaic >= 2) == KERNELS
    assert not square(found, LENGTHS[0])


@pytest.mark.parametrize(
    "card", [cuda.H200, pytest.param(cuda.GB200, marks=pytest.mark.slow)], ids=str, indirect=True
)
def test_the_learners_memory_is_linear_in_the_positions(card: Any) -> None:
    short, long = (card(learn, tokens, DraftConfig(kind="none")) for tokens in LENGTHS)
    assert short.temporaries < long.temporaries <= 2.2 * short.temporaries
    assert not square(long, LENGTHS[1])


@pytest.mark.slow
def test_beside_the_policys_kernels_the_drafts_attention_stays_plain(card: Any) -> None:
    """Its log-sum-exp has a gradient, which the kernels do not give."""
    alone, both = (
        card(learn, 4096, draft)
        for draft in (DraftConfig(kind="none"), DraftConfig(draft_length=2))
    )
    assert alone.mosaic == both.mosaic
    assert not square(both, 4096)


@pytest.mark.skipif(not KERNELS, reason="needs tokamax")
def test_a_card_without_mosaics_backward_pass_has_tritons() -> None:
    """Which reads a mask of all pairs: one for all heads, and up to some length only."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        short, long = (
            process.submit(attention, cuda.RTX_4090, length).result() for length in (4096, 32768)
        )
    assert short.triton >= 2
    assert square(short, 4096) == {(4096, 4096)}
    assert not long.triton + long.mosaic
    assert not square(long, 32768)
