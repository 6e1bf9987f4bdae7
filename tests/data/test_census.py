"""A census of references says which of them nothing, or anything, may equal."""

import json
from pathlib import Path

import pytest

from jaxspec.config.settings import DataConfig, ResolvedConfig, RewardConfig
from jaxspec.data.census import classify_reference, describe_references, take_census
from jaxspec.data.problems import load_sets
from jaxspec.tokens.tokenizer import character_tokenizer


@pytest.mark.parametrize(
    ("reference", "kind"),
    [
        ("42", "numbers"),
        ("-1,234.5", "numbers"),
        ("$42$", "numbers"),
        ("2\\,107", "numbers"),
        ("\\frac{1}{2}", "formulas"),
        ("x^2+1", "formulas"),
        ("5\\text{ cm}", "formulas"),
        ("(1, 2)", "formulas"),
        ("1, 2 \\text{ and } 3", "lists"),
        ("\\{1,2\\}", "lists"),
        ("proof", "words"),
        ("\\text{no solution}", "words"),
        ("not found", "words"),
        ("We add one to 10, so the result is 11.", "sentences"),
        ("\\text{The midpoints form a regular hexagon}", "sentences"),
    ],
)
def test_kinds(reference: str, kind: str) -> None:
    assert classify_reference(reference) == kind


def said(references: list[str]) -> list[str]:
    places = [f"data.path f.jsonl, line {number + 1}" for number in range(len(references))]
    return list(describe_references(zip(places, references, strict=True), "data.answer_column"))


def test_numbers_alone_give_one_line() -> None:
    [line] = said([str(number) for number in range(20)])
    assert line == "data.path f.jsonl: 20 references: 100 % numbers ('0'); 20 differ"


def test_words_are_listed_by_how_often_they_stand() -> None:
    lines = said([str(number) for number in range(27)] + ["proof", "notfound", "proof"])
    assert "90 % numbers ('0') and 10 % words ('proof')" in lines[0].replace(", 10 %", " and 10 %")
    [warning] = [line for line in lines if line.startswith("warning")]
    assert "3 of 30 references are words: 'proof' (2 times)" in warning
    assert "'notfound' (1 times)" in warning


def test_sentences_name_a_line_and_the_remedy() -> None:
    lines = said([f"We add one to {n}, so the result is {n + 1}." for n in range(3)])
    assert "3 of 3 references are whole sentences" in lines[1]
    assert "line 1: 'We add one to 0" in lines[1]
    assert "set data.answer_column to a column of final answers" in lines[1]


def test_one_reference_that_many_share() -> None:
    lines = said([str(number) for number in range(16)] + ["7"] * 4)
    assert lines[1:] == [
        "warning: 5 of 20 references are '7': whoever always answers that is right 25 % of the time"
    ]


def test_no_references_say_nothing() -> None:
    assert said([]) == []


def test_the_sets_of_a_run_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    rows = [{"question": f"{i}+1=", "answer": "proof" if i % 3 else str(i)} for i in range(9)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    data = DataConfig(path=str(file), eval_prompts=2)
    config = ResolvedConfig(data=data)
    lines = list(take_census(config, load_sets(config, character_tokenizer())))
    assert "4 of 7 references are words: 'proof' (4 times)" in lines[1]
    by_code = ResolvedConfig(data=data, reward=RewardConfig(parts=("stated",)))
    assert not list(take_census(by_code, load_sets(by_code, character_tokenizer())))
    generated = ResolvedConfig()
    assert not list(take_census(generated, load_sets(generated, character_tokenizer())))
