"""Angles stay exact where positions are large, whatever the type of the heads."""

import jax.numpy as jnp
import numpy as np

from jaxspec.models.rope import rotary_table
from tests.conftest import tiny_model


def test_narrow_types_round_the_table_and_not_the_angles() -> None:
    positions = np.array([[0, 1, 257, 4099, 32_767]])  # bfloat16 holds no integer above 256 exactly
    table = rotary_table(jnp.asarray(positions, jnp.int32), tiny_model(head_size=8, rope_theta=1e4), jnp.dtype("bfloat16"))
    angle = positions[0, :, None] * 1e4 ** (-np.arange(0, 8, 2) / 8)
    for found, wanted in zip(table, (np.cos(angle), np.sin(angle)), strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(found[0, :, 0], np.float64), wanted, rtol=0, atol=2**-8)
