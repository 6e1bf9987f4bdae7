"""The card: whether it can be measured, what is known of it, and its memory while programs run."""

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
"""Compute capability of Ampere, the first with bfloat16."""
MIN_DRIVERS = {13: 580, 12: 525}
"""The oldest driver for each CUDA that JAX's plugins are built for."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def require_driver(
    file: Path = _DRIVER_FILE, read_version: Callable[[str], str] = metadata.version
) -> str:
    """Returns the driver's version, or an empty text if none is loaded.

    Raises:
      ConfigError: it is too old for the CUDA plugin that is installed.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return ""
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
        alternative = "; install the extra cuda12 instead" if major == 13 else ""
        require(
            bool(supported_majors),
            f"the NVIDIA driver is {driver}, and jax-cuda{major}-plugin"
            f" {read_version(f'jax-cuda{major}-plugin')} (extra cuda{major}) needs"
            f" {MIN_DRIVERS[major]} or newer: update the driver{alternative}",
        )
    return driver


def _is_installed(name: str, read_version: Callable[[str], str]) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(read_version(name))
    return False


def require_card(device: Any, size: str, driver: str = "") -> None:
    """Checks that a device is a GPU of a generation that runs these programs; `driver` is the
    NVIDIA driver that is loaded.

    Raises:
      ConfigError: there is no GPU, or it is older than Ampere.
    """
    driver_note = (
        f" (the NVIDIA driver {driver} is loaded: is the extra cuda13 or cuda12 installed, and"
        " JAX_PLATFORMS unset?)"
        if driver
        else ""
    )
    require(
        device.platform != "cpu" or size == "tiny",
        f"JAX finds no GPU here{driver_note}, and --size 8b is for one: try the command with"
        " --size tiny on this CPU, or compile its programs for a card with --prepare FOLDER"
        " --hardware h100",
    )
    if device.platform == "gpu":
        capability = float(device.compute_capability)
        require(
            capability >= MIN_CAPABILITY,
            f"the {device.device_kind} has compute capability {capability}; bench gpu needs"
            f" {MIN_CAPABILITY} (Ampere) or newer, as older cards have no bfloat16",
        )


def describe_card(device: Any, driver: str) -> dict[str, Any]:
    """Facts about the device and what else runs on the machine."""
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
    """Other processes on the GPUs, as nvidia-smi lists them; none if it does not say."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        output = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return [line for line in lines if line.split(",")[0] != str(os.getpid())]


class DeviceMemory:
    """The most memory in use on a device while programs run, looked at every few milliseconds.

    The allocator's own peak is that of the whole process. A program's temporaries are one piece
    that is held as long as it runs, so that a look in between sees them.
    """

    def __init__(self, device: Any) -> None:
        """Looks at nothing yet."""
        self._device, self.peak = device, 0

    def __enter__(self) -> "DeviceMemory":
        self.peak = self._read_in_use()
        self._stop_event = threading.Event()
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
        return (self._device.memory_stats() or {}).get("bytes_in_use", 0)


def wait_for_arrays(tree: Any) -> Any:
    """Waits until arrays are there; returns them."""
    return jax.block_until_ready(tree)
