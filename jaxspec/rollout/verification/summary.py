"""Distributions as a few numbers, from which each of their log-probabilities follows."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

PART_SIZE = 512
"""Tokens whose weights are summed before those of other parts."""


class Summary(NamedTuple):
    """Of softmax(logits / temperature); at temperature 0, all mass is on the largest logit."""

    temperature: Float[Array, "*B"]
    max_logit: Float[Array, "*B"]
    """The largest of logits / temperature; at temperature 0, of the logits."""
    argmax: Int[Array, "*B"]
    """Where it stands, the first time; 0 if no temperature can be 0."""
    log_total: Float[Array, "*B"]
    """Logarithm of the sum of exp(logits / temperature - largest). It is NaN where no token is
    possible, or one overflows."""

    def select_at(self, *index: slice | Int[Array, "..."]) -> "Summary":
        """That of some of the distributions."""
        return Summary(*(field[index] for field in self))


class Moments(NamedTuple):
    """Sums over distributions that the same reduction gives."""

    entropy: Float[Array, "*B"]
    """In nats."""
    outside_mass: Float[Array, "*B"]
    """Probability of some tokens, such as those that a draft does not have."""
    finite: Bool[Array, "*B"]
    """Whether all that was to be finite is."""


class _Sums(NamedTuple):
    """What is carried along a vocabulary, relative to the largest logit so far."""

    largest: Float[Array, "*B"]
    total: Float[Array, "*B"]
    """Of weights exp(logit - largest)."""
    moment: Float[Array, "*B"]
    """Of weights times logit - largest."""
    outside: Float[Array, "*B"]
    """Of the weights of some tokens."""
    place: Int[Array, "*B"]
    finite: Bool[Array, "*B"]


def summarize(
    logits: Float[Array, "*B V"],
    temperature: Float[Array, "*#B"] | float = 1.0,
    may_be_zero: bool = False,
    outside_mask: Bool[Array, " V"] | None = None,
    raw_logits: Float[Array, "*B V"] | None = None,
) -> tuple[Summary, Moments]:
    """Summarizes distributions in one pass, which holds nothing over the vocabulary.

    Args:
      logits: processed but for the temperature.
      temperature: one for all, or one for each.
      may_be_zero: whether a temperature can be 0.
      outside_mask: tokens whose probability to sum.
      raw_logits: logits that are to be finite, before any was excluded.
    """
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, logits.dtype), logits.shape[:-1])
    is_positive = temperatures > 0
    divisor = (jnp.where(is_positive, temperatures, 1) if may_be_zero else temperatures)[..., None]
    tempered = _split_vocabulary(logits / divisor, -jnp.inf)
    # also of what is impossible, which any other logit outweighs: telling them would be a pass
    weights = jnp.ones_like(tempered)
    zeros = jnp.zeros_like(weights)
    token_ids = jnp.arange(math.prod(tempered.shape[-2:]), dtype=jnp.int32)
    token_ids = token_ids.reshape(tempered.shape[-2:]) if may_be_zero else jnp.int32(0)
    outside_parts = None if outside_mask is None else _split_vocabulary(outside_mask, False)
    sums = _Sums(
        largest=tempered,
        total=weights,
        moment=zeros,
        outside=zeros if outside_parts is None else jnp.where(outside_parts, weights, 0),
        place=jnp.broadcast_to(token_ids, tempered.shape),
        finite=jnp.isfinite(zeros if raw_logits is None else _split_vocabulary(raw_logits, 0.0)),
    )
    zero = jnp.zeros((), logits.dtype)
    initial_sums = _Sums(
        jnp.full_like(zero, -jnp.inf), zero, zero, zero, jnp.int32(0), jnp.bool_(True)
    )
    for _ in range(2):  # each part, then all parts
        sums = lax.reduce(sums, initial_sums, _merge_sums, (sums.largest.ndim - 1,))
    total = jnp.where(jnp.isfinite(sums.largest), sums.total, jnp.nan)
    log_total = jnp.log(total)
    entropy = log_total - sums.moment / sums.total
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
    """Values over a vocabulary [... V] in parts [... N M]. One long sum would round more."""
    part_count = -(-values.shape[-1] // PART_SIZE)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, part_count * PART_SIZE - values.shape[-1])]
    padded = jnp.pad(values, padding, constant_values=fill)
    return padded.reshape(*values.shape[:-1], part_count, PART_SIZE)


def _merge_sums(left: _Sums, right: _Sums) -> _Sums:
    """The sums of two parts of a vocabulary (online softmax)."""
    left_is_larger = left.largest >= right.largest
    # also of two parts without a possible token
    is_tied = left.largest == right.largest
    gap = jnp.where(is_tied, 0, -jnp.abs(left.largest - right.largest))
    scale = jnp.exp(gap)
    gap = jnp.where(gap == -jnp.inf, 0, gap)
    larger = _Sums(
        *(jnp.where(left_is_larger, *fields) for fields in zip(left, right, strict=True))
    )
    smaller = _Sums(
        *(jnp.where(left_is_larger, *fields) for fields in zip(right, left, strict=True))
    )
    argmax = jnp.where(is_tied, jnp.minimum(left.place, right.place), larger.place)
    return _Sums(
        lax.max(left.largest, right.largest),
        larger.total + scale * smaller.total,
        larger.moment + scale * (smaller.moment + gap * smaller.total),
        larger.outside + scale * smaller.outside,
        argmax,
        left.finite & right.finite,
    )


def logprobs_from_summary(
    summary: Summary,
    logits: Float[Array, "*B N"],
    may_be_zero: bool = False,
    token_positions: Int[Array, "*#B N"] | None = None,
) -> Float[Array, "*B N"]:
    """Log-probabilities of some logits of each distribution, which stand at `token_positions`;
    None: of all of them. They are rounded as `log_softmax` does."""
    largest, temperature = summary.max_logit[..., None], summary.temperature[..., None]
    if not may_be_zero:
        return (logits / temperature - largest) - summary.log_total[..., None]
    if token_positions is None:
        token_positions = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    is_positive = temperature > 0
    argmax_logprobs = jnp.where(token_positions == summary.argmax[..., None], 0, -jnp.inf).astype(
        logits.dtype
    )
    shifted = jnp.where(
        is_positive, logits / jnp.where(is_positive, temperature, 1) - largest, argmax_logprobs
    )
    return shifted - summary.log_total[..., None]
