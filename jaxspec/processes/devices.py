"""Devices of a process: CPU devices to make, and devices that JAX finds."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.inputs.checked import ConfigError, first_line, require
from jaxspec.processes.environment import environment_number, parse_whole_number

# No machine has more cores. Asked for a million devices, XLA would not come to an end.
_MOST_DEVICES = 512
"""Maximum number of CPU devices."""


def core_count() -> int:
    """Returns the number of usable cores."""
    # A container or `taskset` may allow fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count() -> int:
    """Returns the number of threads of each CPU device."""
    return environment_number("NPROC", 1) or core_count()


def describe_machine(mesh: Mesh) -> dict[str, Any]:
    """Describes device, mesh shape, CPU and cores."""
    device, cpu_info = mesh.devices.flat[0], Path("/proc/cpuinfo")
    cpu_model = (
        re.search(r"model name\s*: (.*)", cpu_info.read_text(encoding="utf-8"))
        if cpu_info.exists()
        else None
    )
    return {
        "device": device.device_kind,
        "mesh": dict(mesh.shape),
        # `/proc/cpuinfo` names no model on ARM, and does not exist outside Linux.
        "cpu": cpu_model[1] if cpu_model else platform.machine(),
        "cores": os.cpu_count(),
    }


def configure_cpu_devices(device_count: int = 0, threads_per_device: int = 0) -> None:
    """Sets how many devices a CPU is split into.

    Must run before JAX starts its backends. By default there is one device per core, with one
    thread each. Explicit settings in XLA_FLAGS or JAX_NUM_CPU_DEVICES are left as they are.
    JAXSPEC_LOCAL_DEVICES takes precedence over `device_count`.

    Args:
      device_count: number of devices, 0 for one per core.
      threads_per_device: threads of each device, 0 to share the cores among the devices.

    Raises:
      ConfigError: an environment variable does not hold a valid number, or XLA_FLAGS is malformed.
    """
    # NPROC is only checked here.
    environment_number("NPROC", 1)
    configured_count, local_count = (
        environment_number(name, 1, _MOST_DEVICES)
        for name in ("JAX_NUM_CPU_DEVICES", "JAXSPEC_LOCAL_DEVICES")
    )
    if _has_forced_devices() or configured_count:
        return
    # Shards generate rows independently. On two cores, two devices of one thread each decoded
    # small models 1.1 to 2.8 times as fast as one device with two threads. A config that needs more
    # devices is refused later, with the number that there is.
    count = local_count or min(device_count or core_count(), _MOST_DEVICES)
    # XLA's CPU client reads NPROC when it starts.
    os.environ.setdefault("NPROC", str(threads_per_device or max(1, core_count() // count)))
    jax.config.update("jax_num_cpu_devices", count)


def _has_forced_devices() -> bool:
    """Returns whether XLA_FLAGS sets a device count.

    Raises:
      ConfigError: XLA_FLAGS is malformed, or its number of devices is out of range.
    """
    # Checked here, because XLA reports flags that it cannot read with too little or too much text.
    flags = os.environ.get("XLA_FLAGS", "").split()
    if not flags:
        os.environ.pop("XLA_FLAGS", None)  # XLA aborts the process if the value is only blanks
    # XLA takes a first word that is no flag as the name of a file with flags.
    has_file = flags and not flags[0].startswith("--")
    require(
        not has_file or Path(flags[0]).is_file(),
        f"XLA_FLAGS starts with {flags[:1]}: neither a flag (--NAME=VALUE) nor a file of flags",
    )
    counts = [
        flag.partition("=")[2]
        for flag in flags
        if flag.startswith("--xla_force_host_platform_device_count")
    ]
    for count in counts:
        is_valid = 1 <= (parse_whole_number(count) or 0) <= _MOST_DEVICES
        flag = f"--xla_force_host_platform_device_count={count}"
        require(
            is_valid,
            f"XLA_FLAGS has {flag}; give a whole number, 1 or more and at most {_MOST_DEVICES}",
        )
    return bool(counts)


def count_devices() -> int:
    """Starts JAX and counts the devices of all processes.

    All processes of the job must have joined before.

    Raises:
      ConfigError: JAX finds no device, or none of the kind in JAX_PLATFORMS.
    """
    try:
        return jax.device_count()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        problem = (
            f"JAX_PLATFORMS is {platforms!r}, and there is no such device here"
            if platforms
            else "JAX finds no device here"
        )
        # JAX's message may be a page long, and that of a failed assertion is empty.
        details = f" ({first_line(error)})" if str(error) else ""
        raise ConfigError(
            f"{problem}{details}; unset JAX_PLATFORMS, or install JAX for that device (bash"
            " launch/venv.sh)"
        ) from error
