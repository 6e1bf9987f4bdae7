"""The draft's sampling temperature, one factor for each depth: the one whose logged expected acceptance was best.

sum_v min(target, draft_T) is measured for every T of a small grid wherever a round compared target and draft, so nothing is explored and
nothing beyond the cut is looked at. Factors are fixed before a call draws anything: sampling stays exact (drafters.md 6.3, 6.8).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.state import Statistics, Tuner

GRID = (0.0, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25)
"""Factors on the rollout's temperature; 0 drafts the most likely token."""
DECAY = 0.8
"""Weight of what was known before each batch: the draft and the policy move."""


def start(length: int, grid: tuple[float, ...]) -> Tuner:
    """Nothing measured yet."""
    return Tuner(overlap=jnp.zeros((length, len(grid)), jnp.float32), reached=jnp.zeros((length,), jnp.float32))


def update(tuner: Tuner, statistics: Statistics) -> Tuner:
    """Adds what a batch measured, over all rows of the mesh."""
    overlap, reached = jnp.sum(statistics.overlap, axis=0), jnp.sum(statistics.reached, axis=0)
    return Tuner(
        overlap=DECAY * tuner.overlap + overlap.astype(tuner.overlap.dtype),
        reached=DECAY * tuner.reached + reached.astype(tuner.reached.dtype),
    )


def choose(tuner: Tuner, grid: tuple[float, ...]) -> Int[Array, " K"]:
    """Place in the grid of the best factor at each depth; that of 1, or the nearest to it, where nothing was measured."""
    unmeasured = int(np.argmin(np.abs(np.asarray(grid) - 1)))
    return jnp.where(tuner.reached > 0, jnp.argmax(tuner.overlap, axis=-1).astype(jnp.int32), unmeasured)
