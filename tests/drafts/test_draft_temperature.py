"""The draft's temperature follows what was measured, and nothing else."""

import jax.numpy as jnp
import numpy as np

from jaxspec.drafts import draft_temperature
from jaxspec.rollout.feedback.acceptance import init_statistics
from jaxspec.state import Statistics

GRID = (0.0, 0.5, 1.0, 1.5)


def measured(overlap: list[list[list[float]]]) -> Statistics:
    """Of groups of two rows."""
    groups, length, factors = np.shape(overlap)
    return init_statistics(2 * groups, 2, length, factors, jnp.float32).replace(
        overlap_by_factor=jnp.asarray(overlap, jnp.float32)
    )


def test_nothing_measured_means_the_temperature_of_the_rollout() -> None:
    assert draft_temperature.choose_factors(
        draft_temperature.init_overlap(3, GRID), GRID
    ).tolist() == [2, 2, 2]
    assert draft_temperature.choose_factors(
        draft_temperature.init_overlap(3, (0.7,)), (0.7,)
    ).tolist() == [
        0,
        0,
        0,
    ]
    assert (
        draft_temperature.choose_factors(draft_temperature.init_overlap(0, GRID), GRID).tolist()
        == []
    )


def test_each_depth_takes_its_best_factor_summed_over_groups() -> None:
    """Two groups disagree at depth 1, where their sum decides; depth 3 was never reached."""
    overlap = [
        [[0.0, 3.0, 2.0, 0.0], [4.0, 1.0, 1.0, 1.0], [0.0] * 4],
        [[0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 2.0], [0.0] * 4],
    ]
    sums = draft_temperature.update_overlap(
        draft_temperature.init_overlap(3, GRID), measured(overlap)
    )
    assert draft_temperature.choose_factors(sums, GRID).tolist() == [2, 0, 2]


def test_old_batches_fade() -> None:
    """A draft that has become sharper is followed after some batches, not at once, however long the
    past was."""
    sums = draft_temperature.init_overlap(1, GRID)
    for _ in range(50):
        sums = draft_temperature.update_overlap(sums, measured([[[0.0, 9.0, 6.0, 0.0]]]))
    assert draft_temperature.choose_factors(sums, GRID).tolist() == [1]
    followed = 0
    while draft_temperature.choose_factors(sums, GRID).tolist() == [1]:
        sums = draft_temperature.update_overlap(sums, measured([[[0.0, 6.0, 9.0, 0.0]]]))
        followed += 1
    assert 1 < followed < 10


def test_the_grid_holds_argmax_and_the_rollouts_own_temperature() -> None:
    assert {0.0, 1.0} < set(draft_temperature.GRID)
    assert list(draft_temperature.GRID) == sorted(draft_temperature.GRID)
