"""What a run tells: one line of metrics a batch (JSON lines, TensorBoard), samples, progress in the
terminal, a closing table."""

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

from jaxspec.config.json_keys import shown
from jaxspec.config.settings import ConfigError, require
from jaxspec.terminal import heard_or_not, silence

_METRICS, _SAMPLES, _EVENTS = "metrics.jsonl", "samples.jsonl", "tensorboard"
_PHASES = ("data", "prepare", "generate", "reward", "train", "step")
# The classes of generated modules are made at import, out of the type checker's sight.
_Event: Any = vars(event_pb2)["Event"]
_SessionLog: Any = vars(event_pb2)["SessionLog"]
_Summary: Any = vars(summary_pb2)["Summary"]
_REWARD, _EVALUATION = "reward/mean", "eval/exact_match"
_FLUSH_SECONDS = 10.0
_PLAIN_SECONDS = 10.0
_PLAIN_LINES = 20


class MetricsWriter:
    """Appends metrics and samples to the files of a run; in processes other than 0 it does nothing.

    A line of JSON is in the file when the call returns; TensorBoard's events follow within seconds.
    Every method raises ConfigError if a file cannot be written.
    """

    def __init__(self, workdir: Path, process_index: int) -> None:
        self._workdir = Path(workdir)
        self._silent = process_index != 0
        self._events = _Events(self._workdir / _EVENTS)
        # A killed run may have left half a line, which would spoil the next one.
        self._cut(math.inf)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends one line, whose `step` is the x axis in TensorBoard; NaN and infinity are written
        as null."""
        if not self._silent:
            plain = _plain(line)
            _dump(self._workdir / _METRICS, "a", [plain])
            self._events.write(
                plain["step"],
                {
                    name: float(value)
                    for name, value in plain.items()
                    if isinstance(value, int | float)
                },
            )

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Appends one line a sample, with its step."""
        if not self._silent:
            _dump(
                self._workdir / _SAMPLES,
                "a",
                ({"step": step, **_plain(sample)} for sample in samples),
            )

    def cut_back(self, step: int) -> None:
        """Drops the lines of `step` and later, which a resumed run writes again."""
        self._cut(step)
        self._events.purge = step

    def close(self) -> None:
        """Completes TensorBoard's events."""
        self._events.close()

    def _cut(self, step: float | int) -> None:
        if not self._silent:
            _cut(self._workdir / _METRICS, step)
            _cut(self._workdir / _SAMPLES, step)


class _Events:
    """TensorBoard's events, written in the calling thread: SummaryWriter has a thread whose queue
    blocks for good once the disk is full."""

    def __init__(self, folder: Path) -> None:
        self.purge: int | None = None
        """Tell TensorBoard, before the next event, to hide older ones from this step on."""
        self._folder = folder
        self._writer: EventsWriter | None = None
        self._flushed = -math.inf

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        with _writing(self._folder):
            if self._writer is None:
                self._folder.mkdir(exist_ok=True)
                self._writer = EventsWriter(str(self._folder / "events"))
            if self.purge is not None:
                start = _SessionLog(status=_SessionLog.START)
                self._writer.write_event(
                    _Event(wall_time=time.time(), step=self.purge, session_log=start)
                )
                self.purge = None
            values = [
                _Summary.Value(tag=name, simple_value=value)
                for name, value in numbers.items()
                if name != "step"
            ]
            self._writer.write_event(
                _Event(wall_time=time.time(), step=step, summary=_Summary(value=values))
            )
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with _writing(self._folder):
                writer.close()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as reason:
        raise ConfigError(
            f"{path} cannot be written: {reason.strerror}; free some space and run the same command"
            " again"
        ) from reason


def _plain(value: Any) -> Any:
    """Turns arrays and NumPy numbers into JSON's own types, and NaN and infinity into None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _dump(path: Path, mode: Literal["a", "w"], lines: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    with _writing(path), path.open(mode, encoding="utf-8") as file:
        file.write(text)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as reason:
        raise ConfigError(
            f"{path} cannot be read: {reason.strerror}; move it away, or name another folder"
        ) from reason


def _lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a file; a last one that lacks its end, and not only the newline, was torn
    by a kill."""
    if not path.exists():
        return []
    *complete, last = _content(path).split(b"\n")
    lines = []
    for number, text in enumerate([*complete, last] if last.endswith(b"}") else complete, start=1):
        where, remedy = f"{path}, line {number}", "mend or remove that line"
        try:
            line = json.loads(text, parse_constant=_no_number)
            # as it will be written again
            json.dumps(line, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as reason:
            raise ConfigError(f"{where} is not JSON ({reason}); {remedy}") from reason
        require(
            isinstance(line, dict) and type(line.get("step")) is int,
            f"{where} has no `step` that is a whole number; {remedy}",
        )
        lines.append(line)
    return lines


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _cut(path: Path, step: float | int) -> None:
    """Keeps the complete lines before `step`; the file is replaced at once or not at all."""
    kept = [line for line in _lines(path) if line["step"] < step]
    if path.exists():
        shorter = path.with_suffix(".cut")
        _dump(shorter, "w", kept)
        with _writing(path):
            shorter.replace(path)


def read(workdir: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics, oldest first; raises ConfigError for a line, also of
    its samples, that is damaged."""
    _lines(Path(workdir) / _SAMPLES)
    lines = _lines(Path(workdir) / _METRICS)
    for number, line in enumerate(lines, start=1):
        wrong = [
            name
            for name, value in line.items()
            if value is not None and type(value) not in (int, float)
        ]
        where = f"{Path(workdir) / _METRICS}, line {number}"
        require(
            not wrong,
            f"{where} has {shown(', '.join(wrong))} that is no number; mend or remove that line",
        )
    return lines


def missing(lines: Sequence[Mapping[str, Any]], batches: int) -> str:
    """Which of a run's first `batches` batches have no line of metrics; empty where all have
    one."""
    gone = sorted(set(range(batches)) - {line["step"] for line in lines})
    few = ", ".join(map(str, gone[:5])) + (f" and {len(gone) - 5} more" if len(gone) > 5 else "")
    return (
        f"metrics.jsonl has no line for batch {few}, which were made: the closing table is of the"
        " others"
        if gone
        else ""
    )


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


def token_rates(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the tokens a second of a batch's complete line: over the whole step, and over
    generation where that is timed by itself."""
    over = {"rollout/tokens_per_s": "time/step", "rollout/generation_tokens_per_s": "time/generate"}
    return {
        name: line["rollout/tokens"] / line[seconds]
        for name, seconds in over.items()
        if seconds in line
    }


def short(number: float | int) -> str:
    """Returns a number with three significant digits, and thousands in full; NaN as `none`."""
    if math.isnan(number):
        return "none"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def closing_table(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, float | int]) -> Table:
    """Returns what a run achieved, for rich to print; rows whose numbers were not measured are left
    out.

    A batch or an evaluation that has no number counts, as `none`.

    `lines` are those of `read`. `summary` compares plain and speculative decoding of the same
    `rows`: target passes a sequence (`plain/passes`, `spec/passes`), seconds (`plain/seconds`,
    `spec/seconds`) and what a round costs in plain steps (`round_cost`).
    """
    table = Table(
        box=box.SIMPLE, show_header=False, title=f"{len(lines)} batches", title_justify="left"
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def column(name: str) -> list[float | int]:
        return [line[name] for line in lines if line.get(name) is not None]

    for title, text in _from_first_to_last(lines):
        table.add_row(title, text)
    rates = {
        "the whole step": "rollout/tokens_per_s",
        "generation alone": "rollout/generation_tokens_per_s",
    }
    medians = {
        over: sorted(values)[len(values) // 2]
        for over, name in rates.items()
        if (values := column(name))
    }
    for over, rate in medians.items():
        table.add_row("tokens/s", f"{short(rate)} (over {over}, median batch)")
    if phases := {phase: sum(values) for phase in _PHASES if (values := column(f"time/{phase}"))}:
        table.add_row(
            "seconds by phase",
            ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items()),
        )
    for title, unit in (
        ("target passes a sequence", "passes"),
        (f"seconds for {summary.get('rows', 0):.0f} rows", "seconds"),
    ):
        plain, speculative = summary.get(f"plain/{unit}"), summary.get(f"spec/{unit}")
        if plain and speculative:
            gain = (
                f"speed-up {plain / speculative:.2f}"
                if unit == "seconds"
                else f"{plain / speculative:.2f} times fewer"
            )
            table.add_row(title, f"plain {short(plain)}, speculative {short(speculative)}: {gain}")
    if cost := summary.get("round_cost"):
        table.add_row("round_cost", f"{short(cost)} (a round over a plain step, in seconds)")
    return table


def _from_first_to_last(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Rows of the table: how rewards, acceptance and the evaluation went, and how many rows have no
    part in that."""
    for title, name in (("reward", _REWARD), ("acceptance_length", "rollout/acceptance_length")):
        if values := [line[name] for line in lines if name in line]:
            tenth = max(1, len(values) // 10)
            ends = f"first and last {tenth} of {len(values)}{_lacking(values)}"
            yield title, f"{_mean(values[:tenth])} -> {_mean(values[-tenth:])} ({ends})"
    if any(failed := [line.get("status/failed", 0) for line in lines]):
        rows, batches = sum(map(_ended, lines)), sum(map(bool, failed))
        yield (
            "failed rows",
            (
                f"{sum(failed):,.0f} of {rows:,.0f}, in {batches} of {len(lines)} batches (logits"
                " that are not finite)"
            ),
        )
    if values := [line[_EVALUATION] for line in lines if _EVALUATION in line]:
        lacking = f" ({len(values)} evaluations{_lacking(values)})" if _lacking(values) else ""
        yield "held-out exact match", f"{_mean(values[:1])} -> {_mean(values[-1:])}{lacking}"


def _ended(line: Mapping[str, Any]) -> float | int:
    """Rows of a batch, however they ended."""
    return sum(line.get(f"status/{name}", 0) for name in ("eos", "length", "failed"))


def _mean(values: Sequence[float | None]) -> str:
    """Of those that are numbers."""
    numbers = [value for value in values if value is not None]
    return f"{sum(numbers) / len(numbers):.2f}" if numbers else "none"


def _lacking(values: Sequence[float | None]) -> str:
    """How many are no numbers, to be put behind their count."""
    missing = sum(value is None for value in values)
    return f", {missing} without a number" if missing else ""


def without_result(lines: Sequence[Mapping[str, Any]]) -> str:
    """Why a run that made all its batches has no result: its last batch or its last evaluation has
    no number; empty where both have one."""
    evaluations = [line for line in lines if _EVALUATION in line]
    found = []
    if lines and lines[-1].get(_REWARD, 0) is None:
        failed = (
            f"{lines[-1].get('status/failed', 0):.0f} of its {_ended(lines[-1]):.0f} rows failed"
            " (logits that are not finite)"
        )
        found.append(f"the last batch, {lines[-1]['step']}, has no reward: {failed}")
    if evaluations and evaluations[-1][_EVALUATION] is None:
        found.append(
            f"the last evaluation, after batch {evaluations[-1]['step']}, has no number: every"
            " answer failed"
        )
    remedy = (
        "look at loss/policy and grad_norm/policy in metrics.jsonl; a lower --grpo.learning_rate is"
        " the usual remedy"
    )
    return f"{' and '.join(found)}; {remedy}" if found else ""
