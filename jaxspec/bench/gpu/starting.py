"""Start of `bench gpu`.

Starts JAX on one device, or the compiler for an absent card, and opens folders of programs.
"""

import os
from pathlib import Path
from typing import Any

import jax

from jaxspec import mesh as meshes
from jaxspec.bench.gpu.cells import Cells
from jaxspec.bench.gpu.device import require_card, require_driver
from jaxspec.bench.gpu.options import GpuOptions
from jaxspec.bench.gpu.programs import Log
from jaxspec.bench.gpu.run import GpuPlan
from jaxspec.compiled import hardware
from jaxspec.compiled.serialized import (
    ProgramFolder,
    ProgramTarget,
    UnusableProgramError,
    compiler_versions,
    require_writable,
)
from jaxspec.host.job import code_digest
from jaxspec.inputs.checked import require
from jaxspec.processes.devices import configure_cpu_devices, count_devices
from jaxspec.storage.cache import cache_folder

# The rest is for the second process that `sections/alone.py` runs on the same card.
MEMORY_SHARE = "0.90"
"""Fraction of the card's memory that this process reserves at its start."""


def open_plan(options: GpuOptions) -> tuple[GpuPlan, str]:
    """Starts JAX on the first device of this machine.

    Returns the plan for it, and the driver's version.

    Raises:
      ConfigError: the card or its driver is too old, or these sizes need a card and there is none.
    """
    # Checked first, so that a driver that is too old is not reported as a missing GPU.
    driver = require_driver()
    # XLA reads the variable when JAX starts its backend. A value of the user's is kept.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_SHARE)
    configure_cpu_devices(1)
    # Starts the backend, and reports if that fails.
    count_devices()
    device = jax.devices()[0]
    require_card(device, options.size, driver)
    return _make_plan(options, device), driver


def open_compile_plan(options: GpuOptions) -> GpuPlan:
    """Starts the compiler for the card of --hardware, and returns the plan for it.

    Raises:
      ConfigError: the card is unknown, or its compiler is not installed. With `here`, also the
        errors of `open_plan`.
    """
    if options.hardware == hardware.LOCAL_DEVICES:
        return open_plan(options)[0]
    card = hardware.find_card(options.hardware)
    require(
        hardware.has_cuda_plugin(),
        f"--hardware {options.hardware}: the compiler for NVIDIA GPUs is not installed; install the"
        " extra `check` (it needs no GPU)",
    )
    # The compiler works from a description of the card. A GPU of this machine stays unused.
    jax.config.update("jax_platforms", "cpu")
    configure_cpu_devices(1)
    return _make_plan(options, hardware.topology_devices(card, 1)[0])


def _make_plan(options: GpuOptions, device: Any) -> GpuPlan:
    # Programs for a folder must not come from JAX's cache: not all of those can be serialized.
    uses_cache = device.platform == "gpu" and not options.prepare
    jax.config.update("jax_enable_compilation_cache", uses_cache)
    if uses_cache and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    mesh = meshes.make_mesh(1, 1, 1, [device])
    return GpuPlan(options, mesh, Cells(options, mesh))


def program_target(plan: GpuPlan) -> ProgramTarget:
    """Describes everything that the plan's programs depend on."""
    device_kind = plan.mesh.devices.flat[0].device_kind
    # The code is identified by its digest alone. A copy of the package that is not installed, as on
    # a borrowed card, has no version.
    return ProgramTarget(
        compiler_versions(), device_kind, code_digest(), plan.options.program_sizes
    )


def open_program_folder(plan: GpuPlan, log: Log) -> ProgramFolder | None:
    """Opens the folder of --programs.

    Returns None without --programs. Also returns None, with a warning, if the programs were made
    for another target or the manifest is damaged.

    Raises:
      ConfigError: the folder does not exist.
    """
    if not plan.options.programs:
        return None
    folder = Path(plan.options.programs)
    require(
        folder.is_dir(),
        f"--programs {folder} is no folder; make one with --prepare, or omit --programs",
    )
    try:
        return ProgramFolder.open_existing(folder, program_target(plan))
    except UnusableProgramError as error:
        # The benchmark goes on, and compiles all programs here.
        log(f"warning: {error}")
        return None


def create_program_folder(plan: GpuPlan) -> ProgramFolder:
    """Opens the folder of --prepare for writing. Creates it if necessary.

    Raises:
      SaveError: the folder cannot be written to.
    """
    folder = Path(plan.options.prepare)
    require_writable(folder)
    return ProgramFolder.open_writable(folder, program_target(plan))
