"""Two small weights, and gradients for them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WEIGHTS = {"a": np.array([[1.0, -2.0], [0.5, 3.0]]), "b": np.array([0.1, -0.1])}


def gradients(scale: float, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: scale * random.normal(size=value.shape) for name, value in WEIGHTS.items()}


def as_jax(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)
