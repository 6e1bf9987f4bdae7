"""Generated programming problems: functions to write from a list of steps.

Tests decide whether a function is right. Solutions may have wrong steps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

STEP_SIGNS = {"add": "+", "sub": "-", "mul": "*"}
_WORDS, _SIGNS = tuple(STEP_SIGNS), tuple(STEP_SIGNS.values())
# From 2, since a product with 1 would be a step that does nothing.
STEP_NUMBERS = range(2, 10)
"""Numbers that a step adds, subtracts or multiplies by."""
HELD_OUT_EVERY = 8
"""About one function in this many is held out of training."""
# Both forms are right. A free choice keeps some entropy in the policy.
LONG_FORM_PROBABILITY = 0.5
"""Probability that a step is written as `x=x+3` instead of `x+=3`."""
# The functions are linear, so two inputs are enough to tell any two of them apart.
TEST_INPUTS = (-3, 0, 1, 10)
"""Inputs of the tests."""


class ProgramExercise(NamedTuple):
    """A function of x, given by its steps."""

    steps: tuple[tuple[str, int], ...]

    @property
    def question(self) -> str:
        """The prompt, such as `add 3, mul 2:`."""
        return ", ".join(f"{word} {number}" for word, number in self.steps) + ":"

    @property
    def answer(self) -> str:
        """Tests, such as `assert f(0)==6`, one per line."""
        return "\n".join(f"assert f({x})=={self(x)}" for x in TEST_INPUTS)

    def __call__(self, x: int) -> int:
        """Computes the value of the function."""
        for word, number in self.steps:
            match word:
                case "add":
                    x += number
                case "sub":
                    x -= number
                case _:
                    x *= number
        return x


def count_programs(steps: int, *, held_out: bool) -> int:
    """Counts the training or held-out problems. The two sides share no function."""
    return len(_split_programs(steps)[held_out])


def make_program(steps: int, number: int, *, held_out: bool) -> ProgramExercise:
    """Makes a training or held-out problem.

    Raises:
      IndexError: `number` is not from 0 to `count_programs` - 1.
    """
    side = _split_programs(steps)[held_out]
    if not 0 <= number < len(side):
        raise IndexError(f"problem {number} of {len(side)}")
    # A code has a digit for each step. Its base is the number of possible steps.
    code, program_steps = int(side[number]), []
    for _ in range(steps):
        code, step = divmod(code, len(STEP_SIGNS) * len(STEP_NUMBERS))
        word, number_index = divmod(step, len(STEP_NUMBERS))
        program_steps.append((_WORDS[word], STEP_NUMBERS[number_index]))
    return ProgramExercise(tuple(program_steps))


def write_program(
    program: ProgramExercise, rng: np.random.Generator, wrong_steps: float = 0.0
) -> str:
    """Writes a response: a code block with a line for each step.

    A line is `x+=3` or `x=x+3`. With probability `wrong_steps`, it has a wrong sign or number.
    """
    lines = ["```", "def f(x):"]
    for word, number in program.steps:
        sign = STEP_SIGNS[word]
        if rng.random() < wrong_steps:
            if rng.random() < 0.5:
                # A shift that is not a multiple of the length never gives the right sign. The same
                # holds for numbers.
                sign = _SIGNS[
                    (_SIGNS.index(sign) + int(rng.integers(1, len(_SIGNS)))) % len(_SIGNS)
                ]
            else:
                shift = int(rng.integers(1, len(STEP_NUMBERS)))
                number = STEP_NUMBERS[(STEP_NUMBERS.index(number) + shift) % len(STEP_NUMBERS)]
        is_long_form = rng.random() < LONG_FORM_PROBABILITY
        lines.append(f" x=x{sign}{number}" if is_long_form else f" x{sign}={number}")
    return "\n".join([*lines, " return x", "```"])


def max_program_length(steps: int) -> int:
    """Returns the maximum token count of a response."""
    # The frame has 27 characters and the end token, and a line has at most 7 characters.
    return 7 * steps + 28


@lru_cache
def _split_programs(
    steps: int,
) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " held_out"]]:
    """Splits all problems into training and held-out ones.

    The result has their codes, whose digits are the steps, in a fixed pseudo-random order.
    """
    # `add 3, add 4` and `add 4, add 3` are the same function, slope * x + offset. Problems with the
    # same slope and offset are on the same side, so that no held-out function is trained on.
    code = np.arange((len(STEP_SIGNS) * len(STEP_NUMBERS)) ** steps)
    slope, offset, remainder = np.ones_like(code), np.zeros_like(code), code
    for _ in range(steps):
        remainder, step = np.divmod(remainder, len(STEP_SIGNS) * len(STEP_NUMBERS))
        word, number = step // len(STEP_NUMBERS), STEP_NUMBERS[0] + step % len(STEP_NUMBERS)
        factor = np.where(word == _WORDS.index("mul"), number, 1)
        term = np.where(word == _WORDS.index("add"), number, -number)
        slope = slope * factor
        offset = np.where(factor == 1, offset + term, offset * factor)
    # The factor exceeds the range of offsets, so different functions have different numbers.
    held_out = _hash_numbers(slope * 1_000_003 + offset) % HELD_OUT_EVERY == 0
    order = np.argsort(_hash_numbers(code), kind="stable")
    return order[~held_out[order]], order[held_out[order]]


def _hash_numbers(numbers: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Hashes numbers to 31 bits."""
    # Multiplications and shifted xors mix the bits. There are 31, so that a product with a
    # multiplier of 32 bits fits int64.
    hashes = numbers & 0x7FFFFFFF
    for multiplier in (0x45D9F3B, 0x9E3779B1, 0x85EBCA6B):
        hashes = (hashes * multiplier + 0x27D4EB2F) & 0x7FFFFFFF
        hashes ^= hashes >> 15
    return hashes
