"""Which rows of a file give a problem: distinct ones, up to white space and Unicode form, that ask
something and state an answer; found once for each content."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table, parquet

from jaxspec.config.settings import BatchConfig, DataConfig, ResolvedConfig
from jaxspec.data import problem_file
from jaxspec.data.problem_source import SkippedLines
from jaxspec.data.problems import describe_problems, load_problems, load_sets
from jaxspec.tokens.tokenizer import Tokenizer, character_tokenizer

TOKENIZER = character_tokenizer()
ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "reward_model": {"ground_truth": str(number + 1), "style": None},
    }
    for number in range(50)
]


def of(path: object, **changes: Any) -> DataConfig:
    names = {"prompt_column": "prompt", "answer_column": "reward_model.ground_truth"}
    settings: dict[str, Any] = {**names, "eval_prompts": 10, "max_prompt_length": 12, **changes}
    return DataConfig(path=str(path), **settings)


def lines_in(file: Path, *rows: Any) -> str:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))


def test_problems_that_differ_in_white_space_or_unicode_form_are_the_same(
    tmp_path: Path,
) -> None:
    """Whatever comes around them: in a file, and in the held-out file."""
    one, other = "e\u0301 1+1=", "\u00e9  1+1=\n"
    settings: dict[str, Any] = {"tokenizer": "set", "prompt_format": "Q: {problem}"}
    settings |= {"eval_prompts": 2, "max_prompt_length": 40}
    lines = [{"question": text, "answer": "2"} for text in (one, other, "\u00e9 1 + 1=", "7")]
    held = [
        {"question": [{"role": "user", "content": text}], "answer": "2"} for text in (other, "8")
    ]
    settings |= {"eval_path": lines_in(tmp_path / "eval.jsonl", *held)}
    config = DataConfig(path=lines_in(tmp_path / "train.jsonl", *lines), **settings)
    train, _ = load_problems(config, TOKENIZER)
    assert [problem.index for problem in train] == [0, 2, 3]
    assert train.skipped_lines.repeated == 1
    assert [problem.question for problem in train] == ["\u00e9 1+1=", "\u00e9 1 + 1=", "7"]
    run = ResolvedConfig(data=config, batch=BatchConfig(prompts=1))
    assert describe_problems(run, load_sets(run, TOKENIZER))[1:] == [
        "warning: 1 of the 2 held-out problems are among those to train on, too"
    ]


@pytest.mark.parametrize("blank", [None, "absent", "", " \n", []])
def test_null_absent_and_blank_are_counted_alike(tmp_path: Path, blank: Any) -> None:
    """In the answer, in the problem, and in an object around either."""

    def row(number: int, key: str = "") -> dict[str, Any]:
        problem: dict[str, Any] = {"text": f"{number}+1="}
        answer: dict[str, Any] = {"truth": {"value": str(number + 1)}}
        if blank == "absent":
            answer["truth"].pop(key, None)
            problem.pop(key, None)
        elif key:
            (problem if key == "text" else answer["truth"])[key] = blank
        return {"problem": problem, **answer}

    lines: list[dict[str, Any]] = [row(1), row(2, "value"), row(3, "text"), row(4), row(5)]
    lines.append({"problem": None, "truth": lines[0]["truth"]})
    lines.append({"problem": lines[3]["problem"] | {"text": "9+1="}, "truth": None})
    names = {"prompt_column": "problem.text", "answer_column": "truth.value"}
    path = lines_in(tmp_path / "train.jsonl", *lines)
    train, _ = load_problems(of(path, eval_prompts=1, **names), TOKENIZER)
    assert [problem.prompt for problem in train] == ["<bos>1+1=", "<bos>4+1="]
    assert train.skipped_lines == SkippedLines(unanswered=2, empty=2)


def test_rows_that_repeat_are_neither_rendered_nor_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is, nor read, once the result is in the cache, but for what is asked."""
    path, asked = tmp_path / "train.parquet", list[int]()
    parquet.write_table(Table.from_pylist(ROWS * 40), path)
    tokenizer, lengths = character_tokenizer(), Tokenizer.count_tokens
    monkeypatch.setattr(
        Tokenizer,
        "count_tokens",
        lambda self, texts: asked.append(len(texts)) or lengths(self, texts),
    )
    train, held_out = load_problems(of(path), tokenizer)
    assert (len(train), len(held_out), train.skipped_lines.repeated) == (40, 10, 1950)
    assert asked == [50]
    monkeypatch.setattr(problem_file, "iter_batches", None)
    again, _ = load_problems(of(path), tokenizer)
    assert [*again] == [*train]
    assert again.skipped_lines == train.skipped_lines
    few, _ = load_problems(of(path, max_prompt_length=5, eval_prompts=1), tokenizer)
    assert few.skipped_lines == SkippedLines(too_long=40 * 40, repeated=39 * 10)


LOADING = """
import sys, time
from jaxspec.config.settings import DataConfig
from jaxspec.data.problems import load_problems
from jaxspec.tokens.tokenizer import character_tokenizer
names = {"prompt_column": "prompt", "answer_column": "reward_model.ground_truth"}
config = DataConfig(path=sys.argv[1], eval_prompts=10, max_prompt_length=999, **names)
tokenizer, before = character_tokenizer(), time.process_time()
train, held_out = load_problems(config, tokenizer)
print(len(train), len(held_out), time.process_time() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seconds"), [("jsonl", 90), ("parquet", 60)])
def test_a_file_whose_rows_repeat_a_hundred_times(
    tmp_path: Path, kind: str, seconds: float
) -> None:
    """A twentieth of DAPO-Math-17k (1.79 M rows, 17,398 problems), within a twentieth of the time
    of a processor, and of 6 s once the result is in the cache."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"{number}+{number}=" * 60}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(number), "style": "rule"},
            "extra_info": {"index": f"{number}-{number}"},
        }
        for number in range(870)
    ] * 103
    file = tmp_path / f"train.{kind}"
    if kind == "parquet":
        parquet.write_table(Table.from_pylist(rows), file)
    else:
        lines_in(file, *rows)
    for bar in (seconds / 20, 6 / 20 + 0.2):
        # in a process of its own, since types are checked at every call in this one
        command = [sys.executable, "-c", LOADING, str(file)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        assert told[:2] == ["860", "10"]
        assert float(told[2]) < bar
