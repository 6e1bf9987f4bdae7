"""Exact match: a reward never comes without its outcome, and rows keep their places."""

import numpy as np
import pytest

from jaxspec.rewards.exact import Outcome, score


def test_rewards_and_outcomes_by_row():
    scores = score(["#112", "#113", "112", "#0112.0"], ["112", "112", "112", "112"], "hash")
    np.testing.assert_array_equal(scores.rewards, np.array([1, 0, 0, 1], np.float32))
    assert scores.outcomes.tolist() == [
        Outcome.CORRECT,
        Outcome.WRONG,
        Outcome.NO_ANSWER,
        Outcome.CORRECT,
    ]
    assert scores.rewards.dtype == np.float32
    assert scores.outcomes.dtype == np.int8


def test_style_is_obeyed():
    assert score([r"\boxed{7}"], ["7"], "boxed").rewards.tolist() == [1]
    assert score([r"\boxed{7}"], ["7"], "hash").outcomes.tolist() == [Outcome.NO_ANSWER]


def test_no_rows_and_unequal_rows():
    assert score([], [], "hash").rewards.shape == (0,)
    with pytest.raises(ValueError, match="shorter"):
        score(["#1", "#2"], ["1"], "hash")
