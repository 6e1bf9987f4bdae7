"""Numbers of a batch."""

import math

import numpy as np
import pytest

from jaxspec.metrics.batch import (
    effective_shares,
    headline_numbers,
    merge_rollout_metrics,
    read_depths,
    standard_deviation,
    token_rates,
)


def test_tokens_a_second_mean_the_same_however_a_step_is_run() -> None:
    """Over the whole step, learning included; generation alone has a name of its own, where it is
    timed."""
    whole = {"rollout/tokens": 120.0, "time/step": 3.0, "time/data": 0.5}
    assert token_rates(whole) == {"rollout/tokens_per_s": 40.0}
    staged = whole | {"time/generate": 1.5, "time/train": 1.0}
    assert token_rates(staged) == {
        "rollout/tokens_per_s": 40.0,
        "rollout/generation_tokens_per_s": 80.0,
    }


def test_effective_samples_are_those_of_equal_weights_or_of_few() -> None:
    """Of 8 weights, two of which are 1 and the others 0, 2 count."""

    def share(weights: list[float]) -> float:
        mean, square = np.mean(weights), np.mean(np.square(weights))
        record = {"importance/mean": float(mean), "importance/mean_square": float(square)}
        return effective_shares(record)["importance/effective_share"]

    assert share([0.7] * 8) == pytest.approx(1)
    assert share([1.0, 1.0, *[0.0] * 6]) == pytest.approx(2 / 8)
    assert effective_shares({"importance/mean": 1.0}) == {}


def test_a_pipelined_batch_shows_what_its_sides_waited() -> None:
    record = {"reward/mean": 0.5, "rollout/acceptance_length": 2.0, "rollout/tokens_per_s": 9.0}
    shown = headline_numbers(record)
    assert shown == {"reward": 0.5, "acceptance_length": 2.0, "tokens_per_s": 9.0}
    waits = {"time/exposed_generation": 0.25, "time/idle_generate": 0.0}
    assert headline_numbers(record | waits) == shown | {"exposed_s": 0.25, "idle_s": 0.0}


@pytest.mark.parametrize(("value", "count"), [(0.1, 7), (1 / 3, 128), (0.0, 1)])
def test_equal_values_have_no_deviation(value: float, count: int) -> None:
    assert standard_deviation(np.full(count, value, np.float32)) == 0.0


def test_standard_deviation() -> None:
    assert standard_deviation(np.asarray([0.0, 1.0, 1.0, 0.0], np.float32)) == 0.5
    assert math.isnan(standard_deviation(np.zeros(0, np.float32)))


def test_a_batch_of_several_rollouts_has_sums_means_and_extremes() -> None:
    """A rollout without a number of its own takes no part."""
    lines = [
        {
            "time/generate": 1.0,
            "rollout/length_mean": 5.0,
            "rollout/length_min": 2,
            "rollout/length_max": 9,
        },
        {
            "time/generate": 2.0,
            "rollout/length_mean": 8.0,
            "rollout/length_min": 1,
            "rollout/length_max": 8,
            "rollout/length_ended": 4.0,
        },
    ]
    merged = merge_rollout_metrics(lines)
    assert merged == {
        "time/generate": 3.0,
        "rollout/length_mean": 6.5,
        "rollout/length_min": 1,
        "rollout/length_max": 9,
        "rollout/length_ended": 4.0,
    }


def test_depths_end_before_the_first_that_nothing_reached() -> None:
    record = {"rollout/x_1": 0.5, "rollout/x_2": 0.25, "rollout/x_4": 0.9, "rollout/xy_3": 0.1}
    assert read_depths(record, "rollout/x") == [0.5, 0.25]
    assert read_depths(record, "rollout/y") == []
