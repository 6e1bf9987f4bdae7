"""Measurements that benchmarks share: memory, timed calls, and a table of rounds."""

import importlib.metadata
import os
import platform
import re
import resource
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

from rich import box
from rich.table import Table

from jaxspec.inputs.checked import Range, require
from jaxspec.processes.devices import core_count
from jaxspec.system.version import package_version

Budget = Annotated[float, Range(min=0)]
"""Seconds after which disturbed calls are no longer repeated."""


def require_model(model: str, bench: str) -> None:
    """Checks that a checkpoint is given.

    Raises:
      ConfigError: `model` is empty, as it is by default.
    """
    require(
        bool(model),
        f"no --model; give the folder of a checkpoint, see python -m jaxspec.bench {bench} --help",
    )


def package_versions() -> dict[str, str]:
    """Returns the versions that affect measurements."""
    installed = {name: importlib.metadata.version(name) for name in ("jax", "flax")}
    return {"python": platform.python_version(), "jaxspec": package_version()} | installed


class PeakMemory:
    """Measures the peak of this process's anonymous memory inside the context.

    `peak` has the bytes above those on entry, once the context has ended. Memory is sampled every
    5 ms.
    """

    def __enter__(self) -> "PeakMemory":
        self._baseline = self.peak = self._read_anonymous()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._track_peak, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join()
        # Memory may have grown since the last sample.
        self.peak = max(self.peak, self._read_anonymous()) - self._baseline

    def _track_peak(self) -> None:
        while not self._stop_event.wait(0.005):
            self.peak = max(self.peak, self._read_anonymous())

    @staticmethod
    def _read_anonymous() -> int:
        """Reads the size of anonymous pages in memory."""
        # Pages of a mapped checkpoint do not count, since the system can drop them at any time.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(re.findall(r"RssAnon:\s*(\d+) kB", status)[0])


class TimedCall(NamedTuple):
    """Time of one call."""

    seconds: float
    cpu_seconds: float
    """CPU time of this process."""
    other_cores: float
    """Mean number of cores that other processes used meanwhile."""


QUIET_CORES = 0.25
"""Cores that other processes may use during an undisturbed call."""
# The system counts the CPU time of other processes in hundredths of a second, which is too coarse
# for short calls.
MIN_BLOCK_SECONDS = 0.25
"""Minimum seconds of a timed block. Shorter calls are timed several at a time."""


class CallTimings(NamedTuple):
    """Times of one function's calls."""

    first_seconds: float
    """Seconds of the first call, with compilation."""
    calls: list[TimedCall]

    @property
    def quiet_seconds(self) -> list[float]:
        """Seconds of the undisturbed calls."""
        return [call.seconds for call in self.calls if call.other_cores < QUIET_CORES]

    @property
    def is_noisy(self) -> bool:
        """Whether too few calls were undisturbed."""
        return len(self.quiet_seconds) < min(3, len(self.calls))

    @property
    def seconds(self) -> float:
        """Median over undisturbed calls. If there are too few, the fastest call."""
        # Disturbances only slow a call down, so the fastest is the least wrong.
        return (
            min(call.seconds for call in self.calls)
            if self.is_noisy
            else statistics.median(self.quiet_seconds)
        )


def time_calls(function: Callable[[int], Any], repeats: int, budget: float) -> CallTimings:
    """Times calls of a function.

    The calls get 0, 1, 2, ... Two calls warm up. Then `repeats` calls are timed. After that,
    disturbed calls are repeated until `repeats` calls were undisturbed or `budget` seconds have
    passed.
    """
    start_time = time.perf_counter()
    function(0)
    first_seconds = time.perf_counter() - start_time
    start_time, call_index = time.perf_counter(), 2
    function(1)
    # The first call compiles, so the second one tells how long a call takes.
    calls_per_block = max(1, round(MIN_BLOCK_SECONDS / max(time.perf_counter() - start_time, 1e-6)))
    timings, deadline = CallTimings(first_seconds, []), time.perf_counter() + budget
    while len(timings.calls) < repeats or (
        len(timings.quiet_seconds) < repeats and time.perf_counter() < deadline
    ):
        busy_start, cpu_time, start_time = _busy_seconds(), time.process_time(), time.perf_counter()
        for _ in range(calls_per_block):
            function(call_index)
            call_index += 1
        wall_time, cpu_time = time.perf_counter() - start_time, time.process_time() - cpu_time
        # CPU time of other processes is that of all minus that of this one. The counters have
        # different resolutions, so the difference can be negative.
        timings.calls.append(
            TimedCall(
                wall_time / calls_per_block,
                cpu_time / calls_per_block,
                max(0.0, _busy_seconds() - busy_start - cpu_time) / wall_time,
            )
        )
    return timings


def _busy_seconds() -> float:
    """Returns the CPU seconds of all cores since the machine started.

    Returns 0 on systems without `/proc/stat`.
    """
    file = Path("/proc/stat")
    if not file.exists():
        return 0.0
    ticks = [int(word) for word in file.read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
    # `ticks` 3 and 4 are idle time and time of waiting for input or output. The guest fields after
    # the eighth are counted in the first two already.
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def process_age_seconds() -> float:
    """Returns the seconds since this process started.

    Returns 0 on systems without `/proc/self/stat`.
    """
    # Imports take seconds, and no clock of this program can start before them.
    file = Path("/proc/self/stat")
    if not file.exists():
        return 0.0
    # The command name in parentheses may have spaces, so fields are counted after it. Start time is
    # field 22 of the line, in clock ticks since boot.
    start_seconds = int(
        file.read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    ) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0]) - start_seconds


def peak_resident_bytes() -> int:
    """Returns the peak resident memory of this process, in bytes."""
    # Linux reports KiB.
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@runtime_checkable
class Workload(Protocol):
    """Options that describe a measurement on a checkpoint."""

    @property
    def model(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def prompt(self) -> int: ...
    @property
    def new(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def draft(self) -> str: ...


def common_fields(
    kind: str, workload: Workload, timings: CallTimings, tokens: int
) -> dict[str, Any]:
    """Returns the fields that the records of `bench generate` and `bench step` share.

    `tokens` is the number of tokens per call.
    """
    return {
        "peer": f"jaxspec/{'plain' if workload.draft == 'none' else workload.draft}",
        "kind": kind,
        "model": Path(workload.model).name,
        "batch": workload.batch,
        "prompt": workload.prompt,
        "new": workload.new,
        "threads": workload.threads or core_count(),
        "tokens": tokens,
        "tokens_per_s": tokens / timings.seconds,
        "wall_s": timings.seconds,
        "wall_best_s": min(call.seconds for call in timings.calls),
        "noisy": timings.is_noisy,
        "calls": len(timings.calls),
        "quiet_calls": len(timings.quiet_seconds),
        "peak_rss_mib": peak_resident_bytes() / 2**20,
        "versions": package_versions(),
    }


_ROUND_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "live": ("rows", str),
    "K": ("K", str),
    "note": ("", str),
    "round_s": ("ms a round", lambda seconds: f"{1e3 * seconds:.3f}"),
    "bandwidth_share": ("bandwidth", lambda share: f"{share:.0%}"),
    "round_cost": ("round cost", lambda cost: f"{cost:.2f}"),
    "tokens_per_pass": ("tokens a pass", lambda tokens: f"{tokens:.2f}"),
    "tokens_per_s": ("tokens/s", lambda rate: f"{rate:,.0f}"),
    "speedup": ("speed-up", lambda times: f"{times:.2f}"),
}
"""Heading and format of each column of a table of rounds, by field of its rows."""


def build_rounds_table(rows: Sequence[Mapping[str, Any]], title: str = "rounds") -> Table:
    """Builds a table of rounds and plain decode steps.

    Columns without any value are left out.
    """
    # Several benchmarks share the columns, and each has values for some of them.
    table = Table(box=box.SIMPLE, title=title, title_justify="left", padding=0, show_edge=False)
    columns = {
        name: column
        for name, column in _ROUND_COLUMNS.items()
        if any(row.get(name) not in (None, "") for row in rows)
    }
    for heading, _ in columns.values():
        table.add_column(heading, justify="right")
    for row in rows:
        cells = (
            "-" if row.get(name) is None else format_value(row[name])
            for name, (_, format_value) in columns.items()
        )
        table.add_row(*cells)
    return table
