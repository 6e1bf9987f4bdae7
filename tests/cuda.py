"""NVIDIA GPUs that are not there: with the wheels of JAX's CUDA plugin, and no driver, programs are
compiled for them, to be read.

What that takes: `jax-cuda13-plugin` and `jax-cuda13-pjrt` of jax's own release, `nvidia-cuda-nvcc`
and `nvidia-nvvm`; for CUDA 12 `jax-cuda12-plugin`, `jax-cuda12-pjrt` and `nvidia-cuda-nvcc-cu12`;
installed without their dependencies. `launch/newest.sh` does it.
"""

import functools
import importlib.util
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jaxspec.mesh import AXES


class Card(NamedTuple):
    """What the compiler is told of a GPU."""

    kind: str
    capability: tuple[int, int]
    cores: int
    """Multiprocessors."""
    memory: int
    bandwidth: int
    cache: int
    shared: int
    """Bytes of shared memory of a multiprocessor, of which a block may have all but 1,024."""
    threads: int = 2048
    """Threads of a multiprocessor."""
    clock_ghz: float = 1.98

    def __str__(self) -> str:
        return self.kind

    def described(self) -> str:
        """The text of XLA's `GpuTargetConfigProto`."""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared}
              shared_memory_per_block_optin: {self.shared - 1024}
              threads_per_core_limit: {self.threads}
              core_count: {self.cores}
              fpus_per_core: 128
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.kind}"
        """


H200 = Card("NVIDIA H200", (9, 0), 132, 150_754_820_096, 4_800_000_000_000, 62_914_560, 233_472)
GB200 = Card(
    "NVIDIA GB200",
    (10, 0),
    152,
    198_642_237_440,
    8_000_000_000_000,
    132_644_864,
    233_472,
    clock_ghz=2.06,
)
RTX_4090 = Card(
    "NVIDIA GeForce RTX 4090",
    (8, 9),
    128,
    25_393_692_672,
    1_008_096_000_000,
    75_497_472,
    102_400,
    1536,
    2.52,
)


def plugin() -> bool:
    """Whether the plugin's wheels are here."""
    return any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13))


needs_plugin = pytest.mark.skipif(
    not plugin(), reason="needs the wheels of JAX's CUDA plugin (no GPU)"
)


@functools.cache
def devices(card: Card, count: int) -> tuple[Any, ...]:
    """So many GPUs of one machine."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=card.described(), topology=f"1x1x{count}"
    )
    return tuple(topology.devices)


def mesh_of(card: Card, data: int = 1, tensor: int = 1, expert: int = 1) -> Mesh:
    """A mesh of GPUs as `make_mesh` makes it."""
    grid = np.array(devices(card, data * expert * tensor)).reshape(data, expert, tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def compiled(function: Callable, mesh: Mesh, *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
    """The program for the mesh's GPUs, of arrays that are only described.

    What asks the default device for its kind, as kernels do, is told that it is one of these. The
    function is wrapped anew because traces are kept by function. The assembler's optimisations, a
    third of the time, change no memory and no kernel's name.
    """
    with jax.default_device(mesh.devices.flat[0]), jax.numpy_dtype_promotion("standard"):
        lowered = jax.jit(lambda *given: function(*given), donate_argnums=donate).lower(*arguments)
        return lowered.compile(compiler_options={"xla_gpu_disable_gpuasm_optimizations": True})


def temporaries(program: Any) -> int:
    """Bytes on each device beside arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def shapes(program: Any) -> set[tuple[int, ...]]:
    """Shapes of all arrays of a program's text."""
    found = re.findall(r"\w\d+\[([\d,]+)\]", program.as_text())
    return {tuple(int(size) for size in shape.split(",")) for shape in found}
