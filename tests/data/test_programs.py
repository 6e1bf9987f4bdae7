"""Generated programming: tests that right programs alone pass, wrong steps in their share, and
sides without a common function."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config.check import check_config
from jaxspec.config.cli import read_config
from jaxspec.config.settings import (
    DataConfig,
    OfflineConfig,
    ResolvedConfig,
    RewardConfig,
    SftConfig,
)
from jaxspec.data import arithmetic, programs
from jaxspec.data.problems import load_problems
from jaxspec.data.programs import ProgramExercise, count_programs, make_program, write_program
from jaxspec.inputs.checked import ConfigError
from jaxspec.rewards.extract import extract_answer
from jaxspec.rewards.outcome import Outcome
from jaxspec.rewards.pool import RewardPool
from jaxspec.rewards.scorer import RewardInputs, Scorer
from jaxspec.tokens.tokenizer import character_tokenizer

DATA = DataConfig(task="programs", digits=3, max_prompt_length=21, answer_style="code")
TOKENIZER = character_tokenizer("programs")
KNOWN = ProgramExercise((("add", 3), ("mul", 2), ("sub", 7)))


def run(response):
    """Return the function that a response defines."""
    names = {}
    exec(extract_answer(response, "code") or "", names)
    return names["f"]


def by_hand(question):
    """Return what a question asks for, as slope and offset."""
    slope, offset = 1, 0
    for step in question.removesuffix(":").split(", "):
        word, number = step.split()
        times, term = {"add": (1, 1), "sub": (1, -1), "mul": (int(number), 0)}[word]
        slope, offset = slope * times, offset * times + term * int(number)
    return slope, offset


def both_sides(steps):
    return [
        [make_program(steps, i, held_out=side) for i in range(count_programs(steps, held_out=side))]
        for side in (False, True)
    ]


def test_known_program(monkeypatch):
    assert KNOWN.question == "add 3, mul 2, sub 7:"
    assert KNOWN.answer == "assert f(-3)==-7\nassert f(0)==-1\nassert f(1)==1\nassert f(10)==19"
    rng = np.random.default_rng(0)
    monkeypatch.setattr(programs, "LONG_FORM_PROBABILITY", 0.0)
    whole = "```\ndef f(x):\n x+=3\n x*=2\n x-=7\n return x\n```"
    assert write_program(KNOWN, rng) == whole
    monkeypatch.setattr(programs, "LONG_FORM_PROBABILITY", 1.0)
    assert " x=x+3\n x=x*2\n" in write_program(KNOWN, rng)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4), st.integers(0, 10**9), st.integers(0, 99), st.sampled_from([0.0, 0.3, 0.9])
)
def test_tests_hold_of_right_programs_alone(steps, number, seed, wrong_steps):
    program = make_program(steps, number % count_programs(steps, held_out=False), held_out=False)
    response = write_program(program, np.random.default_rng(seed), wrong_steps)
    slope, offset = by_hand(program.question)
    function = run(response)
    right = all(function(x) == slope * x + offset for x in range(-20, 20))
    assert right or wrong_steps
    try:
        exec(program.answer, {"f": function})
        passes = True
    except AssertionError:
        passes = False
    assert passes == right
    assert TOKENIZER.unknown_characters(program.question + response) == ""
    assert len(TOKENIZER.encode(response)) + 1 <= programs.max_program_length(steps)
    assert len(TOKENIZER.encode_prompt(program.question)) == 7 * steps


def test_share_of_wrong_steps():
    rng, rows = np.random.default_rng(0), 3000
    found = Counter()
    for _ in range(rows):
        lines = write_program(KNOWN, rng, 0.2).split("\n")[2:5]
        found.update((line.replace("=x", "").replace("=", "")) for line in lines)
        found["written out"] += sum("=x" in line for line in lines)
    right = found[" x+3"] + found[" x*2"] + found[" x-7"]
    assert right / (3 * rows) == pytest.approx(0.8, abs=0.02)
    assert found["written out"] / (3 * rows) == pytest.approx(0.5, abs=0.02)
    signs = found[" x-3"] + found[" x*3"]
    assert signs / rows == pytest.approx(0.1, abs=0.02)  # the other half is another number


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_sides_have_every_problem_once_and_share_no_function(steps):
    train, held_out = both_sides(steps)
    assert len({*train, *held_out}) == len(train) + len(held_out) == 24**steps
    functions = [{by_hand(program.question) for program in side} for side in (train, held_out)]
    assert not functions[0] & functions[1]
    assert 1 / 16 < len(held_out) / 24**steps < 1 / 6
    firsts = Counter(program.steps[0][0] for program in train[: 24**steps // 2])
    assert set(firsts) == {"add", "sub", "mul"}  # in no order


def test_numbers_out_of_range_are_refused():
    for number in (-1, count_programs(2, held_out=True)):
        with pytest.raises(IndexError):
            make_program(2, number, held_out=True)


def test_problems_are_judged_by_the_pool():
    """References are tests that the verifier reads; it runs what a response defines, and pays right
    ones alone."""
    train, held_out = load_problems(DATA, TOKENIZER)
    assert (len(train), len(held_out)) == (count_programs(3, held_out=False), 64)
    problem = train[5]
    assert TOKENIZER.decode(problem.ids) == make_program(3, 5, held_out=False).question
    program, rng = make_program(3, 5, held_out=False), np.random.default_rng(0)
    right = write_program(program, rng)
    responses = [
        right,
        right.replace(" return x", " x+=1\n return x"),
        right.replace("return x", "return f(x)"),
        right.replace("def f(x):", "def f(x)"),
        right.removesuffix("```"),
        "",
    ]
    count = len(responses)
    with RewardPool(1, 10.0) as pool:
        scorer = Scorer("code", pool=pool, verifier="code")
        assert scorer.find_unreadable_answers([problem.answer]) == []
        scores = scorer(
            RewardInputs(
                [problem.prompt] * count, responses, [problem.answer] * count, [{}] * count
            )
        )
    assert scores.outcomes.tolist() == [
        Outcome.CORRECT,
        *[Outcome.WRONG] * 3,
        *[Outcome.NO_ANSWER] * 2,
    ]


def test_batches():
    sft, length = SftConfig(wrong_steps=0.1), DATA.max_prompt_length + 49
    batch, again = (
        arithmetic.sample_sft_batch(DATA, sft, TOKENIZER, np.random.default_rng(0), 32, length)
        for _ in range(2)
    )
    np.testing.assert_array_equal(batch.tokens, again.tokens)
    held_out = {program.question for program in both_sides(3)[1]}
    for tokens, start, end in zip(*batch, strict=True):
        question = TOKENIZER.decode(tokens[:start])
        assert question not in held_out
        assert callable(run(TOKENIZER.decode(tokens[start:end])))
        assert tokens[end - 1] == TOKENIZER.stop_ids[0]
        assert (tokens[end:] == TOKENIZER.pad_id).all()
    with pytest.raises(ConfigError, match=r"digits 3 .* up to 70 tokens, more than .* = 69; raise"):
        arithmetic.sample_sft_batch(DATA, sft, TOKENIZER, np.random.default_rng(0), 1, length - 1)


def test_the_shipped_model_and_rows_hold_them():
    config, _ = read_config(Path(__file__).parents[2] / "configs/rl_code.py")
    assert TOKENIZER.size <= config.model.vocab
    assert config.data == DATA
    assert config.rollout.max_new_tokens == programs.max_program_length(DATA.digits)


CODE = RewardConfig(verifier="code", run_code=True)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (
            ResolvedConfig(data=DataConfig(task="programs", max_prompt_length=21)),
            ["answer_style hash", "block of code", "--data.answer_style code"],
        ),
        (
            ResolvedConfig(data=DataConfig(answer_style="code"), reward=CODE),
            ["answer_style code", "after `#`", "--data.answer_style hash"],
        ),
        (
            ResolvedConfig(data=DATA, reward=CODE, sft=SftConfig(format="text")),
            ["sft.format text", "data.task is programs"],
        ),
        (
            ResolvedConfig(data=DATA, reward=CODE, offline=OfflineConfig(text="generic")),
            ["offline.text generic", "data.task is programs"],
        ),
    ],
)
def test_refusals(config, parts):
    with pytest.raises(ConfigError) as caught:
        check_config(config, 1)
    assert [part for part in parts if part not in str(caught.value)] == []
