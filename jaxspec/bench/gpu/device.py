"""Checks and describes the card, and tracks its memory while programs run."""

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxspec.inputs.checked import require

MIN_CAPABILITY = 8.0
"""Minimum compute capability: Ampere, the first generation with bfloat16."""
MIN_DRIVERS = {13: 580, 12: 525}
"""Minimum driver by CUDA version of JAX's plugin."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def require_driver(
    file: Path = _DRIVER_FILE, read_version: Callable[[str], str] = metadata.version
) -> str:
    """Checks the NVIDIA driver against the installed CUDA plugins.

    The driver must be new enough for one of them, if there are any. Returns the driver's version,
    or an empty string if no driver is loaded.

    Raises:
      ConfigError: the driver is too old for every installed plugin.
    """
    # The kernel module's file can be read before JAX starts, and without nvidia-smi.
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return ""
    # The file's version line also has a date. Drivers have major versions of three digits.
    match = re.search(r"\b(\d{3,})\.[\d.]+", text)
    driver = match[0] if match else ""
    majors = [
        major for major in MIN_DRIVERS if _is_installed(f"jax-cuda{major}-plugin", read_version)
    ]
    if driver and majors:
        supported_majors = [
            major for major in majors if int(driver.split(".")[0]) >= MIN_DRIVERS[major]
        ]
        major = max(majors)
        alternative = ", or install the extra cuda12 instead" if major == 13 else ""
        require(
            bool(supported_majors),
            f"the NVIDIA driver is {driver}, but jax-cuda{major}-plugin"
            f" {read_version(f'jax-cuda{major}-plugin')} (extra cuda{major}) needs"
            f" {MIN_DRIVERS[major]} or newer; update the driver{alternative}",
        )
    return driver


def _is_installed(name: str, read_version: Callable[[str], str]) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(read_version(name))
    return False


def require_card(device: Any, size: str, driver: str = "") -> None:
    """Checks that a device can run the benchmark.

    Args:
      device: device that JAX found.
      size: value of --size. A CPU is accepted for `tiny` only.
      driver: version of the loaded NVIDIA driver, empty if there is none.

    Raises:
      ConfigError: the device is a CPU, or a GPU older than Ampere.
    """
    # With a driver but no GPU, the likely cause is the installation, so the message asks about it.
    driver_note = (
        f" (the NVIDIA driver {driver} is loaded: is the extra cuda13 or cuda12 installed, and"
        " JAX_PLATFORMS unset?)"
        if driver
        else ""
    )
    require(
        device.platform != "cpu" or size == "tiny",
        f"JAX finds no GPU here{driver_note}, but --size 8b needs one; try the command with"
        " --size tiny on this CPU, or compile its programs for a card with --prepare FOLDER"
        " --hardware h100",
    )
    if device.platform == "gpu":
        capability = float(device.compute_capability)
        require(
            capability >= MIN_CAPABILITY,
            f"the {device.device_kind} has compute capability {capability}, and no bfloat16; use a"
            f" card with {MIN_CAPABILITY} (Ampere) or newer",
        )


def describe_card(device: Any, driver: str) -> dict[str, Any]:
    """Describes the device and the load of the machine."""
    # CPU devices have no memory statistics.
    stats = device.memory_stats() or {}
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version.splitlines()[0],
        "driver": driver or None,
        "compute_capability": getattr(device, "compute_capability", None),
        "memory_limit": stats.get("bytes_limit"),
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "other_processes": other_processes() if device.platform == "gpu" else [],
    }


def other_processes() -> list[str]:
    """Lists other processes on the GPUs, as nvidia-smi prints them.

    The list is empty if nvidia-smi is missing or fails.
    """
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        output = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # This process already holds the device, so nvidia-smi lists it too.
    return [line for line in lines if line.split(",")[0] != str(os.getpid())]


class DeviceMemory:
    """Measures the maximum memory in use on a device inside the context.

    `peak` has it in bytes. A thread reads the memory in use every 5 milliseconds.
    """

    # The allocator's own peak covers the whole life of the process. Sampling is enough, since the
    # temporaries of a program are one allocation that lasts as long as the program runs.

    def __init__(self, device: Any) -> None:
        """Stores the device. Memory is read once the context begins."""
        self._device, self.peak = device, 0

    def __enter__(self) -> "DeviceMemory":
        self.peak = self._read_in_use()
        self._stop_event = threading.Event()
        # A daemon, so that it cannot keep a failed process alive.
        self._thread = threading.Thread(target=self._track_peak, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join()

    def _track_peak(self) -> None:
        while not self._stop_event.wait(0.005):
            self.peak = max(self.peak, self._read_in_use())

    def _read_in_use(self) -> int:
        # CPU devices have no memory statistics: their peak stays 0.
        return (self._device.memory_stats() or {}).get("bytes_in_use", 0)


def wait_for_arrays(tree: Any) -> Any:
    """Waits until arrays are computed. Returns them."""
    # JAX returns arrays before they are computed, so a clock must not be read before this.
    return jax.block_until_ready(tree)
