"""A run of the sections: its options, programs, deadline, and what it says."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxspec.bench.gpu.cells import Cells
from jaxspec.bench.gpu.options import GpuOptions
from jaxspec.bench.gpu.programs import Programs, ProgramUnavailableError, ReadyProgram, Recipe
from jaxspec.bench.gpu.results import Results
from jaxspec.inputs.checked import first_line
from jaxspec.mesh import has_accelerators
from jaxspec.system.progress import Screen

OUT_OF_TIME = "out of time"


class GpuPlan(NamedTuple):
    """What programs follow from, with or without a device."""

    options: GpuOptions
    mesh: Mesh
    cells: Cells

    @property
    def targets_gpu(self) -> bool:
        """Whether the programs are for an accelerator."""
        return has_accelerators(self.mesh)


@dataclass(kw_only=True)
class GpuRun:
    """A run on a device."""

    plan: GpuPlan
    programs: Programs
    results: Results
    screen: Screen
    driver: str
    deadline: float
    """By the monotonic clock."""
    skipped_parts: list[str] = field(default_factory=list)
    """Parts of the section that is measured, left out for want of time."""
    failed_parts: list[str] = field(default_factory=list)
    """Parts of it that failed."""

    @property
    def options(self) -> GpuOptions:
        """Of the command line."""
        return self.plan.options

    @property
    def cells(self) -> Cells:
        """Programs and weights of the tables' cells."""
        return self.plan.cells

    @property
    def device(self) -> Any:
        """The one that is measured."""
        return self.plan.mesh.devices.flat[0]

    @property
    def seconds_left(self) -> float:
        """Seconds of the budget."""
        return self.deadline - time.monotonic()

    def print_line(self, message: str) -> None:
        """Prints a line."""
        self.screen.print(message, markup=False, highlight=False, soft_wrap=True)

    def get_program(self, name: str) -> ReadyProgram:
        """Waits for a program, as long as there is time.

        Raises:
          ProgramUnavailableError: it could not be compiled, or not in time.
        """
        return self.programs.get_program(name, self.seconds_left)

    def attempt_part(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measures a part of a section; says and records why it could not be."""
        if self.seconds_left <= 0:
            self.skipped_parts.append(name)
            return {"left_out": OUT_OF_TIME}
        try:
            return measure()
        except ProgramUnavailableError as error:
            reason = str(error)
            if self.seconds_left <= 0:
                self.skipped_parts.append(name)
                return {"left_out": reason}
        except jax.errors.JaxRuntimeError as error:
            # one cell that does not fit the device is no reason to lose the others
            reason = first_line(error)
        self.failed_parts.append(name)
        self.print_line(f"{name} FAILED: {reason}")
        return {"failed": reason}

    @property
    def peak_bandwidth(self) -> float | None:
        """Bytes a second that section 0 measured; None if it was not."""
        return self.results.get_section(0).get("bytes_per_s")

    @property
    def peak_flops(self) -> float | None:
        """Operations a second of products that section 0 measured; None if it was not."""
        return self.results.get_section(0).get("flops_per_s")


class Section(NamedTuple):
    """A section: its programs, and how it is measured."""

    recipes: Callable[[GpuPlan], Sequence[Recipe]]
    measure: Callable[[GpuRun], dict[str, Any]]
    """Prints its table and returns its numbers."""


NOT_APPLICABLE = "needs a GPU: not applicable here"
"""Of parts that a CPU does not have."""
