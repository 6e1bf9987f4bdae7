"""When the draft learns during a run: with every batch, every n-th, or while that is worth it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.state import AcceptanceTrend, Statistics

RISE, PATIENCE, BEHIND = 0.01, 10, 0.03
"""`while_worth_it` learns until the acceptance length has not risen by the first share in so many
batches, and again where it is behind its best by the last share."""

Schedule = Callable[[AcceptanceTrend, Int[Array, ""]], Bool[Array, ""]]
"""(what acceptance was like so far, batches learnt from so far) -> whether the draft learns from
the next one."""


def start() -> AcceptanceTrend:
    """Nothing was generated yet."""
    return AcceptanceTrend(
        length=jnp.zeros((), jnp.float32),
        best=jnp.zeros((), jnp.float32),
        stale=jnp.zeros((), jnp.int32),
    )


def observed(trend: AcceptanceTrend, statistics: Statistics) -> AcceptanceTrend:
    """The trend after a rollout; as it was after one without a draft."""
    drafted = jnp.sum(statistics.drafted[:, :1])
    kept = jnp.sum(statistics.kept)
    length = kept.astype(jnp.float32) / jnp.maximum(drafted, 1).astype(jnp.float32)
    rose = length > trend.best * (1 + RISE)
    after = AcceptanceTrend(
        length=length,
        # what it rises by is counted from here, however slowly it does
        best=jnp.where(rose, length, trend.best),
        stale=jnp.where(rose, 0, trend.stale + 1),
    )
    return jax.tree.map(lambda new, old: jnp.where(drafted > 0, new, old), after, trend)


def every(batches: int) -> Schedule:
    """With the first batch, and every so many from there."""
    return lambda _, version: version % batches == 0


def while_worth_it(trend: AcceptanceTrend, version: Int[Array, ""]) -> Bool[Array, ""]:
    """While acceptance still rises, or has fallen behind its best: a policy that moves leaves a
    frozen draft behind, and a draft that covers it has nothing to learn."""
    del version
    return (trend.stale < PATIENCE) | (trend.length < trend.best * (1 - BEHIND))
