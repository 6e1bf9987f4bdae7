"""Norms and logits in narrow types against float64."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.kernels.cpu_layouts import (
    BLOCK_LOOP_ROWS,
    RIGHT_OPERAND_ROWS,
    block_weight,
    split_weight,
    transpose_weight,
)
from jaxspec.models.layers import CastHead, head_logits, rms_norm
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


WIDTH, VOCAB = 128, 150
HEADS: dict[str, tuple[int, Callable[[nnx.Param], nnx.Variable]]] = {
    "plain": (3, lambda head: head),
    "transposed, few rows": (3, lambda head: transpose_weight(head, 0, 1)),
    "transposed, many rows": (RIGHT_OPERAND_ROWS, lambda head: transpose_weight(head, 0, 1)),
    "blocked, few rows": (3, lambda head: block_weight(head, 0, 1)),
    "blocked, many rows": (BLOCK_LOOP_ROWS, lambda head: block_weight(head, 0, 1)),
    "split, one row": (1, lambda head: split_weight(head, 0, 1)),
    "split, more rows": (3, lambda head: split_weight(head, 0, 1)),
}
"""Rows that meet the head, and how it lies."""


def narrow_product(rows: int) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Hidden states and a head in bfloat16, and their exact product, at most about 32."""
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(1, rows, WIDTH)), jnp.bfloat16)
    head = random.normal(size=(WIDTH, VOCAB))
    head *= 32 / np.abs(np.asarray(hidden, np.float64) @ head).max()
    narrow = jnp.asarray(head, jnp.bfloat16)
    return hidden, narrow, np.asarray(hidden, np.float64) @ np.asarray(narrow, np.float64)


def assert_float32(logits: jax.Array, exact: np.ndarray) -> None:
    """Where bfloat16 would round to an eighth."""
    assert np.abs(exact).max() > 31
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", HEADS)
def test_logits_are_added_up_in_float32_however_the_head_lies(form: str) -> None:
    rows, lay_out = HEADS[form]
    hidden, head, exact = narrow_product(rows)
    laid_out = lay_out(nnx.Param(head))
    assert_float32(jax.jit(lambda hidden: head_logits(hidden, laid_out))(hidden), exact)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_tied_and_cast_heads_are_added_up_in_float32(tied: bool) -> None:
    hidden, head, exact = narrow_product(3)
    kernel = nnx.Param(head.T if tied else head)
    assert_float32(jax.jit(lambda hidden: head_logits(hidden, kernel, by_rows=tied))(hidden), exact)
    master = nnx.Param(kernel[...].astype(jnp.float32))
    learner = CastHead(master, "bfloat16", by_rows=tied)
    assert_float32(jax.jit(lambda hidden: head_logits(hidden, learner))(hidden), exact)
