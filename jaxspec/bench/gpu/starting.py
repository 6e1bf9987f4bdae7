"""The start: JAX on one device, or the compiler for a card that is not here, and a folder of
programs for it."""

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
from jaxspec.processes.devices import count_devices, prepare_devices
from jaxspec.storage.cache import cache_folder

MEMORY_SHARE = "0.90"
"""Of the card's memory, which this process takes at once; the process of `alone` needs some."""


def open_plan(options: GpuOptions) -> tuple[GpuPlan, str]:
    """Starts JAX on the device of this machine; also returns the driver's version.

    Raises:
      ConfigError: the card or its driver is too old, or there is none for these sizes.
    """
    driver = require_driver()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_SHARE)
    prepare_devices(1)
    count_devices()
    device = jax.devices()[0]
    require_card(device, options.size, driver)
    return _make_plan(options, device), driver


def open_compile_plan(options: GpuOptions) -> GpuPlan:
    """Starts the compiler for the card that --hardware names.

    Raises:
      ConfigError: there is no such card, or no compiler for it here.
    """
    if options.hardware == hardware.LOCAL_DEVICES:
        return open_plan(options)[0]
    card = hardware.find_card(options.hardware)
    require(
        hardware.has_cuda_plugin(),
        f"--hardware {options.hardware}: the compiler for NVIDIA GPUs is not installed; install the"
        " extra `check` (it needs no GPU)",
    )
    jax.config.update("jax_platforms", "cpu")
    prepare_devices(1)
    return _make_plan(options, hardware.topology_devices(card, 1)[0])


def _make_plan(options: GpuOptions, device: Any) -> GpuPlan:
    # where programs are written, none may come from the cache: not all of those can be serialized
    uses_cache = device.platform == "gpu" and not options.prepare
    jax.config.update("jax_enable_compilation_cache", uses_cache)
    if uses_cache and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    mesh = meshes.make_mesh(1, 1, 1, [device])
    return GpuPlan(options, mesh, Cells(options, mesh))


def program_target(plan: GpuPlan) -> ProgramTarget:
    """All that the programs of a plan depend on."""
    device_kind = plan.mesh.devices.flat[0].device_kind
    # by its digest alone: a copy of the package, as on a lent card, does not know its version
    return ProgramTarget(
        compiler_versions(), device_kind, code_digest(), plan.options.program_sizes
    )


def open_program_folder(plan: GpuPlan, log: Log) -> ProgramFolder | None:
    """Opens --programs; says why it cannot be used, and returns None then.

    Raises:
      ConfigError: there is no such folder.
    """
    if not plan.options.programs:
        return None
    folder = Path(plan.options.programs)
    require(
        folder.is_dir(),
        f"--programs {folder} is no folder; make it with --prepare, or leave it out",
    )
    try:
        return ProgramFolder.open_existing(folder, program_target(plan))
    except UnusableProgramError as error:
        log(f"warning: {error}")
        return None


def create_program_folder(plan: GpuPlan) -> ProgramFolder:
    """Opens --prepare to write to.

    Raises:
      SaveError: it cannot be written to.
    """
    folder = Path(plan.options.prepare)
    require_writable(folder)
    return ProgramFolder.open_writable(folder, program_target(plan))
