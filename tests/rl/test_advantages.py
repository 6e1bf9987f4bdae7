"""Group advantages, by worked numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rl.advantages import group_advantages

pytestmark = pytest.mark.usefixtures("x64")


def advantages(rewards: list[float], valid: list[bool] | None = None, group: int = 4) -> np.ndarray:
    mask = jnp.array([True] * len(rewards) if valid is None else valid)
    return np.asarray(group_advantages(jnp.array(rewards, float), mask, group))


def test_worked_numbers_by_group() -> None:
    """(1, 0, 0, 0): mean 1/4, deviation sqrt(3)/4. (1, 2, 3, 4): mean 5/2, deviation sqrt(5)/2.
    Groups do not mix."""
    found = advantages([1, 0, 0, 0, 1, 2, 3, 4])
    root3, root5 = np.sqrt(3), np.sqrt(5)
    np.testing.assert_allclose(
        found, [root3, *[-1 / root3] * 3, -3 / root5, -1 / root5, 1 / root5, 3 / root5], rtol=1e-5
    )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.3])
def test_a_group_that_agrees_teaches_nothing(reward: float) -> None:
    np.testing.assert_allclose(advantages([reward] * 4), 0, atol=1e-9)


@pytest.mark.parametrize("reward", [0.7, 0.1, 1 / 3, 1e-8, 12345.678])
def test_a_group_that_agrees_teaches_exactly_nothing_where_float32_cannot_hold_its_mean(
    reward: float,
) -> None:
    rewards, valid = np.full((3, 12), reward, np.float32), np.ones((3, 12), bool)
    # whatever stands where there is no reward
    rewards[1, [0, 7]], valid[1, [0, 7]] = [np.nan, 5], False
    rewards[2, 11] = 0  # one that differs is learnt from, and so are those that it differs from
    found = np.asarray(
        group_advantages(jnp.asarray(rewards.ravel()), jnp.asarray(valid.ravel()), 12)
    ).reshape(3, 12)
    np.testing.assert_array_equal(found[:2], 0)
    assert (found[2, :11] > 0).all()
    assert found[2, 11] < 0


def test_rows_without_a_reward_count_nowhere() -> None:
    """Whatever stands there; what is left is the group of the others."""
    for junk in (0.0, 1e9, np.nan, np.inf):
        found = advantages([1, junk, 0, 0], [True, False, True, True])
        np.testing.assert_allclose(found, [np.sqrt(2), 0, -np.sqrt(0.5), -np.sqrt(0.5)], rtol=1e-5)
    np.testing.assert_array_equal(advantages([1, 2, 3, np.nan], [False] * 4), 0)
    np.testing.assert_allclose(advantages([5, 7, 7, 7], [True, False, False, False]), 0, atol=1e-9)


def test_order_inside_a_group_scale_and_shift() -> None:
    rewards = np.random.default_rng(0).normal(size=8)
    found = advantages(list(rewards))
    np.testing.assert_allclose(advantages(list(10 * rewards + 3)), found, rtol=1e-5)
    np.testing.assert_allclose(found.reshape(2, 4).mean(1), 0, atol=1e-12)
    np.testing.assert_allclose((found.reshape(2, 4) ** 2).mean(1), 1, rtol=1e-5)
    order = [2, 0, 3, 1]
    np.testing.assert_array_equal(advantages(list(rewards[:4][order])), found[:4][order])
    np.testing.assert_allclose(advantages([1, 0, 1, 0], group=2), [1, -1, 1, -1], rtol=1e-5)
