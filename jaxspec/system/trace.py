"""A trace of some calls, for https://ui.perfetto.dev: operations, and above them the phases and the
parts of a round that they belong to.

Devices name operations after the instructions of the compiled program, and that says which
`jax.named_scope`s each one comes from.
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

PARTS = (
    "learn",
    "logprob",
    "train",
    "train_draft",
    "sync",
    "generate",
    "prefill",
    "refill",
    "tail",
    "draft",
    "verify",
    "commit",
)
"""Scopes that are shown: the phases, and the parts of generation and of a round."""
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"", re.MULTILINE
)
CONTAINERS = ("while", "conditional", "call")
"""Instructions that last as long as all those inside them."""


class Profiler:
    """Traces the calls whose numbers are in a range, and writes them to a file."""

    def __init__(
        self, numbers: range, file: Path, programs: Sequence[Any], say: Callable[[str], Any]
    ) -> None:
        """`programs` are those that the calls run, compiled."""
        self._numbers, self._file, self._programs, self._say = numbers, file, programs, say
        self._raw: tempfile.TemporaryDirectory[str] | None = None
        self._written = False

    @contextlib.contextmanager
    def call(self, number: int) -> Iterator[None]:
        """Around a call: the first of the range starts the trace, the last one writes it."""
        if number not in self._numbers:
            yield
            return
        if self._raw is None:
            self._raw = tempfile.TemporaryDirectory()
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # thousands of Python calls hide what the devices do
            jax.profiler.start_trace(self._raw.name, profiler_options=options)
        with jax.profiler.StepTraceAnnotation("call", step_num=number):
            yield
        if number == self._numbers[-1]:
            self.close()

    def close(self) -> None:
        """Writes what was traced and is not yet written; says so where there was nothing to
        trace."""
        if self._raw is None:
            if self._numbers and not self._written:
                self._say(
                    f"no trace: none of the calls {self._numbers[0]} to {self._numbers[-1]} was"
                    " made"
                )
            return
        jax.profiler.stop_trace()
        with self._raw as folder:
            (raw,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
            events = trace_events(
                jax.profiler.ProfileData.from_file(str(raw)), paths_of(self._programs)
            )
        self._raw, self._written = None, True
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(self._file, "wt", encoding="utf-8") as file:
            json.dump({"traceEvents": events}, file)
        self._say(f"trace: {self._file} (open it at https://ui.perfetto.dev)")


def paths_of(programs: Sequence[Any]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Scopes of each instruction, outermost first, by the name of its module and its own."""
    found = {}
    for program in programs:
        text = program.as_text()
        module = text.split(maxsplit=2)[1].rstrip(",")
        for name, scopes in _INSTRUCTION.findall(text):
            # A scope may stand inside of a transformation: transpose(jvp(train)).
            words = [
                re.findall(r"\w+", part)[-1] for part in scopes.split("/") if re.search(r"\w", part)
            ]
            parts = [word for word in words if word in PARTS]
            found[module, name] = tuple(
                part for place, part in enumerate(parts) if part not in parts[:place]
            )
    return found


class _Operation(NamedTuple):
    start: float
    """Microseconds."""
    end: float
    name: str
    path: tuple[str, ...]


def trace_events(
    profile: Any, paths: dict[tuple[str, str], tuple[str, ...]]
) -> list[dict[str, Any]]:
    """What Perfetto reads: operations by thread or stream, and the parts they belong to on a track
    of their own."""
    events: list[dict[str, Any]] = []
    for process, plane in enumerate(profile.planes, 1):
        for thread, line in enumerate(plane.lines):
            operations = []
            for event in line.events:
                stats = dict(event.stats)
                start, end = event.start_ns / 1e3, event.end_ns / 1e3
                if "hlo_op" in stats:
                    path = paths.get((str(stats.get("hlo_module")), str(stats["hlo_op"])), ())
                    operations.append(_Operation(start, end, event.name, path))
                elif event.name == "call":
                    events += [
                        _slice(f"call {stats.get('step_num')}", start, end, process, 2 * thread)
                    ]
            if operations:
                operations.sort()
                names = {
                    2 * thread: f"{line.name}: parts",
                    2 * thread + 1: f"{line.name}: operations",
                }
                events += [
                    _named("thread_name", name, process, number) for number, name in names.items()
                ]
                events += [
                    _slice(each.name, each.start, each.end, process, 2 * thread + 1, each.path)
                    for each in operations
                ]
                events += _parts(operations, process, 2 * thread)
        if any(event["pid"] == process for event in events):
            events.append(_named("process_name", plane.name, process, 0))
    return events


def _parts(operations: list[_Operation], process: int, thread: int) -> list[dict[str, Any]]:
    """Slices from the first to the last of consecutive operations in the same scope."""
    events: list[dict[str, Any]] = []
    opened: list[tuple[str, float]] = []
    last = 0.0

    def close(depth: int) -> None:
        while len(opened) > depth:
            name, start = opened.pop()
            events.append(_slice(name, start, last, process, thread))

    for operation in operations:
        if operation.name.startswith(CONTAINERS) or not operation.path:
            continue
        same = 0
        while (
            same < min(len(opened), len(operation.path)) and opened[same][0] == operation.path[same]
        ):
            same += 1
        close(same)
        opened += [(name, operation.start) for name in operation.path[same:]]
        last = operation.end
    close(0)
    return events


def _slice(
    name: str, start: float, end: float, process: int, thread: int, path: tuple[str, ...] = ()
) -> dict[str, Any]:
    event = {
        "name": name,
        "ph": "X",
        "ts": start,
        "dur": max(end - start, 0.0),
        "pid": process,
        "tid": thread,
    }
    return event | ({"cat": path[-1], "args": {"part": " / ".join(path)}} if path else {})


def _named(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
