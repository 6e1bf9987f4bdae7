"""Where a process stands among those of its job: what it is told, or what its scheduler says."""

import os
from typing import NamedTuple

from jaxspec.inputs.checked import ConfigError, first_line, require
from jaxspec.processes.environment import environment_number, given

NAMES = ("JAXSPEC_COORDINATOR", "JAXSPEC_PROCESSES", "JAXSPEC_PROCESS_ID")
_OTHERS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""What other programs on JAX are told by; each process would take itself for a lone one."""
REMEDY = (
    f"Set {', '.join(NAMES)} for each process, or none of them and no scheduler's variables for a"
    " single one"
)


class Place(NamedTuple):
    """A process among those of its job."""

    coordinator: str
    processes: int
    process: int

    def __str__(self) -> str:
        return f"process {self.process} of {self.processes}"


def told() -> Place | None:
    """Where the variables of `NAMES` put this process; None where none of them is set.

    Raises:
      ConfigError: they cannot be read, or are not all there.
    """
    if not any(map(given, NAMES)):
        return None
    missing = [name for name in NAMES if not given(name)]
    there = [name for name in NAMES if name not in missing]
    require(
        not missing,
        f"{', '.join(there)} set but not {', '.join(sorted(missing))}: set all three, or none for a"
        " single process",
    )
    coordinator = given(NAMES[0])
    processes = environment_number(NAMES[1], 1)
    process = environment_number(NAMES[2], 0)
    assert processes is not None, "it is set"
    assert process is not None, "it is set"
    require(
        process < processes,
        f"{NAMES[2]} is {process}, but {NAMES[1]} is {processes}: ids go from 0 to {processes - 1}",
    )
    return Place(coordinator, processes, process)


def in_a_job() -> bool:
    """Whether a scheduler's variables say that there are several processes."""
    tasks = (
        environment_number("SLURM_NTASKS", 1) or environment_number("OMPI_COMM_WORLD_SIZE", 1) or 1
    )
    by_srun = "SLURM_STEP_ID" in os.environ or "SLURM_NTASKS" not in os.environ
    return by_srun and (tasks > 1 or environment_number("JOB_COMPLETION_INDEX", 0) is not None)


def require_alone() -> None:
    """Refuses what other programs on JAX are told by, where nothing else says that there are other
    processes."""
    others = [name for name in _OTHERS if given(name)] if given("JAX_NUM_PROCESSES") != "1" else []
    require(
        not others,
        f"{', '.join(others)} set, which jaxspec does not read, so that each process would"
        f" train alone. {REMEDY}",
    )


def detected(seconds: int) -> Place | None:
    """Where JAX's own detection of schedulers puts this process; None where that cannot be asked,
    which leaves the waiting to JAX."""
    try:
        from jax._src.clusters import ClusterEnv

        coordinator, processes, process, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, seconds
        )
    except (ImportError, AttributeError, TypeError):  # these names are JAX's own affair, and may go
        return None
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        raise ConfigError(
            f"the scheduler's variables cannot be read: {type(error).__name__}:"
            f" {first_line(error)}. {REMEDY}"
        ) from error
    if coordinator is None or processes is None or process is None:
        return None
    return Place(coordinator, processes, process)
