"""Shows that a program is being compiled, once that takes long."""

import contextlib
import json
import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from jaxspec.inputs.json_keys import parse_json
from jaxspec.system.files import SaveError, replacing
from jaxspec.system.progress import Screen

QUIET_SECONDS = 10.0
"""A program that is there by then is not spoken of."""
LINE_SECONDS = 30.0
"""Between two lines where there is no terminal."""
_BAR_SECONDS = 0.5
_TITLES = {
    "train_step": "the step",
    "learn": "learning",
    "sync": "the loading of weights",
    "generate": "generation",
    "begin": "prefill",
    "advance": "rounds",
    "to_the_end": "rounds",
    "one_round": "a round",
    "measure": "metrics",
}
"""What people call functions."""

Tell = Callable[[str], Any]
"""Shows a line to people."""


class CompileProgress:
    """Shows which program is compiled, for how long so far, and how long the last one took.

    A bar in a terminal, else a line now and then. Processes other than 0 are silent.
    """

    def __init__(self, title: str, file: Path, tell: Tell | None = None) -> None:
        """Seconds are kept in `file`. Lines go to `tell`, if it is given."""
        self._title, self._file, self._tell = title, file, tell
        # what a program prints for others to read is on the standard output
        self._console = Screen(quiet=jax.process_index() != 0, stderr=True)
        self._ended = threading.Event()
        # The compiler does not return before it is done, so that only a thread can speak meanwhile.
        self._thread = threading.Thread(target=self._watch, name="compile progress", daemon=True)

    def __enter__(self) -> "CompileProgress":
        self._began = time.monotonic()
        if jax.process_index() == 0:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Takes the bar down, and keeps the seconds of a program that took long."""
        seconds = self._seconds()
        self._ended.set()
        if jax.process_index() != 0:
            return
        self._thread.join()
        # less is never shown, and a program from the cache must not count as compiled
        if kind is None and seconds >= QUIET_SECONDS:
            with (
                contextlib.suppress(SaveError),
                replacing(self._file, "", shared=True) as fresh,
            ):
                kept = {"program": self._title, "seconds": round(seconds, 1)}
                fresh.write_text(json.dumps(kept), encoding="utf-8")

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _watch(self) -> None:
        """Waits, and shows what there is to show until the program is there."""
        if self._ended.wait(QUIET_SECONDS):
            return
        usual = _kept_seconds(self._file)
        if self._tell is None and self._console.is_terminal:
            self._show_bar(usual)
            return
        while True:
            line = f"compiling {self._title}: {self._told(usual)}"
            if self._tell is not None:
                self._tell(line)
            else:
                self._console.print(Text(line), soft_wrap=True)
            if self._ended.wait(LINE_SECONDS):
                return

    def _show_bar(self, usual: float | None) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            TextColumn("{task.fields[numbers]}"),
        )
        # without a number to wait for, the bar only moves to and fro
        with Bar(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(f"compiling {self._title}", total=usual, numbers="")
            while not self._ended.wait(_BAR_SECONDS):
                bar.update(task, completed=self._seconds(), numbers=self._told(usual))

    def _told(self, usual: float | None) -> str:
        last = "for the first time here" if usual is None else f"{usual:.0f} s the last time"
        return f"{self._seconds():.0f} s so far, {last}"


def before_the_first(accelerated: bool) -> str:
    """A line on what to expect of a first start; empty if an earlier one has kept programs."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)  # made at import
    if folder and Path(folder).is_dir() and any(Path(folder).iterdir()):
        return ""
    usual = (
        "1 to 3 minutes, up to 10 for the largest models,"
        if accelerated
        else "10 s to 2 minutes for small models"
    )
    return (
        "no program is in the compilation cache yet: learning, the loading of weights and"
        f" generation are compiled now, which usually takes {usual} on"
        f" {'an accelerator' if accelerated else 'a CPU'}; later starts find them in {folder}\n"
    )


def compile_progress(
    function: Callable, arguments: tuple[Any, ...], folder: Path, tell: Tell | None = None
) -> CompileProgress:
    """Returns what shows the compiling of a function for some arguments.

    Seconds are kept in a folder, by the function, the devices, and about how many bytes the
    arguments have: programs of models of different sizes are different kinds.
    """
    leaves = jax.tree.leaves(arguments)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    devices = [
        leaf.sharding.device_set for leaf in leaves if getattr(leaf, "sharding", None) is not None
    ]
    most = max(devices, key=len, default=frozenset())
    kind = next(iter(most)).device_kind if most else "unknown"
    name = getattr(function, "__name__", "program").strip("<>_")
    words = f"{name} {len(most)} {kind} {int(size).bit_length()}"
    file = folder / f"{re.sub('[^A-Za-z0-9_]+', '-', words)}.json"
    return CompileProgress(_TITLES.get(name, name.replace("_", " ")), file, tell)


def _kept_seconds(file: Path) -> float | None:
    """Seconds that a file holds. None: none that can be believed."""
    try:
        seconds = float(parse_json(file.read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
