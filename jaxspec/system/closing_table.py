"""What a run achieved, told at its end from its metrics: a table, and why there is no result."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from jaxspec.system.progress import short

_PHASES = ("data", "prepare", "generate", "reward", "train", "step")
_REWARD, _EVALUATION = "reward/mean", re.compile(r"eval/(\S+/avg@\d+)")


def missing(lines: Sequence[Mapping[str, Any]], batches: int) -> str:
    """Which of a run's first `batches` batches have no line of metrics; empty where all have
    one."""
    gone = sorted(set(range(batches)) - {line["step"] for line in lines})
    few = ", ".join(map(str, gone[:5])) + (f" and {len(gone) - 5} more" if len(gone) > 5 else "")
    return (
        f"metrics.jsonl has no line for batch {few}, which were made: the closing table is of the"
        " others"
        if gone
        else ""
    )


def closing_table(
    lines: Sequence[Mapping[str, Any]],
    summary: Mapping[str, float | int],
    signs: Sequence[str] = (),
) -> Table:
    """Returns what a run achieved, for rich to print; rows whose numbers were not measured are left
    out.

    A batch or an evaluation that has no number counts, as `none`.

    `lines` are those of `read`. `summary` compares plain and speculative decoding of the same
    `rows`: target passes a sequence (`plain/passes`, `spec/passes`), seconds (`plain/seconds`,
    `spec/seconds`) and what a round costs in plain steps (`round_cost`). `signs` say that the run
    could not learn.
    """
    table = Table(
        box=box.SIMPLE, show_header=False, title=f"{len(lines)} batches", title_justify="left"
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def column(name: str) -> list[float | int]:
        return [line[name] for line in lines if line.get(name) is not None]

    for title, text in _from_first_to_last(lines):
        table.add_row(title, text)
    for sign in signs:
        table.add_row("cannot learn", sign)
    rates = {
        "the whole step": "rollout/tokens_per_s",
        "generation alone": "rollout/generation_tokens_per_s",
    }
    medians = {
        over: sorted(values)[len(values) // 2]
        for over, name in rates.items()
        if (values := column(name))
    }
    for over, rate in medians.items():
        table.add_row("tokens/s", f"{short(rate)} (over {over}, median batch)")
    if phases := {phase: sum(values) for phase in _PHASES if (values := column(f"time/{phase}"))}:
        table.add_row(
            "seconds by phase",
            ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items()),
        )
    for title, unit in (
        ("target passes a sequence", "passes"),
        (f"seconds for {summary.get('rows', 0):.0f} rows", "seconds"),
    ):
        plain, speculative = summary.get(f"plain/{unit}"), summary.get(f"spec/{unit}")
        if plain and speculative:
            gain = (
                f"speed-up {plain / speculative:.2f}"
                if unit == "seconds"
                else f"{plain / speculative:.2f} times fewer"
            )
            table.add_row(title, f"plain {short(plain)}, speculative {short(speculative)}: {gain}")
    if cost := summary.get("round_cost"):
        table.add_row("round_cost", f"{short(cost)} (a round over a plain step, in seconds)")
    return table


def _from_first_to_last(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Rows of the table: how rewards, acceptance and the evaluation went, and how many rows have no
    part in that."""
    for title, name in (("reward", _REWARD), ("acceptance_length", "rollout/acceptance_length")):
        if values := [line[name] for line in lines if name in line]:
            tenth = max(1, len(values) // 10)
            ends = f"first and last {tenth} of {len(values)}{_lacking(values)}"
            yield title, f"{_mean(values[:tenth])} -> {_mean(values[-tenth:])} ({ends})"
    if any(failed := [line.get("status/failed", 0) for line in lines]):
        rows, batches = sum(map(_ended, lines)), sum(map(bool, failed))
        yield (
            "failed rows",
            (
                f"{sum(failed):,.0f} of {rows:,.0f}, in {batches} of {len(lines)} batches (logits"
                " that are not finite)"
            ),
        )
    for title, values in _evaluations(lines).items():
        lacking = f" ({len(values)} evaluations{_lacking(values)})" if _lacking(values) else ""
        yield title, f"{_mean(values[:1])} -> {_mean(values[-1:])}{lacking}"


def _evaluations(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Shares of correct answers, by set and number of answers."""
    found: dict[str, list[float | None]] = {}
    for line in lines:
        for name, value in line.items():
            if matched := _EVALUATION.fullmatch(name):
                found.setdefault(matched[1], []).append(value)
    return found


def _ended(line: Mapping[str, Any]) -> float | int:
    """Rows of a batch, however they ended."""
    return sum(line.get(f"status/{name}", 0) for name in ("eos", "length", "failed"))


def _mean(values: Sequence[float | None]) -> str:
    """Of those that are numbers."""
    numbers = [value for value in values if value is not None]
    return f"{sum(numbers) / len(numbers):.2f}" if numbers else "none"


def _lacking(values: Sequence[float | None]) -> str:
    """How many are no numbers, to be put behind their count."""
    missing = sum(value is None for value in values)
    return f", {missing} without a number" if missing else ""


def without_result(lines: Sequence[Mapping[str, Any]]) -> str:
    """Why a run that made all its batches has no result: its last batch or its last evaluation has
    no number; empty where both have one."""
    found = []
    if lines and lines[-1].get(_REWARD, 0) is None:
        failed = (
            f"{lines[-1].get('status/failed', 0):.0f} of its {_ended(lines[-1]):.0f} rows failed"
            " (logits that are not finite)"
        )
        found.append(f"the last batch, {lines[-1]['step']}, has no reward: {failed}")
    for name, values in _evaluations(lines).items():
        if values[-1] is None:
            found.append(f"the last evaluation has no {name}: no answer has a reward")
    remedy = (
        "look at loss/policy and grad_norm/policy in metrics.jsonl; a lower"
        " --optimizer.learning_rate is the usual remedy"
    )
    return f"{' and '.join(found)}; {remedy}" if found else ""
