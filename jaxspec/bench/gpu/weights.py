"""Random weights, drawn on the device."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.mesh import replicated_sharding
from jaxspec.state import PyTree

_WEIGHT_AXES = {"qkv": 4, "query": 3, "key": 3, "value": 3, "output": 3, "gate_up": 3}
"""Number of axes of a layer's weights, if not two."""
_CONTRACTED_AXES = {"output": 2}
"""Number of a weight's axes that its product sums over, if not one."""


def random_weights(shapes: PyTree, mesh: Mesh, seed: int) -> PyTree:
    """Fills a network's shapes with random numbers.

    Norms are one and biases zero. Weights are normal with variance 1 / fan-in, so that products
    keep the variance of their inputs. Integer leaves count from zero.
    """
    sharding, key = replicated_sharding(mesh), jax.random.key(seed)
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    filled_leaves = []
    # One leaf at a time, so that no more than a leaf is held twice.
    for index, (path, leaf) in enumerate(leaves):
        # Some paths end in a variable's `value`, which is preceded by its name.
        names = [entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)]
        name = names[-2] if names[-1] == "value" else names[-1]
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            # Integers map the draft's vocabulary to policy ids. The draft has the first ids.
            values = jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        elif "norm" in name or "bias" in name:
            values = jnp.full(leaf.shape, "norm" in name, leaf.dtype)
        else:
            scale = _fan_in(name, leaf.shape) ** -0.5
            # A key by the leaf's position gives every process the same weights.
            leaf_key = jax.random.fold_in(key, index)
            values = _normal_program(leaf.shape, str(leaf.dtype))(leaf_key, jnp.float32(scale))
        filled_leaves.append(jax.device_put(values, sharding))
    return jax.tree.unflatten(structure, filled_leaves)


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    """Returns the number of inputs of each output of a weight's product."""
    # An embedding is looked up, not multiplied. Its numbers are scaled like those of the head.
    if name == "embedding":
        return shape[-1]
    # Stacked layers have one more axis in front.
    first_axis = len(shape) - _WEIGHT_AXES.get(name, 2)
    inputs = shape[first_axis : first_axis + _CONTRACTED_AXES.get(name, 1)]
    return math.prod(inputs)


# Cached, since each call of `jax.jit` with a new function would compile again.
@functools.cache
def _normal_program(shape: tuple[int, ...], dtype: str) -> Any:
    """Returns a program that draws an array of normal numbers with a given scale."""

    def draw_normal(key: Any, scale: Any) -> jax.Array:
        # The scale is an argument, so that all weights of a shape share a program.
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)

    return jax.jit(draw_normal)
