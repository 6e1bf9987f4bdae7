"""The clipped loss, by worked numbers and by its slopes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rl.losses import LossInputs, clipped_ratio, negative_log_likelihood

pytestmark = pytest.mark.usefixtures("x64")

LOW, HIGH = 0.2, 0.28


def loss(
    policy: jax.Array, old: jax.Array, advantages: list[float], mask: list[list[bool]]
) -> jax.Array:
    """The mean over the tokens to learn, as the learner takes it."""
    chosen = jnp.array(mask)
    by_token = jnp.broadcast_to(jnp.array(advantages)[:, None], chosen.shape)
    losses = clipped_ratio(LossInputs(policy, old, old, by_token, chosen), LOW, HIGH)
    return jnp.sum(jnp.where(chosen, losses, 0)) / jnp.maximum(
        jnp.sum(chosen, dtype=losses.dtype), 1
    )


def test_the_negative_log_likelihood_is_that_of_the_policy_alone() -> None:
    logprobs = jnp.array([[-0.5, -2.0]])
    found = negative_log_likelihood(
        LossInputs(logprobs, logprobs * 3, logprobs * 7, logprobs * 0, jnp.array([[True, True]]))
    )
    np.testing.assert_array_equal(found, [[0.5, 2.0]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain"),
    [
        (1.0, 2.0, 2.0),
        (1.2, 1.0, 1.2),
        (1.5, 1.0, 1.28),  # clipped above, further than below
        (0.5, 1.0, 0.5),  # a bad move away from a good token is not hidden
        (0.9, -1.0, -0.9),
        (0.5, -1.0, -0.8),
        (1.5, -1.0, -1.5),
        (3.0, 0.0, 0.0),
    ],
)
def test_worked_gains(ratio: float, advantage: float, gain: float) -> None:
    old = jnp.array([[-1.3]])
    assert float(loss(old + np.log(ratio), old, [advantage], [[True]])) == pytest.approx(-gain)


def test_tokens_are_averaged_not_rows() -> None:
    """Row 0 has one token, row 1 has three: each counts a quarter."""
    old = jnp.zeros((2, 3))
    mask = [[True, False, False], [True, True, True]]
    assert float(loss(old, old, [4.0, 8.0], mask)) == pytest.approx(-(4 + 3 * 8) / 4)


def test_what_is_masked_has_neither_value_nor_slope() -> None:
    mask = [[True, False, False]]
    old = jnp.array([[-1.0, -np.inf, 2.0]])
    for junk in (0.0, 900.0, np.nan, np.inf, -np.inf):
        policy = jnp.array([[-1.0, junk, 1e3]])
        value, slope = jax.value_and_grad(loss)(policy, old, [3.0], mask)
        assert float(value) == pytest.approx(-3)
        np.testing.assert_allclose(slope, [[-3.0, 0, 0]])


def test_slopes_are_the_policy_gradient_inside_the_clip_and_zero_outside() -> None:
    ratios = np.array([[1.0, 1.1, 1.5], [1.0, 0.7, 0.85]])
    old = jnp.full((2, 3), -0.7)
    slope = jax.grad(loss)(old + np.log(ratios), old, [2.0, -1.0], [[True] * 3] * 2)
    np.testing.assert_allclose(slope, -np.array([[2.0, 2.2, 0], [-1.0, 0, -0.85]]) / 6, rtol=1e-12)
    assert float(jnp.abs(jax.grad(loss, 1)(old, old, [2.0, -1.0], [[False] * 3] * 2)).sum()) == 0
