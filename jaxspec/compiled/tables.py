"""Costs as terminal tables and as JSON values."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

from jaxspec.compiled.counts import Collective, Cost
from jaxspec.compiled.hardware import Card
from jaxspec.system.progress import format_number


def iterate_collectives(cost: Cost) -> Iterator[tuple[Collective, float, float]]:
    """Yields collectives with count and bytes sent."""
    for collective in sorted(cost.collectives):
        yield collective, cost.collectives[collective], cost.bytes_sent[collective]


def cost_to_json(cost: Cost) -> dict[str, Any]:
    """Converts a cost to JSON values."""
    return {
        "flops": cost.flops,
        "bytes": cost.bytes,
        "kernels": cost.kernels,
        "loops_outside_command_buffers": cost.loops,
        "collectives": [
            {
                "kind": collective.kind,
                "axes": list(collective.axes),
                "count": count,
                "bytes": byte_count,
            }
            for collective, count, byte_count in iterate_collectives(cost)
        ],
    }


def build_work_table(costs: Mapping[str, Cost], card: Card | None) -> Table:
    """Builds the table of work per device.

    The last column is a lower bound in milliseconds, which needs a known card.
    """
    table = Table(
        *("on each device", "TFLOP", "GB", "kernels", "host loops", "ms at least"),
        box=box.SIMPLE,
    )
    for name, cost in costs.items():
        # Products and memory traffic may overlap completely, so the slower one is the bound.
        least_seconds = (
            max(cost.flops / card.peak, cost.bytes / card.bandwidth) if card else math.nan
        )
        numbers = cost.flops / 1e12, cost.bytes / 1e9, cost.kernels, cost.loops, least_seconds * 1e3
        table.add_row(name, *map(format_number, numbers))
    return table


def build_collectives_table(costs: Mapping[str, Cost]) -> Table:
    """Builds the table of communication between devices."""
    table = Table("between devices", "kind", "over", "count", "MB sent", box=box.SIMPLE)
    for name, cost in costs.items():
        for collective, count, byte_count in iterate_collectives(cost):
            axis_names = ", ".join(collective.axes)
            table.add_row(
                name,
                collective.kind,
                axis_names,
                format_number(count),
                format_number(byte_count / 1e6),
            )
    return table
