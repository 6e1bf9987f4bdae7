"""Tables of measurements are as they were written, or count as none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.storage.tables import load_table, save_table

COST = np.asarray([[1.25, 2.5], [3.0, 4.75]], np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "costs"


def load(file: Path, shape: tuple[int, ...] = COST.shape) -> np.ndarray:
    return load_table(file, shape, "rounds are timed anew")


def test_a_table_is_kept_without_a_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "key.json"
    assert not load(file).any()
    save_table(file, COST, "the next run times its rounds anew")
    np.testing.assert_array_equal(load(file), COST)
    assert not load(file, (3, 3)).any()  # of another shape
    assert [each.name for each in folder.iterdir()] == ["key.json"]
    assert capsys.readouterr().out == ""


def _instead(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.unlink()
        make(file)

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.write_text(""), "is damaged"),
        (lambda file: file.write_text(file.read_text().replace("4.75", "4.25")), "is damaged"),
        (lambda file: file.write_text("[" * 100_000), "is damaged"),
        (lambda file: file.write_text("{}"), "is damaged"),
        (_instead(lambda file: file.mkdir()), "cannot be read (Is a directory)"),
        (
            _instead(lambda file: file.symlink_to(file)),
            "cannot be read (Too many levels of symbolic links)",
        ),
    ],
)
def test_a_table_that_is_not_what_was_written_is_told_and_measured_anew(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], Any], said: str
) -> None:
    file = folder / "key.json"
    save_table(file, COST, "the next run times its rounds anew")
    damage(file)
    assert not load(file).any()
    assert capsys.readouterr().out == f"warning: {file} {said}: rounds are timed anew\n"


@pytest.mark.parametrize("place", ["costs", "costs/key.json"])
def test_a_table_that_cannot_be_written_is_no_reason_to_stop(
    folder: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    file = folder / "key.json"
    if place == "costs":
        folder.write_text("no folder")
    else:
        file.mkdir(parents=True)
    save_table(file, COST, "the next run times its rounds anew")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {file} cannot be written: ")
    assert line.endswith("; the next run times its rounds anew")
