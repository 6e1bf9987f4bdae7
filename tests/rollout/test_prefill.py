"""Prompts are read in pieces that see what comes before them: the same values, and memory that is
linear in their length."""

import collections
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    EngineConfig,
)
from jaxspec.host.programs import abstract_arguments, compile_ahead
from jaxspec.models import attention
from jaxspec.rollout.decode_state import DecodeState
from jaxspec.rollout.generate import begin
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.modes import Matching
from tests.conftest import small_mesh, tiny_config, tiny_model, tiny_prompts
from tests.rollout.harness import GROUP, SPREAD, draft_of, drafter, network_of, plain

WIDTH = 13


def begun(kind: str) -> DecodeState:
    target, draft, network = plain()[0], draft_of(kind, 2), network_of(kind, 0.8)
    settings, prompts = Settings(GROUP, 8, SPREAD, Matching()), tiny_prompts(8, WIDTH)
    prompts = prompts.replace(lengths=prompts.lengths.at[3].set(1))
    return jax.jit(
        lambda: begin(
            target,
            drafter(network, draft),
            draft,
            prompts,
            jnp.int32(0),
            jax.random.key(5),
            settings,
        )
    )()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["none", "eagle3", "mtp 2", "model"])
@pytest.mark.parametrize(("fewest", "block"), [(1, 512), (5, 512), (5, 4)])
def test_prompts_that_are_read_in_pieces_leave_the_same(
    kind: str, fewest: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 1 to 13 tokens: what target and draft keep of them is that of one piece."""
    whole = begun(kind)
    for name, size in (("TILE_QUERIES", 1), ("MIN_ROW_QUERIES", fewest), ("BLOCK", block)):
        monkeypatch.setattr(attention, name, size)
    pieces = begun(kind)
    assert jax.tree.structure(pieces) == jax.tree.structure(whole)
    for found, wanted in zip(
        jax.tree.leaves((pieces.caches, pieces.draft)),
        jax.tree.leaves((whole.caches, whole.draft)),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def prefill(width: int, prompts: int, data: int = 1, tensor: int = 1, kind: Any = "none") -> Any:
    """The compiled program that reads so many prompts of this length."""
    model = tiny_model(dtype="float32", heads=16, kv_heads=4)
    config = tiny_config(
        model, DraftConfig(kind=kind), batch=BatchConfig(prompts=prompts, group_size=2)
    )
    rollout = dataclasses.replace(
        config.rollout, engine=EngineConfig(page_size=64, slots=1, tail=False)
    )
    config = dataclasses.replace(config, rollout=rollout, data=DataConfig(max_prompt_length=width))
    step = build_step(config, small_mesh(data, tensor), (1,), 11)
    state, _, asked = abstract_arguments(step, prompts)
    _, ready = compile_ahead(step.sync, state)
    return compile_ahead(step.generator.begin, ready, asked)[0]


@pytest.mark.parametrize("kind", ["none", pytest.param("eagle3", marks=pytest.mark.sweep)])
def test_memory_is_linear_in_the_length_of_prompts(kind: Any) -> None:
    short, long = (
        prefill(width, 2, kind=kind).memory_analysis().temp_size_in_bytes for width in (2048, 4096)
    )
    assert long < 2.3 * short
    scores = 2 * 4096 * 16 * attention.BLOCK * 4
    assert long < 0.75 * scores, (
        "the scores of all queries to a block of keys are never there at once"
    )


def test_pieces_cost_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tensor` peers add up what their heads give, once a product, as they do without pieces."""

    def collectives() -> collections.Counter[str]:
        text = prefill(24, 4, 2, 4, "eagle3").as_text()
        return collections.Counter(
            re.findall(
                r" (all-\w+|reduce-scatter|collective-\w+|ragged-all-to-all)(?:-start)?\(", text
            )
        )

    whole = collectives()
    assert whole["all-reduce"] > 0, "tensor peers must talk"
    monkeypatch.setattr(attention, "TILE_QUERIES", 1)
    monkeypatch.setattr(attention, "MIN_ROW_QUERIES", 8)
    assert collectives() == whole
