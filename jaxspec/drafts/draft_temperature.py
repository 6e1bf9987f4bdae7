"""The draft's sampling temperature, one factor for each depth: the one whose logged expected
acceptance was best.

sum_v min(target, draft_T) is measured for every T of a small grid where a round compared target and
draft, so nothing is explored and nothing beyond the cut is looked at. Factors are fixed before a
call draws anything, so a draft never steers whether it is kept: sampling stays exact.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.state import Statistics

GRID = (0.0, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25)
"""Factors on the rollout's temperature; 0 drafts the most likely token."""
DECAY = 0.8
"""Weight of what was known before each batch: the draft and the policy move."""


def init_overlap(draft_length: int, grid: tuple[float, ...]) -> Float[Array, "K F"]:
    """Nothing measured yet."""
    return jnp.zeros((draft_length, len(grid)), jnp.float32)


def update_overlap(
    overlap_sums: Float[Array, "K F"], statistics: Statistics
) -> Float[Array, "K F"]:
    """Adds a batch, over all groups of the mesh."""
    return DECAY * overlap_sums + jnp.sum(statistics.overlap_by_factor, axis=0).astype(
        overlap_sums.dtype
    )


def choose_factors(overlap_sums: Float[Array, "K F"], grid: tuple[float, ...]) -> Int[Array, " K"]:
    """Place in the grid of the best factor at each depth; that of 1, or the nearest to it, where
    nothing was measured."""
    default_index = int(np.argmin(np.abs(np.asarray(grid) - 1)))
    return jnp.where(
        jnp.any(overlap_sums > 0, axis=-1),
        jnp.argmax(overlap_sums, axis=-1).astype(jnp.int32),
        default_index,
    )
