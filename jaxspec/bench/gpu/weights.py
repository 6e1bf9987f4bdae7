"""Random weights, made on the device leaf by leaf, so that nothing is held twice."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.mesh import replicated_sharding
from jaxspec.state import PyTree

_WEIGHT_AXES = {"qkv": 4, "query": 3, "key": 3, "value": 3, "output": 3, "gate_up": 3}
"""Axes of a layer's weights where they are not two; stacked layers have one more, in front."""
_CONTRACTED_AXES = {"output": 2}
"""Axes that a weight's product sums over, where it is not one."""


def random_weights(shapes: PyTree, mesh: Mesh, seed: int) -> PyTree:
    """Fills a network's shapes: unit norms, zero biases, and weights that keep variances."""
    sharding, key = replicated_sharding(mesh), jax.random.key(seed)
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    filled_leaves = []
    for index, (path, leaf) in enumerate(leaves):
        names = [entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)]
        name = names[-2] if names[-1] == "value" else names[-1]
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            # the draft's ids are the first of the policy's
            values = jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        elif "norm" in name or "bias" in name:
            values = jnp.full(leaf.shape, "norm" in name, leaf.dtype)
        else:
            scale = _fan_in(name, leaf.shape) ** -0.5
            leaf_key = jax.random.fold_in(key, index)
            values = _normal_program(leaf.shape, str(leaf.dtype))(leaf_key, jnp.float32(scale))
        filled_leaves.append(jax.device_put(values, sharding))
    return jax.tree.unflatten(structure, filled_leaves)


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    """Numbers that an element of a weight's product sums over."""
    if name == "embedding":
        return shape[-1]
    first_axis = len(shape) - _WEIGHT_AXES.get(name, 2)
    inputs = shape[first_axis : first_axis + _CONTRACTED_AXES.get(name, 1)]
    return math.prod(inputs)


@functools.cache
def _normal_program(shape: tuple[int, ...], dtype: str) -> Any:
    """A program that draws an array of normal numbers."""

    def draw_normal(key: Any, scale: Any) -> jax.Array:
        # the scale is an argument, so that all weights of a shape share a program
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)

    return jax.jit(draw_normal)
