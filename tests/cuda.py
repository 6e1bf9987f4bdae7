"""Three NVIDIA GPUs that are not there, and what tests read of programs for them."""

import re
from typing import Any

import pytest
from jax.sharding import Mesh

from jaxspec.compiled.compiler import compile_for_mesh as compile_for_mesh
from jaxspec.compiled.hardware import HARDWARE, Card, has_cuda_plugin, topology_devices
from jaxspec.mesh import make_mesh

H200, GB200, RTX_4090 = (HARDWARE[name] for name in ("h200", "gb200", "rtx4090"))
needs_plugin = pytest.mark.skipif(
    not has_cuda_plugin(), reason="needs the wheels of JAX's CUDA plugin, extra `check` (no GPU)"
)


def mesh_of(card: Card, data: int = 1, tensor: int = 1, expert: int = 1) -> Mesh:
    """A mesh of GPUs that are not there."""
    return make_mesh(data, tensor, expert, topology_devices(card, data * tensor * expert))


def temporaries(program: Any) -> int:
    """Bytes on each device beside arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def shapes(program: Any) -> set[tuple[int, ...]]:
    """Shapes of all arrays of a program's text."""
    found = re.findall(r"\w\d+\[([\d,]+)\]", program.as_text())
    return {tuple(int(size) for size in shape.split(",")) for shape in found}
