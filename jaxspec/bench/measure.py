"""What all benchmarks share: memory, and calls against the clock."""

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
"""Seconds after which disturbed calls are no longer made up for."""


def require_model(model: str, bench: str) -> None:
    """Whether a benchmark of a checkpoint was given one; its options have none by default."""
    require(
        bool(model),
        f"no --model: give the folder of a checkpoint; see python -m jaxspec.bench {bench} --help",
    )


def package_versions() -> dict[str, str]:
    """What it ran with."""
    installed = {name: importlib.metadata.version(name) for name in ("jax", "flax")}
    return {"python": platform.python_version(), "jaxspec": package_version()} | installed


class PeakMemory:
    """The most anonymous memory of this process above what it had at the start, in bytes; looked at
    every few milliseconds."""

    def __enter__(self) -> "PeakMemory":
        self._baseline = self.peak = self._read_anonymous()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._track_peak, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join()
        self.peak = max(self.peak, self._read_anonymous()) - self._baseline

    def _track_peak(self) -> None:
        while not self._stop_event.wait(0.005):
            self.peak = max(self.peak, self._read_anonymous())

    @staticmethod
    def _read_anonymous() -> int:
        """Anonymous pages that are in memory; those of mapped files are not among them."""
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(re.findall(r"RssAnon:\s*(\d+) kB", status)[0])


class TimedCall(NamedTuple):
    """One call against the clock."""

    seconds: float
    cpu_seconds: float
    """Of this process."""
    other_cores: float
    """Cores that everybody else used meanwhile."""


QUIET_CORES = 0.25
"""Cores that others may use while a call counts as undisturbed."""
MIN_BLOCK_SECONDS = 0.25
"""Seconds below which several calls are timed as one: the system counts what others use in steps of
a hundredth."""


class CallTimings(NamedTuple):
    """Calls of one function, of which the quiet ones count."""

    first_seconds: float
    """Seconds of the first call, which compiles."""
    calls: list[TimedCall]

    @property
    def quiet_seconds(self) -> list[float]:
        """Seconds of the calls that nobody disturbed."""
        return [call.seconds for call in self.calls if call.other_cores < QUIET_CORES]

    @property
    def is_noisy(self) -> bool:
        """Whether too few calls were quiet."""
        return len(self.quiet_seconds) < min(3, len(self.calls))

    @property
    def seconds(self) -> float:
        """The median of the quiet calls; where there are too few, the best call: what disturbs only
        slows down."""
        return (
            min(call.seconds for call in self.calls)
            if self.is_noisy
            else statistics.median(self.quiet_seconds)
        )


def time_calls(function: Callable[[int], Any], repeats: int, budget: float) -> CallTimings:
    """Calls a function with 0, 1, 2, ...: twice to warm up, then until `repeats` calls were quiet
    or `budget` seconds have passed."""
    start_time = time.perf_counter()
    function(0)
    first_seconds = time.perf_counter() - start_time
    start_time, call_index = time.perf_counter(), 2
    function(1)
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
        timings.calls.append(
            TimedCall(
                wall_time / calls_per_block,
                cpu_time / calls_per_block,
                max(0.0, _busy_seconds() - busy_start - cpu_time) / wall_time,
            )
        )
    return timings


def _busy_seconds() -> float:
    """Seconds that all cores have worked since the machine started; 0 where the system does not
    say."""
    file = Path("/proc/stat")
    if not file.exists():
        return 0.0
    ticks = [int(word) for word in file.read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def process_age_seconds() -> float:
    """Seconds since this process started; 0 where the system does not say."""
    file = Path("/proc/self/stat")
    if not file.exists():
        return 0.0
    start_seconds = int(
        file.read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    ) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0]) - start_seconds


def peak_resident_bytes() -> int:
    """The most memory this process has held, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@runtime_checkable
class Workload(Protocol):
    """What is said of a measurement on a checkpoint."""

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
    """What every line about a checkpoint says, whose calls make so many tokens each."""
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
"""Columns of a table of rounds, by what its rows call them."""


def build_rounds_table(rows: Sequence[Mapping[str, Any]], title: str = "rounds") -> Table:
    """Rounds beside plain decode steps, as rich prints them; only columns that any row has."""
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
