"""Progress fits terminals and files."""

import io
import time

import pytest
from rich.console import Console

from jaxspec.system import progress
from jaxspec.system.progress import Heartbeat, Progress


def test_plain_progress_prints_some_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("RL", 100) as progress:
        progress.print_line("resuming [not markup] from step 3 " + "x" * 100)
        for step in range(1, 101):
            progress.update(
                step, reward=0.51234, acceptance_length=3.2, tokens_per_s=12345.6, entropy=None
            )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "resuming [not markup] from step 3 " + "x" * 100
    assert lines[1].startswith("RL 1/100  reward 0.512  acceptance_length 3.2  tokens/s 12,346")
    assert lines[2].startswith("RL 5/100")
    assert lines[2].endswith(" s left")
    assert lines[-1] == "RL 100/100  reward 0.512  acceptance_length 3.2  tokens/s 12,346"
    assert len(lines) == 22


def test_plain_progress_prints_after_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 4000, 4))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with Progress("draft", 1000) as progress:
        for step in range(1, 11):
            progress.update(step)
    assert capsys.readouterr().out.splitlines() == [
        "draft 1/1000",
        "draft 4/1000  66 min 24 s left",
        "draft 7/1000  66 min 12 s left",
        "draft 10/1000  66 min 00 s left",
    ]


def test_terminal_shows_a_bar() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with Progress("RL", 60, console=console) as progress:
        progress.update(30, reward=0.5, tokens_per_s=1234.0)
        progress.print_line("saved")
    progress.stop()
    text = screen.getvalue()
    assert "30/60" in text
    assert "tokens/s 1,234" in text
    assert "saved" in text
    assert text.rstrip().endswith("\x1b[?25h")


def test_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("RL", 2, process_index=1) as progress:
        progress.print_line("hello")
        progress.update(2, reward=1.0)
    assert capsys.readouterr().out == ""


def test_what_takes_long_is_said_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.05)
    told: list[str] = []
    with Heartbeat(told.append) as waiting:
        waiting.start_activity("reading the problems")
        while not told:
            time.sleep(0.01)
        waiting.print_line("compiling")
        said = len(told)
        time.sleep(0.2)
        assert len(told) == said
    assert {*told} == {"reading the problems: 0 s so far", "compiling"}


def test_nothing_is_said_of_what_is_soon_done() -> None:
    told: list[str] = []
    with Heartbeat(told.append) as waiting:
        waiting.start_activity("reading the problems")
    assert told == []
