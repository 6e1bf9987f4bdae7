"""Weights from the train layout to the rollout layout: cast and reshard, nothing else."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec import mesh as meshes


def cast(network: Any, dtype: Any) -> Any:
    """The network with its floating leaves in `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, network)


def to_rollout(network: Any, mesh: Mesh, axes: Mapping[str, tuple[str | None, ...]], dtype: Any) -> Any:
    """Casts to `dtype` and constrains every leaf to the rollout layout: inside a jit, one all-gather for each sharded weight."""
    ready = cast(network, dtype)
    return jax.lax.with_sharding_constraint(ready, meshes.shardings(mesh, ready, axes, meshes.ROLLOUT_RULES))
