"""Estimates over problems, against enumeration and worked numbers."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binomtest

from jaxspec.evaluation.estimates import (
    AnswerTally,
    compare_shares,
    estimate_mean,
    estimate_metrics,
    majority_accuracy,
    pass_at_k,
)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(count: int) -> None:
    for correct, k in itertools.product(range(count + 1), range(1, count + 1)):
        answers = [place < correct for place in range(count)]
        chosen = [any(some) for some in itertools.combinations(answers, k)]
        assert pass_at_k(count, correct, k) == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


def test_pass_at_k_of_fewer_answers_is_no_number() -> None:
    with pytest.raises(ValueError, match="pass@4 of 3 answers"):
        pass_at_k(3, 1, 4)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["7", "7", "3"], [True, True, False], 1.0),
        (["7", "3", "3"], [True, False, False], 0.0),
        (["7", "3"], [True, False], 0.5),  # equally frequent: one of two
        (["7", "7", "3", "3", "5"], [True, True, False, False, False], 0.5),
        ([None, None, None, "7"], [False, False, False, True], 1.0),  # saying nothing is no vote
        ([None, None], [False, False], 0.0),
        (["7", "7"], [True, False], 0.5),  # written alike, judged differently
        ([], [], 0.0),
    ],
)
def test_the_majority_decides(
    answers: list[str | None], correct: list[bool], expected: float
) -> None:
    assert majority_accuracy(answers, correct) == pytest.approx(expected)


def test_the_interval_of_a_share_is_wilsons() -> None:
    """Textbook ends, as scipy gives them."""
    for right, count in ((0, 30), (3, 30), (15, 30), (30, 30), (1, 2)):
        found = estimate_mean([1.0] * right + [0.0] * (count - right))
        expected = binomtest(right, count).proportion_ci(method="wilson")
        assert found == pytest.approx((right / count, *expected, count), abs=1e-6)
    assert estimate_mean(np.zeros(30)).high == pytest.approx(0.1135, abs=1e-4)
    assert estimate_mean([0.0, 0.5, 0.5, 1.0])[1:] == estimate_mean([0.0, 0.0, 1.0, 1.0])[1:]
    assert estimate_mean([0.25]) == (0.25, 0.0, 1.0, 1)
    assert math.isnan(estimate_mean([]).value)


def test_the_interval_of_another_mean_is_two_standard_errors_wide() -> None:
    """0, 0, 1, 1: the deviation is 0.57735, of the mean of four 0.288675."""
    found = estimate_mean([0.0, 0.0, 1.0, 1.0], is_share=False)
    assert found.value == 0.5
    assert found.high - found.value == pytest.approx(1.959964 * 0.288675, rel=1e-5)
    assert found.value - found.low == pytest.approx(found.high - found.value)


@pytest.mark.parametrize("mean", [0.02, 0.1, 0.5, 0.9, 0.98])
def test_intervals_hold_the_truth_as_often_as_they_say(mean: float) -> None:
    """1,000 evaluations of 30 problems, whose own shares are drawn, with 1, 8 and 32 answers."""
    rng = np.random.default_rng(0)
    for spread, answers in itertools.product((0.5, 2, 8), (1, 8, 32)):
        shares = rng.beta(mean * spread, (1 - mean) * spread, (1000, 30))
        found = [estimate_mean(row / answers) for row in rng.binomial(answers, shares)]
        held = np.mean([each.low <= mean <= each.high for each in found])
        assert held >= 0.93, (spread, answers)


def test_a_set_of_known_answers() -> None:
    """Four problems with 4, 2, 0 right of 4, and one of which nothing is known; of the last but one
    only two answers count."""
    tally = AnswerTally(
        answer_count=np.array([4.0, 4.0, 2.0, 0.0]),
        correct_count=np.array([4.0, 2.0, 0.0, 0.0]),
        vote_accuracy=np.array([1.0, 0.5, 0.0, 0.0]),
        reward_sum=np.array([4.0, 3.0, -1.0, 0.0]),
    )
    found = estimate_metrics(tally, 4, has_votes=True)
    assert list(found) == ["avg@4", "pass@2", "pass@4", "cons@4", "reward"]
    assert found["avg@4"][::3] == pytest.approx((0.5, 3))
    assert found["pass@2"][::3] == pytest.approx(((1 + 5 / 6 + 0) / 3, 3))
    assert found["pass@4"][::3] == pytest.approx((2 / 3, 3))
    assert found["cons@4"][::3] == pytest.approx((0.5, 3))
    assert found["reward"][::3] == pytest.approx(((1 + 0.75 - 0.5) / 3, 3))
    assert found["reward"].low < 0
    alike = estimate_metrics(tally._replace(reward_sum=tally.correct_count), 4, has_votes=True)
    assert alike["reward"] == alike["avg@4"]
    assert "cons@4" not in estimate_metrics(tally, 4, has_votes=False)
    assert list(estimate_metrics(tally, 1, has_votes=True)) == ["avg@1", "reward"]
    assert list(estimate_metrics(tally, 6, has_votes=False)) == [
        "avg@6",
        *("pass@2", "pass@4", "pass@6"),
        "reward",
    ]


def test_all_k_are_of_the_same_problems() -> None:
    """More answers never find less, also where some of them are unknown."""
    rng = np.random.default_rng(0)
    counted = rng.integers(0, 33, 50).astype(float)
    correct = rng.binomial(counted.astype(int), 0.2).astype(float)
    found = estimate_metrics(
        AnswerTally(counted, correct, correct > 3, correct), 32, has_votes=True
    )
    assert {each.problems for each in found.values()} == {int((counted > 0).sum())}
    passes = [each.value for name, each in found.items() if name.startswith("pass@")]
    assert [found["avg@32"].value, *passes] == sorted([found["avg@32"].value, *passes])


def test_a_difference_is_paired_by_problem() -> None:
    """Hard problems are hard for both, so that the difference is known better than either."""
    first = {"a": 0.0, "b": 0.5, "c": 1.0, "only here": 1.0}
    second = {"c": 1.0, "b": 0.75, "a": 0.25, "only there": 0.0}
    found = compare_shares(first, second)
    assert (found.first_mean, found.second_mean) == pytest.approx((0.5, 2 / 3))
    assert found.estimate.value == pytest.approx(1 / 6)
    width = 1.959964 * np.std([0.25, 0.25, 0.0], ddof=1) / 3**0.5
    assert found.estimate.high - found.estimate.value == pytest.approx(width)
    assert (found.better_count, found.worse_count, found.estimate.problems) == (2, 0, 3)
    assert estimate_mean(list(first.values())).high - 0.5 > width
