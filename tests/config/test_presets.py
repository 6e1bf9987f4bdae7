"""The published sizes, through the number of parameters that each checkpoint is known to hold."""

import pytest

from jaxspec.config.presets import (
    QWEN3_0_6B,
    QWEN3_1_7B,
    QWEN3_4B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
)
from jaxspec.inputs.spec import ModelSpec


@pytest.mark.parametrize(
    ("model", "experts", "parameters"),
    [
        (QWEN3_0_6B, 0, 596_049_920),
        (QWEN3_1_7B, 0, 1_720_574_976),
        (QWEN3_4B, 0, 4_022_468_096),
        (QWEN3_8B, 0, 8_190_735_360),
        (QWEN3_30B_A3B, 128, 30_532_122_624),
        (QWEN3_235B_A22B, 128, 235_093_634_560),
    ],
)
def test_published_parameter_counts(model: ModelSpec, experts: int, parameters: int) -> None:
    attention = (
        2 * model.embed * (model.heads + model.kv_heads) * model.head_size + 2 * model.head_size
    )
    router = experts * model.embed
    layer = attention + router + max(1, experts) * 3 * model.embed * model.ffn + 2 * model.embed
    tables = model.vocab * model.embed * (1 if model.tied else 2)
    assert tables + model.layers * layer + model.embed == parameters
    assert (model.rope_theta, model.norm_eps) == (1e6, 1e-6)
