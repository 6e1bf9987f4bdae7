"""Section 0: facts about the card, and its measured peaks.

Other sections are compared with these peaks.
"""

from typing import Any

from rich import box
from rich.table import Table

from jaxspec.bench.gpu.device import describe_card
from jaxspec.bench.gpu.run import GpuRun, Section
from jaxspec.bench.measure import package_versions
from jaxspec.bench.roofline import copy_rate, product_rate, read_rate

# A GPU's array is far larger than its caches, so that memory is measured.
GPU_MIB, CPU_MIB = 2048, 64
"""MiB of the array that is copied and read, on a GPU and on a CPU."""


def measure_card(run: GpuRun) -> dict[str, Any]:
    """Measures bandwidth and products, and describes card and machine."""
    mib = GPU_MIB if run.plan.targets_gpu else CPU_MIB
    # Compilers that time products on the same device would slow these measurements down.
    with run.programs.pause_compiling():
        copy_speed, read_speed = copy_rate(mib), read_rate(mib)
        flops = product_rate(run.options.dtype)
    facts = describe_card(run.device, run.driver)
    record = {
        **facts,
        "python_and_packages": package_versions(),
        "copy_bytes_per_s": copy_speed,
        "read_bytes_per_s": read_speed,
        # The peak that bandwidth shares are relative to.
        "bytes_per_s": max(copy_speed, read_speed),
        "flops_per_s": flops,
    }
    table = Table(box=box.SIMPLE, title="the card", title_justify="left", show_header=False)
    memory = facts["memory_limit"]
    users = ", ".join(facts["other_processes"]) or "none"
    rows = {
        "device": f"{facts['device']} ({facts['platform']}), driver {facts['driver'] or 'none'}",
        "memory": f"{memory / 2**30:.1f} GiB for this process" if memory else "not told",
        "load": f"{facts['load_average']:.1f} on {facts['cores']} cores; other processes: {users}",
        "bandwidth": f"copy {copy_speed / 1e9:,.0f} GB/s, read {read_speed / 1e9:,.0f} GB/s",
        "products": f"{flops / 1e12:.3g} TFLOP/s ({run.options.dtype})",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    run.screen.print(table)
    return record


CARD_SECTION = Section(lambda plan: [], measure_card)
