"""A run that cannot learn says so, once, and again where that goes on."""

from typing import Any

import pytest

from jaxspec.system.alarms import FALL_PATIENCE, PATIENCE, StallWatch


def healthy(step: int, **other: Any) -> dict[str, Any]:
    """The line of a batch of a run that learns."""
    return {
        "step": step,
        "reward/mean": 0.3 + step / 1000,
        "reward/std": 0.4,
        "reward/frac_zero_std": 0.2,
        "reward/correct": 0.3,
        "reward/wrong": 0.7,
        "reward/no_answer": 0.0,
        "entropy": 0.5,
        "rollout/length_mean": 400.0,
        "status/eos": 60.0,
        "status/length": 4.0,
        "status/failed": 0.0,
    } | {name.replace("__", "/"): value for name, value in other.items()}


def said(lines: list[dict[str, Any]], rate: float = 1e-6, by_group: bool = True) -> list[str]:
    """All warnings of a run, each with the batch after which it came."""
    watch = StallWatch(by_group, rate)
    return [f"{line['step']}: {warning}" for line in lines for warning in watch.add_record(line)]


def summary(lines: list[dict[str, Any]], rate: float = 1e-6) -> list[str]:
    watch = StallWatch(True, rate)
    for line in lines:
        watch.add_record(line)
    return watch.lasting_signs()


def test_nothing_is_said_of_a_run_that_learns() -> None:
    lines = [healthy(step) for step in range(100)]
    for step in range(0, 100, 10):
        lines[step]["eval/held_out/avg@8"] = 0.4 + step / 1000
    assert said(lines) == []
    assert summary(lines) == []


def test_equal_rewards_are_reported_after_10_20_and_40_batches() -> None:
    lines = [
        healthy(step, reward__mean=0.0, reward__std=0.0, reward__frac_zero_std=1.0)
        for step in range(45)
    ]
    found = said(lines)
    assert [line.partition(": ")[0] for line in found] == ["9", "19", "39"]
    assert found[0].startswith("9: warning: batches 0 to 9: all rewards are 0, ")
    (row,) = summary(lines)
    assert row.startswith("batches 0 to 44: all rewards are 0")


def test_a_spell_that_is_over_stays_in_the_closing_table() -> None:
    equal = {"reward__mean": 1.0, "reward__std": 0.0, "reward__frac_zero_std": 1.0}
    lines = [healthy(step, **(equal if 20 <= step < 35 else {})) for step in range(60)]
    (row,) = summary(lines)
    assert row.startswith("batches 20 to 34: all rewards are 1")
    interrupted = [healthy(step, **(equal if step % 9 else {})) for step in range(60)]
    assert said(interrupted) == summary(interrupted) == []


def test_a_run_of_a_few_batches_says_it_in_the_closing_table() -> None:
    lines = [healthy(step, reward__mean=0.0, reward__std=0.0) for step in range(3)]
    assert said(lines) == []
    (row,) = summary(lines)
    assert row.startswith("batches 0 to 2: all rewards are 0")
    assert summary([*lines, healthy(3)]) == []


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        (
            {
                "reward__no_answer": 0.9,
                "reward__wrong": 0.1,
                "status__length": 48.0,
                "status__eos": 16.0,
            },
            ["90%", "75% were cut", "--data.answer_style"],
        ),
        ({"reward__correct": 1.0, "reward__wrong": 0.0}, ["too easy"]),
        ({"reward__wrong": 1.0, "reward__correct": 0.0}, ["too hard", "--batch.group_size"]),
    ],
)
def test_the_likely_cause_is_named(shares: dict[str, float], words: list[str]) -> None:
    lines = [healthy(step, reward__std=0.0, **shares) for step in range(PATIENCE)]
    (line,) = said(lines)
    assert [word for word in words if word not in line] == []


def test_groups_without_different_rewards() -> None:
    lines = [healthy(step, reward__frac_zero_std=1.0) for step in range(PATIENCE)]
    (line,) = said(lines)
    assert "in no group do rewards differ" in line
    assert said(lines, by_group=False) == []


@pytest.mark.parametrize(("right", "words"), [(0.6, "too easy"), (0.4, "too hard")])
def test_batches_of_one_group_are_summed_up_as_they_are(right: float, words: str) -> None:
    equal = {"reward__std": 0.0, "reward__frac_zero_std": 1.0}
    means = [float(step < right * PATIENCE) for step in range(PATIENCE)]
    lines = [
        healthy(step, reward__mean=mean, reward__correct=mean, **equal)
        for step, mean in enumerate(means)
    ]
    for by_group, unit in ((True, "group"), (False, "batch")):
        (line,) = said(lines, by_group=by_group)
        assert f"in no {unit} do rewards differ (their mean is {right})" in line
        assert words in line


def test_batches_without_any_reward_end_no_spell() -> None:
    lines = [healthy(step, reward__std=0.0) for step in range(PATIENCE + 1)]
    for unknown in (None, float("nan")):
        lines[4] |= {"reward/mean": unknown, "reward/std": unknown}
        assert [line.partition(": ")[0] for line in said(lines)] == [str(PATIENCE)]


def test_entropy_that_has_collapsed() -> None:
    lines = [healthy(step, entropy=0.5 * 0.9**step) for step in range(60)]
    first = said(lines)[0]
    assert "entropy has collapsed, from 0.3" in first
    half = [healthy(step, entropy=max(0.06, 0.5 * 0.9**step)) for step in range(60)]
    high = [healthy(step, entropy=3.0 if step < 20 else 0.2) for step in range(60)]
    assert said(half) == said(high) == []


def test_responses_that_have_collapsed_earn_no_more() -> None:
    lines = [
        healthy(step, rollout__length_mean=400 * 0.9**step, reward__mean=0.3) for step in range(60)
    ]
    assert "responses have collapsed, from 26" in said(lines)[0]
    learned = [line | {"reward/mean": 0.3 + line["step"] / 1000} for line in lines]
    assert said(learned) == []


def test_held_out_that_falls_in_three_evaluations() -> None:
    values = [0.60, 0.62, 0.58, 0.55, 0.51, 0.50, 0.57]
    lines = [healthy(step) for step in range(61)]
    for number, value in enumerate(values):
        lines[10 * number]["eval/held_out/avg@8"] = value
    (line,) = said(lines)
    start = "40: warning: batches 20 to 40: held_out/avg@8 falls: 0.62 > 0.58 > 0.55 > 0.51. "
    assert line.startswith(start)
    (row,) = summary(lines)
    assert row.startswith("batches 20 to 50: held_out/avg@8 falls: 0.62 > 0.58 > 0.55 > 0.51 > 0.5")
    assert said(lines[: 10 * FALL_PATIENCE + 1]) == []
    equal = [healthy(step, **{"eval__held_out__avg@8": 0.5}) for step in range(20)]
    assert said(equal) == []


def test_a_learning_rate_of_next_to_nothing() -> None:
    lines = [healthy(step) for step in range(2)]
    assert summary(lines, 1e-9) == []
    (row,) = summary(lines, 1e-12)
    assert "the learning rate is at most 1e-12" in row
