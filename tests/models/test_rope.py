"""Rotary tables: exact where positions are large, whatever the type of the heads, and made once."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.decoder import Decoder
from jaxspec.models.rope import rotary_table
from jaxspec.models.weight_layout import WeightLayout, apply_layout
from tests.conftest import tiny_model, tiny_network


def test_narrow_types_round_the_table_and_not_the_angles() -> None:
    positions = np.array([[0, 1, 257, 4099, 32_767]])  # bfloat16 holds no integer above 256 exactly
    table = rotary_table(
        jnp.asarray(positions, jnp.int32),
        tiny_model(head_size=8, rope_theta=1e4),
        jnp.dtype("bfloat16"),
    )
    angle = positions[0, :, None] * 1e4 ** (-np.arange(0, 8, 2) / 8)
    for found, wanted in zip(table, (np.cos(angle), np.sin(angle)), strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(found[0, :, 0], np.float64), wanted, rtol=0, atol=2**-8
        )


def test_cosines_are_computed_once_for_all_heads_of_all_layers() -> None:
    policy = apply_layout(
        tiny_network(Decoder, tiny_model(layers=3, dtype="float32"), 1),
        WeightLayout(fused=True, unrolled=True),
    )
    tokens = jnp.zeros((2, 1), jnp.int32)
    program = jax.jit(lambda policy, cache, at: policy(tokens, at, cache).hidden)
    text = program.lower(policy, policy.empty_cache(2, 8), tokens).compile().as_text() or ""
    assert [text.count(f" {function}(") for function in ("cosine", "sine")] == [1, 1]
