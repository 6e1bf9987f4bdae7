"""Rewards of rows: each with its outcome, rows keep their places, and what nothing is known of is
never a zero."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxspec.rewards.outcome import Outcome, Scores
from jaxspec.rewards.pool import RewardPool
from jaxspec.rewards.scorer import RewardInputs, Scorer, begins_with_thought


def scored(responses: list[str], answers: list[str], style: Any = "hash", **options: Any) -> Scores:
    """Of responses to prompts without a text."""
    nothing = [""] * len(responses)
    return Scorer(style, **options)(
        RewardInputs(nothing, responses, answers, [{}] * len(responses))
    )


def test_rewards_and_outcomes_by_row() -> None:
    scores = scored(["#112", "#113", "112", "#0112.0"], ["112", "112", "112", "112"])
    np.testing.assert_array_equal(scores.rewards, np.array([1, 0, 0, 1], np.float32))
    assert scores.outcomes.tolist() == [
        Outcome.CORRECT,
        Outcome.WRONG,
        Outcome.NO_ANSWER,
        Outcome.CORRECT,
    ]
    assert scores.rewards.dtype == np.float32
    assert scores.outcomes.dtype == np.int8
    assert scores.valid.all()


def test_style_is_obeyed() -> None:
    assert scored([r"\boxed{7}"], ["7"], "boxed").rewards.tolist() == [1]
    assert scored([r"\boxed{7}"], ["7"]).outcomes.tolist() == [Outcome.NO_ANSWER]


def test_no_rows_and_unequal_rows() -> None:
    assert scored([], []).rewards.shape == (0,)
    with pytest.raises(ValueError, match="shorter"):
        Scorer("hash")(RewardInputs(["", ""], ["#1", "#2"], ["1"], [{}, {}]))


def test_without_a_verifier_mathematics_is_text() -> None:
    outcomes = scored([r"\boxed{0.5}"], [r"\frac{1}{2}"], "boxed").outcomes.tolist()
    assert outcomes == [Outcome.WRONG]


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("Answer: $42$", True),
        ("Answer: x = 42", True),
        ("Answer:\n42", True),
        (r"Answer: \boxed{42}", True),
        ("Answer: 42 degrees", True),
        ("answer : 42", True),
        ("Answer: 42\nAnswer: 41", False),
        ("Answer: 42.", False),
        ("**Answer:** 42", False),
        ("**Answer: 42**", False),
        ("Answer: 42.0", False),
        ("Answer: 042", False),
        ("Answer: 42" + " " * 300, False),  # beyond the last 300 characters
    ],
)
def test_dapos_own_rule(response: str, correct: bool) -> None:
    """Verdicts that its published code gives (measured)."""
    assert scored([response], ["42"], "dapo").rewards.tolist() == [correct]


@pytest.mark.parametrize(
    ("response", "holds"),
    [
        ("<think>so</think> 4", True),
        ("so</think> 4", True),  # where the prompt ends with the first mark
        ("<think>so</think>", False),
        ("<think></think> 4", False),
        ("<think>so 4", False),
        ("4", False),
        ("<think>a</think> b <think>c</think> d", False),
        ("well <think>so</think> 4", False),
    ],
)
def test_thought_comes_first_and_once(response: str, holds: bool) -> None:
    assert begins_with_thought(response) == holds


def test_a_box_in_a_thought_that_never_closes_does_not_count() -> None:
    responses = [r"\boxed{7}", r"\boxed{7}", r"so</think>\boxed{7}", r"<think>\boxed{7}"]
    prompts = ["6+1=", "6+1=<think>\n", "6+1=<think>\n", "6+1="]
    scores = Scorer("boxed")(RewardInputs(prompts, responses, ["7"] * 4, [{}] * 4))
    assert scores.rewards.tolist() == [1, 0, 1, 0]
    assert scores.outcomes.tolist()[1] == scores.outcomes.tolist()[3] == Outcome.NO_ANSWER


@pytest.mark.parametrize(
    ("reference", "answer"), [("1,234", "1, 234"), ("1234", "1, 234"), ("12", "1 2")]
)
def test_a_list_is_no_number(reference: str, answer: str) -> None:
    assert scored([rf"\boxed{{{answer}}}"], [reference], "boxed").rewards.tolist() == [0]


def test_several_boxes_are_a_list_without_a_verifier() -> None:
    response = r"\boxed{1} and \boxed{2}"
    assert scored([response] * 3, ["1, 2", "2", "1"], "boxed").rewards.tolist() == [1, 0, 0]


class Busy(RewardPool):
    """A pool whose batch is over before most of it has begun."""

    def __init__(self) -> None:
        """Starts nothing."""

    def submit_tasks(self, tasks: Sequence[list[Any]]) -> int:
        return len(tasks)

    def collect_answers(self, batch_id: int) -> list[Any]:
        return [True, True, False, True] + [{"unjudged": 60.0}] * (batch_id - 4)


def test_what_was_not_judged_is_left_out_and_said() -> None:
    responses = [f"\\boxed{{x^{number}}}" for number in range(3)]
    scores = scored(responses, ["x", "y", "z"], "boxed", pool=Busy(), verifier="math")
    assert scores.valid.tolist() == [True, False, False]
    assert scores.rewards.tolist() == [1, 0, 0]
    assert scores.outcomes.tolist() == [Outcome.CORRECT, Outcome.TIMEOUT, Outcome.TIMEOUT]
    assert "kept the workers busy for 60 s, the time limit of a batch" in scores.reason


def test_parts_are_added_by_weight() -> None:
    responses = [r"<think>so</think>\boxed{4}", r"\boxed{4}", r"\boxed{5}", "4"]
    options = {"parts": ("stated", "answer", "thought"), "weights": (0.1, 1.0, 0.25)}
    scores = scored(responses, ["4"] * 4, "boxed", **options)
    np.testing.assert_allclose(scores.rewards, [1.35, 1.1, 0.1, 0], rtol=1e-6)
    assert [Outcome(o).name for o in scores.outcomes] == [
        "CORRECT",
        "CORRECT",
        "WRONG",
        "NO_ANSWER",
    ]
