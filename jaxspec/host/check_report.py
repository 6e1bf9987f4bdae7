"""Report of `python -m jaxspec.check`, as tables or JSON."""

from typing import Any, NamedTuple

import jax
from rich import box
from rich.table import Table

from jaxspec import mesh as meshes
from jaxspec.compiled import findings
from jaxspec.compiled.hardware import Card
from jaxspec.compiled.tables import build_collectives_table, build_work_table, cost_to_json
from jaxspec.host import memory
from jaxspec.host.fit import FittedStep
from jaxspec.host.job import Job
from jaxspec.system.progress import Screen

_GIB = 2**30


class StepTarget(NamedTuple):
    """What a step is compiled for."""

    name: str
    card: Card | None
    """None: the devices that are here."""
    devices: list[Any]
    virtual: bool
    """Whether the CPU's virtual devices stand for the card's."""

    @property
    def memory_limit(self) -> int:
        """Bytes that a device has."""
        return self.card.usable_memory if self.card else memory.device_memory()

    @property
    def label(self) -> str:
        """In words."""
        kind = self.card.kind if self.card else self.devices[0].device_kind
        stand_in = ", compiled for virtual devices of this CPU" if self.virtual else ""
        return f"{kind}{stand_in}"


class CheckResult(NamedTuple):
    """What there is to tell."""

    job: Job
    target: StepTarget
    unchecked: list[str]
    fit: FittedStep
    reason: str
    """Why it will not run; empty where it should."""
    analysis: findings.Findings
    warnings: list[str]
    seconds: list[float]
    """Of each program that was compiled, the last of which is told of."""


def describe_verdict(result: CheckResult) -> str:
    """In a line."""
    used_bytes = sum(owner.size for owner in result.fit.memory_uses)
    memory_text = f"{format_gib(used_bytes)} of {format_gib(result.fit.limit)} a device"
    if result.reason:
        return f"it will not run: {result.reason}"
    caveat = (
        "; its temporaries are those of a program for CPUs, which are not a GPU's"
        if result.target.virtual
        else ""
    )
    warning_text = f", with {len(result.warnings)} warnings" if result.warnings else ""
    return f"it should run: {memory_text}{caveat}{warning_text}"


def count_micro_batches(result: CheckResult) -> int:
    """That a data shard learns from in a step, if all rows are of the longest kind."""
    step, config = result.fit.step, result.job.config
    rows = config.batch.prompts * config.batch.group_size // meshes.row_shard_count(step.mesh)
    return -(-rows * (config.row_length - 1) // step.learner.micro_tokens)


def as_json(name: str, result: CheckResult) -> dict[str, Any]:
    """All of it as plain values; sizes are bytes on each device."""
    step, card = result.fit.step, result.target.card
    return {
        "config": name,
        "hardware": result.target.name,
        "device": result.target.label,
        "card": card._asdict() if card else None,
        "devices": step.mesh.size,
        "mesh": dict(step.mesh.shape),
        "jax": jax.__version__,
        "virtual": result.target.virtual,
        "not_looked_at": result.unchecked,
        "compile_seconds": result.seconds,
        "sizes": step.sizes._asdict() | {"slots": step.generator.settings.slots},
        "memory": {
            "limit": result.fit.limit,
            "taken": sum(owner.size for owner in result.fit.memory_uses),
            "owners": {owner.name: owner.size for owner in result.fit.memory_uses},
            "remedies": {owner.name: owner.remedy for owner in result.fit.memory_uses},
        },
        "micro_batches": count_micro_batches(result),
        "work": {phase: cost_to_json(cost) for phase, cost in result.analysis.cost_rows.items()},
        "sync_moves_each_weight": result.analysis.sync_moves,
        "warnings": result.warnings,
        "runs": not result.reason,
        "verdict": describe_verdict(result),
    }


def print_report(name: str, result: CheckResult, screen: Screen) -> None:
    """The tables, and the verdict last."""
    step, costs = result.fit.step, result.analysis.cost_rows
    sizes, mesh = step.sizes, dict(step.mesh.shape)
    screen.print(
        f"{name} on {step.mesh.size} x {result.target.label}, {mesh}, jax {jax.__version__}"
    )
    for item in result.unchecked:
        screen.print(f"not looked at: {item}")
    screen.print(
        _memory_table(result),
        build_work_table(costs, result.target.card),
        build_collectives_table(costs),
    )
    slots = step.generator.settings.slots
    pages = f"{sizes.pages} pages of {sizes.page_size}" if sizes.page_size else "a page a row"
    screen.print(
        f"{count_micro_batches(result)} micro-batches of {sizes.tokens} tokens a data shard if all"
        f" rows are of the longest kind; {slots} slots, {pages}; sync sends"
        f" {result.analysis.sync_moves:.2f} times the bytes of the split weights"
    )
    for warning in result.warnings:
        screen.print(f"warning: {warning}", markup=False)
    screen.print(describe_verdict(result), markup=False)


def _memory_table(result: CheckResult) -> Table:
    table = Table("of each device", "GiB", "less with", box=box.SIMPLE)
    for owner in sorted(result.fit.memory_uses, key=lambda owner: -owner.size):
        table.add_row(owner.name, f"{owner.size / _GIB:.2f}", owner.remedy)
    total = sum(owner.size for owner in result.fit.memory_uses)
    table.add_row("in all", f"{total / _GIB:.2f}", f"of {result.fit.limit / _GIB:.2f}")
    return table


def format_gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
