"""Predicted rounds cost as much as those of programs that were compiled for a card."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.compiled.hardware import HARDWARE
from jaxspec.compiled.roofline import (
    LAYER_KERNELS,
    GeneratorDevices,
    NetworkSizes,
    count_kernels,
    estimate_round_seconds,
    find_card_by_kind,
)
from jaxspec.config.presets import QWEN3_8B, QWEN3_30B_A3B, spec_without_checkpoint
from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.mtp import Mtp
from jaxspec.rollout.feedback.cost_table import context_buckets, predict_costs
from tests.conftest import eagle3

H100 = GeneratorDevices(HARDWARE["h100"])
CONTEXT = 2048
MEASURED = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
COUNTED = {
    1: (7.4, 1.11, 1.32, 1.53),
    8: (8.2, 1.11, 1.32, 1.53),
    32: (11.1, 1.11, 1.32, 1.53),
    64: (15.0, 1.11, 1.37, 1.78),
    128: (22.8, 1.14, 1.62, 2.10),
}
"""By rows: milliseconds of a plain step of Qwen3-8B on an H100, and how many of them rounds of 1, 3
and 5 drafts cost. Counted instruction by instruction; two points were measured."""


def shapes(make: object, model: ModelSpec) -> object:
    """A network in bfloat16 that is not there."""
    fresh = jax.eval_shape(functools.partial(make, model, key=jax.random.key(0)))  # pyright: ignore[reportCallIssue,reportArgumentType]
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, jnp.bfloat16 if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        ),
        fresh,
    )


def costs(
    target: ModelSpec, draft: object, rows: int, devices: GeneratorDevices = H100
) -> np.ndarray:
    table = predict_costs(devices, shapes(Decoder, target), draft, (0, 1, 3, 5), (rows,), CONTEXT)  # pyright: ignore[reportArgumentType]
    assert table.shape == (4, 3, len(context_buckets(CONTEXT)))
    np.testing.assert_array_equal(table[:, :1], table[:, 1:2])  # there is one loop
    return table[:, 0, -1]


@pytest.mark.parametrize("rows", COUNTED)
def test_costs_are_those_that_were_counted(rows: int) -> None:
    model = spec_without_checkpoint(QWEN3_8B)
    found = costs(model, shapes(eagle3, model), rows)
    plain, *rounds = COUNTED[rows]
    np.testing.assert_allclose(found[0] * 1e3, plain, rtol=0.1)
    np.testing.assert_allclose(found[1:] / found[0], rounds, rtol=0.1)


def test_a_small_vocabulary_of_a_draft_saves_its_head() -> None:
    model = spec_without_checkpoint(QWEN3_8B)
    whole, few = (
        costs(model, shapes(functools.partial(eagle3, vocab=vocab), model), 1)
        for vocab in (0, 32_000)
    )
    saved = 3 * 2 * (model.vocab - 32_000) * model.embed / (0.85 * H100.card.bandwidth)
    np.testing.assert_allclose(whole[2] - few[2], saved, rtol=1e-4)
    assert whole[0] == few[0]


def test_a_layer_of_several_in_turn_is_read_once_a_draft() -> None:
    model = spec_without_checkpoint(QWEN3_8B)
    one, three = (
        costs(model, shapes(functools.partial(Mtp, layers=layers), model), 4) for layers in (1, 3)
    )
    np.testing.assert_allclose(one, three, rtol=1e-5)


def test_few_tokens_touch_few_experts_and_many_all() -> None:
    model = spec_without_checkpoint(QWEN3_30B_A3B)
    draft = shapes(eagle3, spec_without_checkpoint(QWEN3_8B))
    one, many = (costs(model, draft, rows)[0] for rows in (1, 64))
    expert = 3 * 2 * model.layers * model.embed * model.ffn / (0.85 * H100.card.bandwidth)
    # 8 of 128 experts, and all of them; what else 64 rows take more is less than that
    assert 120 * expert < many - one < 2.5 * 120 * expert


def test_devices_that_split_weights_read_less_each() -> None:
    model = spec_without_checkpoint(QWEN3_8B)
    draft = shapes(eagle3, model)
    alone, split = (
        costs(model, draft, 64, GeneratorDevices(HARDWARE["h100"], tensor=count))
        for count in (1, 4)
    )
    assert (split < alone).all()
    assert (split > alone / 4).all()


def test_products_wait_for_the_tensor_cores_once_rows_are_many() -> None:
    head = NetworkSizes(1, 2 * 10**9, 0, 0.0, 10**9, 100_000, 10**4, 10**5, 4096, 2)
    few, more, many = (
        estimate_round_seconds(H100, head, head, 0, rows, 0, 1) for rows in (1, 2, 2000)
    )
    assert more - few < 1e-5
    assert many > 5 * few


def test_cards_are_known_by_the_name_that_jax_gives_them() -> None:
    assert find_card_by_kind("NVIDIA H200") is HARDWARE["h200"]
    assert find_card_by_kind("TPU v5e") is None


def test_kernels_are_those_of_the_benchmarks() -> None:
    found = re.search(r"in (\d+) kernels plain, \S+ ms in (\d+) with K 3", MEASURED)
    assert found is not None
    plain, drafted = int(found[1]), int(found[2])
    assert count_kernels(QWEN3_8B.layers, 0) == plain
    # The kernels of three drafts are no multiple of three.
    assert abs(count_kernels(QWEN3_8B.layers, 3) - drafted) <= 1
    assert f"in the layers, {LAYER_KERNELS} each" in MEASURED
