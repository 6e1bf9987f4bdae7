"""What became of a response, and its reward."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int8


class Outcome(IntEnum):
    """What became of a response."""

    CORRECT = 0
    WRONG = 1
    NO_ANSWER = 2
    TIMEOUT = 3
    """Nothing was found in time: by a check of jaxspec that counts as wrong, or else to keep the
    check busy would pay; by a user's function it says nothing of the response."""
    ERROR = 4
    """A user's function failed, or gave no number: nothing is known of the response."""


class Scores(NamedTuple):
    """Rewards with the outcome each of them stands for."""

    rewards: Float32[np.ndarray, " rows"]
    outcomes: Int8[np.ndarray, " rows"]
    valid: Bool[np.ndarray, " rows"]
    """Rows that a reward is known of; the others must not be learnt from."""
    reason: str = ""
    """Why the first of the others has none."""


def make_invalid_scores(row_count: int, reason: str) -> Scores:
    """Scores of rows of which nothing is known, and why."""
    outcomes = np.full(row_count, Outcome.ERROR, np.int8)
    return Scores(np.zeros(row_count, np.float32), outcomes, np.zeros(row_count, bool), reason)
