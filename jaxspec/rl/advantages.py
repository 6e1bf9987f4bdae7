"""Advantages: how much better each answer is than what could be expected.

An estimator takes a baseline from every reward, and divides what is left by some scale. Rows
without a reward count nowhere and get 0.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

STD_EPSILON = 1e-6
"""Beside a standard deviation."""
MIN_VARIANCE = 1e-8
"""Of advantages that are whitened."""

Rewards = Float[Array, "n G"]
"""By group; whatever stands where there is no reward."""
Valid = Bool[Array, "n G"]
"""Which rows have a reward."""
Baseline = Callable[[Rewards, Valid], Float[Array, "n G"]]
"""Rewards less what could be expected of them."""
Centered = Float[Array, "n G *T"]
"""Rewards less their baseline: one of each row, or of each of its T tokens."""
TokenCounts = Int[Array, "n G *T"]
"""Tokens that each advantage is of: the length of a response, or 1 for one of its tokens."""
Scale = Callable[[Centered, Rewards, Valid, TokenCounts], Centered]


def compute_advantages(
    rewards: Float[Array, " B"],
    valid: Bool[Array, " B"],
    token_counts: Int[Array, "B ..."],
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

    def group_rows(values: Array) -> Array:
        return values.reshape(-1, group_size, *values.shape[1:])

    rewards, valid, token_counts = group_rows(rewards), group_rows(valid), group_rows(token_counts)
    centered, has_advantage = jnp.where(valid, baseline(rewards, valid), 0), valid
    if costs is not None:
        has_advantage = valid[..., None] & (token_counts > 0)
        centered = jnp.where(has_advantage, centered[..., None] - group_rows(costs), 0)
    scaled = jnp.where(has_advantage, scale(centered, rewards, valid, token_counts), 0)
    return scaled.reshape(-1, *scaled.shape[2:])


def _append_axes(values: Array, reference: Array) -> Array:
    """Values with an axis of 1 for each further axis of another array."""
    return values.reshape(*values.shape, *(1,) * (reference.ndim - values.ndim))


# ---- baselines


def keep_rewards(rewards: Rewards, valid: Valid) -> Float[Array, "n G"]:
    """Rewards as they are (REINFORCE)."""
    del valid
    return rewards


def subtract_group_mean(rewards: Rewards, valid: Valid) -> Float[Array, "n G"]:
    """Against the mean of the group: exactly 0 where its rewards are equal.

    Source: GRPO, arXiv 2402.03300, section 4.1.2.
    """
    return _values_differ(rewards, valid) * (rewards - _valid_mean(rewards, valid))


def subtract_leave_one_out_mean(rewards: Rewards, valid: Valid) -> Float[Array, "n G"]:
    """Against the mean of the group's other rewards (leave-one-out); 0 for a row without others.

    Source: RLOO, arXiv 2402.14740, section 2.3.
    """
    other_rows = _other_rows(valid)
    is_alone = ~jnp.any(other_rows, axis=-1)
    leave_one_out_mean = _valid_mean(_repeat_group(rewards), other_rows)[..., 0]
    return jnp.where(is_alone, 0, _values_differ(rewards, valid) * (rewards - leave_one_out_mean))


# ---- scales


def keep_scale(
    centered: Centered, rewards: Rewards, valid: Valid, token_counts: TokenCounts
) -> Centered:
    """As they are: dividing by a group's deviation weighs easy and hard prompts more than others.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.1.
    """
    del rewards, valid, token_counts
    return centered


def divide_by_population_std(
    centered: Centered, rewards: Rewards, valid: Valid, token_counts: TokenCounts
) -> Centered:
    """Over the standard deviation of the group's G rewards, whose squares are divided by G."""
    del token_counts
    return _divide_by_std(centered, _valid_variance(rewards, valid, ddof=0))


def divide_by_sample_std(
    centered: Centered, rewards: Rewards, valid: Valid, token_counts: TokenCounts
) -> Centered:
    """Over the standard deviation of the group with Bessel's correction, whose squares are divided
    by G - 1: what TRL, verl and NeMo RL take."""
    del token_counts
    return _divide_by_std(centered, _valid_variance(rewards, valid, ddof=1))


def divide_by_leave_one_out_std(
    centered: Centered, rewards: Rewards, valid: Valid, token_counts: TokenCounts
) -> Centered:
    """Over the same of the group's other rewards, so that rows of one group have different scales
    (NeMo RL's, with a leave-one-out baseline)."""
    del token_counts
    return _divide_by_std(
        centered, _valid_variance(_repeat_group(rewards), _other_rows(valid), ddof=1)[..., 0]
    )


def divide_by_batch_std(
    centered: Centered, rewards: Rewards, valid: Valid, token_counts: TokenCounts
) -> Centered:
    """Over the standard deviation, with Bessel's correction, of all rewards of the batch."""
    del token_counts
    variance = _valid_variance(rewards.reshape(1, -1), valid.reshape(1, -1), ddof=1)
    return _divide_by_std(centered, variance)


def whiten_over_tokens(
    centered: Centered, rewards: Rewards, valid: Valid, token_counts: TokenCounts
) -> Centered:
    """Mean 0 and variance 1 over all tokens of the batch; exactly 0 if all are equal.

    A row counts as often as its response has tokens.

    Source: REINFORCE++, arXiv 2501.03262, section 3.
    """
    del rewards
    weight = jnp.where(_append_axes(valid, token_counts), token_counts, 0).astype(centered.dtype)
    count = jnp.maximum(jnp.sum(weight), 1)
    deviations = centered - jnp.sum(weight * centered) / count
    variance = jnp.sum(weight * deviations * deviations) / count
    # the mean of equal numbers may be rounded, and the least variance would magnify what is left
    has_spread = _values_differ(centered.reshape(1, -1), weight.reshape(1, -1) > 0)[0, 0]
    return has_spread * deviations * lax.rsqrt(jnp.maximum(variance, MIN_VARIANCE))


# ---- statistics of the valid entries of the last axis, which stays with one entry


def _valid_mean(values: Float[Array, "*n G"], valid: Bool[Array, "*n G"]) -> Float[Array, "*n 1"]:
    return jnp.sum(jnp.where(valid, values, 0), axis=-1, keepdims=True) / _valid_count(
        valid, values
    )


def _valid_count(valid: Bool[Array, "*n G"], values: Float[Array, "*n G"]) -> Float[Array, "*n 1"]:
    return jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True, dtype=values.dtype), 1)


def _values_differ(
    values: Float[Array, "*n G"], valid: Bool[Array, "*n G"]
) -> Float[Array, "*n 1"]:
    """1 where two of them differ, else 0: the mean of equal numbers may be rounded, and what is
    then left of them is as large as `STD_EPSILON`."""
    highest = jnp.max(jnp.where(valid, values, -jnp.inf), axis=-1, keepdims=True)
    lowest = jnp.min(jnp.where(valid, values, jnp.inf), axis=-1, keepdims=True)
    return (highest > lowest).astype(values.dtype)


def _valid_variance(
    values: Float[Array, "*n G"], valid: Bool[Array, "*n G"], ddof: int
) -> Float[Array, "*n 1"]:
    """The sum of squares over the count less `freedom`; exactly 0 where all are equal."""
    deviations = jnp.where(valid, values - _valid_mean(values, valid), 0)
    count = jnp.maximum(_valid_count(valid, values) - ddof, 1)
    return (
        _values_differ(values, valid)
        * jnp.sum(deviations * deviations, axis=-1, keepdims=True)
        / count
    )


def _divide_by_std(centered: Centered, variance: Float[Array, "..."]) -> Centered:
    """Over the standard deviation; what has none is left as it is."""
    deviation = jnp.sqrt(_append_axes(variance, centered))
    return centered / jnp.where(deviation > 0, deviation + STD_EPSILON, 1)


def _repeat_group(values: Float[Array, "n G"]) -> Float[Array, "n G G"]:
    """Every group once for each of its rows."""
    return jnp.broadcast_to(values[:, None, :], (*values.shape, values.shape[1]))


def _other_rows(valid: Bool[Array, "n G"]) -> Bool[Array, "n G G"]:
    """For each row, the other rows of its group that have a reward."""
    return valid[:, None, :] & ~jnp.eye(valid.shape[1], dtype=bool)
