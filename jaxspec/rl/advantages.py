"""Advantages: rewards relative to a baseline.

An estimator subtracts a baseline from every reward and divides the difference by a scale. Rows
without a reward affect no other row and get 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""
MIN_VARIANCE = 1e-8
"""Lower bound on the variance when whitening."""

Rewards = Float[Array, "n G"]
"""Rewards by group. Values of rows without a reward are ignored."""
Valid = Bool[Array, "n G"]
"""Mask of rows that have a reward."""
Baseline = Callable[[Rewards, Valid], Float[Array, "n G"]]
"""(rewards, valid) -> rewards minus a baseline."""
Centered = Float[Array, "n G *T"]
"""Rewards minus their baseline: one value per row, or one for each of its T tokens."""
TokenCounts = Int[Array, "n G *T"]
"""Tokens per advantage: a response's length, or 1 for a single token."""
Scale = Callable[[Centered, Rewards, Valid, TokenCounts], Centered]
"""(centered rewards, rewards, valid, token counts) -> scaled values."""


class AdvantageEstimator(NamedTuple):
    """Estimator of advantages: a baseline and a scale.

    Rows of a group are adjacent. `valid` masks the rows that have a reward.
    """

    group_size: int
    """Rows per group."""
    baseline: Baseline
    scale: Scale

    def compute_row_advantages(
        self,
        rewards: Float[Array, " B"],
        valid: Bool[Array, " B"],
        token_counts: Int[Array, " B"],
    ) -> Float[Array, " B"]:
        """Computes the advantage of each row. `token_counts` has the tokens of its response."""
        rewards, valid, token_counts = self._group_rows(rewards, valid, token_counts)
        centered = self._subtract_baseline(rewards, valid)
        scaled = jnp.where(valid, self.scale(centered, rewards, valid, token_counts), 0)
        return scaled.reshape(-1)

    def compute_token_advantages(
        self,
        rewards: Float[Array, " B"],
        valid: Bool[Array, " B"],
        response_mask: Bool[Array, "B S"],
        costs: Float[Array, "B S"],
    ) -> Float[Array, "B S"]:
        """Computes the advantage of each response token. `costs` are subtracted from its reward."""
        rewards, valid, response_mask, costs = self._group_rows(
            rewards, valid, response_mask, costs
        )
        # A cost is a token's own. Subtracted before the baseline, it would enter the group's mean.
        has_advantage = valid[..., None] & response_mask
        centered = self._subtract_baseline(rewards, valid)[..., None] - costs
        centered = jnp.where(has_advantage, centered, 0)
        token_counts = response_mask.astype(jnp.int32)
        scaled = jnp.where(has_advantage, self.scale(centered, rewards, valid, token_counts), 0)
        return scaled.reshape(-1, scaled.shape[-1])

    def _group_rows(self, *values: Array) -> list[Array]:
        return [array.reshape(-1, self.group_size, *array.shape[1:]) for array in values]

    def _subtract_baseline(self, rewards: Rewards, valid: Valid) -> Float[Array, "n G"]:
        # Invalid rewards may be NaN, so they are replaced before arithmetic and masked after it.
        return jnp.where(valid, self.baseline(rewards, valid), 0)


def _append_axes(values: Array, reference: Array) -> Array:
    """Appends axes of size 1 up to the rank of `reference`."""
    return values.reshape(*values.shape, *(1,) * (reference.ndim - values.ndim))


# ---- baselines


def keep_rewards(rewards: Rewards, valid: Valid) -> Float[Array, "n G"]:
    """Returns rewards unchanged (REINFORCE)."""
    del valid
    return rewards


def subtract_group_mean(rewards: Rewards, valid: Valid) -> Float[Array, "n G"]:
    """Subtracts the group's mean reward.

    The result is exactly 0 if all rewards of a group are equal.

    Source: GRPO, arXiv 2402.03300, section 4.1.2.
    """
    return _values_differ(rewards, valid) * (rewards - _valid_mean(rewards, valid))


def subtract_leave_one_out_mean(rewards: Rewards, valid: Valid) -> Float[Array, "n G"]:
    """Subtracts the mean of the group's other rewards.

    The result is 0 for a row without others.

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
    """Returns centered rewards unchanged.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.1.
    """
    # Dividing by a group's deviation would give very easy and very hard prompts more weight.
    del rewards, valid, token_counts
    return centered


def divide_by_population_std(
    centered: Centered, rewards: Rewards, valid: Valid, token_counts: TokenCounts
) -> Centered:
    """Divides by the group's population deviation.

    It is the standard deviation of the rewards without Bessel's correction.
    """
    del token_counts
    return _divide_by_std(centered, _valid_variance(rewards, valid, ddof=0))


def divide_by_sample_std(
    centered: Centered, rewards: Rewards, valid: Valid, token_counts: TokenCounts
) -> Centered:
    """Divides by the group's sample standard deviation.

    It is the standard deviation of the rewards with Bessel's correction, as in TRL, verl and NeMo
    RL.
    """
    del token_counts
    return _divide_by_std(centered, _valid_variance(rewards, valid, ddof=1))


def divide_by_leave_one_out_std(
    centered: Centered, rewards: Rewards, valid: Valid, token_counts: TokenCounts
) -> Centered:
    """Divides by the other rows' sample deviation.

    It is the standard deviation of the group's other rewards, with Bessel's correction. Rows of a
    group get different scales. NeMo RL uses it with a leave-one-out baseline.
    """
    del token_counts
    return _divide_by_std(
        centered, _valid_variance(_repeat_group(rewards), _other_rows(valid), ddof=1)[..., 0]
    )


def divide_by_batch_std(
    centered: Centered, rewards: Rewards, valid: Valid, token_counts: TokenCounts
) -> Centered:
    """Divides by the batch's sample deviation.

    It is the standard deviation of all rewards, with Bessel's correction.
    """
    del token_counts
    variance = _valid_variance(rewards.reshape(1, -1), valid.reshape(1, -1), ddof=1)
    return _divide_by_std(centered, variance)


def whiten_over_tokens(
    centered: Centered, rewards: Rewards, valid: Valid, token_counts: TokenCounts
) -> Centered:
    """Whitens over all tokens of the batch.

    The result has mean 0 and variance 1. It is exactly 0 if all values are equal. A row has the
    weight of its token count.

    Source: REINFORCE++, arXiv 2501.03262, section 3.
    """
    del rewards
    weight = jnp.where(_append_axes(valid, token_counts), token_counts, 0).astype(centered.dtype)
    count = jnp.maximum(jnp.sum(weight), 1)
    deviations = centered - jnp.sum(weight * centered) / count
    variance = jnp.sum(weight * deviations * deviations) / count
    # Rounding may leave a difference of equal values, which `MIN_VARIANCE` would magnify.
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
    """Returns 1 where two valid values differ, else 0."""
    # The mean of equal values may be rounded. The difference left is then as large as
    # `STD_EPSILON` and would become an advantage, so callers multiply by this.
    highest = jnp.max(jnp.where(valid, values, -jnp.inf), axis=-1, keepdims=True)
    lowest = jnp.min(jnp.where(valid, values, jnp.inf), axis=-1, keepdims=True)
    return (highest > lowest).astype(values.dtype)


def _valid_variance(
    values: Float[Array, "*n G"], valid: Bool[Array, "*n G"], ddof: int
) -> Float[Array, "*n 1"]:
    """Returns the variance with `ddof` fewer degrees of freedom.

    It is exactly 0 if all values are equal.
    """
    deviations = jnp.where(valid, values - _valid_mean(values, valid), 0)
    # A single value with ddof=1 would divide by 0. Its sum of squares is 0 anyway.
    count = jnp.maximum(_valid_count(valid, values) - ddof, 1)
    return (
        _values_differ(values, valid)
        * jnp.sum(deviations * deviations, axis=-1, keepdims=True)
        / count
    )


def _divide_by_std(centered: Centered, variance: Float[Array, "..."]) -> Centered:
    """Divides by a standard deviation, unless it is 0."""
    deviation = jnp.sqrt(_append_axes(variance, centered))
    return centered / jnp.where(deviation > 0, deviation + STD_EPSILON, 1)


def _repeat_group(values: Float[Array, "n G"]) -> Float[Array, "n G G"]:
    """Repeats every group for each of its rows."""
    return jnp.broadcast_to(values[:, None, :], (*values.shape, values.shape[1]))


def _other_rows(valid: Bool[Array, "n G"]) -> Bool[Array, "n G G"]:
    """Masks each row's valid siblings in its group."""
    return valid[:, None, :] & ~jnp.eye(valid.shape[1], dtype=bool)
