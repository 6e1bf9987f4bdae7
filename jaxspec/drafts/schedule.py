"""Schedules for training the draft during a run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.state import AcceptanceTrend, Statistics

MIN_RISE, PATIENCE, MAX_DROP = 0.01, 10, 0.03
"""Thresholds of `train_while_useful`: relative rise, batches without a rise, relative drop.

Training stops after `PATIENCE` batches without a rise of the acceptance length by `MIN_RISE`. It
resumes if the length falls below its best by `MAX_DROP`.
"""

Schedule = Callable[[AcceptanceTrend, Int[Array, ""]], Bool[Array, ""]]
"""(acceptance trend, batches trained on) -> whether the draft trains on the next batch."""


def init_trend() -> AcceptanceTrend:
    """Returns the trend before the first rollout."""
    return AcceptanceTrend(
        length=jnp.zeros((), jnp.float32),
        best=jnp.zeros((), jnp.float32),
        stale=jnp.zeros((), jnp.int32),
    )


def update_trend(trend: AcceptanceTrend, statistics: Statistics) -> AcceptanceTrend:
    """Updates the trend with a rollout.

    Returns it unchanged if no round had a draft.
    """
    # Every round with a draft has a first position.
    drafted_rounds = jnp.sum(statistics.draft_rounds[:, :1])
    kept_count = jnp.sum(statistics.quarter_tokens)
    length = kept_count.astype(jnp.float32) / jnp.maximum(drafted_rounds, 1).astype(jnp.float32)
    has_risen = length > trend.best * (1 + MIN_RISE)
    new_trend = AcceptanceTrend(
        length=length,
        # The best moves only with a sufficient rise, so that slow rises add up to one.
        best=jnp.where(has_risen, length, trend.best),
        stale=jnp.where(has_risen, 0, trend.stale + 1),
    )
    return jax.tree.map(lambda new, old: jnp.where(drafted_rounds > 0, new, old), new_trend, trend)


def train_every(batches: int) -> Schedule:
    """Returns a schedule that trains on the first of every `batches` batches."""
    return lambda _, version: version % batches == 0


def train_while_useful(trend: AcceptanceTrend, version: Int[Array, ""]) -> Bool[Array, ""]:
    """Trains while acceptance rises or is below its best."""
    # A policy that changes leaves a frozen draft behind. A draft that matches it learns nothing.
    del version
    return (trend.stale < PATIENCE) | (trend.length < trend.best * (1 - MAX_DROP))
