"""Generated arithmetic exercises, solutions and documents.

Answers are exact, and worked solutions may have wrong steps. Also samples supervised batches of any
generated task.
"""

from __future__ import annotations

from math import isqrt
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int32

from jaxspec.config.settings import DataConfig, SftConfig
from jaxspec.data.programs import (
    ProgramExercise,
    count_programs,
    make_program,
    max_program_length,
    write_program,
)
from jaxspec.inputs.checked import ConfigError
from jaxspec.tokens.tokenizer import Tokenizer

Arithmetic = Literal["add", "subtract", "mixed"]
Task = Arithmetic | Literal["programs"]

HELD_OUT_EVERY = 8
"""One pair of operands in this many is held out of training."""
# Both orders are right. A free choice keeps some entropy in the policy.
SWAP_PROBABILITY = 0.5
"""Probability that a step writes the carry before the second digit."""
DOCUMENT_SHARES = {
    "book": 0.5,
    "worked": 0.07,
    "guess": 0.12,
    "list": 0.12,
    "digits": 0.11,
    "count": 0.08,
}
"""Probability of each kind of document in the corpus."""
_DOCUMENT_KINDS, _CUMULATIVE_SHARES = (
    tuple(DOCUMENT_SHARES),
    np.cumsum(list(DOCUMENT_SHARES.values())),
)


class Exercise(NamedTuple):
    """An addition or subtraction without negative results."""

    first: int
    operator: Literal["+", "-"]
    second: int

    @property
    def question(self) -> str:
        """The prompt, such as `27+85=`."""
        return f"{self.first}{self.operator}{self.second}="

    @property
    def answer(self) -> str:
        """The exact result, such as `112`."""
        return str(self.first + self.second if self.operator == "+" else self.first - self.second)


class SftBatch(NamedTuple):
    """Padded rows for supervised training.

    A row is a prompt and its response. The loss covers the response only.
    """

    tokens: Int32[np.ndarray, "rows length"]
    prompt_lengths: Int32[np.ndarray, " rows"]
    """Tokens of the prompt."""
    lengths: Int32[np.ndarray, " rows"]
    """Tokens of prompt and response."""


def count_problems(task: Task, digits: int, *, held_out: bool) -> int:
    """Counts the problems on one side of a task.

    The training and held-out sides share no pair of operands, or no function if the task is
    `programs`.
    """
    if task == "programs":
        return count_programs(digits, held_out=held_out)
    families = 2 if task == "mixed" else 1
    held_out_pairs = _count_pairs(digits) // HELD_OUT_EVERY
    return families * (held_out_pairs if held_out else _count_pairs(digits) - held_out_pairs)


def make_problem(
    task: Task, digits: int, number: int, *, held_out: bool
) -> Exercise | ProgramExercise:
    """Makes a training or held-out problem.

    Raises:
      IndexError: `number` is not from 0 to `count_problems` - 1.
    """
    if task == "programs":
        return make_program(digits, number, held_out=held_out)
    return make_exercise(task, digits, number, held_out=held_out)


def make_exercise(task: Arithmetic, digits: int, number: int, *, held_out: bool) -> Exercise:
    """Makes a training or held-out exercise.

    Operands have exactly `digits` digits. Additions have each unordered pair once, and so do
    subtractions.

    Raises:
      IndexError: `number` is not from 0 to `count_problems` - 1.
    """
    if not 0 <= number < count_problems(task, digits, held_out=held_out):
        raise IndexError(f"exercise {number} of {count_problems(task, digits, held_out=held_out)}")
    if task == "mixed":
        # Interleaved, so that any range of exercises has both families. The same pair in both
        # families is on the same side.
        number, family = divmod(number, 2)
        task = "subtract" if family else "add"
    # The first ranks are held out. The permutation spreads them over operands of all sizes.
    rank = _permute_rank(
        number if held_out else number + _count_pairs(digits) // HELD_OUT_EVERY,
        _count_pairs(digits),
    )
    # Inverts rank = larger * (larger + 1) / 2 + smaller, where smaller <= larger.
    larger = (isqrt(8 * rank + 1) - 1) // 2
    smaller = rank - larger * (larger + 1) // 2
    lowest = _lowest_operand(digits)
    if task == "subtract":
        return Exercise(lowest + larger, "-", lowest + smaller)
    # A pair occurs in one order only, so the larger operand must not always be the first.
    first, second = (larger, smaller) if rank % 2 else (smaller, larger)
    return Exercise(lowest + first, "+", lowest + second)


def write_solution(exercise: Exercise, rng: np.random.Generator, wrong_steps: float = 0.0) -> str:
    """Writes a solution digit by digit, units first.

    The solution of 27+85 is `7+5+0=12,2+8+1=11,#112`. A step adds (or subtracts) the second digit
    and the carry, in random order. Its result is the new carry (or borrow) and the digit to write.

    Args:
      exercise: exercise to solve.
      rng: source of the random choices.
      wrong_steps: probability that a step has a wrong carry or a wrong digit. Later steps and the
        final answer follow from the wrong value.
    """
    operator, sign = exercise.operator, 1 if exercise.operator == "+" else -1
    width = len(str(max(exercise.first, exercise.second)))
    steps, carry, total = [], 0, 0
    for place in range(width):
        first, second = (operand // 10**place % 10 for operand in (exercise.first, exercise.second))
        terms = (carry, second) if rng.random() < SWAP_PROBABILITY else (second, carry)
        quotient, digit = divmod(first + sign * (second + carry), 10)
        carry = sign * quotient
        if rng.random() < wrong_steps:
            if rng.random() < 0.5:
                carry = 1 - carry
            else:  # a shift of 1 to 9 never gives the right digit
                digit = (digit + int(rng.integers(1, 10))) % 10
        steps.append(f"{first}{operator}{terms[0]}{operator}{terms[1]}={carry}{digit}")
        total += digit * 10**place
    # A carry left over is the top digit. Only a wrong step leaves a borrow, which makes the answer
    # negative.
    total += sign * carry * 10**width
    return ",".join([*steps, f"#{total}"])


def sample_document(
    task: Arithmetic, digits: int, rng: np.random.Generator, wrong_steps: float = 0.0
) -> str:
    """Samples a document of the corpus.

    Half of the documents are pages of a solution book, which start with `?`. Other documents start
    with a bare question, or count upwards. `DOCUMENT_SHARES` has the probability of each kind.
    """
    # Only about one bare question in six is followed by its solution. A model of this corpus knows
    # how to solve an exercise but seldom does, which leaves room for RL to improve it.
    exercise = _sample_exercise(task, digits, rng)
    question = exercise.question
    kind = _DOCUMENT_KINDS[
        # The last sum may differ from 1 by rounding, so the draw is scaled to it.
        np.searchsorted(_CUMULATIVE_SHARES, rng.random() * _CUMULATIVE_SHARES[-1], side="right")
    ]
    match kind:
        case "book":
            return f"?{question}{write_solution(exercise, rng, wrong_steps)}"
        case "worked":
            return question + write_solution(exercise, rng, wrong_steps)
        case "guess":
            # Takes the absolute value, since no answer is negative.
            return f"{question}#{abs(int(exercise.answer) + int(rng.integers(-12, 13)))}"
        case "list":
            questions = [
                _sample_exercise(task, digits, rng).question for _ in range(rng.integers(1, 3))
            ]
            return ";".join([question, *questions])
        case "digits":
            return question + "".join(
                str(digit) for digit in rng.integers(0, 10, rng.integers(3, 13))
            )
        case _:
            first_number = int(rng.integers(10**digits))
            return ",".join(str(first_number + i) for i in range(rng.integers(3, 7)))


def max_solution_length(digits: int) -> int:
    """Returns the maximum token count of a solution."""
    # A step and its separator take 9 characters. `#`, an answer such as `-100` and the end token
    # follow.
    return 9 * digits + 1 + (digits + 2) + 1


def sample_sft_batch(
    data: DataConfig,
    sft: SftConfig,
    tokenizer: Tokenizer,
    rng: np.random.Generator,
    rows: int,
    length: int,
) -> SftBatch:
    """Samples documents for supervised training.

    Each ends with the end token. If `sft.format` is `worked`, documents are prompts with their
    solutions. If it is `text`, they are of the corpus, and all tokens but the beginning token are
    trained on.

    Raises:
      ConfigError: a document could be longer than `length` tokens.
    """
    # All questions of a task have equally many characters, so the first one stands for all.
    question = make_problem(data.task, data.digits, 0, held_out=False).question
    response_length = (max_program_length if data.task == "programs" else max_solution_length)(
        data.digits
    )
    prompt_length = (
        len(tokenizer.encode_prompt(question))
        if sft.format == "worked"
        else len(tokenizer.bos_ids) + len(f"?{question}")
    )
    # The longest document is checked, since a random one might exceed `length` late in a run.
    if length < prompt_length + response_length:
        raise ConfigError(
            f"data.digits {data.digits} gives documents of up to {prompt_length + response_length}"
            f" tokens, more than data.max_prompt_length + rollout.max_new_tokens = {length}; raise"
            " rollout.max_new_tokens or lower data.digits"
        )
    tokens = np.full((rows, length), tokenizer.pad_id, np.int32)
    prompt_lengths, lengths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for row in range(rows):
        if sft.format == "worked":
            number = int(rng.integers(count_problems(data.task, data.digits, held_out=False)))
            problem = make_problem(data.task, data.digits, number, held_out=False)
            prompt = tokenizer.encode_prompt(problem.question)
            response = (
                write_program(problem, rng, sft.wrong_steps)
                if isinstance(problem, ProgramExercise)
                else write_solution(problem, rng, sft.wrong_steps)
            )
        else:
            assert data.task != "programs", "the config check refuses a corpus of programs"
            prompt = [*tokenizer.bos_ids]
            response = sample_document(data.task, data.digits, rng, sft.wrong_steps)
        ids = [*prompt, *tokenizer.encode(response), tokenizer.stop_ids[0]]
        tokens[row, : len(ids)] = ids
        prompt_lengths[row], lengths[row] = len(prompt), len(ids)
    return SftBatch(tokens, prompt_lengths, lengths)


def _lowest_operand(digits: int) -> int:
    return 10 ** (digits - 1) if digits > 1 else 0


def _count_pairs(digits: int) -> int:
    """Counts the unordered pairs of operands."""
    # Unordered, so that 85+27 is on the same side as 27+85.
    operands = 10**digits - _lowest_operand(digits)
    return operands * (operands + 1) // 2


def _permute_rank(rank: int, size: int) -> int:
    """Maps a rank to its place in a fixed pseudo-random order of 0 to `size` - 1."""
    # Products with odd numbers, sums and shifted xors permute the numbers of this many bits.
    bits = (size - 1).bit_length()
    mask = (1 << bits) - 1
    while True:
        for multiplier in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35):
            rank = (rank * multiplier + 0x27D4EB2F) & mask
            rank ^= rank >> (bits // 2)
        # Cycle walking: repeating until the image is below `size` keeps the map one to one.
        if rank < size:
            return rank


def _sample_exercise(task: Arithmetic, digits: int, rng: np.random.Generator) -> Exercise:
    return make_exercise(
        task,
        digits,
        int(rng.integers(count_problems(task, digits, held_out=False))),
        held_out=False,
    )
