"""When the draft learns during a run: with every batch, every n-th, or while that is worth it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.state import AcceptanceTrend, Statistics

MIN_RISE, PATIENCE, MAX_DROP = 0.01, 10, 0.03
"""`train_while_useful` learns until the acceptance length has not risen by the first share in so
many batches, and again where it is behind its best by the last share."""

Schedule = Callable[[AcceptanceTrend, Int[Array, ""]], Bool[Array, ""]]
"""(what acceptance was like so far, batches learnt from so far) -> whether the draft learns from
the next one."""


def init_trend() -> AcceptanceTrend:
    """Nothing was generated yet."""
    return AcceptanceTrend(
        length=jnp.zeros((), jnp.float32),
        best=jnp.zeros((), jnp.float32),
        stale=jnp.zeros((), jnp.int32),
    )


def update_trend(trend: AcceptanceTrend, statistics: Statistics) -> AcceptanceTrend:
    """The trend after a rollout; as it was after one without a draft."""
    drafted_rounds = jnp.sum(statistics.draft_rounds[:, :1])
    kept_count = jnp.sum(statistics.quarter_tokens)
    length = kept_count.astype(jnp.float32) / jnp.maximum(drafted_rounds, 1).astype(jnp.float32)
    has_risen = length > trend.best * (1 + MIN_RISE)
    new_trend = AcceptanceTrend(
        length=length,
        # what it rises by is counted from here, however slowly it does
        best=jnp.where(has_risen, length, trend.best),
        stale=jnp.where(has_risen, 0, trend.stale + 1),
    )
    return jax.tree.map(lambda new, old: jnp.where(drafted_rounds > 0, new, old), new_trend, trend)


def train_every(batches: int) -> Schedule:
    """With the first batch, and every so many from there."""
    return lambda _, version: version % batches == 0


def train_while_useful(trend: AcceptanceTrend, version: Int[Array, ""]) -> Bool[Array, ""]:
    """While acceptance still rises, or has fallen behind its best: a policy that moves leaves a
    frozen draft behind, and a draft that covers it has nothing to learn."""
    del version
    return (trend.stale < PATIENCE) | (trend.length < trend.best * (1 - MAX_DROP))
