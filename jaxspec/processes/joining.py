"""Joins the processes of a job: they meet, compare what they were started with, and start JAX."""

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
    is_multiprocess_job,
    member_from_variables,
    require_no_jax_variables,
)

_HEARTBEAT_TIMEOUT = 12
"""After so long without a heartbeat JAX takes a process for dead and ends the others. A thread of
C++ sends them, which neither a long compilation nor code that holds Python's lock keeps from it;
what does is a machine that is gone, or a process that is stopped."""
_SHUTDOWN_TIMEOUT = 60
"""How long processes that have finished wait for those that have not."""


def initialize_processes(identity: Mapping[str, Any]) -> None:
    """Joins the other processes of the job, if there are any.

    Explicit: JAXSPEC_COORDINATOR (host:port), JAXSPEC_PROCESSES, JAXSPEC_PROCESS_ID. Otherwise
    SLURM, Open MPI or Kubernetes as `jax.distributed` detects them, when the environment says that
    the job has more than one process. `identity` is what must be the same in all of them, by name.

    Raises:
      ConfigError: the variables cannot be read or are not all there, the port is taken, a process
        has not come in time, or one was started with something else than the others.
    """
    wait_seconds = environment_number(WAIT_VARIABLE, minimum=1) or 300
    member = member_from_variables()
    if member is None:
        if not is_multiprocess_job():
            return require_no_jax_variables()
        member = detect_member(wait_seconds)
    coordinator, process_count, process_id = member or (None, None, None)
    if member is not None:
        peers.watch_peers(member, meet_processes(member, float(wait_seconds), identity))
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
