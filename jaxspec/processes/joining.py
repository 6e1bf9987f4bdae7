"""Joins the processes of a job: they meet, compare what they were started with, and start JAX."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxspec.inputs.checked import ConfigError, first_line
from jaxspec.processes import peers
from jaxspec.processes.environment import environment_number
from jaxspec.processes.meeting import WAIT, meet
from jaxspec.processes.places import REMEDY, detected, in_a_job, require_alone, told

_DEAD_SECONDS = 12
"""After so long without a heartbeat JAX takes a process for dead and ends the others. A thread of
C++ sends them, which neither a long compilation nor code that holds Python's lock keeps from it;
what does is a machine that is gone, or a process that is stopped."""
_LEAVING_SECONDS = 60
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
    seconds = environment_number(WAIT, at_least=1) or 300
    place = told()
    if place is None:
        if not in_a_job():
            return require_alone()
        place = detected(seconds)
    coordinator, processes, process = place or (None, None, None)
    if place is not None:
        peers.hold(place, meet(place, float(seconds), identity))
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=max(seconds, _LEAVING_SECONDS),
            heartbeat_timeout_seconds=_DEAD_SECONDS,
            shutdown_timeout_seconds=_LEAVING_SECONDS,
        )
    except (RuntimeError, ValueError, LookupError) as error:
        raise ConfigError(
            f"JAX cannot join the processes of this job: {first_line(error)}. {REMEDY}"
        ) from error
