"""What judges a run's responses is made of its config, or refused with what is wrong."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.settings import DataConfig, ResolvedConfig, RewardConfig
from jaxspec.data import scoring
from jaxspec.data.problems import load_sets
from jaxspec.data.scoring import choose_worker_count, make_scorers, try_scorers
from jaxspec.inputs.checked import ConfigError
from jaxspec.rewards.code import find_sandbox
from jaxspec.rewards.pool import RewardPool
from jaxspec.tokens.tokenizer import character_tokenizer


def config(**reward: Any) -> ResolvedConfig:
    return ResolvedConfig(data=DataConfig(answer_style="boxed"), reward=RewardConfig(**reward))


def test_without_workers_nothing_is_started() -> None:
    assert not make_scorers(config()).has_workers


def test_a_verifier_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"bash launch/venv\.sh math"):
        make_scorers(config(verifier="math"))


def test_workers_are_bounded_by_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "core_count", lambda: 2)
    assert choose_worker_count(0) == 1
    assert choose_worker_count(8) == 8
    with pytest.raises(ConfigError, match=r"reward\.workers is 9, .* 2 cores .*workers 8 or less"):
        make_scorers(config(verifier="math", workers=9))
    monkeypatch.setattr(scoring, "core_count", lambda: 1000)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**19}.get)
    assert choose_worker_count(0) == 4
    with pytest.raises(ConfigError, match=r"2 GiB of memory, runs at most 4 .*512 MiB"):
        choose_worker_count(5)


def test_a_function_that_cannot_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import nothing_of_the_kind\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.py:f: ModuleNotFoundError") as told:
        make_scorers(config(function=f"{file}:f", workers=1))
    assert "(mine.py, line 1)" in str(told.value)


def test_references_that_cannot_be_read_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    answers = ["1", "\\frac{1}{2}", "\\text{}", "2"]
    rows = [{"question": f"{i}+1=", "answer": answer} for i, answer in enumerate(answers)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    data = DataConfig(path=str(file), answer_style="boxed", eval_prompts=1)
    asked = ResolvedConfig(data=data, reward=RewardConfig(verifier="math", workers=1))
    sets = load_sets(asked, character_tokenizer())
    with pytest.raises(ConfigError, match=r"1 reference answers cannot be read .*line 3: .*text"):
        try_scorers(asked, sets, make_scorers(asked))


def test_workers_that_die_during_the_trial_are_told_of(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def f(*_):\n    return [0.0]\n", encoding="utf-8")
    asked = config(function=f"{file}:f", workers=1)
    scorers, sets = make_scorers(asked), load_sets(asked, character_tokenizer())
    pool = scorers[0]._pool
    assert pool is not None
    pool._process.kill()
    pool._process.wait()
    reason = (
        r"^reward\.function .*own\.py:f: the keeper process of the workers ended with status -9"
    )
    with pytest.raises(ConfigError, match=reason):
        try_scorers(asked, sets, scorers)


def test_a_sandbox_is_said_and_none_is_refused_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ResolvedConfig(
        data=DataConfig(answer_style="code"),
        reward=RewardConfig(verifier="code", run_code=True, workers=1, deadline=20.0),
    )
    if find_sandbox():
        [line] = make_scorers(asked).remarks
        assert line.startswith("reward.verifier code runs programs in ")
    found = {"sandbox": ""}
    call = RewardPool.__call__

    def without(pool: RewardPool, tasks: Any) -> Any:
        return [
            found.get(task[0], answer)
            for task, answer in zip(tasks, call(pool, tasks), strict=True)
        ]

    monkeypatch.setattr(RewardPool, "__call__", without)
    with pytest.raises(ConfigError, match=r"finds no sandbox .* JAXSPEC_WITHOUT_SANDBOX=1"):
        make_scorers(asked)
    monkeypatch.setenv("JAXSPEC_WITHOUT_SANDBOX", "1")
    [line] = make_scorers(asked).remarks
    assert "no sandbox, as none works here" in line


OWN = """
import time

def compute_score(data_source, solution_str, ground_truth):
    return float(ground_truth in solution_str)

def in_trl(completions, question, **kwargs):
    return [float(len(each)) for each in completions]

def two_lists(responses, answers):
    return [1.0] * len(responses)

def by_name(prompts, responses, answers, rows, *, tokenizer):
    return [1.0] * len(responses)

def one_number(prompts, responses, answers, rows):
    return 1.0

def text(prompts, responses, answers, rows):
    return "10"

def dictionary(prompts, responses, answers, rows):
    return {"score": 1.0, "other": 0.0}

def texts(prompts, responses, answers, rows):
    return ["1.0"] * len(responses)

def dictionaries(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0}

def no_column(prompts, responses, answers, rows):
    return [row["bonus"] for row in rows]

def column(prompts, responses, answers, rows):
    return [len(row["question"]) for row in rows]

def late(prompts, responses, answers, rows):
    time.sleep(60)

def only_stated(prompts, responses, answers, rows):
    return [float(response.split("boxed{")[1][0] == "1") for response in responses]
"""


@pytest.fixture
def judged(tmp_path: Path) -> Any:
    """Has a function of `OWN` made ready and tried; returns the remarks."""
    file, data = tmp_path / "own.py", tmp_path / "train.jsonl"
    file.write_text(OWN, encoding="utf-8")
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

    def judge(name: str) -> list[str]:
        asked = ResolvedConfig(
            data=DataConfig(path=str(data), answer_style="boxed", eval_prompts=1),
            reward=RewardConfig(function=f"{file}:{name}", workers=1, deadline=3.0),
        )
        scorers = make_scorers(asked)
        try_scorers(asked, load_sets(asked, character_tokenizer()), scorers)
        return list(scorers.remarks)

    return judge


def test_functions_of_other_projects_are_called_in_their_form(judged: Any) -> None:
    [line] = judged("compute_score")
    assert line.endswith(
        "own.py:compute_score is called in verl's form, row by row:"
        " compute_score(data_source, solution_str, ground_truth, extra_info)"
    )
    [line] = judged("in_trl")
    assert line.endswith("in TRL's form: function(prompts, completions, **columns)")
    assert judged("column") == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "two_lists",
            r"two_lists\(responses, answers\) cannot be called with four lists \(too many",
        ),
        ("by_name", r"cannot be called with four lists \(missing a required .*'tokenizer'"),
        ("one_number", "it returned a float for 2 rows; return a list with a number for each row"),
        ("text", "it returned a str for 2 rows"),
        ("dictionary", "it returned a dictionary for 2 rows"),
        ("texts", "it returned the text '1.0', not a number"),
        ("dictionaries", r"it returned the dictionary \{'score': 1.0\}, not a number"),
        ("no_column", r"tried on the responses .*KeyError: 'bonus' \(own.py, line 32\)"),
        ("late", "a call exceeded reward.deadline; .* or raise --reward.deadline"),
        ("only_stated", "IndexError"),
    ],
)
def test_a_function_that_gives_no_rewards_is_refused_at_the_start(
    judged: Any, name: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as told:
        judged(name)
    assert f"own.py:{name}" in str(told.value)
