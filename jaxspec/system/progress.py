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

from jaxspec.system.terminal import heard_or_not, silence

WAITING_SECONDS = 10.0
"""Between two lines of `Waiting`."""
_PLAIN_SECONDS = 10.0
_PLAIN_LINES = 20


class Screen(Console):
    """A console of rich that lets the program go on when nobody reads any more; rich's own ends
    it."""

    def on_broken_pipe(self) -> None:
        silence()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Writes what was printed meanwhile, as does every `print`; a full disk is survived as
        well."""
        with heard_or_not():
            super().__exit__(kind, error, trace)


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
        self._first: tuple[int, float] | None = None
        self._shown = -math.inf

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
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def update(self, step: int, **numbers: float | int | None) -> None:
        """Says that `step` of `total` are done, with numbers such as reward, acceptance_length,
        tokens_per_s; None is left out."""
        now = time.monotonic()
        self._first = self._first or (step, now)
        shown = [
            f"{name.replace('_per_', '/')} {short(value)}"
            for name, value in numbers.items()
            if value is not None
        ]
        text = "  ".join(shown + self._left(step, now))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=text)
        elif (
            step == self._total
            or step % max(1, self._total // _PLAIN_LINES) == 0
            or now - self._shown >= _PLAIN_SECONDS
        ):
            self.say(f"{self._title} {step}/{self._total}  {text}".rstrip())
            self._shown = now

    def say(self, message: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(Text(message), soft_wrap=True)

    def stop(self) -> None:
        """Takes the bar down and gives the terminal back; may be called twice, and from any
        thread."""
        if self._bar is not None:
            self._bar.stop()

    def _left(self, step: int, now: float) -> list[str]:
        """Seconds left at the pace since the first update, which had to wait for the compiler."""
        if self._first is None or step <= self._first[0] or step >= self._total:
            return []
        seconds = (now - self._first[1]) / (step - self._first[0]) * (self._total - step)
        return [
            (
                f"{int(seconds // 60)} min {int(seconds % 60):02d} s left"
                if seconds >= 60
                else f"{math.ceil(seconds)} s left"
            )
        ]


class Waiting:
    """Says every ten seconds what is being done, and for how long so far."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._now = "", 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="waiting", daemon=True)

    def __enter__(self) -> "Waiting":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self, doing: str) -> None:
        """Says from now on that this is done; nothing of an empty text."""
        self._now = doing, time.monotonic()

    def say(self, line: str) -> None:
        """Says a line in place of what was begun."""
        self.begin("")
        self._tell(line)

    def _watch(self) -> None:
        while not self._ended.wait(WAITING_SECONDS):
            doing, began = self._now
            if doing:
                self._tell(f"{doing}: {time.monotonic() - began:.0f} s so far")


def short(number: float | int) -> str:
    """Returns a number with three significant digits, and thousands in full; NaN as `none`."""
    if math.isnan(number):
        return "none"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
