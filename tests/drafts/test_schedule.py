"""When the draft learns: every n batches, or while acceptance rises or is behind its best."""

import jax.numpy as jnp
import pytest

from jaxspec.drafts import schedule
from jaxspec.rollout.feedback.acceptance import init_statistics
from jaxspec.state import Statistics


def rollout(length: float, drafted: int = 100) -> Statistics:
    """100 rounds with a draft, each of which kept `length` tokens on average."""
    nothing = init_statistics(1, 1, 2, 1, jnp.float32)
    return nothing.replace(
        draft_rounds=jnp.array([[drafted, drafted]], jnp.int32),
        quarter_tokens=jnp.array([[round(length * drafted), 0, 0, 0]], jnp.int32),
    )


def learns(lengths: list[float]) -> list[bool]:
    """Whether the draft would learn after each of these rollouts."""
    trend, told = schedule.init_trend(), []
    for length in lengths:
        trend = schedule.update_trend(trend, rollout(length))
        told.append(bool(schedule.train_while_useful(trend, jnp.int32(0))))
    return told


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_every_so_many_batches(batches: int) -> None:
    chosen = schedule.train_every(batches)
    trend = schedule.init_trend()
    told = [bool(chosen(trend, jnp.int32(version))) for version in range(10)]
    assert told == [version % batches == 0 for version in range(10)]


def test_a_draft_learns_until_it_rises_no_more_and_again_where_it_falls_behind() -> None:
    patience = schedule.PATIENCE
    rising = [1 + 0.1 * step for step in range(20)]
    assert all(learns(rising))
    # slower than the smallest rise from one batch to the next, but a rise
    assert all(learns([1.004**step for step in range(60)]))
    settled = learns([2.0] * (patience + 3))
    assert settled == [True] * patience + [False] * 3
    # 1 % less is noise, 5 % less is a policy that has moved
    after = learns([2.0] * (patience + 1) + [1.98, 1.9, 1.9, 1.99, 2.2])
    assert after[-5:] == [False, True, True, False, True]


def test_a_rollout_without_drafts_says_nothing() -> None:
    trend = schedule.update_trend(schedule.init_trend(), rollout(2.5))
    same = schedule.update_trend(trend, rollout(0.0, drafted=0))
    assert (float(same.length), float(same.best), int(same.stale)) == (2.5, 2.5, 0)
