"""While a program compiles for long, people see which one, for how long, and how long it took the
last time."""

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.host.programs import compile_ahead
from jaxspec.system import compiling
from jaxspec.system.compiling import CompileProgress, track_compilation
from jaxspec.system.progress import Screen


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compiling, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(compiling, "LINE_SECONDS", 0.25)
    return tmp_path / "compile_seconds" / "kind.json"


def compile_for(seconds: float, file: Path, tell: Callable[[str], Any] | None = None) -> None:
    with CompileProgress("the step", file, tell):
        time.sleep(seconds)


def test_what_takes_long_is_told_now_and_then(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_for(0.5, file)
    first = capsys.readouterr().err.splitlines()
    assert first == ["compiling the step: 0 s so far, for the first time here"] * 2
    kept = json.loads(file.read_text())
    assert kept["program"] == "the step"
    assert 0.5 <= kept["seconds"] < 5
    file.write_text(json.dumps(kept | {"seconds": 94.6}))
    compile_for(0.2, file)
    assert capsys.readouterr().err == "compiling the step: 0 s so far, 95 s the last time\n"


def test_what_is_soon_there_is_not_spoken_of(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_for(0.0, file)
    assert capsys.readouterr() == ("", "")
    assert not file.exists()


def test_what_fails_has_taken_no_time(file: Path) -> None:
    def fail(_: str) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError), CompileProgress("the step", file):
        fail(str(time.sleep(0.2)))
    assert not file.exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"seconds": "x"}', '{"seconds": -1}'])
def test_damaged_seconds_count_as_none(
    file: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.parent.mkdir()
    file.write_text(text)
    compile_for(0.2, file)
    assert "for the first time here" in capsys.readouterr().err


def test_seconds_that_cannot_be_kept_stop_nothing(file: Path) -> None:
    file.parent.write_text("no folder")
    compile_for(0.2, file)


def test_other_processes_are_silent(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    compile_for(0.2, file)
    assert capsys.readouterr() == ("", "")
    assert not file.exists()


def test_lines_go_where_they_are_to_go(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    compile_for(0.2, file, lines.append)
    assert lines == ["compiling the step: 0 s so far, for the first time here"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar_that_goes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(
        compiling, "Screen", lambda **_: Screen(file=shown, force_terminal=True, width=100)
    )
    compile_for(1.0, file)
    text = shown.getvalue()
    assert "compiling the step" in text
    assert "s so far, for the first time here" in text
    assert text.rstrip().endswith("\x1b[2K")  # the line is cleared


def test_programs_are_told_apart_by_function_devices_and_size(tmp_path: Path) -> None:
    def files(function: Callable, size: int) -> str:
        given = jax.ShapeDtypeStruct((size,), jnp.float32)
        return track_compilation(function, (given,), tmp_path)._file.name

    def learn() -> None: ...

    def sync() -> None: ...

    assert files(learn, 1000) == files(learn, 1001) == "learn-0-unknown-12.json"
    assert len({files(learn, 1000), files(learn, 4000), files(sync, 1000)}) == 3


def test_programs_that_are_compiled_ahead_are_told(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXSPEC_CACHE", str(file.parent.parent))
    monkeypatch.setattr(compiling, "QUIET_SECONDS", 0.0)
    lines: list[str] = []

    def advance(value: jax.Array) -> jax.Array:
        return jnp.sin(value) + 1

    given = jax.device_put(jnp.ones((7,)), jax.devices()[0])
    program, _ = compile_ahead(advance, given, print_line=lines.append)
    assert program(given).shape == (7,)
    assert lines[:1] == ["compiling rounds: 0 s so far, for the first time here"]
    assert (file.parent / "advance-1-cpu-5.json").exists()


@pytest.mark.parametrize(("accelerated", "usual"), [(True, "minutes"), (False, "10 s")])
def test_a_first_start_is_told_what_it_takes(accelerated: bool, usual: str, tmp_path: Path) -> None:
    before = getattr(jax.config, "jax_compilation_cache_dir", None)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "compiled"))
    try:
        line = compiling.first_start_notice(accelerated)
        assert line.endswith(f"{tmp_path}/compiled\n")
        assert "learning, the loading of weights and generation are compiled now" in line
        assert f"usually takes {usual}" in line or f"1 to 3 {usual}" in line
        (tmp_path / "compiled").mkdir()
        (tmp_path / "compiled" / "jit_train_step-cache").write_bytes(b"a program")
        assert compiling.first_start_notice(accelerated) == ""
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
