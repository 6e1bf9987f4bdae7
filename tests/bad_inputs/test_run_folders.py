"""Bad folders of runs end in one line, for who reads them and for who goes on with them, and stay
as they are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxspec import export, sample
from jaxspec.config.as_json import to_json
from jaxspec.config.cli import load_config
from jaxspec.config.from_checkpoint import resolve_config
from jaxspec.host import loaded_run
from jaxspec.host.job import run_and_report_errors
from jaxspec.host.workdir import prepare_workdir
from jaxspec.system.interrupt import Interrupt
from tests.bad_inputs.programs import QUICK, assert_one_line, edited, ended, put, trained
from tests.conftest import answering_config


@pytest.mark.parametrize("setting", ["--workdir", "--checkpoint", "--out"])
def test_a_home_that_nobody_has(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, place = loaded_run.SavedRun(tmp_path, 4, answering_config()), "~nosuch/x"
    work: dict[str, Callable[[], Any]] = {
        "--workdir": lambda: prepare_workdir(place),
        "--checkpoint": lambda: loaded_run.find_run(place),
        "--out": lambda: export.export_run(run, export.ExportOptions(out=place)),
    }
    status, printed = ended(lambda: run_and_report_errors(work[setting]), capsys)
    assert status == 2
    assert_one_line(
        printed, f"{setting} is '{place}', and no home directory of ~nosuch is known here"
    )


def a_run(folder: Path) -> Path:
    """What a run of two batches leaves, by the command that the tests give, with a checkpoint that
    holds nothing."""
    config, _ = load_config(["--config", "rl_think.py", *QUICK], "train", "Trains.")
    (folder / "checkpoints" / "4").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(to_json(resolve_config(config, print))))
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    return folder


RUNS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no folder": (shutil.rmtree, "no such folder", ""),
    "no config": (
        lambda run: (run / "config.json").unlink(),
        "has no config.json",
        "holds checkpoints but no config.json",
    ),
    "an empty config": (
        put("config.json", ""),
        "config.json is not JSON",
        "config.json is not JSON",
    ),
    "a list of config": (
        put("config.json", "[1]"),
        "config.json holds a list",
        "config.json holds a list",
    ),
    "half a config": (
        put("config.json", '{"steps": 3'),
        "config.json is not JSON",
        "config.json is not JSON",
    ),
    "a key too few": (
        edited("config.json", lambda content: content.pop("seed")),
        "it lacks seed",
        "it lacks seed; use that version, or choose another --workdir",
    ),
    "a key too many": (
        edited("config.json", lambda content: content.update(stepz=1)),
        "it has stepz",
        "it has stepz, which is unknown here; use that version, or choose another --workdir",
    ),
    "text of a number": (
        edited("config.json", lambda content: content.update(seed="one")),
        "seed is 'one'",
        "seed: one -> 0",
    ),
    "a bad number": (
        edited("config.json", lambda content: content["optimizer"].update(grad_clip=-1)),
        "optimizer.grad_clip is -1",
        "optimizer.grad_clip: -1 -> ",
    ),
    "no checkpoints": (
        lambda run: shutil.rmtree(run / "checkpoints"),
        "has no checkpoint yet",
        "checkpoints is missing",
    ),
    "an empty checkpoint": (
        lambda run: None,
        "checkpoints/4 cannot be read",
        "checkpoints/4 cannot be read",
    ),
    "a file of checkpoints": (
        lambda run: (shutil.rmtree(run / "checkpoints"), put("checkpoints", "x")(run)),
        "checkpoints is not a folder",
        "checkpoints is not a folder",
    ),
    "a file as a checkpoint": (
        put("checkpoints/13", "x"),
        "checkpoints/13 is called like",
        "checkpoints/13 is called like",
    ),
}
"""What is done to a run's folder, and what is said of it to who reads it and to who goes on with
it."""


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("program", ["sample", "export"])
def test_run_folders(
    name: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (spoil, words, _) = a_run(tmp_path / "run"), RUNS[name]
    spoil(folder)

    def work() -> int:
        if program == "sample":
            return run_and_report_errors(
                lambda: sample.main(["--checkpoint", str(folder), "--prompt", "1+1="])
            )
        with Interrupt() as interrupt:
            return run_and_report_errors(
                lambda: export.main(["--checkpoint", str(folder), "--out", "out"], interrupt)
            )

    status, printed = ended(work, capsys)
    assert status == 2
    assert_one_line(printed, str(folder), words)
    assert not Path("out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNS if name != "no folder"])
def test_run_folders_that_are_resumed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (spoil, _, words) = a_run(tmp_path / "run"), RUNS[name]
    spoil(folder)
    before = (folder / "metrics.jsonl").read_bytes()
    status, printed = ended(lambda: trained(*QUICK, "--workdir", str(folder)), capsys)
    assert status == 2
    assert_one_line(printed, str(folder), words)
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("place", ["/proc/run", "file/run", "/dev/null"])
def test_folders_that_cannot_be_written(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    status, printed = ended(lambda: trained(*QUICK, "--workdir", place), capsys)
    assert status == 2
    assert_one_line(printed, place, "--workdir")
