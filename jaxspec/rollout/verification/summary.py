"""Summaries of distributions.

With a summary, any log-probability follows from its logit.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

PART_SIZE = 512
"""Tokens in each part of the vocabulary that is summed by itself."""
NO_TOKENS, ALL_TOKENS = np.zeros(1, bool), np.ones(1, bool)
"""Masks with one value for all tokens."""


class Summary(NamedTuple):
    """Summary of softmax(logits / temperature).

    At temperature 0, all mass is on the largest logit.
    """

    temperature: Float[Array, "*B"]
    max_logit: Float[Array, "*B"]
    """Largest of logits / temperature, or of the logits at temperature 0."""
    argmax: Int[Array, "*B"]
    """First index of the largest logit. 0 if no temperature can be 0."""
    log_total: Float[Array, "*B"]
    """Logarithm of the sum of exp(logits / temperature - max_logit).

    NaN if no token is possible, or if a logit overflows.
    """

    def select_at(self, *index: slice | Int[Array, "..."]) -> "Summary":
        """Returns the summary of the indexed distributions."""
        return Summary(*(field[index] for field in self))


class Moments(NamedTuple):
    """Further results of the reduction that makes a summary."""

    entropy: Float[Array, "*B"]
    """Entropy in nats."""
    outside_mass: Float[Array, "*B"]
    """Probability of the tokens in `outside_mask`."""
    finite: Bool[Array, "*B"]
    """Whether all raw logits are finite."""


class _Sums(NamedTuple):
    """Partial sums over a vocabulary, relative to the largest logit so far."""

    largest: Float[Array, "*B"]
    """Largest logit so far."""
    total: Float[Array, "*B"]
    """Sum of the weights exp(logit - largest)."""
    moment: Float[Array, "*B"]
    """Sum of weight times (logit - largest)."""
    outside: Float[Array, "*B"]
    """Sum of the weights of tokens in `outside_mask`."""
    place: Int[Array, "*B"]
    """Index of the largest logit."""
    finite: Bool[Array, "*B"]
    """Whether all raw logits so far are finite."""


def summarize_logits(
    logits: Float[Array, "*B V"],
    temperature: Float[Array, "*#B"] | float = 1.0,
    may_be_zero: bool = False,
    outside_mask: Bool[np.ndarray | Array, " #V"] = NO_TOKENS,
    finite_mask: Bool[np.ndarray | Array, "*#B #V"] = ALL_TOKENS,
) -> tuple[Summary, Moments]:
    """Summarizes distributions in one pass over the vocabulary.

    The pass keeps no array over the vocabulary.

    Args:
      logits: logits after all processing except the temperature.
      temperature: one temperature for all distributions, or one for each.
      may_be_zero: whether a temperature can be 0.
      outside_mask: tokens whose probability is summed.
      finite_mask: logits that were finite before any token was excluded.
    """
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, logits.dtype), logits.shape[:-1])
    is_positive = temperatures > 0
    divisor = (jnp.where(is_positive, temperatures, 1) if may_be_zero else temperatures)[..., None]
    tempered = _split_vocabulary(logits / divisor, -jnp.inf)
    # Impossible tokens also get a weight of 1, which any possible token scales to 0. Masking them
    # would take another pass.
    weights = jnp.ones_like(tempered)
    zeros = jnp.zeros_like(weights)
    token_ids = jnp.arange(math.prod(tempered.shape[-2:]), dtype=jnp.int32)
    # Only temperature 0 needs the argmax.
    token_ids = token_ids.reshape(tempered.shape[-2:]) if may_be_zero else jnp.int32(0)
    sums = _Sums(
        largest=tempered,
        total=weights,
        moment=zeros,
        outside=jnp.where(_split_mask(outside_mask, False), weights, 0),
        place=jnp.broadcast_to(token_ids, tempered.shape),
        finite=jnp.broadcast_to(_split_mask(finite_mask, True), tempered.shape),
    )
    zero = jnp.zeros((), logits.dtype)
    initial_sums = _Sums(
        jnp.full_like(zero, -jnp.inf), zero, zero, zero, jnp.int32(0), jnp.bool_(True)
    )
    for _ in range(2):  # Within each part, then over the parts.
        sums = lax.reduce(sums, initial_sums, _merge_sums, (sums.largest.ndim - 1,))
    total = jnp.where(jnp.isfinite(sums.largest), sums.total, jnp.nan)
    log_total = jnp.log(total)
    entropy = log_total - sums.moment / sums.total
    # At temperature 0 one token has log-probability 0, and the entropy is 0.
    if may_be_zero:
        certain = jnp.where(sums.largest > -jnp.inf, zero, jnp.nan)
        log_total, entropy = (
            jnp.where(is_positive, values, certain) for values in (log_total, entropy)
        )
    return (
        Summary(temperatures, sums.largest, sums.place, log_total),
        Moments(entropy, sums.outside / total, sums.finite),
    )


def _split_vocabulary(values: Array, fill: float | bool) -> Array:
    """Splits values over a vocabulary [... V] into parts [... N M]."""
    # One long sum would have a larger rounding error.
    part_count = -(-values.shape[-1] // PART_SIZE)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, part_count * PART_SIZE - values.shape[-1])]
    padded = jnp.pad(values, padding, constant_values=fill)
    return padded.reshape(*values.shape[:-1], part_count, PART_SIZE)


def _split_mask(mask: np.ndarray | Array, fill: bool) -> Array:
    """Splits a mask of all tokens like the vocabulary, or one value for all."""
    # Padding would keep XLA from folding the constant.
    if mask.shape[-1] == 1:
        return jnp.asarray(mask)[..., None]
    return _split_vocabulary(jnp.asarray(mask), fill)


def _merge_sums(left: _Sums, right: _Sums) -> _Sums:
    """Merges the sums of two parts of a vocabulary (online softmax)."""
    left_is_larger = left.largest >= right.largest
    # For two parts without a possible token, the difference would be NaN.
    is_tied = left.largest == right.largest
    gap = jnp.where(is_tied, 0, -jnp.abs(left.largest - right.largest))
    scale = jnp.exp(gap)
    # For a gap of -inf the scale is 0, but -inf times 0 would be NaN.
    gap = jnp.where(gap == -jnp.inf, 0, gap)
    larger = _Sums(
        *(jnp.where(left_is_larger, *fields) for fields in zip(left, right, strict=True))
    )
    smaller = _Sums(
        *(jnp.where(left_is_larger, *fields) for fields in zip(right, left, strict=True))
    )
    # The order in which XLA reduces is not defined, so ties take the lower index.
    argmax = jnp.where(is_tied, jnp.minimum(left.place, right.place), larger.place)
    return _Sums(
        lax.max(left.largest, right.largest),
        larger.total + scale * smaller.total,
        larger.moment + scale * (smaller.moment + gap * smaller.total),
        larger.outside + scale * smaller.outside,
        argmax,
        left.finite & right.finite,
    )


def logprobs_from_summary(summary: Summary, logits: Float[Array, "*B N"]) -> Float[Array, "*B N"]:
    """Returns log-probabilities of some logits of each distribution.

    No temperature may be 0.
    """
    # The order of operations is that of `log_softmax`, so that rounding is the same.
    largest, temperature = summary.max_logit[..., None], summary.temperature[..., None]
    return (logits / temperature - largest) - summary.log_total[..., None]


def logprobs_at_any_temperature(
    summary: Summary, logits: Float[Array, "*B N"], token_positions: Int[Array, "*#B N"]
) -> Float[Array, "*B N"]:
    """Returns log-probabilities of some logits, also at temperature 0.

    `token_positions` are their indices in the vocabulary of the distribution.
    """
    largest, temperature = summary.max_logit[..., None], summary.temperature[..., None]
    is_positive = temperature > 0
    argmax_logprobs = jnp.where(token_positions == summary.argmax[..., None], 0, -jnp.inf).astype(
        logits.dtype
    )
    shifted = jnp.where(
        is_positive, logits / jnp.where(is_positive, temperature, 1) - largest, argmax_logprobs
    )
    return shifted - summary.log_total[..., None]
