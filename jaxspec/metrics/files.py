"""Metrics and samples written by a run."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.inputs.json_keys import format_value


@contextlib.contextmanager
def _hide_module(name: str) -> Iterator[None]:
    """Hides a module that is not imported yet."""
    modules: dict[str, Any] = sys.modules
    # Python raises ImportError for a module whose entry is None.
    is_hidden = modules.setdefault(name, None) is None
    try:
        yield
    finally:
        if is_hidden:
            del modules[name]


# tensorboardX imports torch if it is installed, which takes seconds and memory. Only functions that
# are not used here need it.
with _hide_module("torch"):
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2, summary_pb2

_METRICS, _SAMPLES, _EVENTS = "metrics.jsonl", "samples.jsonl", "tensorboard"
# The classes of generated modules are created at import, out of the type checker's sight.
_Event: Any = vars(event_pb2)["Event"]
_SessionLog: Any = vars(event_pb2)["SessionLog"]
_Summary: Any = vars(summary_pb2)["Summary"]
_FLUSH_SECONDS = 10.0
"""Seconds between two flushes of TensorBoard events."""


class MetricsWriter:
    """Appends metrics and samples to the files of a run.

    JSON lines are in the file when a call returns. TensorBoard events follow within seconds.
    Processes other than 0 write nothing.

    Raises:
      ConfigError: a file cannot be written or has a damaged line. All methods may raise it.
    """

    def __init__(self, workdir: Path, process_index: int) -> None:
        self.folder = Path(workdir)
        self._silent = process_index != 0
        self._events = _EventWriter(self.folder / _EVENTS)
        # A killed run may have left half a line, to which the next line would be appended.
        self._truncate_files(math.inf)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Appends one line of metrics.

        Its `step` is the x axis in TensorBoard. NaN and infinity are written as null.
        """
        if not self._silent:
            json_record = to_json_value(record)
            append_records(self.folder / _METRICS, [json_record])
            self._events.write_numbers(
                json_record["step"],
                {
                    name: float(value)
                    for name, value in json_record.items()
                    if isinstance(value, int | float)
                },
            )

    def write_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Appends one line per sample, with its step."""
        if not self._silent:
            append_records(self.folder / _SAMPLES, ({"step": step, **sample} for sample in samples))

    def truncate_from(self, step: int) -> None:
        """Removes the lines of `step` and later.

        A resumed run writes them again.
        """
        self._truncate_files(step)
        # TensorBoard's files are only appended to, so its old events are hidden instead.
        self._events.purge_step = step

    def close(self) -> None:
        """Writes pending events and closes TensorBoard's file."""
        self._events.close()

    def _truncate_files(self, step: float | int) -> None:
        if not self._silent:
            truncate_records(self.folder / _METRICS, step)
            truncate_records(self.folder / _SAMPLES, step)


class _EventWriter:
    """Writes TensorBoard events in the calling thread."""

    # SummaryWriter writes in a thread of its own, whose queue blocks forever once the disk is full.

    def __init__(self, folder: Path) -> None:
        self.purge_step: int | None = None
        """Step from which older events are to be hidden, before the next event."""
        self._folder = folder
        # Opened with the first event, so that other processes create no file.
        self._writer: EventsWriter | None = None
        self._last_flush_time = -math.inf

    def write_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        with _explain_write_errors(self._folder):
            if self._writer is None:
                self._folder.mkdir(exist_ok=True)
                self._writer = EventsWriter(str(self._folder / "events"))
            # TensorBoard hides older events from the step of a START event on.
            if self.purge_step is not None:
                session_start = _SessionLog(status=_SessionLog.START)
                self._writer.write_event(
                    _Event(wall_time=time.time(), step=self.purge_step, session_log=session_start)
                )
                self.purge_step = None
            values = [
                _Summary.Value(tag=name, simple_value=value)
                for name, value in numbers.items()
                if name != "step"
            ]
            self._writer.write_event(
                _Event(wall_time=time.time(), step=step, summary=_Summary(value=values))
            )
            if time.monotonic() - self._last_flush_time > _FLUSH_SECONDS:
                self._writer.flush()
                self._last_flush_time = time.monotonic()

    def close(self) -> None:
        # Cleared first, so that closing is not tried again after an error.
        writer, self._writer = self._writer, None
        if writer is not None:
            with _explain_write_errors(self._folder):
                writer.close()


@contextlib.contextmanager
def _explain_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; free some space and run the same command"
            " again"
        ) from error


def to_json_value(value: Any) -> Any:
    """Converts arrays and numbers to JSON values. NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {str(name): to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    # Arrays and scalars of NumPy and JAX.
    if hasattr(value, "tolist"):
        return to_json_value(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Appends JSON lines to a file. NaN and infinity are written as null.

    Raises:
      ConfigError: the file cannot be written.
    """
    _write_records(path, "a", map(to_json_value, records))


def _write_records(
    path: Path, mode: Literal["a", "w"], records: Iterable[Mapping[str, Any]]
) -> None:
    # Serialized before the file is opened, so that an error writes nothing.
    text = "".join(
        json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records
    )
    with _explain_write_errors(path), path.open(mode, encoding="utf-8") as file:
        file.write(text)


def _load_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; move it away, or name another folder"
        ) from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """Reads the complete JSON lines of a file.

    An absent file has none.

    Raises:
      ConfigError: the file cannot be read, or a complete line is damaged or has no integer `step`.
    """
    if not path.exists():
        return []
    *complete_lines, last_line = _load_bytes(path).split(b"\n")
    records = []
    # A kill may tear the last line. It counts if only its newline is missing.
    for line_number, text in enumerate(
        [*complete_lines, last_line] if last_line.endswith(b"}") else complete_lines, start=1
    ):
        location, remedy = f"{path}, line {line_number}", "correct or remove that line"
        try:
            record = json.loads(text, parse_constant=_reject_constant)
            # A resumed run writes the line again, which must not fail then.
            json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{location} is not JSON ({error}); {remedy}") from error
        require(
            isinstance(record, dict) and type(record.get("step")) is int,
            f"{location} has no `step` that is an integer; {remedy}",
        )
        records.append(record)
    return records


def _reject_constant(name: str) -> None:
    # JSON has no NaN or Infinity, but Python's parser accepts them.
    raise ValueError(f"{name} is no number")


def truncate_records(path: Path, step: float | int) -> None:
    """Removes the lines of `step` and later, atomically.

    Raises:
      ConfigError: the file cannot be written, or as in `read_records`.
    """
    remaining_records = [record for record in read_records(path) if record["step"] < step]
    if path.exists():
        temporary_file = path.with_suffix(".cut")
        _write_records(temporary_file, "w", remaining_records)
        with _explain_write_errors(path):
            temporary_file.replace(path)


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Reads the metrics of a run, oldest first.

    Raises:
      ConfigError: a metric is no number, or as in `read_records` for metrics or samples.
    """
    # A resumed run truncates the samples too, so damage there is reported early.
    read_records(Path(workdir) / _SAMPLES)
    records = read_records(Path(workdir) / _METRICS)
    for line_number, record in enumerate(records, start=1):
        invalid_names = [
            name
            for name, value in record.items()
            if value is not None and type(value) not in (int, float)
        ]
        location = f"{Path(workdir) / _METRICS}, line {line_number}"
        require(
            not invalid_names,
            f"{location} has {format_value(', '.join(invalid_names))} that is no number; correct or"
            " remove that line",
        )
    return records
