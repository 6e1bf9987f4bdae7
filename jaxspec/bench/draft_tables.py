"""Tables of `bench drafts`."""

from typing import Any

from rich import box
from rich.table import Table

from jaxspec.system.progress import format_number


def build_tables(rows: list[dict[str, Any]]) -> tuple[Table, Table]:
    """Builds the tables of totals and of depths.

    Both fit in 80 columns.
    """
    # Two tables with line breaks in titles, since a single one would be too wide.
    totals = _empty_table(
        "drafts", "acceptance\nlength", "tokens\na pass", "round\ncost", "tokens/s", "speed-up"
    )
    by_depth = _empty_table("by depth", "conditional\nrate", "expected\nacceptance", "draft T")
    for row in rows:
        # Drafts that draw no tokens have no sampling, and plain decoding has no rule.
        labels = row["draft"], row["sampling"] or "-", row["verify"] or "-", str(row["K"])
        numbers = [
            f"{row[name]:.2f}"
            for name in ("acceptance_length", "tokens_per_target_pass", "round_cost")
        ]
        speed = format_number(row["tokens_per_s"]), f"{row['speed_up']:.2f}"
        totals.add_row(*labels, *numbers, *speed)
        series = [
            row[name] for name in ("conditional_rate", "expected_acceptance", "draft_temperature")
        ]
        by_depth.add_row(*labels, *(_format_depths(values, row) for values in series))
    return totals, by_depth


def _format_depths(values: list[float], row: dict[str, Any]) -> str:
    """Formats values by depth, with a dash for each depth that no draft reached."""
    depths = max(map(int, row["lengths"])) if row["lengths"] else row["K"]
    texts = [f"{value:.2f}" for value in values]
    return " ".join(texts + ["-"] * (depths - len(values))) if texts else "-"


def _empty_table(name: str, *titles: str) -> Table:
    # Padding and edges would take width that the numbers need.
    table = Table(box=box.SIMPLE, title=name, title_justify="left", padding=0, show_edge=False)
    # A wrapped name would be hard to match with its row.
    table.add_column("draft", no_wrap=True)
    for title in ("sampling", "verify", "K", *titles):
        table.add_column(title, justify="right")
    return table
