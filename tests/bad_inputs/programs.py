"""Programs run to their end in one process, with a model so small that what is wrong is met within
a second; and files that are spoilt for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxspec import train
from jaxspec.host.job import run_program
from tests.conftest import tiny_model

MODEL = tiny_model(vocab=24, dtype="float32")
SIZES = {"vocab": 24, "layers": 1, "embed": 8, "heads": 2, "kv_heads": 1, "head_size": 4, "ffn": 8}
TINY = [word for name, size in SIZES.items() for word in (f"--model.{name}", str(size))]
ALONE = "--sft.steps 0 --rollout.draft.kind none --rollout.engine.no_tail".split()  # noqa: SIM905
QUICK = [*TINY, *ALONE]


def ended(work: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Status of a program, and what it printed; what tyro or argparse refuse ends it."""
    try:
        status = work()
    except SystemExit as stop:
        status = int(stop.code or 0)
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def trained(*argv: str, config: str = "rl_think.py") -> int:
    return run_program("train", "Trains.", train.main, ["--config", config, *argv])


def assert_one_line(printed: str, *words: str) -> None:
    last = printed.splitlines()[-1]
    assert "Traceback" not in printed
    assert last.startswith("error: "), printed
    assert [word for word in words if word not in last] == []


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Changes what a JSON file of a folder holds."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def put(name: str, content: str | bytes) -> Callable[[Path], Any]:
    """Writes a file of a folder anew."""
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
