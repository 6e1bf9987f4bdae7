"""Costs as tables for people, and as plain values for programs."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

from jaxspec.compiled.counts import Collective, Cost
from jaxspec.compiled.hardware import Card
from jaxspec.system.progress import format_number


def iterate_collectives(cost: Cost) -> Iterator[tuple[Collective, float, float]]:
    """Its collectives, each with how many there are and the bytes that each device sends."""
    for collective in sorted(cost.collectives):
        yield collective, cost.collectives[collective], cost.bytes_sent[collective]


def cost_to_json(cost: Cost) -> dict[str, Any]:
    """A cost as plain values."""
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
    """What each part of a step computes and moves on each device, and how long that takes a card
    at least."""
    table = Table(
        *("on each device", "TFLOP", "GB", "kernels", "loops of the host", "ms at least"),
        box=box.SIMPLE,
    )
    for name, cost in costs.items():
        least_seconds = (
            max(cost.flops / card.peak, cost.bytes / card.bandwidth) if card else math.nan
        )
        numbers = cost.flops / 1e12, cost.bytes / 1e9, cost.kernels, cost.loops, least_seconds * 1e3
        table.add_row(name, *map(format_number, numbers))
    return table


def build_collectives_table(costs: Mapping[str, Cost]) -> Table:
    """What goes between devices in each part of a step."""
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
