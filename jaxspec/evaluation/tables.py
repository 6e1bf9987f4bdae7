"""Tables of evaluations."""

import math
from collections.abc import Mapping

from rich import box
from rich.table import Table

from jaxspec.evaluation.estimates import Estimate, PairedDifference


def build_results_table(estimates: Mapping[str, Mapping[str, Estimate]]) -> Table:
    """Builds the table of an evaluation."""
    table = Table(box=box.SIMPLE)
    for title in ("set", "metric", "value", "95 %", "problems"):
        table.add_column(title, justify="left" if title in ("set", "metric") else "right")
    for name, set_estimates in estimates.items():
        for metric, estimate in set_estimates.items():
            is_finite = math.isfinite(estimate.low)  # a single problem gives no interval
            interval = f"{estimate.low:.3f} - {estimate.high:.3f}" if is_finite else ""
            value = f"{estimate.value:.3f}" if estimate.problems else "-"
            table.add_row(name, metric, value, interval, str(estimate.problems))
    return table


def build_comparison_table(
    first: str, second: str, differences: Mapping[str, PairedDifference]
) -> Table:
    """Builds the table of a comparison."""
    table = Table(box=box.SIMPLE, title=f"{first} -> {second}", title_justify="left")
    for title in ("set", "first", "second", "change", "95 %", "problems"):
        align_left = title in ("set", "problems")
        table.add_column(title, justify="left" if align_left else "right", no_wrap=True)
    for name, difference in differences.items():
        change = difference.estimate
        table.add_row(
            name,
            f"{difference.first_mean:.3f}",
            f"{difference.second_mean:.3f}",
            f"{change.value:+.3f}",
            f"{change.low:+.2f} to {change.high:+.2f}",
            f"+{difference.better_count} -{difference.worse_count} of {change.problems}",
        )
    return table
