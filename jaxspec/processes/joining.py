"""Joins a job's processes and starts JAX."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxspec.inputs.checked import ConfigError, first_line
from jaxspec.processes import peers
from jaxspec.processes.environment import environment_number
from jaxspec.processes.meeting import WAIT_VARIABLE, meet_processes
from jaxspec.processes.places import (
    REMEDY,
    detect_member,
    is_multiprocess_scheduler_job,
    member_from_variables,
    require_no_jax_variables,
)

# Short, because a C++ thread sends the heartbeats: neither a long compilation nor Python code that
# keeps the interpreter lock delays them. Only a stopped process or a lost machine does.
_HEARTBEAT_TIMEOUT = 12
"""Seconds without a heartbeat after which JAX ends the other processes."""
_SHUTDOWN_TIMEOUT = 60
"""Seconds that finished processes wait for the others."""


def join_job(job_values: Mapping[str, Any]) -> None:
    """Joins the other processes of the job, if there are any.

    JAXSPEC_COORDINATOR (host:port), JAXSPEC_PROCESSES and JAXSPEC_PROCESS_ID describe the job. If
    they are unset, `jax.distributed` detects SLURM, Open MPI or Kubernetes, provided that the
    environment names more than one process.

    Args:
      job_values: values by name that must be equal in all processes.

    Raises:
      ConfigError: the variables are invalid or incomplete, the port is taken, a process is late,
        the processes were started differently, or JAX cannot join them.
    """
    wait_seconds = environment_number(WAIT_VARIABLE, minimum=1) or 300
    member = member_from_variables()
    if member is None:
        if not is_multiprocess_scheduler_job():
            return require_no_jax_variables()
        member = detect_member(wait_seconds)
    # With None, `jax.distributed` detects the values itself.
    coordinator, process_count, process_id = member or (None, None, None)
    # Before JAX starts, which would wait without output and end with a stack trace of C++.
    if member is not None:
        peers.watch_peers(member, meet_processes(member, float(wait_seconds), job_values))
    try:
        jax.distributed.initialize(
            coordinator,
            process_count,
            process_id,
            initialization_timeout=max(wait_seconds, _SHUTDOWN_TIMEOUT),
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT,
        )
    except (RuntimeError, ValueError, LookupError) as error:
        raise ConfigError(
            f"JAX cannot join the processes of this job: {first_line(error)}. {REMEDY}"
        ) from error
