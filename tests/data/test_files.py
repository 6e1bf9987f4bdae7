"""Rows of a parquet file are those of the same JSON lines, nested columns included."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config.settings import DataConfig
from jaxspec.data.problem_source import Problem
from jaxspec.data.problems import load_problems
from jaxspec.data.tokenizer import character_tokenizer
from jaxspec.inputs.checked import ConfigError

ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "reward_model": {"ground_truth": str(number + 1), "style": None},
        "ability": "MATH",
        "weights": [0.5, float(number)],
    }
    for number in range(3000)
]
SETTINGS: dict[str, Any] = {
    "prompt_column": "prompt",
    "answer_column": "reward_model.ground_truth",
    "eval_prompts": 10,
    "max_prompt_length": 12,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/data"


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(rows), file)
    return str(file)


def problems(path: str) -> list[Problem]:
    train, held_out = load_problems(DataConfig(path=path, **SETTINGS), character_tokenizer())
    return [*train, *held_out]


def test_rows_are_those_of_json_lines(tmp_path: Path, cache: Path) -> None:
    """Written out once for each content."""
    lines = tmp_path / "same.jsonl"
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    path = write(tmp_path / "train.parquet", ROWS)
    assert problems(path) == problems(str(lines))
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    assert problems(path) == problems(str(lines))
    assert made.stat().st_mtime_ns == before
    write(tmp_path / "train.parquet", ROWS[:20])
    assert len(problems(path)) == 20


def test_what_json_has_no_word_for_is_text(tmp_path: Path) -> None:
    rows = [{**row, "day": datetime.date(2026, 1, 2), "raw": b"x"} for row in ROWS[:12]]
    found = problems(write(tmp_path / "train.parquet", rows))
    assert found[0].columns["day"] == "2026-01-02"
    assert found[0].columns["raw"] == "b'x'"


def test_a_damaged_file_and_a_wrong_column_are_named(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"damaged\.parquet: no parquet file .*write it anew"):
        problems(str(damaged))
    with pytest.raises(ConfigError, match=r"absent\.parquet: No such file"):
        problems(str(tmp_path / "absent.parquet"))
    path = write(tmp_path / "train.parquet", [{"prompt": "1+1=", "answer": "2"}] * 3)
    with pytest.raises(ConfigError, match=r"train\.parquet, line 1: no column 'reward_model\."):
        problems(path)


def test_without_pyarrow_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "train.parquet", ROWS[:3])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"bash launch/venv\.sh parquet"):
        problems(path)
