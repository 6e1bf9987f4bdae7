"""Norms in narrow types against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.layers import rms_norm
from tests.twins import numpy_rms_norm


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_the_norm_itself_is_taken_in_at_least_float32(dtype: str, tolerance: float) -> None:
    """Only the result is rounded: with weights of 1 it is the exact one to half a unit in the last
    place."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 300)), dtype)
    found = rms_norm(x, jnp.ones((300,), dtype), 1e-6)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64),
        numpy_rms_norm(np.asarray(x, np.float64), np.ones(300), 1e-6),
        rtol=tolerance,
    )
