"""Number of a process in its job, from variables or the scheduler."""

import os
from typing import NamedTuple

from jaxspec.inputs.checked import ConfigError, first_line, require
from jaxspec.processes.environment import environment_number, environment_text

VARIABLES = ("JAXSPEC_COORDINATOR", "JAXSPEC_PROCESSES", "JAXSPEC_PROCESS_ID")
"""Variables that describe the job to each process."""
_JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Variables that other JAX programs read, but jaxspec does not."""
REMEDY = (
    f"Set {', '.join(VARIABLES)} for each process, or none of them and no scheduler's variables for"
    " a single one"
)


class JobMember(NamedTuple):
    """A process of a job."""

    coordinator: str
    process_count: int
    process_id: int

    def __str__(self) -> str:
        return f"process {self.process_id} of {self.process_count}"


def member_from_variables() -> JobMember | None:
    """Reads `VARIABLES`. Returns None if none of them is set.

    Raises:
      ConfigError: they are invalid or incomplete.
    """
    if not any(map(environment_text, VARIABLES)):
        return None
    missing = [name for name in VARIABLES if not environment_text(name)]
    present = [name for name in VARIABLES if name not in missing]
    require(
        not missing,
        f"{', '.join(present)} set but not {', '.join(sorted(missing))}: set all three, or none for"
        " a single process",
    )
    coordinator = environment_text(VARIABLES[0])
    process_count = environment_number(VARIABLES[1], 1)
    process_id = environment_number(VARIABLES[2], 0)
    assert process_count is not None, "it is set"
    assert process_id is not None, "it is set"
    require(
        process_id < process_count,
        f"{VARIABLES[2]} is {process_id}, but {VARIABLES[1]} is {process_count}: ids go from 0 to"
        f" {process_count - 1}",
    )
    return JobMember(coordinator, process_count, process_id)


def is_multiprocess_scheduler_job() -> bool:
    """Returns whether a scheduler's variables name several processes."""
    task_count = (
        environment_number("SLURM_NTASKS", 1) or environment_number("OMPI_COMM_WORLD_SIZE", 1) or 1
    )
    # A batch script of SLURM has SLURM_NTASKS too, but only `srun` starts that many processes.
    is_srun_step = "SLURM_STEP_ID" in os.environ or "SLURM_NTASKS" not in os.environ
    # An indexed job of Kubernetes has no variable with the number of processes.
    return is_srun_step and (
        task_count > 1 or environment_number("JOB_COMPLETION_INDEX", 0) is not None
    )


def require_no_jax_variables() -> None:
    """Refuses variables for other JAX programs in a single process.

    Raises:
      ConfigError: one is set, and JAX_NUM_PROCESSES is not 1.
    """
    # Otherwise each process of such a job would train alone, all of them in the same folder.
    conflicting = (
        [name for name in _JAX_VARIABLES if environment_text(name)]
        if environment_text("JAX_NUM_PROCESSES") != "1"
        else []
    )
    require(
        not conflicting,
        f"{', '.join(conflicting)} set, which jaxspec does not read, so that each process would"
        f" train alone. {REMEDY}",
    )


def detect_member(timeout_seconds: int) -> JobMember | None:
    """Detects the scheduler's job with JAX's own code.

    Returns None if that code cannot be called or finds nothing.

    Raises:
      ConfigError: the scheduler's variables cannot be read.
    """
    try:
        from jax._src.clusters import ClusterEnv

        coordinator, process_count, process_id, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, timeout_seconds
        )
    except (ImportError, AttributeError, TypeError):
        # These functions are private to JAX and may change. Without them the processes do not meet,
        # and JAX alone waits for them.
        return None
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        raise ConfigError(
            f"the scheduler's variables cannot be read: {type(error).__name__}:"
            f" {first_line(error)}. {REMEDY}"
        ) from error
    if coordinator is None or process_count is None or process_id is None:
        return None
    return JobMember(coordinator, process_count, process_id)
