"""What a run writes about itself: one line of metrics a batch (JSON lines and TensorBoard), and
samples of its responses."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Literal

import numpy as np

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import shown


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """As if a module were not installed, unless it is imported already."""
    modules: dict[str, Any] = sys.modules
    hidden = modules.setdefault(name, None) is None
    try:
        yield
    finally:
        if hidden:
            del modules[name]


# tensorboardX imports torch wherever it finds it, which takes seconds and its memory, for what is
# not used here.
with _without("torch"):
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2, summary_pb2

_METRICS, _SAMPLES, _EVENTS = "metrics.jsonl", "samples.jsonl", "tensorboard"
# The classes of generated modules are made at import, out of the type checker's sight.
_Event: Any = vars(event_pb2)["Event"]
_SessionLog: Any = vars(event_pb2)["SessionLog"]
_Summary: Any = vars(summary_pb2)["Summary"]
_FLUSH_SECONDS = 10.0


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
            written = plain(line)
            append_lines(self._workdir / _METRICS, [written])
            self._events.write(
                written["step"],
                {
                    name: float(value)
                    for name, value in written.items()
                    if isinstance(value, int | float)
                },
            )

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Appends one line a sample, with its step."""
        if not self._silent:
            append_lines(self._workdir / _SAMPLES, ({"step": step, **sample} for sample in samples))

    def cut_back(self, step: int) -> None:
        """Drops the lines of `step` and later, which a resumed run writes again."""
        self._cut(step)
        self._events.purge = step

    def close(self) -> None:
        """Completes TensorBoard's events."""
        self._events.close()

    def _cut(self, step: float | int) -> None:
        if not self._silent:
            cut_lines(self._workdir / _METRICS, step)
            cut_lines(self._workdir / _SAMPLES, step)


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


def plain(value: Any) -> Any:
    """Turns arrays and NumPy numbers into JSON's own types, and NaN and infinity into None."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Appends lines of JSON to a file; NaN and infinity are written as null."""
    _dump(path, "a", map(plain, lines))


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


def read_lines(path: Path) -> list[dict[str, Any]]:
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


def cut_lines(path: Path, step: float | int) -> None:
    """Keeps the complete lines before `step`; the file is replaced at once or not at all."""
    kept = [line for line in read_lines(path) if line["step"] < step]
    if path.exists():
        shorter = path.with_suffix(".cut")
        _dump(shorter, "w", kept)
        with _writing(path):
            shorter.replace(path)


def read(workdir: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics, oldest first; raises ConfigError for a line, also of
    its samples, that is damaged."""
    read_lines(Path(workdir) / _SAMPLES)
    lines = read_lines(Path(workdir) / _METRICS)
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


def over_rollouts(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of a batch that several rollouts fill, each over the rollouts that have it.

    Seconds, tokens and counts of rows are added up. Of shortest and longest responses the extremes
    are taken, of everything else means.
    """
    merged = {}
    for name in {name: None for line in lines for name in line}:
        found = [value for line in lines if not math.isnan(value := line.get(name, math.nan))]
        summed = name == "rollout/tokens" or name.startswith(("time/", "status/"))
        extremes = {"rollout/length_min": min, "rollout/length_max": max}
        merge = sum if summed else extremes.get(name, fmean)
        merged[name] = merge(found) if found else math.nan
    return merged | {"step": lines[0]["step"]}


def standard_deviation(values: np.ndarray) -> float:
    """Population standard deviation: exactly 0 if all values are equal, NaN if there are none."""
    if not values.size:
        return math.nan
    # The mean of equal values is rounded, so that they would differ from it.
    return float(values.std(dtype=np.float64)) if np.ptp(values) else 0.0


def headline(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a batch's complete line that the terminal shows: what speaks of its
    result, and failed rows and skipped updates where there are any."""
    shown = {
        "reward": "reward/mean",
        "acceptance_length": "rollout/acceptance_length",
        "tokens_per_s": "rollout/tokens_per_s",
    }
    faults = {
        "failed": "status/failed",
        "skipped_policy": "skipped/policy",
        "skipped_draft": "skipped/draft",
    }
    numbers = {name: line[key] for name, key in shown.items()}
    return numbers | {name: line[key] for name, key in faults.items() if line.get(key)}


def token_rates(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the tokens a second of a batch's complete line: over the whole step, and over
    generation where that is timed by itself."""
    over = {"rollout/tokens_per_s": "time/step", "rollout/generation_tokens_per_s": "time/generate"}
    return {
        name: line["rollout/tokens"] / line[seconds]
        for name, seconds in over.items()
        if seconds in line
    }
