"""Report of `python -m jaxspec.check`."""

from typing import Any, NamedTuple

import jax
from rich import box
from rich.table import Table

from jaxspec import mesh as meshes
from jaxspec.compiled import findings
from jaxspec.compiled.hardware import Card
from jaxspec.compiled.tables import build_collectives_table, build_work_table, cost_to_json
from jaxspec.config.settings import ResolvedConfig
from jaxspec.host import memory
from jaxspec.host.fit import FittedStep
from jaxspec.system.progress import Screen

_GIB = 2**30


class StepTarget(NamedTuple):
    """Devices that a step is compiled for."""

    name: str
    card: Card | None
    """Figures of the card, or None for the devices of this machine."""
    devices: list[Any]
    virtual: bool
    """Whether virtual CPU devices stand in for the card."""

    @property
    def memory_limit(self) -> int:
        """Bytes of memory on each device."""
        return self.card.usable_memory if self.card else memory.device_memory()

    @property
    def label(self) -> str:
        """Description of the devices for the report."""
        kind = self.card.kind if self.card else self.devices[0].device_kind
        stand_in = ", compiled for virtual devices of this CPU" if self.virtual else ""
        return f"{kind}{stand_in}"


class CheckResult(NamedTuple):
    """Result of checking one config for one target."""

    config: ResolvedConfig
    target: StepTarget
    unchecked: list[str]
    """Parts of the config that were not checked, as text."""
    fit: FittedStep
    reason: str
    """Reason why the config will not run. Empty if it should run."""
    analysis: findings.Findings
    warnings: list[str]
    seconds: list[float]
    """Compile time of each attempt. The report describes the last one."""


class SidesResult(NamedTuple):
    """Result of checking both sides of a pipelined run."""

    learner: CheckResult
    generator: CheckResult
    weight_bytes: int
    """Bytes of the weights that travel for each version."""
    batch_bytes: int
    """Bytes of a batch that travel back."""

    @property
    def reason(self) -> str:
        """Reason why the config will not run. Empty if it should run."""
        return self.learner.reason or self.generator.reason

    @property
    def transfer_seconds(self) -> float | None:
        """Least seconds of moving the weights of a version. None if links are unknown."""
        card = self.learner.target.card
        if card is None:
            return None
        # Every device of the side that has fewer sends or receives its share.
        devices = min(len(side.target.devices) for side in (self.learner, self.generator))
        return self.weight_bytes / devices / self.link_rate

    @property
    def link_rate(self) -> float:
        """Bandwidth between devices of the two sides, one way, in bytes per second."""
        card = self.learner.target.card
        assert card is not None, "the caller knows the card"
        both = sum(len(side.target.devices) for side in (self.learner, self.generator))
        return card.link if both <= card.domain else card.nic


def describe_verdict(result: CheckResult) -> str:
    """Summarizes the result in one line."""
    used_bytes = sum(owner.size for owner in result.fit.memory_uses)
    memory_text = f"{format_gib(used_bytes)} of {format_gib(result.fit.limit)} a device"
    if result.reason:
        return f"it will not run: {result.reason}"
    # XLA plans memory per backend: only the sizes of arrays carry over from CPU to GPU.
    caveat = (
        "; its temporaries are those of a CPU program, and a GPU's differ"
        if result.target.virtual
        else ""
    )
    warning_text = f", with {len(result.warnings)} warnings" if result.warnings else ""
    return f"it should run: {memory_text}{caveat}{warning_text}"


def estimate_micro_batches(result: CheckResult) -> int:
    """Estimates a step's micro-batches on each data shard, for rows of full length."""
    step, config = result.fit.step, result.config
    shard_count = meshes.row_shard_count(step.learner.mesh)
    rows = config.batch.prompts * config.batch.group_size // shard_count
    # The last token of a row is only a label, never an input.
    return -(-rows * (config.row_length - 1) // step.learner.micro_tokens)


def result_to_json(name: str, result: CheckResult) -> dict[str, Any]:
    """Converts the result to JSON values. Memory sizes are bytes on each device."""
    step, card = result.fit.step, result.target.card
    mesh = step.learner.mesh
    # Scripts read these keys, so they stay when the tables change.
    return {
        "config": name,
        "hardware": result.target.name,
        "device": result.target.label,
        "card": card._asdict() if card else None,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
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
        "micro_batches": estimate_micro_batches(result),
        "work": {phase: cost_to_json(cost) for phase, cost in result.analysis.cost_rows.items()},
        "sync_moves_each_weight": result.analysis.sync_moves,
        "warnings": result.warnings,
        "runs": not result.reason,
        "verdict": describe_verdict(result),
    }


def print_report(name: str, result: CheckResult, screen: Screen) -> None:
    """Prints the tables and warnings, then the verdict."""
    step, costs = result.fit.step, result.analysis.cost_rows
    sizes, mesh = step.sizes, step.learner.mesh
    screen.print(
        f"{name} on {mesh.size} x {result.target.label}, {dict(mesh.shape)}, jax {jax.__version__}"
    )
    for item in result.unchecked:
        screen.print(f"not checked: {item}")
    screen.print(
        _build_memory_table(result),
        build_work_table(costs, result.target.card),
        build_collectives_table(costs),
    )
    slots = step.generator.settings.slots
    pages = f"{sizes.pages} pages of {sizes.page_size}" if sizes.page_size else "a page a row"
    screen.print(
        f"{estimate_micro_batches(result)} micro-batches of {sizes.tokens} tokens a data shard if"
        f" all rows have full length; {slots} slots, {pages}; sync sends"
        f" {result.analysis.sync_moves:.2f} times the bytes of the split weights"
    )
    for warning in result.warnings:
        # Messages may contain brackets, which rich would read as markup.
        screen.print(f"warning: {warning}", markup=False)
    screen.print(describe_verdict(result), markup=False)


def _build_memory_table(result: CheckResult) -> Table:
    table = Table("of each device", "GiB", "less with", box=box.SIMPLE)
    for owner in sorted(result.fit.memory_uses, key=lambda owner: -owner.size):
        table.add_row(owner.name, f"{owner.size / _GIB:.2f}", owner.remedy)
    total = sum(owner.size for owner in result.fit.memory_uses)
    table.add_row("in all", f"{total / _GIB:.2f}", f"of {result.fit.limit / _GIB:.2f}")
    return table


def format_gib(size: int) -> str:
    """Formats bytes as GiB."""
    return f"{size / _GIB:.2f} GiB"


def sides_to_json(name: str, result: SidesResult) -> dict[str, Any]:
    """Converts the result of both sides to JSON values."""
    return {
        "config": name,
        "learner": result_to_json(name, result.learner),
        "generator": result_to_json(name, result.generator),
        "weight_bytes": result.weight_bytes,
        "batch_bytes": result.batch_bytes,
        "transfer_seconds": result.transfer_seconds,
        "runs": not result.reason,
    }


def print_sides(name: str, result: SidesResult, screen: Screen) -> None:
    """Prints the reports of both sides, and what travels between them."""
    for side, side_result in (("learning", result.learner), ("generation", result.generator)):
        screen.print(f"{side}:")
        print_report(name, side_result, screen)
        screen.print("")
    seconds, lag = result.transfer_seconds, result.learner.config.schedule.lag
    time_text = ""
    if seconds is not None:
        rate = result.link_rate / 1e9
        time_text = f", in {seconds:.2g} s at least over links of {rate:.0f} GB/s"
    screen.print(
        f"lag {lag}: {format_gib(result.weight_bytes)} of weights travel for each"
        f" version{time_text}; {format_gib(result.batch_bytes)} of a batch travel back",
        markup=False,
    )
