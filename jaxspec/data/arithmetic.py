"""Generated arithmetic: exercises with exact answers, worked solutions with some wrong steps, and a
corpus to continue; and supervised batches of any generated task."""

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

HELD_OUT_EVERY = 8  # one exercise in so many is never trained on
# share of steps that write the carry before the second digit: a free choice, so that the policy
# keeps some entropy
SWAP_PROBABILITY = 0.5
# documents of the corpus
DOCUMENT_SHARES = {
    "book": 0.5,
    "worked": 0.07,
    "guess": 0.12,
    "list": 0.12,
    "digits": 0.11,
    "count": 0.08,
}
_DOCUMENT_KINDS, _CUMULATIVE_SHARES = (
    tuple(DOCUMENT_SHARES),
    np.cumsum(list(DOCUMENT_SHARES.values())),
)


class Exercise(NamedTuple):
    """`first operator second`; never negative."""

    first: int
    operator: Literal["+", "-"]
    second: int

    @property
    def question(self) -> str:
        """The prompt, such as `27+85=`."""
        return f"{self.first}{self.operator}{self.second}="

    @property
    def answer(self) -> str:
        """The exact answer, such as `112`."""
        return str(self.first + self.second if self.operator == "+" else self.first - self.second)


class SftBatch(NamedTuple):
    """Rows for supervised training: prompt and response end to end, then padding; the loss starts
    after the prompt."""

    tokens: Int32[np.ndarray, "rows length"]
    prompt_lengths: Int32[np.ndarray, " rows"]
    lengths: Int32[np.ndarray, " rows"]


def count_problems(task: Task, digits: int, *, held_out: bool) -> int:
    """Return how many problems the training or the held-out side has; the sides share no pair of
    operands, or no function."""
    if task == "programs":
        return count_programs(digits, held_out=held_out)
    families = 2 if task == "mixed" else 1
    held_out_pairs = _count_pairs(digits) // HELD_OUT_EVERY
    return families * (held_out_pairs if held_out else _count_pairs(digits) - held_out_pairs)


def make_problem(
    task: Task, digits: int, number: int, *, held_out: bool
) -> Exercise | ProgramExercise:
    """Return problem `number` of one side of a generated task, 0 <= number < `count_problems`."""
    if task == "programs":
        return make_program(digits, number, held_out=held_out)
    return make_exercise(task, digits, number, held_out=held_out)


def make_exercise(task: Arithmetic, digits: int, number: int, *, held_out: bool) -> Exercise:
    """Return exercise `number` of one side of an arithmetic task: operands of exactly `digits`
    digits, every pair once a family."""
    if not 0 <= number < count_problems(task, digits, held_out=held_out):
        raise IndexError(f"exercise {number} of {count_problems(task, digits, held_out=held_out)}")
    if task == "mixed":
        number, family = divmod(number, 2)
        task = "subtract" if family else "add"
    rank = _permute_rank(
        number if held_out else number + _count_pairs(digits) // HELD_OUT_EVERY,
        _count_pairs(digits),
    )
    larger = (isqrt(8 * rank + 1) - 1) // 2
    smaller = rank - larger * (larger + 1) // 2
    lowest = _lowest_operand(digits)
    if task == "subtract":
        return Exercise(lowest + larger, "-", lowest + smaller)
    first, second = (larger, smaller) if rank % 2 else (smaller, larger)
    return Exercise(lowest + first, "+", lowest + second)


def write_solution(exercise: Exercise, rng: np.random.Generator, wrong_steps: float = 0.0) -> str:
    """Return the solution digit by digit, units first: `7+5+0=12,2+8+1=11,#112` for 27+85.

    A step adds (or subtracts) the second digit and the carry, in either order; its result is the
    carry (or borrow) and the digit to write. With probability `wrong_steps` one of the two is
    wrong, and all that comes later, the final answer too, follows from it.
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
            else:
                digit = (digit + int(rng.integers(1, 10))) % 10
        steps.append(f"{first}{operator}{terms[0]}{operator}{terms[1]}={carry}{digit}")
        total += digit * 10**place
    total += sign * carry * 10**width
    return ",".join([*steps, f"#{total}"])


def sample_document(
    task: Arithmetic, digits: int, rng: np.random.Generator, wrong_steps: float = 0.0
) -> str:
    """Return one document of a corpus in which a bare question is only sometimes followed by its
    solution.

    A page of the solution book starts with `?` and teaches the working. A document that starts with
    a question goes on as `DOCUMENT_SHARES` says: worked in about one of six, else a guess, more
    questions or a run of digits. So a model of this corpus knows how to solve an exercise, and
    does so on few prompts.
    """
    exercise = _sample_exercise(task, digits, rng)
    question = exercise.question
    kind = _DOCUMENT_KINDS[
        np.searchsorted(_CUMULATIVE_SHARES, rng.random() * _CUMULATIVE_SHARES[-1], side="right")
    ]
    match kind:
        case "book":
            return f"?{question}{write_solution(exercise, rng, wrong_steps)}"
        case "worked":
            return question + write_solution(exercise, rng, wrong_steps)
        case "guess":
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
    """Return the most tokens a worked solution takes: a step is 9 characters, then `#`, an answer
    such as `-100`, and the end token."""
    return 9 * digits + 1 + (digits + 2) + 1


def sample_sft_batch(
    data: DataConfig,
    sft: SftConfig,
    tokenizer: Tokenizer,
    rng: np.random.Generator,
    rows: int,
    length: int,
) -> SftBatch:
    """Return `rows` training documents of at most `length` tokens, each closed by the end token.

    `sft.format` `worked` gives prompts with their solutions; `text` gives the corpus, where
    everything but the beginning token is trained.
    Raises `ConfigError` where a document could be longer than `length`.
    """
    question = make_problem(data.task, data.digits, 0, held_out=False).question
    response_length = (max_program_length if data.task == "programs" else max_solution_length)(
        data.digits
    )
    prompt_length = (
        len(tokenizer.encode_prompt(question))
        if sft.format == "worked"
        else len(tokenizer.bos_ids) + len(f"?{question}")
    )
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
            assert data.task != "programs", "a config that asks for a corpus of them is refused"
            prompt = [*tokenizer.bos_ids]
            response = sample_document(data.task, data.digits, rng, sft.wrong_steps)
        ids = [*prompt, *tokenizer.encode(response), tokenizer.stop_ids[0]]
        tokens[row, : len(ids)] = ids
        prompt_lengths[row], lengths[row] = len(prompt), len(ids)
    return SftBatch(tokens, prompt_lengths, lengths)


def _lowest_operand(digits: int) -> int:
    return 10 ** (digits - 1) if digits > 1 else 0


def _count_pairs(digits: int) -> int:
    """Return how many unordered pairs of operands there are; unordered, so that 85+27 is on the
    side of 27+85."""
    operands = 10**digits - _lowest_operand(digits)
    return operands * (operands + 1) // 2


def _permute_rank(rank: int, size: int) -> int:
    """Return the image of `rank` under a fixed pseudo-random permutation of 0..size-1.

    Odd multiplications and shifted xors permute the numbers of so many bits; walking on to an image
    below `size` keeps it one to one.
    """
    bits = (size - 1).bit_length()
    mask = (1 << bits) - 1
    while True:
        for multiplier in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35):
            rank = (rank * multiplier + 0x27D4EB2F) & mask
            rank ^= rank >> (bits // 2)
        if rank < size:
            return rank


def _sample_exercise(task: Arithmetic, digits: int, rng: np.random.Generator) -> Exercise:
    return make_exercise(
        task,
        digits,
        int(rng.integers(count_problems(task, digits, held_out=False))),
        held_out=False,
    )
