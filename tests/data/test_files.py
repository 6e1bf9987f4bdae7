"""Rows of a parquet file are those of the same JSON lines, nested columns included; so are those of
several files, of a folder or of a dataset on the hub."""

import datetime
import decimal
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pytest
from pyarrow import parquet

from jaxspec.config.settings import DataConfig
from jaxspec.data import files
from jaxspec.data.files import data_digest, find_data_files, iter_lines
from jaxspec.data.problem_source import Problem
from jaxspec.data.problems import load_problems
from jaxspec.inputs.checked import ConfigError
from jaxspec.tokens.tokenizer import character_tokenizer

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
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    files._download_dataset.cache_clear()
    return tmp_path / "cache"


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return str(file)


def problems(path: str) -> list[Problem]:
    train, held_out = load_problems(DataConfig(path=path, **SETTINGS), character_tokenizer())
    return [*train, *held_out]


@pytest.mark.slow
def test_rows_are_those_of_json_lines(tmp_path: Path, cache: Path) -> None:
    """Looked through once for each content."""
    lines = tmp_path / "same.jsonl"
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    path = write(tmp_path / "train.parquet", ROWS)
    assert problems(path) == problems(str(lines))
    (made,) = cache.glob("problems-*/table.npy")
    before = made.stat().st_mtime_ns
    assert problems(path) == problems(str(lines))
    assert made.stat().st_mtime_ns == before
    assert [*cache.glob("problems-*/table.npy")] == [made]
    write(tmp_path / "train.parquet", ROWS[:20])
    assert len(problems(path)) == 20


def test_what_json_has_no_word_for_is_text(tmp_path: Path) -> None:
    rows = [{**row, "day": datetime.date(2026, 1, 2), "raw": b"x"} for row in ROWS[:12]]
    found = problems(write(tmp_path / "train.parquet", rows))
    assert found[0].columns["day"] == "2026-01-02"
    assert found[0].columns["raw"] == "b'x'"
    priced = [
        {"prompt": f"{n}", "reward_model": {"ground_truth": decimal.Decimal(n) / 4}}
        for n in range(12)
    ]
    assert problems(write(tmp_path / "priced.parquet", priced))[1].answer == "0.25"


def test_a_damaged_file_and_a_wrong_column_are_named(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"damaged\.parquet: not a readable .*write it again"):
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


def dataset(folder: Path) -> Path:
    """The files of a dataset: two shards of training rows in parquet, test rows in JSON lines
    without an end of the last line, and a card."""
    (folder / "main").mkdir(parents=True)
    write(folder / "main/train-00001-of-2.parquet", ROWS[20:40])
    write(folder / "main/train-00000-of-2.parquet", ROWS[:20])
    lines = [json.dumps(row) for row in ROWS[40:60]]
    (folder / "main/test-0.jsonl").write_text("\n".join(lines[:12]), encoding="utf-8")
    (folder / "main/test-1.jsonl").write_text("\n".join(lines[12:]), encoding="utf-8")
    (folder / "README.md").write_text("a card")
    return folder


Asked = list[tuple[str, str, list[str]]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    """Puts a hub in place of the library's, with Somebody/Sums and what it is asked; without a
    network, what was downloaded may be there or not."""
    there = dataset(tmp_path / "there")

    def place(network: bool = True, downloaded: bool = False) -> Asked:
        asked: Asked = []

        def listing(self: Any, name: str) -> Any:
            if not network:
                unreachable, _ = huggingface_hub.errors.HfHubHTTPError.__bases__
                raise unreachable("no route")
            if name != "Somebody/Sums":
                raise OSError("404 Client Error\nmore lines")
            names = [str(each.relative_to(there)) for each in there.rglob("*.*")]
            siblings = [type("File", (), {"rfilename": name}) for name in names]
            return type("Info", (), {"siblings": siblings})

        def download(name: str, repo_type: str, allow_patterns: list[str]) -> str:
            asked.append((name, repo_type, allow_patterns))
            if not network and not downloaded:
                raise OSError("Got: ConnectError: no route\nmore lines")
            if name != "Somebody/Sums":
                raise OSError("404 Client Error\nmore lines")
            return str(there)

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", listing)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return asked

    return place


def rows_of(path: str) -> list[dict[str, Any]]:
    where = f"data.path {path}"
    return [json.loads(line) for line in iter_lines(find_data_files(path, "data.path"), where)]


@pytest.mark.parametrize("network", [True, False])
def test_shards_of_a_dataset_on_the_hub_are_read_in_order_as_one(
    hub: Callable[..., Asked], network: bool
) -> None:
    """Asked for once, and with no more than the files that match; what was downloaded before does
    without a network."""
    asked = hub(network=network, downloaded=True)
    path = "Somebody/Sums:main/train-*.parquet"
    assert rows_of(path) == ROWS[:40]
    assert sorted(problems(path), key=lambda problem: problem.index) == problems(path)
    assert asked == [("Somebody/Sums", "dataset", ["main/train-*.parquet"])]
    assert rows_of("Somebody/Sums:*test*") == ROWS[40:60]
    assert rows_of("Somebody/Sums:*.*[lt]") == ROWS[40:60] + ROWS[:40]


def test_a_single_file_of_lines_is_read_where_it_is(
    hub: Callable[..., Asked], tmp_path: Path, cache: Path
) -> None:
    hub()
    path = "Somebody/Sums:main/test-0.jsonl"
    assert len(problems(path)) == 12
    assert find_data_files(path, "data.path") == [tmp_path / "there/main/test-0.jsonl"]
    assert not cache.exists()


def test_without_a_pattern_a_dataset_must_have_one_data_file(
    hub: Callable[..., Asked], tmp_path: Path
) -> None:
    asked = hub()
    with pytest.raises(
        ConfigError,
        match=r"data\.path Somebody/Sums: Somebody/Sums has 4 data files, main/test-0\.jsonl, "
        r".*; say which with Somebody/Sums:GLOB, such as Somebody/Sums:main/test-0\.jsonl",
    ):
        find_data_files("Somebody/Sums", "data.path")
    with pytest.raises(ConfigError, match=r"no file of Somebody/Sums matches a/\*; it has main/t"):
        find_data_files("Somebody/Sums:a/*", "data.path")
    assert asked == []  # nothing is downloaded in vain
    for file in (tmp_path / "there/main").glob("t*1*"):
        file.unlink()
    (tmp_path / "there/main/test-0.jsonl").unlink()
    assert rows_of("Somebody/Sums") == ROWS[:20]


@pytest.mark.parametrize("network", [True, False])
def test_a_dataset_that_cannot_be_had_is_named_with_what_to_do(
    hub: Callable[..., Asked], network: bool
) -> None:
    hub(network=network)
    why = "404 Client Error" if network else "Got: ConnectError: no route"
    with pytest.raises(
        ConfigError,
        match=rf"^data\.path Some/Nothing:\*: no such file here, and the hub cannot give a dataset"
        rf" Some/Nothing \({why}\); correct the id, or download .* FILE, or FOLDER:GLOB",
    ):
        problems("Some/Nothing:*")


def test_files_of_a_folder_are_read_likewise(tmp_path: Path, cache: Path) -> None:
    """Written out anew once one of them has changed."""
    folder = dataset(tmp_path / "sums")
    path = f"{folder}:main/*.parquet"
    assert rows_of(path) == ROWS[:40]
    before, found = data_digest(path, "data.path"), problems(path)
    assert problems(path) == found
    write(folder / "main/train-00001-of-2.parquet", ROWS[90:100])
    assert rows_of(path) == [*ROWS[:20], *ROWS[90:100]]
    assert data_digest(path, "data.path") != before
    assert problems(path) != found
    assert len(list(cache.glob("problems-*/lines.jsonl"))) == 2
    (folder / "main/train-00000-of-2.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"sums:main/\*\.parquet, train-00000-of-2\.parquet: no"):
        rows_of(path)
    with pytest.raises(ConfigError, match=r"no file of .*sums matches none\*; it has main/test-0"):
        rows_of(f"{folder}:none*")
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"sums:main/\*\.parquet: No such file"):
        problems(path)


@pytest.mark.parametrize(
    ("names", "last", "told"),
    [
        (["question", "answer", "answer"], b"3", "duplicate columns: answer;"),
        (["question", "answer", "id"], b"\xff", "not a readable parquet file .*write it again"),
    ],
)
def test_tables_that_cannot_be_read_are_refused(
    tmp_path: Path, names: list[str], last: bytes, told: str
) -> None:
    """Also where the damage is found only in a value."""
    file = tmp_path / "train.parquet"
    text = pyarrow.array([b"1", b"2", last], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, text.buffers())
    parquet.write_table(pyarrow.table([column] * 3, names=names), file)
    with pytest.raises(ConfigError, match=rf"^data\.path {file}: {told}"):
        problems(str(file))


def test_a_folder_with_one_data_file_is_that_file(tmp_path: Path) -> None:
    """With several, the message's own remedy names one of them, and works."""
    folder = tmp_path / "main"
    folder.mkdir()
    write(folder / "train-0.parquet", ROWS[:20])
    (folder / "README.md").write_text("a card")
    assert rows_of(str(folder)) == ROWS[:20]
    assert len(problems(str(folder))) == 20
    write(folder / "train-1.parquet", ROWS[20:40])
    with pytest.raises(ConfigError, match=r"has 2 data files.*; say which with .*:GLOB") as refused:
        problems(str(folder))
    assert len(problems(str(refused.value).rpartition("such as ")[2])) == 20


@pytest.mark.parametrize("path", ["nowhere/train.jsonl", "./a/b", "a/b/c", "/nowhere/at-all", "x"])
def test_a_file_that_is_not_there_is_no_dataset(path: str, hub: Callable[..., Asked]) -> None:
    asked = hub()
    assert find_data_files(path, "data.path") == [Path(path)]
    assert asked == []
