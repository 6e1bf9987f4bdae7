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
from jaxspec.system.files import SaveError, atomic_replace
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

LinePrinter = Callable[[str], Any]
"""Shows a line to people."""


class CompileProgress:
    """Shows which program is compiled, for how long so far, and how long the last one took.

    A bar in a terminal, else a line now and then. Processes other than 0 are silent.
    """

    def __init__(self, title: str, file: Path, print_line: LinePrinter | None = None) -> None:
        """Seconds are kept in `file`. Lines go to `print_line`, if it is given."""
        self._title, self._file, self._print_line = title, file, print_line
        # what a program prints for others to read is on the standard output
        self._console = Screen(quiet=jax.process_index() != 0, stderr=True)
        self._stop_event = threading.Event()
        # The compiler does not return before it is done, so that only a thread can speak meanwhile.
        self._thread = threading.Thread(
            target=self._show_progress, name="compile progress", daemon=True
        )

    def __enter__(self) -> "CompileProgress":
        self._start_time = time.monotonic()
        if jax.process_index() == 0:
            self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Takes the bar down, and keeps the seconds of a program that took long."""
        seconds = self._elapsed_seconds()
        self._stop_event.set()
        if jax.process_index() != 0:
            return
        self._thread.join()
        # less is never shown, and a program from the cache must not count as compiled
        if error_type is None and seconds >= QUIET_SECONDS:
            with (
                contextlib.suppress(SaveError),
                atomic_replace(self._file, "", shared=True) as temporary_file,
            ):
                record = {"program": self._title, "seconds": round(seconds, 1)}
                temporary_file.write_text(json.dumps(record), encoding="utf-8")

    def _elapsed_seconds(self) -> float:
        return time.monotonic() - self._start_time

    def _show_progress(self) -> None:
        """Waits, and shows what there is to show until the program is there."""
        if self._stop_event.wait(QUIET_SECONDS):
            return
        previous_seconds = _load_previous_seconds(self._file)
        if self._print_line is None and self._console.is_terminal:
            self._show_bar(previous_seconds)
            return
        while True:
            line = f"compiling {self._title}: {self._describe_time(previous_seconds)}"
            if self._print_line is not None:
                self._print_line(line)
            else:
                self._console.print(Text(line), soft_wrap=True)
            if self._stop_event.wait(LINE_SECONDS):
                return

    def _show_bar(self, previous_seconds: float | None) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            TextColumn("{task.fields[numbers]}"),
        )
        # without a number to wait for, the bar only moves to and fro
        with Bar(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(f"compiling {self._title}", total=previous_seconds, numbers="")
            while not self._stop_event.wait(_BAR_SECONDS):
                bar.update(
                    task,
                    completed=self._elapsed_seconds(),
                    numbers=self._describe_time(previous_seconds),
                )

    def _describe_time(self, previous_seconds: float | None) -> str:
        comparison = (
            "for the first time here"
            if previous_seconds is None
            else f"{previous_seconds:.0f} s the last time"
        )
        return f"{self._elapsed_seconds():.0f} s so far, {comparison}"


def first_start_notice(has_accelerator: bool) -> str:
    """A line on what to expect of a first start; empty if an earlier one has kept programs."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)  # made at import
    if folder and Path(folder).is_dir() and any(Path(folder).iterdir()):
        return ""
    usual_time = (
        "1 to 3 minutes, up to 10 for the largest models,"
        if has_accelerator
        else "10 s to 2 minutes for small models"
    )
    return (
        "no program is in the compilation cache yet: learning, the loading of weights and"
        f" generation are compiled now, which usually takes {usual_time} on"
        f" {'an accelerator' if has_accelerator else 'a CPU'}; later starts find them in {folder}\n"
    )


def track_compilation(
    function: Callable,
    arguments: tuple[Any, ...],
    folder: Path,
    print_line: LinePrinter | None = None,
) -> CompileProgress:
    """Returns what shows the compiling of a function for some arguments.

    Seconds are kept in a folder, by the function, the devices, and about how many bytes the
    arguments have: programs of models of different sizes are different kinds.
    """
    leaves = jax.tree.leaves(arguments)
    byte_count = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    device_sets = [
        leaf.sharding.device_set for leaf in leaves if getattr(leaf, "sharding", None) is not None
    ]
    largest_set = max(device_sets, key=len, default=frozenset())
    device_kind = next(iter(largest_set)).device_kind if largest_set else "unknown"
    name = getattr(function, "__name__", "program").strip("<>_")
    label = f"{name} {len(largest_set)} {device_kind} {int(byte_count).bit_length()}"
    file = folder / f"{re.sub('[^A-Za-z0-9_]+', '-', label)}.json"
    return CompileProgress(_TITLES.get(name, name.replace("_", " ")), file, print_line)


def _load_previous_seconds(file: Path) -> float | None:
    """Seconds that a file holds. None: none that can be believed."""
    try:
        seconds = float(parse_json(file.read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
