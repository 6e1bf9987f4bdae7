"""Section 7: kernels of three rounds by their time on the device."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich import box
from rich.table import Table

from jaxspec.bench.gpu.cells import Cell
from jaxspec.bench.gpu.device import wait_for
from jaxspec.bench.gpu.options import GpuOptions
from jaxspec.bench.gpu.run import GpuRun, Section
from jaxspec.bench.gpu.sections.rounds import recipes_of, rounds
from jaxspec.system.trace import CONTAINERS

ROUNDS = 3
LISTED = 15
"""Kernels that are printed."""


class Kernel(NamedTuple):
    """Kernels of one name but for their numbers, in all rounds."""

    name: str
    seconds: float
    calls: int


def profiled_cells(options: GpuOptions) -> list[Cell]:
    """Plain steps and rounds of as many rows as the last of `--few` says."""
    lengths = 0, options.draft_length
    return [Cell(options.few[-1], each, options.new, options.draft_vocab) for each in lengths]


def by_kernel(profile: Any) -> list[Kernel]:
    """Adds up the kernels of a trace, the longest first.

    Those of devices count, or of the host if there are none, as on a CPU.
    """
    planes = list(profile.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for chosen in (devices, planes):
        for name, length in _operations(chosen):
            seconds[name] += length
            calls[name] += 1
        if seconds:
            break
    found = [Kernel(name, seconds[name], calls[name]) for name in seconds]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def _operations(planes: Sequence[Any]) -> list[tuple[str, float]]:
    """Names and seconds of a trace's operations, but those that contain others."""
    found = []
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                if "hlo_op" not in dict(event.stats) or event.name.startswith(CONTAINERS):
                    continue
                name = re.sub(r"[._]\d+", "", event.name)
                found.append((name, (event.end_ns - event.start_ns) / 1e9))
    return found


def _profiled(run: GpuRun, cell: Cell) -> dict[str, Any]:
    prefill, advance = run.get(cell.prefill_name), run.get(cell.rounds_name)
    ready, prompts = run.cells.ready(cell), run.cells.prompts(cell)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # thousands of Python calls hide the device's work
    with run.programs.quiet(), tempfile.TemporaryDirectory() as folder:
        running = advance.program(ready, prefill.program(ready, prompts), rounds(run, 1))
        count = wait_for((running, rounds(run, ROUNDS)))[1]
        jax.profiler.start_trace(folder, profiler_options=options)
        wait_for(advance.program(ready, running, count))
        jax.profiler.stop_trace()
        (raw,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        kernels = by_kernel(jax.profiler.ProfileData.from_file(str(raw)))
    return {
        "rounds": ROUNDS,
        "seconds": sum(kernel.seconds for kernel in kernels),
        "calls": sum(kernel.calls for kernel in kernels),
        "kernels": [kernel._asdict() for kernel in kernels],
    }


def measure_profile(run: GpuRun) -> dict[str, Any]:
    """Section 7."""
    found = {}
    for cell in profiled_cells(run.options):
        name = f"a profile of {cell.words}"
        found[cell.words] = made = run.attempt(name, lambda cell=cell: _profiled(run, cell))
        if "kernels" in made:
            run.screen.print(_table(cell.words, made))
    return found


def _table(title: str, made: dict[str, Any]) -> Table:
    each, count = made["seconds"] / ROUNDS, made["calls"] / ROUNDS
    told = f"{title}: {1e3 * each:.2f} ms in {count:.0f} kernels a round"
    table = Table(box=box.SIMPLE, title=told, title_justify="left", padding=0, show_edge=False)
    table.add_column("kernel", overflow="fold")
    for heading in ("us a round", "share", "calls a round"):
        table.add_column(heading, justify="right")
    for kernel in made["kernels"][:LISTED]:
        table.add_row(
            kernel["name"],
            f"{1e6 * kernel['seconds'] / ROUNDS:.0f}",
            f"{kernel['seconds'] / made['seconds']:.0%}",
            f"{kernel['calls'] / ROUNDS:.1f}",
        )
    return table


PROFILE = Section(lambda plan: recipes_of(plan, profiled_cells(plan.options)), measure_profile)
