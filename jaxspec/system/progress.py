"""Progress display of loops in the terminal."""

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from jaxspec.system.terminal import ignore_output_errors, silence_stdout

HEARTBEAT_SECONDS = 10.0
"""Seconds between two lines of `Heartbeat`."""
_PLAIN_SECONDS = 10.0
"""Seconds after which an update prints a plain line in any case."""
_PLAIN_LINES = 20
"""Number of plain lines that are spread evenly over a loop."""


class Screen(Console):
    """Console of rich that ignores errors of its output."""

    def on_broken_pipe(self) -> None:
        # The method of rich ends the program when a reader such as `head` has ended.
        silence_stdout()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Writes the buffered output, ignoring errors."""
        # Every `print` of rich enters and leaves the console once. The disk may be full.
        with ignore_output_errors():
            super().__exit__(error_type, error, traceback)


class Progress:
    """Shows the progress of a loop.

    Draws a bar in a terminal. Elsewhere it prints a line at each twentieth of the loop, and if the
    last line is 10 s old. Processes other than 0 are silent.
    """

    def __init__(
        self, title: str, total: int, process_index: int = 0, console: Console | None = None
    ) -> None:
        self._title = title
        self._total = total
        self._console = console or Screen(quiet=process_index != 0)
        self._bar: Bar | None = None
        self._first_update: tuple[int, float] | None = None
        self._last_line_time = -math.inf

    def __enter__(self) -> "Progress":
        if self._console.is_terminal and not self._console.quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
            )
            self._bar = Bar(*columns, console=self._console, refresh_per_second=2)
            self._task = self._bar.add_task(self._title, total=self._total, numbers="")
            self._bar.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def update(self, step: int, **numbers: float | int | None) -> None:
        """Shows that `step` of `total` steps are done.

        Args:
          step: number of steps done.
          **numbers: numbers to show, such as reward or tokens_per_s. None is left out.
        """
        current_time = time.monotonic()
        self._first_update = self._first_update or (step, current_time)
        number_texts = [
            f"{name.replace('_per_', '/')} {format_number(value)}"
            for name, value in numbers.items()
            if value is not None
        ]
        text = "  ".join(number_texts + self._format_remaining(step, current_time))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=text)
        elif (
            step == self._total
            or step % max(1, self._total // _PLAIN_LINES) == 0
            or current_time - self._last_line_time >= _PLAIN_SECONDS
        ):
            self.print_line(f"{self._title} {step}/{self._total}  {text}".rstrip())
            self._last_line_time = current_time

    def print_line(self, message: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(Text(message), soft_wrap=True)

    def stop(self) -> None:
        """Stops the bar and restores the terminal.

        May be called repeatedly and from any thread.
        """
        if self._bar is not None:
            self._bar.stop()

    def _format_remaining(self, step: int, current_time: float) -> list[str]:
        """Formats the estimated remaining time, if any."""
        # The pace counts from the first update on, since that one may wait for compilation.
        if self._first_update is None or step <= self._first_update[0] or step >= self._total:
            return []
        seconds = (
            (current_time - self._first_update[1])
            / (step - self._first_update[0])
            * (self._total - step)
        )
        return [
            (
                f"{int(seconds // 60)} min {int(seconds % 60):02d} s left"
                if seconds >= 60
                else f"{math.ceil(seconds)} s left"
            )
        ]


class Heartbeat:
    """Prints the current activity every ten seconds."""

    def __init__(self, print_line: Callable[[str], object]) -> None:
        self._print_line = print_line
        # One tuple, so that the thread never sees a new activity with an old start time.
        self._current = "", 0.0
        self._stop_event = threading.Event()
        self._thread = threading.Thread(
            target=self._print_periodically, name="waiting", daemon=True
        )

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_event.set()
        self._thread.join()

    def start_activity(self, activity: str) -> None:
        """Sets the current activity. An empty text stops the lines."""
        self._current = activity, time.monotonic()

    def print_line(self, message: str) -> None:
        """Ends the current activity and prints a line."""
        self.start_activity("")
        self._print_line(message)

    def _print_periodically(self) -> None:
        while not self._stop_event.wait(HEARTBEAT_SECONDS):
            activity, start_time = self._current
            if activity:
                self._print_line(f"{activity}: {time.monotonic() - start_time:.0f} s so far")


def format_number(number: float | int) -> str:
    """Formats a number for display.

    Below 1,000 it has three significant digits. A larger number is rounded to an integer. NaN
    becomes `none`.
    """
    if math.isnan(number):
        return "none"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
