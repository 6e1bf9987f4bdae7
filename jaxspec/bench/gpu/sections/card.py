"""Section 0: the card, and the real peaks that the other sections are compared with."""

from typing import Any

from rich import box
from rich.table import Table

from jaxspec.bench.gpu.device import about_card
from jaxspec.bench.gpu.run import GpuRun, Section
from jaxspec.bench.measure import versions
from jaxspec.bench.roofline import copy_rate, product_rate, read_rate

GPU_MIB, CPU_MIB = 2048, 64
"""Sizes of what is copied: far more than a card's caches hold."""


def measure_card(run: GpuRun) -> dict[str, Any]:
    """Measures bandwidth and products, and says what else uses the machine."""
    mib = GPU_MIB if run.plan.on_gpu else CPU_MIB
    with run.programs.quiet():
        copied, read = copy_rate(mib), read_rate(mib)
        flops = product_rate(run.options.dtype)
    about = about_card(run.device, run.driver)
    found = {
        **about,
        "python_and_packages": versions(),
        "copy_bytes_per_s": copied,
        "read_bytes_per_s": read,
        "bytes_per_s": max(copied, read),
        "flops_per_s": flops,
    }
    table = Table(box=box.SIMPLE, title="the card", title_justify="left", show_header=False)
    memory = about["memory_limit"]
    others = ", ".join(about["other_processes"]) or "none"
    rows = {
        "device": f"{about['device']} ({about['platform']}), driver {about['driver'] or 'none'}",
        "memory": f"{memory / 2**30:.1f} GiB for this process" if memory else "not told",
        "load": f"{about['load_average']:.1f} on {about['cores']} cores; other processes: {others}",
        "bandwidth": f"copy {copied / 1e9:,.0f} GB/s, read {read / 1e9:,.0f} GB/s",
        "products": f"{flops / 1e12:.3g} TFLOP/s ({run.options.dtype})",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    run.screen.print(table)
    return found


CARD = Section(lambda plan: [], measure_card)
