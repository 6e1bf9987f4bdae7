"""Costs as tables for people, and as plain values for programs."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

from jaxspec.compiled.counts import Cost, Exchange
from jaxspec.compiled.hardware import Card
from jaxspec.system.progress import short


def listed(cost: Cost) -> Iterator[tuple[Exchange, float, float]]:
    """Its collectives, each with how many there are and the bytes that each device sends."""
    for exchange in sorted(cost.exchanges):
        yield exchange, cost.exchanges[exchange], cost.sent[exchange]


def cost_json(cost: Cost) -> dict[str, Any]:
    """A cost as plain values."""
    return {
        "flops": cost.products,
        "bytes": cost.bytes,
        "kernels": cost.kernels,
        "loops_outside_command_buffers": cost.loops,
        "collectives": [
            {"kind": exchange.kind, "axes": list(exchange.axes), "count": count, "bytes": size}
            for exchange, count, size in listed(cost)
        ],
    }


def work_table(rows: Mapping[str, Cost], card: Card | None) -> Table:
    """What each part of a step computes and moves on each device, and how long that takes a card
    at least."""
    table = Table(
        *("on each device", "TFLOP", "GB", "kernels", "loops of the host", "ms at least"),
        box=box.SIMPLE,
    )
    for row, cost in rows.items():
        least = max(cost.products / card.peak, cost.bytes / card.bandwidth) if card else math.nan
        numbers = cost.products / 1e12, cost.bytes / 1e9, cost.kernels, cost.loops, least * 1e3
        table.add_row(row, *map(short, numbers))
    return table


def exchanges_table(rows: Mapping[str, Cost]) -> Table:
    """What goes between devices in each part of a step."""
    table = Table("between devices", "kind", "over", "count", "MB sent", box=box.SIMPLE)
    for row, cost in rows.items():
        for exchange, count, size in listed(cost):
            over = ", ".join(exchange.axes)
            table.add_row(row, exchange.kind, over, short(count), short(size / 1e6))
    return table
