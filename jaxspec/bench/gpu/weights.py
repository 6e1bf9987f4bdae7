"""Random weights, made on the device leaf by leaf, so that nothing is held twice."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.mesh import replicated
from jaxspec.state import PyTree

_AXES = {"qkv": 4, "query": 3, "key": 3, "value": 3, "output": 3, "gate_up": 3}
"""Axes of a layer's weights where they are not two; stacked layers have one more, in front."""
_SUMMED = {"output": 2}
"""Axes that a weight's product sums over, where it is not one."""


def random_weights(shapes: PyTree, mesh: Mesh, seed: int) -> PyTree:
    """Fills a network's shapes: unit norms, zero biases, and weights that keep variances."""
    whole, key = replicated(mesh), jax.random.key(seed)
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    filled = []
    for number, (path, leaf) in enumerate(leaves):
        inside = [entry.name for entry in path if isinstance(entry, jax.tree_util.GetAttrKey)]
        name = inside[-2] if inside[-1] == "value" else inside[-1]
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            # the draft's ids are the first of the policy's
            made = jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        elif "norm" in name or "bias" in name:
            made = jnp.full(leaf.shape, "norm" in name, leaf.dtype)
        else:
            scale = _fan_in(name, leaf.shape) ** -0.5
            own = jax.random.fold_in(key, number)
            made = _draw(leaf.shape, str(leaf.dtype))(own, jnp.float32(scale))
        filled.append(jax.device_put(made, whole))
    return jax.tree.unflatten(structure, filled)


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    """Numbers that an element of a weight's product sums over."""
    if name == "embedding":
        return shape[-1]
    first = len(shape) - _AXES.get(name, 2)
    inputs = shape[first : first + _SUMMED.get(name, 1)]
    return math.prod(inputs)


@functools.cache
def _draw(shape: tuple[int, ...], dtype: str) -> Any:
    """A program that draws an array of normal numbers."""

    def draw(key: Any, scale: Any) -> jax.Array:
        # the scale is an argument, so that all weights of a shape share a program
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)

    return jax.jit(draw)
