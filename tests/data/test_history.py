"""What is remembered of earlier answers, and that a checkpoint keeps it."""

import numpy as np

from jaxspec.data.history import History


def filled() -> History:
    history = History(2)
    history.keep(7, [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])])
    history.keep(3, [np.array([], np.int32), np.array([9, 9])])
    return history


def texts(history: History, problem: int) -> list[list[int]]:
    return [text.tolist() for text in history.texts(problem, [8, 8])]


def test_the_first_answers_of_each_problem_follow_its_prompt() -> None:
    history = filled()
    assert texts(history, 7) == [[8, 8, 1, 2, 3], [8, 8, 4]]
    assert texts(history, 3) == [[8, 8], [8, 8, 9, 9]]
    assert texts(history, 1) == []


def test_newer_answers_replace_older_ones() -> None:
    history = filled()
    history.keep(7, [np.array([0])])
    assert texts(history, 7) == [[8, 8, 0]]
    assert texts(history, 3) == [[8, 8], [8, 8, 9, 9]]


def test_dump_and_load() -> None:
    saved = filled().dump()
    other = History(2)
    other.keep(1, [np.array([1])])
    other.load(saved)
    assert [texts(other, problem) for problem in (7, 3, 1)] == [
        texts(filled(), problem) for problem in (7, 3, 1)
    ]
    empty = History(0)
    empty.load(History(0).dump())
    assert texts(empty, 7) == []
