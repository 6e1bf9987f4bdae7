"""The remedies that messages about data name can be followed, and then it works."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.settings import DataConfig
from jaxspec.data.arithmetic import Task
from jaxspec.data.problems import load_problems
from jaxspec.inputs.checked import ConfigError
from jaxspec.tokens.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()


def rows(count: int, question: str = "question", answer: str = "answer") -> list[dict[str, Any]]:
    return [{question: f"{number}+1=", answer: str(number + 1)} for number in range(count)]


def write(file: Path, *lines: dict[str, Any]) -> str:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return str(file)


def refusal(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        load_problems(DataConfig(**settings), TOKENIZER)
    return str(error.value)


def follow(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the first option that the refusal names set to what it says."""
    told = refusal(settings)
    option, value = re.findall(r"--data\.(\w+) ([^\s?;,]+)", told)[0]
    return settings | {option: int(value) if value.isdecimal() else value}


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        (rows(3, "questions"), {"eval_prompts": 1}),
        (rows(3, answer="answers"), {"eval_prompts": 1}),
        ([*rows(3), {"question": "1" * 20, "answer": "1"}], {"max_prompt_length": 3}),
        (rows(3), {"eval_prompts": 3}),
        (rows(2), {"eval_prompts": 64}),
    ],
)
def test_an_option_that_is_named(
    tmp_path: Path, lines: list[dict[str, Any]], settings: dict[str, Any]
) -> None:
    followed = follow(
        {"path": write(tmp_path / "train.jsonl", *lines), "eval_prompts": 1} | settings
    )
    train, held_out = load_problems(DataConfig(**followed), TOKENIZER)
    assert len(train) + len(held_out) == len(lines)


def test_a_single_problem_is_not_held_out_for_less(tmp_path: Path) -> None:
    """No number of held-out problems would do: more problems, or another file."""
    settings = {"path": write(tmp_path / "train.jsonl", *rows(1)), "eval_prompts": 1}
    told = refusal(settings)
    assert "data.eval_prompts 0" not in told
    assert "give more, or hold out those of another file with --data.eval_path" in told
    settings["eval_path"] = write(tmp_path / "eval.jsonl", *rows(2))
    assert len(load_problems(DataConfig(**settings), TOKENIZER)[0]) == 1


@pytest.mark.parametrize("task", ["add", "subtract", "mixed"])
@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_the_longest_prompt_of_a_generated_task(task: Task, digits: int) -> None:
    followed = follow({"task": task, "digits": digits, "max_prompt_length": 2})
    for problems in load_problems(DataConfig(**followed), TOKENIZER):
        places = range(0, len(problems), len(problems) // 200 + 1)
        lengths = [len(problems[place].ids) for place in places]
        assert max(lengths) <= followed["max_prompt_length"]


def test_a_folder_that_is_no_dataset_yet(tmp_path: Path) -> None:
    """What it has is named, such that it is read; with nothing in it another one is asked for."""
    (tmp_path / "sums").mkdir()
    settings = {"path": str(tmp_path / "sums"), "eval_prompts": 1}
    assert refusal(settings).endswith("it has none; give one that has some")
    write(tmp_path / "sums/train.json", *rows(3))
    settings["path"] = refusal(settings).rpartition("such as ")[2]
    assert len(load_problems(DataConfig(**settings), TOKENIZER)[0]) == 2
