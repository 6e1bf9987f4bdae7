"""Traces of calls for https://ui.perfetto.dev.

A trace shows operations, and above them the phases and parts of a round that they belong to.
"""

import contextlib
import gzip
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

TRACED_SCOPES = (
    "learn",
    "logprob",
    "train",
    "train_draft",
    "prepare",
    "export",
    "load",
    "sync",
    "generate",
    "prefill",
    "refill",
    "tail",
    "draft",
    "verify",
    "commit",
)
"""Scopes that a trace shows: phases, and parts of generation and of a round."""
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"", re.MULTILINE
)
CONTAINER_OPCODES = ("while", "conditional", "call")
"""Prefixes of instructions that span the instructions inside them."""


class Profiler:
    """Writes a trace of a range of calls."""

    def __init__(
        self,
        call_numbers: range,
        file: Path,
        programs: Sequence[Any],
        print_line: Callable[[str], Any],
    ) -> None:
        """Prepares a trace.

        Args:
          call_numbers: numbers of the calls to trace.
          file: file of the trace, compressed by gzip.
          programs: compiled programs that the calls run.
          print_line: receives a line about the result.
        """
        self._call_numbers, self._file, self._programs, self._print_line = (
            call_numbers,
            file,
            programs,
            print_line,
        )
        self._raw_folder: tempfile.TemporaryDirectory[str] | None = None
        self._is_written = False

    @contextlib.contextmanager
    def trace_call(self, call_number: int) -> Iterator[None]:
        """Traces a call if its number is in the range.

        The first call of the range starts the trace, the last one writes it.
        """
        if call_number not in self._call_numbers:
            yield
            return
        if self._raw_folder is None:
            self._raw_folder = tempfile.TemporaryDirectory()
            options = jax.profiler.ProfileOptions()
            # Thousands of Python calls would hide the operations of the devices.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._raw_folder.name, profiler_options=options)
        with jax.profiler.StepTraceAnnotation("call", step_num=call_number):
            yield
        if call_number == self._call_numbers[-1]:
            self.close()

    def close(self) -> None:
        """Writes a trace that is not written yet.

        Prints a line if none of the calls was made.
        """
        if self._raw_folder is None:
            if self._call_numbers and not self._is_written:
                self._print_line(
                    f"no trace: none of the calls {self._call_numbers[0]} to"
                    f" {self._call_numbers[-1]} was made"
                )
            return
        # The run may have ended within the range, so the trace may have fewer calls.
        jax.profiler.stop_trace()
        with self._raw_folder as folder:
            (trace_file,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
            events = build_trace_events(
                jax.profiler.ProfileData.from_file(str(trace_file)),
                read_scope_paths(self._programs),
            )
        self._raw_folder, self._is_written = None, True
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(self._file, "wt", encoding="utf-8") as file:
            json.dump({"traceEvents": events}, file)
        self._print_line(f"trace: {self._file} (open it at https://ui.perfetto.dev)")


def read_scope_paths(programs: Sequence[Any]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Reads the scopes of each instruction, outermost first.

    Keys are the name of the module and the name of the instruction.
    """
    # Devices name operations after instructions of the compiled program. Its text has the
    # `jax.named_scope`s that each instruction comes from.
    paths = {}
    for program in programs:
        text = program.as_text()
        module = text.split(maxsplit=2)[1].rstrip(",")
        for name, op_name in _INSTRUCTION.findall(text):
            # A scope may be inside a transformation: transpose(jvp(train)).
            scope_names = [
                re.findall(r"\w+", component)[-1]
                for component in op_name.split("/")
                if re.search(r"\w", component)
            ]
            traced = [scope for scope in scope_names if scope in TRACED_SCOPES]
            # Nested functions may enter a scope twice.
            paths[module, name] = tuple(
                scope for index, scope in enumerate(traced) if scope not in traced[:index]
            )
    return paths


class _Operation(NamedTuple):
    # Perfetto's trace format has times in microseconds.
    start_us: float
    end_us: float
    name: str
    path: tuple[str, ...]


def build_trace_events(
    profile: Any, paths: dict[tuple[str, str], tuple[str, ...]]
) -> list[dict[str, Any]]:
    """Builds trace events in Perfetto's JSON format.

    Each thread or stream gets a track of operations, and one of the scopes that they belong to.
    """
    events: list[dict[str, Any]] = []
    for process_id, plane in enumerate(profile.planes, 1):
        # A line has two tracks: an even one for scopes and calls, an odd one for operations.
        for thread_id, line in enumerate(plane.lines):
            operations = []
            for event in line.events:
                stats = dict(event.stats)
                start_us, end_us = event.start_ns / 1e3, event.end_ns / 1e3
                # Other events, such as those of the runtime, are left out.
                if "hlo_op" in stats:
                    path = paths.get((str(stats.get("hlo_module")), str(stats["hlo_op"])), ())
                    operations.append(_Operation(start_us, end_us, event.name, path))
                elif event.name == "call":
                    events += [
                        _make_slice(
                            f"call {stats.get('step_num')}",
                            start_us,
                            end_us,
                            process_id,
                            2 * thread_id,
                        )
                    ]
            if operations:
                operations.sort()
                names = {
                    2 * thread_id: f"{line.name}: parts",
                    2 * thread_id + 1: f"{line.name}: operations",
                }
                events += [
                    _make_name_event("thread_name", name, process_id, track_id)
                    for track_id, name in names.items()
                ]
                events += [
                    _make_slice(
                        operation.name,
                        operation.start_us,
                        operation.end_us,
                        process_id,
                        2 * thread_id + 1,
                        operation.path,
                    )
                    for operation in operations
                ]
                events += _make_scope_slices(operations, process_id, 2 * thread_id)
        # Planes without events would be empty processes in Perfetto.
        if any(event["pid"] == process_id for event in events):
            events.append(_make_name_event("process_name", plane.name, process_id, 0))
    return events


def _make_scope_slices(
    operations: list[_Operation], process_id: int, thread_id: int
) -> list[dict[str, Any]]:
    """Joins consecutive operations of a scope into slices."""
    events: list[dict[str, Any]] = []
    open_scopes: list[tuple[str, float]] = []
    last_end_us = 0.0

    def close_scopes(depth: int) -> None:
        while len(open_scopes) > depth:
            name, start_us = open_scopes.pop()
            events.append(_make_slice(name, start_us, last_end_us, process_id, thread_id))

    for operation in operations:
        # A loop lasts as long as its body, whose operations have more exact scopes.
        if operation.name.startswith(CONTAINER_OPCODES) or not operation.path:
            continue
        # Scopes that this operation shares with the one before stay open.
        shared_depth = 0
        while (
            shared_depth < min(len(open_scopes), len(operation.path))
            and open_scopes[shared_depth][0] == operation.path[shared_depth]
        ):
            shared_depth += 1
        close_scopes(shared_depth)
        open_scopes += [(name, operation.start_us) for name in operation.path[shared_depth:]]
        last_end_us = operation.end_us
    close_scopes(0)
    return events


def _make_slice(
    name: str,
    start_us: float,
    end_us: float,
    process_id: int,
    thread_id: int,
    path: tuple[str, ...] = (),
) -> dict[str, Any]:
    event = {
        "name": name,
        "ph": "X",
        "ts": start_us,
        "dur": max(end_us - start_us, 0.0),
        "pid": process_id,
        "tid": thread_id,
    }
    return event | ({"cat": path[-1], "args": {"part": " / ".join(path)}} if path else {})


def _make_name_event(kind: str, name: str, process_id: int, thread_id: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process_id, "tid": thread_id, "args": {"name": name}}
