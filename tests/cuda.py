"""Three NVIDIA GPUs that are not there, and what tests read of programs for them."""

import re
from typing import Any

import pytest
from jax.sharding import Mesh

from jaxspec.compiled.compiler import compiled as compiled
from jaxspec.compiled.hardware import HARDWARE, Card, devices_of, mesh_over, plugin
from jaxspec.mesh import DATA, TENSOR

H200, GB200, RTX_4090 = (HARDWARE[name] for name in ("h200", "gb200", "rtx4090"))
needs_plugin = pytest.mark.skipif(
    not plugin(), reason="needs the wheels of JAX's CUDA plugin, extra `check` (no GPU)"
)


def mesh_of(card: Card, data: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of GPUs as `make_mesh` makes it."""
    return mesh_over(devices_of(card, data * tensor), {DATA: data, TENSOR: tensor})


def temporaries(program: Any) -> int:
    """Bytes on each device beside arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def shapes(program: Any) -> set[tuple[int, ...]]:
    """Shapes of all arrays of a program's text."""
    found = re.findall(r"\w\d+\[([\d,]+)\]", program.as_text())
    return {tuple(int(size) for size in shape.split(",")) for shape in found}
