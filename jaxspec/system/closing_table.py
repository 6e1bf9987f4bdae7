"""Closing table of a run."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from jaxspec.system.progress import format_number

_PHASES = ("data", "prepare", "generate", "reward", "train", "step")
_REWARD, _EVALUATION = "reward/mean", re.compile(r"eval/(\S+/avg@\d+)")


def describe_missing_batches(records: Sequence[Mapping[str, Any]], batch_count: int) -> str:
    """Describes which batches lack metrics.

    Returns "" if all of the first `batch_count` batches have a line.
    """
    missing_batches = sorted(set(range(batch_count)) - {record["step"] for record in records})
    listing = ", ".join(map(str, missing_batches[:5])) + (
        f" and {len(missing_batches) - 5} more" if len(missing_batches) > 5 else ""
    )
    return (
        f"metrics.jsonl has no line for batch {listing}: the closing table covers the other batches"
        if missing_batches
        else ""
    )


def build_closing_table(
    records: Sequence[Mapping[str, Any]],
    summary: Mapping[str, float | int],
    signs: Sequence[str] = (),
) -> Table:
    """Builds the closing table of a run.

    Rows without measured numbers are left out, except that of the reward. A mean leaves out missing
    numbers, and is `none` if there are no others.

    Args:
      records: metrics of all batches, from `read_metrics`.
      summary: comparison of plain and speculative decoding of the same `rows`. It has target passes
        per sequence (`plain/passes`, `spec/passes`) and seconds (`plain/seconds`, `spec/seconds`).
        `round_cost` is the cost of a round in plain steps. `in_turn` is 1 if learner and generator
        of a pipelined run never work at the same time.
      signs: signs that the run could not learn.
    """
    table = Table(
        box=box.SIMPLE, show_header=False, title=f"{len(records)} batches", title_justify="left"
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    for title, text in _summary_rows(records):
        table.add_row(title, text)
    for sign in signs:
        table.add_row("cannot learn", sign)
    rows = *_speed_rows(records), *_pipeline_rows(records, summary), *_comparison_rows(summary)
    for title, text in rows:
        table.add_row(title, text)
    return table


def _summary_rows(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields rows for rewards, acceptance, failures and evaluations."""
    for title, name in (("reward", _REWARD), ("acceptance_length", "rollout/acceptance_length")):
        values = [record.get(name) for record in records]
        # Without any reward the row says so.
        if values and (name == _REWARD or any(value is not None for value in values)):
            # Single batches are noisy, so tenths of the run are compared.
            tenth = max(1, len(values) // 10)
            sample_note = f"first and last {tenth} of {len(values)}{_missing_note(values)}"
            yield (
                title,
                f"{_format_mean(values[:tenth])} -> {_format_mean(values[-tenth:])}"
                f" ({sample_note})",
            )
    if any(failed_counts := [record.get("status/failed", 0) for record in records]):
        row_count, batch_count = sum(map(_count_rows, records)), sum(map(bool, failed_counts))
        yield (
            "failed rows",
            (
                f"{sum(failed_counts):,.0f} of {row_count:,.0f}, in {batch_count} of {len(records)}"
                " batches (logits that are not finite)"
            ),
        )
    for title, values in _evaluation_series(records).items():
        missing_note = (
            f" ({len(values)} evaluations{_missing_note(values)})" if _missing_note(values) else ""
        )
        yield title, f"{_format_mean(values[:1])} -> {_format_mean(values[-1:])}{missing_note}"


def _speed_rows(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields rows for tokens per second, and seconds by phase."""
    rate_metrics = {
        "the whole step": "rollout/tokens_per_s",
        "generation alone": "rollout/generation_tokens_per_s",
    }
    medians = {
        basis: _find_median(values)
        for basis, name in rate_metrics.items()
        if (values := _list_values(records, name))
    }
    for basis, rate in medians.items():
        yield "tokens/s", f"{format_number(rate)} (over {basis}, median batch)"
    if phases := {
        phase: sum(values)
        for phase in _PHASES
        if (values := _list_values(records, f"time/{phase}"))
    }:
        yield (
            "seconds by phase",
            ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items()),
        )


def _pipeline_rows(
    records: Sequence[Mapping[str, Any]], summary: Mapping[str, float | int]
) -> Iterator[tuple[str, str]]:
    """Yields rows for the two sides of a pipelined run, as it was and without drafts.

    Seconds without drafts are predicted. Generation takes as much longer as the comparison has
    measured. A step takes as long as the busier side, or both sides if they take turns.
    """
    measured = [record for record in records if "time/exposed_generation" in record]
    if not measured:
        return

    def find_median(name: str) -> float:
        return _find_median(_list_values(measured, f"time/{name}"))

    step, exposed = find_median("step"), find_median("exposed_generation")
    idle = find_median("idle_generate")
    learning, generating = step - exposed, find_median("generator_step") - idle
    yield (
        "pipeline",
        f"step {step:.3g} s: learner busy {learning:.3g}, exposed generation {exposed:.3g};"
        f" generator busy {generating:.3g}, idle {idle:.3g} (median batch)",
    )
    plain, speculative = summary.get("plain/seconds"), summary.get("spec/seconds")
    if not (plain and speculative):
        return
    generating += find_median("generate") * (plain / speculative - 1)
    sides = learning, generating
    step = sum(sides) if summary.get("in_turn") else max(sides)
    yield (
        "without drafts",
        f"step {step:.3g} s, exposed generation {step - learning:.3g} (predicted by the speed-up of"
        " generation)",
    )


def _comparison_rows(summary: Mapping[str, float | int]) -> Iterator[tuple[str, str]]:
    """Yields rows for plain and speculative decoding."""
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
            yield (
                title,
                f"plain {format_number(plain)}, speculative {format_number(speculative)}: {gain}",
            )
    if cost := summary.get("round_cost"):
        yield "round_cost", f"{format_number(cost)} (a round over a plain step, in seconds)"


def _evaluation_series(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Collects the values of each evaluation metric."""
    series: dict[str, list[float | None]] = {}
    for record in records:
        for name, value in record.items():
            if match := _EVALUATION.fullmatch(name):
                series.setdefault(match[1], []).append(value)
    return series


def _list_values(records: Sequence[Mapping[str, Any]], name: str) -> list[float | int]:
    """Lists the numbers of a metric, without missing ones."""
    return [record[name] for record in records if record.get(name) is not None]


def _find_median(values: Sequence[float | int]) -> float | int:
    """Returns the median, which ignores a few slow batches, such as the first."""
    return sorted(values)[len(values) // 2]


def _count_rows(record: Mapping[str, Any]) -> float | int:
    """Counts the rows of a batch."""
    return sum(record.get(f"status/{name}", 0) for name in ("eos", "length", "failed"))


def _format_mean(values: Sequence[float | None]) -> str:
    """Formats the mean without missing numbers."""
    numbers = [value for value in values if value is not None]
    return f"{sum(numbers) / len(numbers):.2f}" if numbers else "none"


def _missing_note(values: Sequence[float | None]) -> str:
    """Formats the count of missing numbers."""
    missing_count = sum(value is None for value in values)
    return f", {missing_count} without a number" if missing_count else ""


def explain_missing_result(records: Sequence[Mapping[str, Any]]) -> str:
    """Explains why a complete run has no result.

    This is so if its last batch or its last evaluation has no number. Returns "" otherwise.
    """
    reasons = []
    if records and records[-1].get(_REWARD) is None:
        failed_rows = (
            f"{records[-1].get('status/failed', 0):.0f} of its {_count_rows(records[-1]):.0f} rows"
            " failed (logits that are not finite)"
        )
        reasons.append(f"the last batch, {records[-1]['step']}, has no reward: {failed_rows}")
    for name, values in _evaluation_series(records).items():
        if values[-1] is None:
            reasons.append(f"the last evaluation has no {name}: no answer has a reward")
    remedy = (
        "look at status/failed, loss/policy and grad_norm/policy in metrics.jsonl; a lower"
        " --optimizer.learning_rate is the usual remedy"
    )
    return f"{' and '.join(reasons)}; {remedy}" if reasons else ""
