"""Outcomes of responses, and their rewards."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int8


class Outcome(IntEnum):
    """Outcome of judging a response."""

    CORRECT = 0
    WRONG = 1
    NO_ANSWER = 2
    TIMEOUT = 3
    """No verdict in time. The response counts as wrong if a verifier of jaxspec was late with it,
    and has no reward otherwise."""
    ERROR = 4
    """No verdict because of an error, such as a user's function that raised."""


class Scores(NamedTuple):
    """Rewards and outcomes, row by row."""

    rewards: Float32[np.ndarray, " rows"]
    outcomes: Int8[np.ndarray, " rows"]
    valid: Bool[np.ndarray, " rows"]
    """Rows that have a reward. The learner must skip the others."""
    reason: str = ""
    """Why the first row without a reward has none."""


def make_invalid_scores(row_count: int, reason: str) -> Scores:
    """Makes the scores of rows without rewards. `reason` says why they have none."""
    outcomes = np.full(row_count, Outcome.ERROR, np.int8)
    return Scores(np.zeros(row_count, np.float32), outcomes, np.zeros(row_count, bool), reason)
