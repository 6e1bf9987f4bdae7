"""Weights from the train layout to the rollout layout: cast and reshard, nothing else."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec import mesh as meshes
from jaxspec.models.layers import cast


def to_rollout(
    network: Any, mesh: Mesh, axes: Mapping[str, tuple[str | None, ...]], dtype: Any
) -> Any:
    """Casts to `dtype` and constrains every leaf to the rollout layout: inside a jit, one
    all-gather for each sharded weight."""
    ready = cast(network, dtype)
    return jax.lax.with_sharding_constraint(
        ready, meshes.shardings(mesh, ready, axes, meshes.ROLLOUT_RULES)
    )
