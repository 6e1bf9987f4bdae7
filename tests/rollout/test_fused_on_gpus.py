"""Passes over the vocabulary that verification makes on a GPU that is not there."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.compiled.counts import CostCounter
from jaxspec.compiled.hardware import HARDWARE, Card
from jaxspec.compiled.text import Instruction, Program, Shape
from jaxspec.drafts import draft_temperature
from jaxspec.drafts.base import DrawnProposal, PointProposal
from jaxspec.rollout.verification.block import Block
from jaxspec.rollout.verify import block_rule, count_leading, match_rule
from jaxspec.sampling import Processing, Uniforms, level_count
from tests import cuda
from tests.rollout.harness import FORMS

pytestmark = cuda.needs_plugin

ROWS, LENGTH, GROUP = 64, 3, 16
VOCAB, OWN = 151_936, 32_000
KNOWN = Processing(vocab_size=151_669)
"""As Qwen3's tokenizer has them."""


class Found(NamedTuple):
    """What is read of a compiled verification."""

    bytes: int
    """Read and written by kernels with an operand or a result over a vocabulary."""
    kernels: int
    temporaries: int


def found(program: Any) -> Found:
    parsed = Program(program.as_text())
    counted, entry = CostCounter(parsed, {"data": 1}), parsed.entry
    lines, total = parsed.instructions_by_name[entry], 0

    def is_wide(shape: Shape) -> bool:
        return any(size in (VOCAB, OWN) for size in shape.sizes)

    def shapes(each: Instruction) -> list[Shape]:
        operands = (lines[name] for name in each.operands if name in lines)
        return [*each.results, *(shape for operand in operands for shape in operand.results)]

    for each in parsed.computations[entry]:
        if any(map(is_wide, shapes(each))):
            total += counted.count_bytes(entry, each) if each.opcode == "fusion" else 0
    return Found(total, int(counted.count_computation(entry).kernels), cuda.temporaries(program))


def verification(card: Card, form: str, own: bool, auto: bool, dtype: str) -> Found:
    """A block of bfloat16 drafts, with logits of the target as `dtype`."""
    mesh, size = cuda.mesh_of(card), OWN if own else VOCAB
    grid = draft_temperature.GRID if auto else (1.0,)

    def verify(
        logits: jax.Array,
        draft: jax.Array,
        ids: jax.Array,
        tokens: jax.Array,
        produced: jax.Array,
        choice: jax.Array,
        coins: jax.Array,
        noise: jax.Array,
    ) -> Any:
        factors = jnp.asarray(grid, jnp.float32)[choice] if auto else 1.0
        offered = jnp.full((ROWS,), LENGTH, jnp.int32)
        proposal = DrawnProposal(tokens, draft, offered, ids if own else None)
        rows = slice(None, None, GROUP)
        wide = logits.astype(jnp.float32)
        compared = FORMS[form].compare_block(
            Block(wide, proposal, produced, KNOWN, factors, grid, rows)
        )
        offered = jnp.minimum(offered, count_leading(compared.finite[:, :LENGTH]))
        verdict = block_rule(compared.distributions, tokens, offered, coins, Uniforms(noise))
        block = jnp.where(
            jnp.arange(LENGTH + 1, dtype=jnp.int32) < verdict.accepted[:, None],
            jnp.pad(tokens, ((0, 0), (0, 1))),
            verdict.next_token[:, None],
        )
        said = compared.finite, compared.entropy, compared.draft_overlap, compared.logprobs(block)
        return verdict, said

    described = described_on(mesh)
    arguments = (
        described((ROWS, LENGTH + 1, VOCAB), dtype),
        described((ROWS, LENGTH, size), "bfloat16"),
        described((size,), "int32"),
        described((ROWS, LENGTH), "int32"),
        described((ROWS, LENGTH + 1), "int32"),
        described((LENGTH,), "int32"),
        described((ROWS, LENGTH), "float32"),
        described((ROWS, level_count(VOCAB)), "float32"),
    )
    return found(cuda.compile_for_mesh(verify, mesh, *arguments))


def plain_step(card: Card, form: str) -> Found:
    """A token of plain decoding."""
    mesh = cuda.mesh_of(card)

    def step(logits: jax.Array, noise: jax.Array) -> Any:
        nothing = jnp.zeros((ROWS, 0), jnp.int32)
        produced = jnp.zeros((ROWS, 1), jnp.int32)
        proposal = PointProposal(nothing, produced[:, 0])
        block = Block(
            logits.astype(jnp.float32), proposal, produced, KNOWN, 1.0, (1.0,), slice(None)
        )
        compared = FORMS[form].compare_block(block)
        verdict = match_rule(compared.distributions, nothing, produced[:, 0], Uniforms(noise))
        logprobs = compared.logprobs(verdict.next_token[:, None])
        return verdict, compared.finite, compared.entropy, logprobs

    described = described_on(mesh)
    noise = described((ROWS, 1, level_count(VOCAB)), "float32")
    return found(cuda.compile_for_mesh(step, mesh, described((ROWS, 1, VOCAB), "bfloat16"), noise))


def described_on(mesh: Any) -> Any:
    sharding = NamedSharding(mesh, P())
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


class Compiler(NamedTuple):
    """A GPU, and a process of its own to compile for it."""

    name: str
    process: ProcessPoolExecutor

    def __call__(self, function: Any, *arguments: Any) -> Found:
        return self.process.submit(function, HARDWARE[self.name], *arguments).result()


@pytest.fixture(scope="module", params=["h200", pytest.param("gb200", marks=pytest.mark.sweep)])
def card(request: pytest.FixtureRequest) -> Iterator[Compiler]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield Compiler(request.param, process)


@pytest.mark.parametrize("auto", [False, True], ids=["one factor", "grid"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_verification_passes_over_the_vocabulary_three_times(
    card: Compiler, auto: bool, dtype: str
) -> None:
    """The plain form takes more than 2 GB. Of the fast one, no array over the vocabulary is held,
    but on a GB200, as XLA weighs it, that of one position a row."""
    plain, fast = (card(verification, form, True, auto, dtype) for form in ("plain", "fused"))
    print(plain, fast)
    assert plain.bytes > 1.7e9
    assert fast.bytes <= (0.3e9 if dtype == "bfloat16" else 0.5e9)
    assert fast.temporaries <= (4e6 if card.name == "h200" else 45e6)
    assert fast.kernels <= 0.8 * plain.kernels


def test_a_draft_with_the_whole_vocabulary_is_verified_in_as_many(card: Compiler) -> None:
    fast = card(verification, "fused", False, False, "bfloat16")
    print(fast)
    assert fast.bytes <= 0.7e9


def test_a_plain_step_reads_its_logits_twice(card: Compiler) -> None:
    plain, fast = (card(plain_step, form) for form in ("plain", "fused"))
    print(plain, fast)
    assert fast.bytes < min(plain.bytes, 0.06e9)
    assert fast.temporaries <= 4e6
