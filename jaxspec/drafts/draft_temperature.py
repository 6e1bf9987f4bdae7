"""Selects the draft's temperature by measured acceptance.

Each depth has its own factor, with the best expected acceptance sum_v min(target, draft_T).
Verification measures this for every T of a small grid, so no exploration is needed. Factors are
fixed before a call draws anything, so they do not affect exactness of sampling.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.state import Statistics

GRID = (0.0, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25)
"""Factors on the rollout's temperature. 0 drafts the most likely token."""
DECAY = 0.8
"""Decay of older measurements per batch, because draft and policy change."""


def init_overlap(draft_length: int, grid: tuple[float, ...]) -> Float[Array, "K F"]:
    """Returns the sums before any measurement."""
    return jnp.zeros((draft_length, len(grid)), jnp.float32)


def update_overlap(
    overlap_sums: Float[Array, "K F"], statistics: Statistics
) -> Float[Array, "K F"]:
    """Decays the sums and adds a batch."""
    return DECAY * overlap_sums + jnp.sum(statistics.overlap_by_factor, axis=0).astype(
        overlap_sums.dtype
    )


def choose_factors(overlap_sums: Float[Array, "K F"], grid: tuple[float, ...]) -> Int[Array, " K"]:
    """Returns each depth's best factor, as grid index.

    Without measurements it is the index of 1, or of the nearest factor.
    """
    # A depth without measurements keeps the rollout's own temperature.
    default_index = int(np.argmin(np.abs(np.asarray(grid) - 1)))
    return jnp.where(
        jnp.any(overlap_sums > 0, axis=-1),
        jnp.argmax(overlap_sums, axis=-1).astype(jnp.int32),
        default_index,
    )
