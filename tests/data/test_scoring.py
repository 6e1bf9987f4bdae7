"""What judges a run's responses is made of its config, or refused with what is wrong."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.settings import DataConfig, ResolvedConfig, RewardConfig
from jaxspec.data.problems import load_sets
from jaxspec.data.scoring import scorer_of
from jaxspec.inputs.checked import ConfigError
from jaxspec.tokens.tokenizer import character_tokenizer


def config(**reward: Any) -> ResolvedConfig:
    return ResolvedConfig(data=DataConfig(answer_style="boxed"), reward=RewardConfig(**reward))


def test_without_workers_nothing_is_started() -> None:
    assert not scorer_of(config()).has_workers


def test_a_verifier_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"bash launch/venv\.sh math"):
        scorer_of(config(verifier="math"))


def test_a_function_that_cannot_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import nothing_of_the_kind\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.py:f: ModuleNotFoundError") as told:
        scorer_of(config(function=f"{file}:f", workers=1))
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
        scorer_of(asked, sets)
