"""How far a loop is, told in the terminal: a bar, or a plain line now and then."""

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
"""Between two lines of `Heartbeat`."""
_PLAIN_SECONDS = 10.0
_PLAIN_LINES = 20


class Screen(Console):
    """A console of rich that lets the program go on when nobody reads any more; rich's own ends
    it."""

    def on_broken_pipe(self) -> None:
        silence_stdout()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Writes what was printed meanwhile, as does every `print`; a full disk is survived as
        well."""
        with ignore_output_errors():
            super().__exit__(error_type, error, traceback)


class Progress:
    """Shows how far a loop is: a bar in a terminal, else a plain line now and then; processes other
    than 0 are silent.

    Plain lines come every twentieth of the loop, and at least every 10 s if there is an update.
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
        """Says that `step` of `total` are done, with numbers such as reward, acceptance_length,
        tokens_per_s; None is left out."""
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
        """Takes the bar down and gives the terminal back; may be called twice, and from any
        thread."""
        if self._bar is not None:
            self._bar.stop()

    def _format_remaining(self, step: int, current_time: float) -> list[str]:
        """Seconds left at the pace since the first update, which had to wait for the compiler."""
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
    """Says every ten seconds what is being done, and for how long so far."""

    def __init__(self, print_line: Callable[[str], object]) -> None:
        self._print_line = print_line
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
        """Says from now on that this is done; nothing of an empty text."""
        self._current = activity, time.monotonic()

    def print_line(self, message: str) -> None:
        """Says a line in place of what was begun."""
        self.start_activity("")
        self._print_line(message)

    def _print_periodically(self) -> None:
        while not self._stop_event.wait(HEARTBEAT_SECONDS):
            activity, start_time = self._current
            if activity:
                self._print_line(f"{activity}: {time.monotonic() - start_time:.0f} s so far")


def format_number(number: float | int) -> str:
    """Returns a number with three significant digits, and thousands in full; NaN as `none`."""
    if math.isnan(number):
        return "none"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
