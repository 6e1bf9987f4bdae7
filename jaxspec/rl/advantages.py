"""Advantages: how much better each answer is than what could be expected.

An estimator takes a baseline from every reward, and divides what is left by some scale. Rows
without a reward count nowhere and get 0.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

EPSILON = 1e-6
"""Beside a standard deviation."""
LEAST_VARIANCE = 1e-8
"""Of advantages that are whitened."""

Rewards = Float[Array, "n G"]
"""By group; whatever stands where there is no reward."""
Valid = Bool[Array, "n G"]
"""Which rows have a reward."""
Baseline = Callable[[Rewards, Valid], Float[Array, "n G"]]
"""Rewards less what could be expected of them."""
Centred = Float[Array, "n G *T"]
"""Rewards less their baseline: one of each row, or of each of its T tokens."""
Counts = Int[Array, "n G *T"]
"""Tokens that each advantage is of: the length of a response, or 1 for one of its tokens."""
Scale = Callable[[Centred, Rewards, Valid, Counts], Centred]


def advantages(
    rewards: Float[Array, " B"],
    valid: Bool[Array, " B"],
    counts: Int[Array, "B ..."],
    group_size: int,
    baseline: Baseline,
    scale: Scale,
    costs: Float[Array, "B ..."] | None = None,
) -> Float[Array, "B ..."]:
    """Computes the advantage of every row, or of every token if there are `costs`.

    Args:
      rewards: of each row; rows of a group are adjacent.
      valid: which rows have a reward.
      counts: tokens of each response; with `costs`, 1 for each token of a response and 0 elsewhere.
      group_size: rows of a group.
      baseline: takes from each reward its expectation.
      scale: divides the rest.
      costs: what each token takes from its reward, after the baseline.
    """

    def by_group(values: Array) -> Array:
        return values.reshape(-1, group_size, *values.shape[1:])

    rewards, valid, counts = by_group(rewards), by_group(valid), by_group(counts)
    centred, learnt = jnp.where(valid, baseline(rewards, valid), 0), valid
    if costs is not None:
        learnt = valid[..., None] & (counts > 0)
        centred = jnp.where(learnt, centred[..., None] - by_group(costs), 0)
    scaled = jnp.where(learnt, scale(centred, rewards, valid, counts), 0)
    return scaled.reshape(-1, *scaled.shape[2:])


def _widened(values: Array, like: Array) -> Array:
    """Values with an axis of 1 for each further axis of another array."""
    return values.reshape(*values.shape, *(1,) * (like.ndim - values.ndim))


# ---- baselines


def no_baseline(rewards: Rewards, valid: Valid) -> Float[Array, "n G"]:
    """Rewards as they are (REINFORCE)."""
    del valid
    return rewards


def group_mean(rewards: Rewards, valid: Valid) -> Float[Array, "n G"]:
    """Against the mean of the group: exactly 0 where its rewards are equal.

    Source: GRPO, arXiv 2402.03300, section 4.1.2.
    """
    return _differs(rewards, valid) * (rewards - _mean(rewards, valid))


def others_mean(rewards: Rewards, valid: Valid) -> Float[Array, "n G"]:
    """Against the mean of the group's other rewards (leave-one-out); 0 for a row without others.

    Source: RLOO, arXiv 2402.14740, section 2.3.
    """
    others = _others(valid)
    alone = ~jnp.any(others, axis=-1)
    of_others = _mean(_spread(rewards), others)[..., 0]
    return jnp.where(alone, 0, _differs(rewards, valid) * (rewards - of_others))


# ---- scales


def unscaled(centred: Centred, rewards: Rewards, valid: Valid, counts: Counts) -> Centred:
    """As they are: dividing by a group's deviation weighs easy and hard prompts more than others.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.1.
    """
    del rewards, valid, counts
    return centred


def over_population(centred: Centred, rewards: Rewards, valid: Valid, counts: Counts) -> Centred:
    """Over the standard deviation of the group's G rewards, whose squares are divided by G."""
    del counts
    return _over(centred, _variance(rewards, valid, freedom=0))


def over_sample(centred: Centred, rewards: Rewards, valid: Valid, counts: Counts) -> Centred:
    """Over the standard deviation of the group with Bessel's correction, whose squares are divided
    by G - 1: what TRL, verl and NeMo RL take."""
    del counts
    return _over(centred, _variance(rewards, valid, freedom=1))


def over_others(centred: Centred, rewards: Rewards, valid: Valid, counts: Counts) -> Centred:
    """Over the same of the group's other rewards, so that rows of one group have different scales
    (NeMo RL's, with a leave-one-out baseline)."""
    del counts
    return _over(centred, _variance(_spread(rewards), _others(valid), freedom=1)[..., 0])


def over_batch(centred: Centred, rewards: Rewards, valid: Valid, counts: Counts) -> Centred:
    """Over the standard deviation, with Bessel's correction, of all rewards of the batch."""
    del counts
    variance = _variance(rewards.reshape(1, -1), valid.reshape(1, -1), freedom=1)
    return _over(centred, variance)


def whitened(centred: Centred, rewards: Rewards, valid: Valid, counts: Counts) -> Centred:
    """Mean 0 and variance 1 over all tokens of the batch; exactly 0 if all are equal.

    A row counts as often as its response has tokens.

    Source: REINFORCE++, arXiv 2501.03262, section 3.
    """
    del rewards
    weight = jnp.where(_widened(valid, counts), counts, 0).astype(centred.dtype)
    count = jnp.maximum(jnp.sum(weight), 1)
    left = centred - jnp.sum(weight * centred) / count
    variance = jnp.sum(weight * left * left) / count
    # the mean of equal numbers may be rounded, and the least variance would magnify what is left
    differs = _differs(centred.reshape(1, -1), weight.reshape(1, -1) > 0)[0, 0]
    return differs * left * lax.rsqrt(jnp.maximum(variance, LEAST_VARIANCE))


# ---- statistics of the valid entries of the last axis, which stays with one entry


def _mean(values: Float[Array, "*n G"], valid: Bool[Array, "*n G"]) -> Float[Array, "*n 1"]:
    return jnp.sum(jnp.where(valid, values, 0), axis=-1, keepdims=True) / _count(valid, values)


def _count(valid: Bool[Array, "*n G"], like: Float[Array, "*n G"]) -> Float[Array, "*n 1"]:
    return jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True, dtype=like.dtype), 1)


def _differs(values: Float[Array, "*n G"], valid: Bool[Array, "*n G"]) -> Float[Array, "*n 1"]:
    """1 where two of them differ, else 0: the mean of equal numbers may be rounded, and what is
    then left of them is as large as `EPSILON`."""
    highest = jnp.max(jnp.where(valid, values, -jnp.inf), axis=-1, keepdims=True)
    lowest = jnp.min(jnp.where(valid, values, jnp.inf), axis=-1, keepdims=True)
    return (highest > lowest).astype(values.dtype)


def _variance(
    values: Float[Array, "*n G"], valid: Bool[Array, "*n G"], freedom: int
) -> Float[Array, "*n 1"]:
    """The sum of squares over the count less `freedom`; exactly 0 where all are equal."""
    left = jnp.where(valid, values - _mean(values, valid), 0)
    count = jnp.maximum(_count(valid, values) - freedom, 1)
    return _differs(values, valid) * jnp.sum(left * left, axis=-1, keepdims=True) / count


def _over(centred: Centred, variance: Float[Array, "..."]) -> Centred:
    """Over the standard deviation; what has none is left as it is."""
    deviation = jnp.sqrt(_widened(variance, centred))
    return centred / jnp.where(deviation > 0, deviation + EPSILON, 1)


def _spread(values: Float[Array, "n G"]) -> Float[Array, "n G G"]:
    """Every group once for each of its rows."""
    return jnp.broadcast_to(values[:, None, :], (*values.shape, values.shape[1]))


def _others(valid: Bool[Array, "n G"]) -> Bool[Array, "n G G"]:
    """For each row, the other rows of its group that have a reward."""
    return valid[:, None, :] & ~jnp.eye(valid.shape[1], dtype=bool)
