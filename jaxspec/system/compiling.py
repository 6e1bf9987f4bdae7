"""Progress display for slow compilations."""

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
from jaxspec.system.terminal import LinePrinter

QUIET_SECONDS = 10.0
"""Seconds of compilation before anything is shown."""
LINE_SECONDS = 30.0
"""Seconds between two lines if there is no terminal."""
_BAR_SECONDS = 0.5
"""Seconds between two updates of the bar."""
_TITLES = {
    "train_step": "the step",
    "learn": "learning",
    "sync": "the loading of weights",
    "generate": "generation",
    "begin": "prefill",
    "advance": "rounds",
    "measure_rollout": "metrics",
}
"""Names of compiled functions for users."""


class CompileProgress:
    """Shows the elapsed time of a compilation.

    Draws a bar in a terminal, and prints lines elsewhere. Both show the time of the previous
    compilation. Processes other than 0 are silent.
    """

    def __init__(self, title: str, file: Path, print_line: LinePrinter | None = None) -> None:
        """Prepares the display.

        Args:
          title: name of the program.
          file: file that stores the seconds of the last compilation.
          print_line: receives lines instead of the terminal, if given.
        """
        self._title, self._file, self._print_line = title, file, print_line
        # Standard output is for the results of a program.
        self._console = Screen(quiet=jax.process_index() != 0, stderr=True)
        self._stop_event = threading.Event()
        # The compiler blocks the calling thread until it is done.
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
        """Removes the bar and stores the seconds."""
        seconds = self._elapsed_seconds()
        self._stop_event.set()
        if jax.process_index() != 0:
            return
        self._thread.join()
        # Shorter times are never shown. A program from the compilation cache takes less, and must
        # not replace the time of a real compilation.
        if error_type is None and seconds >= QUIET_SECONDS:
            # The time is only informative, so a failure to store it is ignored.
            with (
                contextlib.suppress(SaveError),
                atomic_replace(self._file, "", shared=True) as temporary_file,
            ):
                record = {"program": self._title, "seconds": round(seconds, 1)}
                temporary_file.write_text(json.dumps(record), encoding="utf-8")

    def _elapsed_seconds(self) -> float:
        return time.monotonic() - self._start_time

    def _show_progress(self) -> None:
        """Shows progress until the program is compiled."""
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
        # Without a previous time there is no total, and rich shows an indeterminate bar.
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
    """Returns a notice about the first compilation.

    It is "" if the compilation cache has programs.
    """
    # The type checker does not see options of `jax.config`, which are created at import.
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
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
    """Returns a progress display for compiling a function.

    Seconds are stored in `folder`, by function, devices, and approximate bytes of the arguments.

    Args:
      function: function to compile.
      arguments: its arguments, or their shapes.
      folder: folder of stored seconds.
      print_line: receives lines instead of the terminal, if given.
    """
    leaves = jax.tree.leaves(arguments)
    byte_count = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    device_sets = [
        leaf.sharding.device_set for leaf in leaves if getattr(leaf, "sharding", None) is not None
    ]
    largest_set = max(device_sets, key=len, default=frozenset())
    device_kind = next(iter(largest_set)).device_kind if largest_set else "unknown"
    name = getattr(function, "__name__", "program").strip("<>_")
    # The power of two of the bytes distinguishes models of different sizes, but not small changes.
    label = f"{name} {len(largest_set)} {device_kind} {int(byte_count).bit_length()}"
    file = folder / f"{re.sub('[^A-Za-z0-9_]+', '-', label)}.json"
    return CompileProgress(_TITLES.get(name, name.replace("_", " ")), file, print_line)


def _load_previous_seconds(file: Path) -> float | None:
    """Reads the seconds of the last compilation. Returns None if absent or invalid."""
    try:
        seconds = float(parse_json(file.read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
