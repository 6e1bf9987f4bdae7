"""Exact match: a response earns 1 where its final answer equals the reference, and says why it did
not elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int8

from jaxspec.rewards.extract import Style, extract, normalise


class Outcome(IntEnum):
    """What became of a response."""

    CORRECT = 0
    WRONG = 1
    NO_ANSWER = 2


class Scores(NamedTuple):
    """Rewards with the outcome each of them stands for."""

    rewards: Float32[np.ndarray, " rows"]
    outcomes: Int8[np.ndarray, " rows"]


def score(responses: Sequence[str], answers: Sequence[str], style: Style) -> Scores:
    """Return the scores of `responses` against their reference `answers`, row by row; raises
    ValueError for different numbers of rows."""
    outcomes = np.array(
        [
            _judge(response, answer, style)
            for response, answer in zip(responses, answers, strict=True)
        ],
        np.int8,
    )
    return Scores((outcomes == Outcome.CORRECT).astype(np.float32), outcomes)


def _judge(response: str, answer: str, style: Style) -> Outcome:
    found = extract(response, style)
    if found is None:
        return Outcome.NO_ANSWER
    return Outcome.CORRECT if normalise(found) == normalise(answer) else Outcome.WRONG
