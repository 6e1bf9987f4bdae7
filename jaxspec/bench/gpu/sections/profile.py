"""Section 7: kernels of three rounds, by time on the device."""

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
from jaxspec.bench.gpu.device import wait_for_arrays
from jaxspec.bench.gpu.options import GpuOptions
from jaxspec.bench.gpu.run import GpuRun, Section
from jaxspec.bench.gpu.sections.rounds import cell_recipes, place_round_count
from jaxspec.system.trace import CONTAINER_OPCODES

ROUNDS = 3
"""Number of profiled rounds."""
LISTED_KERNELS = 15
"""Number of printed kernels."""


class Kernel(NamedTuple):
    """Total of all kernels whose names differ only in numbers."""

    name: str
    seconds: float
    calls: int


def profile_cells(options: GpuOptions) -> list[Cell]:
    """Lists the profiled cells: plain steps and rounds at the last number of rows of --few."""
    lengths = 0, options.draft_length
    return [Cell(options.few[-1], length, options.new, options.draft_vocab) for length in lengths]


def sum_kernels(profile: Any) -> list[Kernel]:
    """Adds up the time of each kernel of a trace. The result is ordered, longest first.

    Uses the planes of devices. If they have no operations, as on a CPU, uses all planes.
    """
    planes = list(profile.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for selected_planes in (devices, planes):
        for name, duration in _list_operations(selected_planes):
            seconds[name] += duration
            calls[name] += 1
        if seconds:
            break
    kernels = [Kernel(name, seconds[name], calls[name]) for name in seconds]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def _list_operations(planes: Sequence[Any]) -> list[tuple[str, float]]:
    """Lists names and seconds of the operations of a trace, without container operations."""
    operations = []
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                # Loops and calls contain operations that are counted themselves.
                if "hlo_op" not in dict(event.stats) or event.name.startswith(CONTAINER_OPCODES):
                    continue
                # XLA numbers instructions: `fusion.1` and `fusion.23` become one kernel.
                name = re.sub(r"[._]\d+", "", event.name)
                operations.append((name, (event.end_ns - event.start_ns) / 1e9))
    return operations


def _profile_cell(run: GpuRun, cell: Cell) -> dict[str, Any]:
    prefill, advance = run.get_program(cell.prefill_name), run.get_program(cell.rounds_name)
    weights, prompts = run.cells.rollout_weights(cell), run.cells.make_prompts(cell)
    options = jax.profiler.ProfileOptions()
    # Thousands of Python calls would hide the device's work.
    options.python_tracer_level = 0
    with run.programs.pause_compiling(), tempfile.TemporaryDirectory() as folder:
        # The first round loads the kernels, outside of the trace.
        decode_state = advance.program(
            weights, prefill.program(weights, prompts), place_round_count(run, 1)
        )
        # The trace must contain neither the end of this round nor the copy of the count.
        count = wait_for_arrays((decode_state, place_round_count(run, ROUNDS)))[1]
        jax.profiler.start_trace(folder, profiler_options=options)
        # Calls return before the device has finished, so the trace ends after waiting.
        wait_for_arrays(advance.program(weights, decode_state, count))
        jax.profiler.stop_trace()
        (trace_file,) = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        kernels = sum_kernels(jax.profiler.ProfileData.from_file(str(trace_file)))
    return {
        "rounds": ROUNDS,
        "seconds": sum(kernel.seconds for kernel in kernels),
        "calls": sum(kernel.calls for kernel in kernels),
        "kernels": [kernel._asdict() for kernel in kernels],
    }


def measure_profile(run: GpuRun) -> dict[str, Any]:
    """Profiles each of `profile_cells`, and prints its kernels."""
    profiles = {}
    for cell in profile_cells(run.options):
        name = f"a profile of {cell.label}"
        profiles[cell.label] = profile = run.attempt_part(
            name, lambda cell=cell: _profile_cell(run, cell)
        )
        if "kernels" in profile:
            run.screen.print(_kernel_table(cell.label, profile))
    return profiles


def _kernel_table(label: str, profile: dict[str, Any]) -> Table:
    seconds_per_round, kernels_per_round = profile["seconds"] / ROUNDS, profile["calls"] / ROUNDS
    title = f"{label}: {1e3 * seconds_per_round:.2f} ms in {kernels_per_round:.0f} kernels a round"
    table = Table(box=box.SIMPLE, title=title, title_justify="left", padding=0, show_edge=False)
    table.add_column("kernel", overflow="fold")
    for heading in ("us a round", "share", "calls a round"):
        table.add_column(heading, justify="right")
    for kernel in profile["kernels"][:LISTED_KERNELS]:
        table.add_row(
            kernel["name"],
            f"{1e6 * kernel['seconds'] / ROUNDS:.0f}",
            f"{kernel['seconds'] / profile['seconds']:.0%}",
            f"{kernel['calls'] / ROUNDS:.1f}",
        )
    return table


PROFILE_SECTION = Section(
    lambda plan: cell_recipes(plan, profile_cells(plan.options)), measure_profile
)
