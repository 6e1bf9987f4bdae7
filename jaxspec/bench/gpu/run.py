"""State of a run of the sections.

Holds options, programs, results and the deadline, and reports progress.
"""

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
    """Inputs that determine the programs.

    The devices of `mesh` may be absent, for compilation only.
    """

    options: GpuOptions
    mesh: Mesh
    cells: Cells

    @property
    def targets_gpu(self) -> bool:
        """Whether the mesh has accelerators, present or absent."""
        return has_accelerators(self.mesh)


@dataclass(kw_only=True)
class GpuRun:
    """Run on the device of this machine."""

    plan: GpuPlan
    programs: Programs
    results: Results
    screen: Screen
    driver: str
    deadline: float
    """Time of the monotonic clock at which the budget ends."""
    skipped_parts: list[str] = field(default_factory=list)
    """Parts of the current section that were skipped for lack of time."""
    failed_parts: list[str] = field(default_factory=list)
    """Parts of the current section that failed."""

    @property
    def options(self) -> GpuOptions:
        """Options of the command line."""
        return self.plan.options

    @property
    def cells(self) -> Cells:
        """Builder of the cells' programs and arguments."""
        return self.plan.cells

    @property
    def device(self) -> Any:
        """Device that is measured."""
        return self.plan.mesh.devices.flat[0]

    @property
    def seconds_left(self) -> float:
        """Remaining seconds of the budget, negative after its end."""
        return self.deadline - time.monotonic()

    def print_line(self, message: str) -> None:
        """Prints a message verbatim, without wrapping."""
        # Messages may contain brackets, which rich would take for markup.
        self.screen.print(message, markup=False, highlight=False, soft_wrap=True)

    def get_program(self, name: str) -> ReadyProgram:
        """Waits for a program until the budget ends.

        Raises:
          ProgramUnavailableError: the program failed to compile, or was not ready in time.
        """
        return self.programs.get_program(name, self.seconds_left)

    def attempt_part(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measures a part of a section, and returns its numbers.

        If there is no time, a program is missing or JAX's runtime fails, records its name instead.
        The result then has the reason, as `left_out` or `failed`. Other errors are raised.
        """
        if self.seconds_left <= 0:
            self.skipped_parts.append(name)
            return {"left_out": OUT_OF_TIME}
        try:
            return measure()
        except ProgramUnavailableError as error:
            reason = str(error)
            # A program that is late because the budget ended counts as skipped, not as failed. The
            # exit status stays 0.
            if self.seconds_left <= 0:
                self.skipped_parts.append(name)
                return {"left_out": reason}
        except jax.errors.JaxRuntimeError as error:
            # A cell that does not fit into the device's memory must not cost the others.
            reason = first_line(error)
        self.failed_parts.append(name)
        self.print_line(f"{name} FAILED: {reason}")
        return {"failed": reason}

    @property
    def peak_bandwidth(self) -> float | None:
        """Bytes per second as measured by section 0, None if it was not measured."""
        # Read from the results, so that a later command can use what an earlier one measured.
        return self.results.get_section(0).get("bytes_per_s")

    @property
    def peak_flops(self) -> float | None:
        """Operations per second of products as measured by section 0, None if not measured."""
        return self.results.get_section(0).get("flops_per_s")


class Section(NamedTuple):
    """Section of the benchmark: its programs and its measurement."""

    recipes: Callable[[GpuPlan], Sequence[Recipe]]
    measure: Callable[[GpuRun], dict[str, Any]]
    """Measures the section, prints its table and returns its numbers."""


NOT_APPLICABLE = "needs a GPU: not applicable here"
"""Result of parts that need a GPU, on a CPU."""
