"""Generated programming: functions to write from a list of steps, tests that say whether they are
right, and solutions with some wrong steps."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

STEP_SIGNS = {"add": "+", "sub": "-", "mul": "*"}
_WORDS, _SIGNS = tuple(STEP_SIGNS), tuple(STEP_SIGNS.values())
STEP_NUMBERS = range(2, 10)
"""By which a step adds, subtracts or multiplies: 1 would leave a product as it is."""
HELD_OUT_EVERY = 8  # one function in about so many is never trained on
# share of steps that name x twice (`x=x+3`): a free choice, so that the policy keeps some entropy
LONG_FORM_PROBABILITY = 0.5
TEST_INPUTS = (-3, 0, 1, 10)
"""Where the tests call a function; two places tell such functions apart."""


class ProgramExercise(NamedTuple):
    """A function of x by its steps, each a word and a number."""

    steps: tuple[tuple[str, int], ...]

    @property
    def question(self) -> str:
        """The prompt, such as `add 3, mul 2:`."""
        return ", ".join(f"{word} {number}" for word, number in self.steps) + ":"

    @property
    def answer(self) -> str:
        """The tests, a line for each place where the function is called: `assert f(0)==6`."""
        return "\n".join(f"assert f({x})=={self(x)}" for x in TEST_INPUTS)

    def __call__(self, x: int) -> int:
        """What the function gives."""
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
    """Return how many problems the training or the held-out side has; the sides share no
    function."""
    return len(_split_programs(steps)[held_out])


def make_program(steps: int, number: int, *, held_out: bool) -> ProgramExercise:
    """Return problem `number` of one side, 0 <= number < `count_programs`, of just so many
    steps."""
    side = _split_programs(steps)[held_out]
    if not 0 <= number < len(side):
        raise IndexError(f"problem {number} of {len(side)}")
    code, program_steps = int(side[number]), []
    for _ in range(steps):
        code, step = divmod(code, len(STEP_SIGNS) * len(STEP_NUMBERS))
        word, number_index = divmod(step, len(STEP_NUMBERS))
        program_steps.append((_WORDS[word], STEP_NUMBERS[number_index]))
    return ProgramExercise(tuple(program_steps))


def write_program(
    program: ProgramExercise, rng: np.random.Generator, wrong_steps: float = 0.0
) -> str:
    """Return a response: a function in a block of code, a line for each step.

    A line says `x+=3` or `x=x+3`. With probability `wrong_steps` its sign or its number is another.
    """
    lines = ["```", "def f(x):"]
    for word, number in program.steps:
        sign = STEP_SIGNS[word]
        if rng.random() < wrong_steps:
            if rng.random() < 0.5:
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
    """Return the most tokens of a response: 27 characters and the end token around lines of at most
    7."""
    return 7 * steps + 28


@lru_cache
def _split_programs(
    steps: int,
) -> tuple[Int64[np.ndarray, " train"], Int64[np.ndarray, " held_out"]]:
    """The problems of each side, as numbers whose digits are steps, in a fixed order that looks
    random.

    `add 3, add 4` and `add 4, add 3` are the same function, slope * x + offset, and all problems of
    a function are on one side.
    """
    code = np.arange((len(STEP_SIGNS) * len(STEP_NUMBERS)) ** steps)
    slope, offset, remainder = np.ones_like(code), np.zeros_like(code), code
    for _ in range(steps):
        remainder, step = np.divmod(remainder, len(STEP_SIGNS) * len(STEP_NUMBERS))
        word, number = step // len(STEP_NUMBERS), STEP_NUMBERS[0] + step % len(STEP_NUMBERS)
        factor = np.where(word == _WORDS.index("mul"), number, 1)
        term = np.where(word == _WORDS.index("add"), number, -number)
        slope = slope * factor
        offset = np.where(factor == 1, offset + term, offset * factor)
    held_out = _hash_numbers(slope * 1_000_003 + offset) % HELD_OUT_EVERY == 0
    order = np.argsort(_hash_numbers(code), kind="stable")
    return order[~held_out[order]], order[held_out[order]]


def _hash_numbers(numbers: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Numbers that look random, of 31 bits, the same for the same number (multiplications and
    shifted xors)."""
    hashes = numbers & 0x7FFFFFFF
    for multiplier in (0x45D9F3B, 0x9E3779B1, 0x85EBCA6B):
        hashes = (hashes * multiplier + 0x27D4EB2F) & 0x7FFFFFFF
        hashes ^= hashes >> 15
    return hashes
