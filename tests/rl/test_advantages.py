"""Advantages of every estimator, by worked numbers, and what holds for all of them."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rl import advantages as estimators
from jaxspec.rl.advantages import (
    AdvantageEstimator,
    divide_by_batch_std,
    divide_by_leave_one_out_std,
    divide_by_population_std,
    divide_by_sample_std,
    keep_rewards,
    keep_scale,
    subtract_group_mean,
    subtract_leave_one_out_mean,
    whiten_over_tokens,
)

pytestmark = pytest.mark.usefixtures("x64")

BASELINES = (keep_rewards, subtract_group_mean, subtract_leave_one_out_mean)
SCALES = (
    keep_scale,
    divide_by_population_std,
    divide_by_sample_std,
    divide_by_leave_one_out_std,
    divide_by_batch_std,
    whiten_over_tokens,
)


@functools.partial(jax.jit, static_argnames="estimator")
def compiled(estimator: AdvantageEstimator, rewards: Any, valid: Any, lengths: Any) -> jax.Array:
    return estimator.compute_row_advantages(rewards, valid, lengths)


def found(
    rewards: Any,
    baseline: Any = subtract_group_mean,
    scale: Any = divide_by_population_std,
    valid: Any = None,
    lengths: Any = None,
    group: int = 4,
) -> np.ndarray:
    rewards = jnp.asarray(rewards)
    count = len(rewards)
    mask = jnp.ones(count, bool) if valid is None else jnp.asarray(valid)
    tokens = jnp.ones(count, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    return np.asarray(compiled(AdvantageEstimator(group, baseline, scale), rewards, mask, tokens))


# ---- worked numbers


def test_population_deviation_by_group() -> None:
    """(1, 0, 0, 0): mean 1/4, deviation sqrt(3)/4. (1, 2, 3, 4): mean 5/2, deviation sqrt(5)/2.
    Groups do not mix."""
    root3, root5 = np.sqrt(3), np.sqrt(5)
    np.testing.assert_allclose(
        found([1.0, 0, 0, 0, 1, 2, 3, 4]),
        [root3, *[-1 / root3] * 3, -3 / root5, -1 / root5, 1 / root5, 3 / root5],
        rtol=1e-5,
    )


def test_sample_deviation_of_a_pair() -> None:
    np.testing.assert_allclose(
        found([1.0, 3.0], scale=divide_by_sample_std, group=2), [-0.7071, 0.7071], atol=5e-5
    )


def test_leave_one_out_baselines_and_deviations() -> None:
    """Rewards 1, 2, 3: baselines 2.5, 2, 1.5; deviations of the others .7071, 1.4142, .7071."""
    rewards = [1.0, 2, 3, 4, 5, 6]
    centred = found(rewards, subtract_leave_one_out_mean, keep_scale, group=3)
    np.testing.assert_allclose(np.array(rewards) - centred, [2.5, 2, 1.5, 5.5, 5, 4.5])
    scaled = found(rewards, subtract_leave_one_out_mean, divide_by_leave_one_out_std, group=3)
    deviations = centred[[0, 2, 3, 5]] / scaled[[0, 2, 3, 5]]
    np.testing.assert_allclose(deviations, [0.7071] * 4, atol=5e-5)
    assert scaled[1] == 0  # 2 - 2, over 1.4142
    uneven = found([1.0, 2, 6], subtract_leave_one_out_mean, divide_by_leave_one_out_std, group=3)
    np.testing.assert_allclose(uneven, [-3 / 2.8284, -1.5 / 3.5355, 4.5 / 0.7071], rtol=1e-4)


def test_leave_one_out_of_a_pair_has_no_deviation_and_keeps_the_difference() -> None:
    np.testing.assert_array_equal(
        found([1.0, 3.0], subtract_leave_one_out_mean, divide_by_leave_one_out_std, group=2),
        [-2, 2],
    )


def test_a_row_without_a_reward_is_no_other() -> None:
    """Rewards 1, (999 without one), 3: baselines 3 and 1."""
    centred = found(
        [1.0, 999, 3], subtract_leave_one_out_mean, keep_scale, [True, False, True], group=3
    )
    np.testing.assert_array_equal(centred, [1 - 3, 0, 3 - 1])


def test_the_deviation_of_the_batch_is_of_all_its_rewards() -> None:
    rewards = np.array([0.0, 1, 0, 0, 1, 1, 0, 1])
    by_group = rewards.reshape(2, 4)
    wanted = (by_group - by_group.mean(1, keepdims=True)).ravel() / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(found(rewards, scale=divide_by_batch_std), wanted, rtol=1e-12)


@pytest.mark.parametrize("baseline", [keep_rewards, subtract_group_mean])
def test_whitened_advantages_have_mean_0_and_variance_1_over_tokens(baseline: Any) -> None:
    rewards, lengths = np.array([0.0, 1, 0, 3, 1, 5, 0, 1]), np.array([5, 1, 2, 9, 4, 4, 7, 3])
    scaled = found(rewards, baseline, whiten_over_tokens, lengths=lengths)
    by_token = np.repeat(scaled, lengths)
    np.testing.assert_allclose([by_token.mean(), by_token.var()], [0, 1], atol=1e-12)
    centred = found(rewards, baseline, keep_scale)
    tokens = np.repeat(centred, lengths)
    np.testing.assert_allclose(scaled, (centred - tokens.mean()) / tokens.std(), rtol=1e-9)
    # all tokens alike, however their mean is rounded
    lengths = np.random.default_rng(0).integers(1, 4000, 16)
    for reward in (2.0, 0.7, 0.1, 1e-3):
        equal = np.full(16, reward, np.float32)
        np.testing.assert_array_equal(
            found(equal, baseline, whiten_over_tokens, lengths=lengths), 0
        )


# ---- what holds for all


ALL = [
    pytest.param(*pair, id=" ".join(each.__name__ for each in pair))
    for pair in itertools.product(BASELINES, SCALES)
]


@pytest.mark.parametrize(("baseline", "scale"), ALL)
def test_rows_without_a_reward_count_nowhere_whatever_stands_there(
    baseline: Any, scale: Any
) -> None:
    rewards = np.array([1.0, 0, 0.5, 0, 1, 0.25, 0, 1])
    valid = np.array([True, False, True, True, True, True, True, False])
    lengths = np.array([3, 9, 1, 2, 4, 4, 2, 8])
    wanted = found(rewards, baseline, scale, valid, lengths)
    assert (wanted[~valid] == 0).all()
    assert np.isfinite(wanted).all()
    for junk in (1e9, np.nan, np.inf, -np.inf):
        there = np.where(valid, rewards, junk)
        np.testing.assert_array_equal(found(there, baseline, scale, valid, lengths), wanted)
    none = np.zeros(8, bool)
    np.testing.assert_array_equal(found(rewards, baseline, scale, none, lengths), 0)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", [subtract_group_mean, subtract_leave_one_out_mean])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.7, 0.1, 1 / 3, 1e-8, 12345.678])
def test_groups_that_agree_teach_exactly_nothing_where_float32_cannot_hold_their_mean(
    reward: float, baseline: Any, scale: Any
) -> None:
    rewards, valid = np.full((3, 12), reward, np.float32), np.ones((3, 12), bool)
    rewards[1, [0, 7]], valid[1, [0, 7]] = [np.nan, 5], False
    rewards[2, 11] = reward + 1  # one that differs is learnt from
    scaled = found(rewards.ravel(), baseline, scale, valid.ravel(), group=12).reshape(3, 12)
    if scale is not whiten_over_tokens:  # which takes the mean of all tokens away
        np.testing.assert_array_equal(scaled[:2], 0)
    assert scaled[2, 11] > max(scaled[2, :11])
    # an outcome without spread among the others is not divided by its rounding
    assert np.abs(scaled).max() < 20


@pytest.mark.parametrize("baseline", [subtract_group_mean, subtract_leave_one_out_mean])
def test_a_row_alone_in_its_group_teaches_nothing(baseline: Any) -> None:
    for scale in set(SCALES) - {whiten_over_tokens}:
        alone = found([5.0, 7, 7, 7], baseline, scale, [True, False, False, False])
        np.testing.assert_array_equal(alone, 0)


@pytest.mark.parametrize(
    "scale",
    [divide_by_population_std, divide_by_sample_std, divide_by_batch_std, whiten_over_tokens],
)
def test_scaled_advantages_know_neither_shift_nor_scale_nor_order(scale: Any) -> None:
    rewards = np.random.default_rng(0).normal(size=8)
    wanted = found(rewards, scale=scale)
    np.testing.assert_allclose(found(10 * rewards + 3, scale=scale), wanted, rtol=1e-5)
    order = np.array([2, 0, 3, 1, 4, 5, 7, 6])
    np.testing.assert_allclose(found(rewards[order], scale=scale), wanted[order], rtol=1e-9)


def test_every_estimator_is_among_those_tested() -> None:
    said = {
        name
        for name, value in vars(estimators).items()
        if callable(value) and getattr(value, "__module__", "") == estimators.__name__
    }
    tested = {each.__name__ for each in (*BASELINES, *SCALES)} | {"AdvantageEstimator"}
    assert {name for name in said if not name.startswith("_")} == tested
