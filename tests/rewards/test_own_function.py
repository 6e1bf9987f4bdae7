"""Reward functions of users: each form is called with its own arguments, and only numbers count."""

from typing import Any

import pytest

from jaxspec.rewards.own_function import adapt_function, compute_rewards

PROMPTS, RESPONSES, ANSWERS = ["p", "q"], ["r 1", "s"], ["1", "2"]
ROWS: list[dict[str, Any]] = [{"data_source": "d", "extra_info": {"n": 3}, "level": 5}, {}]


def called(function: Any, rows: list[dict[str, Any]] = ROWS) -> Any:
    return compute_rewards(adapt_function(function).call, PROMPTS, RESPONSES, ANSWERS, rows)


def rewards(function: Any, rows: list[dict[str, Any]] = ROWS) -> list[float]:
    return [reward for reward, _ in called(function, rows)["rewards"]]


def test_four_lists() -> None:
    seen: list[Any] = []

    def own(prompts: Any, completions: Any, answers: Any, rows: Any) -> Any:
        seen.append((prompts, completions, answers, rows))
        return 1, 2

    assert rewards(own) == [1, 2]
    assert seen == [(PROMPTS, RESPONSES, ANSWERS, ROWS)]
    assert rewards(lambda *columns: [len(columns), 0]) == [4, 0]
    assert adapt_function(own).form == ""


def test_form_of_verl() -> None:
    seen: list[Any] = []

    def compute_score(
        data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any
    ) -> Any:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return ground_truth in solution_str

    assert rewards(compute_score) == [1, 0]
    assert seen == [("d", "r 1", "1", {"n": 3}), ("", "s", "2", {})]
    assert "verl" in adapt_function(compute_score).form

    async def later(solution_str: str, ground_truth: str, **_: Any) -> float:
        return float(ground_truth in solution_str)

    assert rewards(later) == [1, 0]

    def batch(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> Any:
        assert (data_sources, extra_infos) == (["d", ""], [{"n": 3}, {}])
        return [g in s for g, s in zip(ground_truths, solution_strs, strict=True)]

    assert rewards(batch) == [1, 0]


def test_form_of_trl() -> None:
    def lengths(completions: list[str], **_: Any) -> list[float]:
        return [float(len(each)) for each in completions]

    def graded(prompts: Any, completions: Any, ground_truth: Any, level: Any, **_: Any) -> Any:
        assert (prompts, level) == (PROMPTS, [5, None])
        return [g in c for g, c in zip(ground_truth, completions, strict=True)]

    assert rewards(lengths) == [3, 1]
    assert rewards(graded) == [1, 0]
    assert rewards(lambda completions: [7, len(completions)]) == [7, 2]
    assert "TRL" in adapt_function(graded).form


def test_completions_are_chats_where_prompts_are() -> None:
    chat = [{"role": "user", "content": "p"}]

    def contents(prompts: Any, completions: Any, answer: Any, **columns: Any) -> Any:
        assert prompts == [chat, chat]
        assert "prompt" not in columns
        return [a in c[0]["content"] for a, c in zip(answer, completions, strict=True)]

    assert rewards(contents, [{"prompt": chat}] * 2) == [1, 0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda queries, prompts, labels: 0, "cannot be called with four lists .*too many"),
        (lambda solution_str, ground_truth, tokenizer: 0, "verl's form and requires tokenizer"),
        (lambda solution_str, ground_truth, /: 0, "solution_str, ground_truth by position only"),
    ],
)
def test_other_forms_are_refused(function: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        adapt_function(function)


def test_completions_are_of_trl_whatever_else_is_taken() -> None:
    """Four parameters are four lists only where they are called so."""
    adapted = adapt_function(lambda prompts, completions, answer, level: 0)
    assert adapted.form.startswith("TRL's form")


def test_none_is_told_apart() -> None:
    [[reward, told], _] = called(lambda *_: [None, 1])["rewards"]
    assert reward is None
    assert "return 0 for rows that the function does not apply to" in told


def test_a_column_that_the_rows_do_not_have_is_named() -> None:
    found = called(lambda completions, target, **_: [0, 0])
    assert "TRL's form and requires target, which is not among " in found["error"]
    assert "level, prompts, completions" in found["error"]


@pytest.mark.parametrize(
    "returned", ["10", b"10", {"a": 1, "b": 2}, {1, 2}, 0.5, None, frozenset({1, 2})]
)
def test_what_is_no_list_is_refused(returned: Any) -> None:
    found = called(lambda *_: returned)
    assert "return a list with a number for each row" in found["error"]


@pytest.mark.parametrize("each", ["0.5", b"1", {"score": 1.0}, None, [1.0, 2.0], "good"])
def test_what_is_no_number_is_refused(each: Any) -> None:
    assert [reward for reward, _ in called(lambda *_: [each, 1])["rewards"]] == [None, 1]


def test_iterators_and_what_counts_as_numbers() -> None:
    assert rewards(lambda *_: iter([True, False])) == [1, 0]
    assert called(lambda *_: [(2, "no_answer"), (-1, None)])["rewards"] == [
        [2, "no_answer"],
        [-1, "wrong"],
    ]
