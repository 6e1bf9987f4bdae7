"""Generated arithmetic: exact answers, consistent working, a clean split, and a corpus that solves
few of its questions."""

import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config.settings import DataConfig, SftConfig
from jaxspec.data import arithmetic
from jaxspec.data.arithmetic import Exercise, count_problems, make_exercise, write_solution
from jaxspec.inputs.checked import ConfigError
from jaxspec.rewards.outcome import Outcome
from jaxspec.rewards.scorer import RewardInputs, Scorer
from jaxspec.tokens.tokenizer import character_tokenizer

STEP = re.compile(r"(\d)([+-])(\d)[+-](\d)=(\d)(\d)")
TASKS = ("add", "subtract", "mixed")


def both_sides(task, digits):
    return [
        {
            make_exercise(task, digits, i, held_out=side)
            for i in range(count_problems(task, digits, held_out=side))
        }
        for side in (False, True)
    ]


def follow(text):
    """Return the final value that the steps' own results lead to, and how many steps are wrong."""
    carry, total, wrong = 0, 0, 0
    steps = STEP.findall(text)
    sign = 1 if steps[0][1] == "+" else -1
    for place, (first, _, left, right, carried, written) in enumerate(steps):
        assert carry in (int(left), int(right))
        value = int(first) + sign * (int(left) + int(right))
        carry = int(carried)
        wrong += value != sign * 10 * carry + int(written)
        total += int(written) * 10**place
    return total + sign * carry * 10 ** len(steps), wrong


def test_known_solution(monkeypatch):
    monkeypatch.setattr(arithmetic, "SWAP_PROBABILITY", 0.0)
    rng = np.random.default_rng(0)
    assert write_solution(Exercise(27, "+", 85), rng) == "7+5+0=12,2+8+1=11,#112"
    assert write_solution(Exercise(82, "-", 27), rng) == "2-7-0=15,8-2-1=05,#55"


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(TASKS),
    st.integers(1, 4),
    st.integers(0, 10**9),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.3, 0.9]),
)
def test_working_is_consistent(task, digits, number, seed, wrong_steps):
    exercise = make_exercise(
        task, digits, number % count_problems(task, digits, held_out=False), held_out=False
    )
    text = write_solution(exercise, np.random.default_rng(seed), wrong_steps)
    total, wrong = follow(text)
    assert text.endswith(f",#{total}")
    assert wrong or str(total) == exercise.answer
    assert wrong_steps or not wrong
    assert len(text) + 1 <= arithmetic.max_solution_length(digits)
    assert int(exercise.answer) == eval(exercise.question[:-1])
    assert len(str(exercise.first)) == len(str(exercise.second)) == digits


def test_share_of_wrong_steps():
    rng = np.random.default_rng(0)
    wrong = sum(follow(write_solution(Exercise(27, "+", 85), rng, 0.12))[1] for _ in range(2000))
    assert abs(wrong / 4000 - 0.12) < 0.02


def test_traces_are_short_and_uncertain():
    rng = np.random.default_rng(0)
    exercise, rows = Exercise(47, "+", 85), 4000
    texts = Counter(write_solution(exercise, rng, 0.12) for _ in range(rows))
    nats = -sum(n / rows * math.log(n / rows) for n in texts.values())
    assert max(map(len, texts)) + 1 <= 24
    assert nats / (len(next(iter(texts))) + 1) >= 0.1


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("digits", [1, 2])
def test_sides_cover_every_pair_once_and_share_none(task, digits):
    train, held_out = both_sides(task, digits)
    assert len(train) == count_problems(task, digits, held_out=False)
    assert len(held_out) == count_problems(task, digits, held_out=True)
    pairs = [
        {(e.operator, *sorted((e.first, e.second))) for e in side} for side in (train, held_out)
    ]
    assert not pairs[0] & pairs[1]
    operands = 10 if digits == 1 else 90
    assert len(pairs[0] | pairs[1]) == operands * (operands + 1) // 2 * (
        2 if task == "mixed" else 1
    )
    assert all(int(e.answer) >= 0 for e in train)
    assert len(held_out) / len(train | held_out) == pytest.approx(
        1 / arithmetic.HELD_OUT_EVERY, abs=0.02
    )


def test_held_out_side_looks_like_the_other():
    train, held_out = both_sides("add", 2)
    for digit in range(10):
        shares = [
            np.mean([digit == int(str(e.first)[1]) for e in side]) for side in (train, held_out)
        ]
        assert abs(shares[0] - shares[1]) < 0.05


def test_numbers_out_of_range_are_refused():
    with pytest.raises(IndexError):
        make_exercise("add", 2, count_problems("add", 2, held_out=True), held_out=True)


@pytest.mark.parametrize("task", TASKS)
def test_corpus_solves_few_of_its_questions(task):
    rng = np.random.default_rng(0)
    documents = [arithmetic.sample_document(task, 2, rng, 0.12) for _ in range(6000)]
    begun = [match for text in documents if (match := re.match(r"(\d+)([+-])(\d+)=", text))]
    answers = [
        Exercise(int(match[1]), "+" if match[2] == "+" else "-", int(match[3])).answer
        for match in begun
    ]
    responses = [match.string[match.end() :] for match in begun]
    outcomes = Counter(
        Scorer("hash")(
            RewardInputs(responses, responses, answers, [{}] * len(responses))
        ).outcomes.tolist()
    )
    assert 0.08 < outcomes[Outcome.CORRECT] / len(begun) < 0.2
    assert outcomes[Outcome.NO_ANSWER] / len(begun) > 0.4
    assert sum(text.startswith("?") for text in documents) / len(documents) == pytest.approx(
        arithmetic.DOCUMENT_SHARES["book"], abs=0.03
    )


@pytest.mark.parametrize("form", ["worked", "text"])
@pytest.mark.parametrize(("digits", "length"), [(1, 20), (2, 56), (4, 56)])
def test_batches(form, digits, length):
    tokenizer = character_tokenizer()
    data, sft = DataConfig(digits=digits, task="mixed"), SftConfig(format=form, wrong_steps=0.1)
    batch, again = (
        arithmetic.sample_sft_batch(data, sft, tokenizer, np.random.default_rng(0), 32, length)
        for _ in range(2)
    )
    np.testing.assert_array_equal(batch.tokens, again.tokens)
    held_out = {e.question for e in both_sides("mixed", digits)[1]} if digits <= 2 else set()
    for tokens, start, end in zip(*batch, strict=True):
        assert tokens[0] == tokenizer.bos_ids[0]
        assert tokens[end - 1] == tokenizer.stop_ids[0]
        assert (tokens[end:] == tokenizer.pad_id).all()
        assert tokenizer.unknown_characters(tokenizer.decode(tokens)) == ""
        questions = (
            re.findall(rf"\b\d{{{digits}}}[+-]\d{{{digits}}}=(?=[;#?]|$)", tokenizer.decode(tokens))
            if form == "text"
            else []
        )
        assert not held_out & {*questions, tokenizer.decode(tokens[:start])}
        assert start == (1 if form == "text" else 2 * digits + 3)


def test_too_short_rows_are_refused():
    with pytest.raises(
        ConfigError, match=r"data\.digits 4 .* up to 55 tokens, more than .* = 24; raise"
    ):
        arithmetic.sample_sft_batch(
            *(DataConfig(digits=4), SftConfig(), character_tokenizer()),
            *(np.random.default_rng(0), 4, 24),
        )
