"""Distributions as a few numbers, from which each of their log-probabilities follows."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

PART = 512
"""Tokens whose weights are summed before those of other parts."""


class Summary(NamedTuple):
    """Of softmax(logits / temperature); at temperature 0, all mass is on the largest logit."""

    temperature: Float[Array, "*B"]
    largest: Float[Array, "*B"]
    """The largest of logits / temperature; at temperature 0, of the logits."""
    place: Int[Array, "*B"]
    """Where it stands, the first time; 0 if no temperature can be 0."""
    log_total: Float[Array, "*B"]
    """Logarithm of the sum of exp(logits / temperature - largest). It is NaN where no token is
    possible, or one overflows."""

    def at(self, *index: slice | Int[Array, "..."]) -> "Summary":
        """That of some of the distributions."""
        return Summary(*(part[index] for part in self))


class Moments(NamedTuple):
    """Sums over distributions that the same reduction gives."""

    entropy: Float[Array, "*B"]
    """In nats."""
    outside: Float[Array, "*B"]
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
    outside: Bool[Array, " V"] | None = None,
    raw: Float[Array, "*B V"] | None = None,
) -> tuple[Summary, Moments]:
    """Summarizes distributions in one pass, which holds nothing over the vocabulary.

    Args:
      logits: processed but for the temperature.
      temperature: one for all, or one for each.
      may_be_zero: whether a temperature can be 0.
      outside: tokens whose probability to sum.
      raw: logits that are to be finite, before any was excluded.
    """
    each = jnp.broadcast_to(jnp.asarray(temperature, logits.dtype), logits.shape[:-1])
    hot = each > 0
    divisor = (jnp.where(hot, each, 1) if may_be_zero else each)[..., None]
    tempered = _in_parts(logits / divisor, -jnp.inf)
    # also of what is impossible, which any other logit outweighs: telling them would be a pass
    weights = jnp.ones_like(tempered)
    nothing = jnp.zeros_like(weights)
    places = jnp.arange(math.prod(tempered.shape[-2:]), dtype=jnp.int32)
    places = places.reshape(tempered.shape[-2:]) if may_be_zero else jnp.int32(0)
    others = None if outside is None else _in_parts(outside, False)
    sums = _Sums(
        largest=tempered,
        total=weights,
        moment=nothing,
        outside=nothing if others is None else jnp.where(others, weights, 0),
        place=jnp.broadcast_to(places, tempered.shape),
        finite=jnp.isfinite(nothing if raw is None else _in_parts(raw, 0.0)),
    )
    zero = jnp.zeros((), logits.dtype)
    start = _Sums(jnp.full_like(zero, -jnp.inf), zero, zero, zero, jnp.int32(0), jnp.bool_(True))
    for _ in range(2):  # each part, then all parts
        sums = lax.reduce(sums, start, _joined, (sums.largest.ndim - 1,))
    total = jnp.where(jnp.isfinite(sums.largest), sums.total, jnp.nan)
    log_total = jnp.log(total)
    entropy = log_total - sums.moment / sums.total
    if may_be_zero:
        certain = jnp.where(sums.largest > -jnp.inf, zero, jnp.nan)
        log_total, entropy = (jnp.where(hot, part, certain) for part in (log_total, entropy))
    return (
        Summary(each, sums.largest, sums.place, log_total),
        Moments(entropy, sums.outside / total, sums.finite),
    )


def _in_parts(values: Array, fill: float | bool) -> Array:
    """Values over a vocabulary [... V] in parts [... N M]. One long sum would round more."""
    count = -(-values.shape[-1] // PART)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, count * PART - values.shape[-1])]
    padded = jnp.pad(values, padding, constant_values=fill)
    return padded.reshape(*values.shape[:-1], count, PART)


def _joined(left: _Sums, right: _Sums) -> _Sums:
    """The sums of two parts of a vocabulary (online softmax)."""
    ahead = left.largest >= right.largest
    # also of two parts without a possible token
    level = left.largest == right.largest
    gap = jnp.where(level, 0, -jnp.abs(left.largest - right.largest))
    shrinks = jnp.exp(gap)
    gap = jnp.where(gap == -jnp.inf, 0, gap)
    high = _Sums(*(jnp.where(ahead, *parts) for parts in zip(left, right, strict=True)))
    low = _Sums(*(jnp.where(ahead, *parts) for parts in zip(right, left, strict=True)))
    first = jnp.where(level, jnp.minimum(left.place, right.place), high.place)
    return _Sums(
        lax.max(left.largest, right.largest),
        high.total + shrinks * low.total,
        high.moment + shrinks * (low.moment + gap * low.total),
        high.outside + shrinks * low.outside,
        first,
        left.finite & right.finite,
    )


def logprobs_by(
    summary: Summary,
    logits: Float[Array, "*B N"],
    may_be_zero: bool = False,
    places: Int[Array, "*#B N"] | None = None,
) -> Float[Array, "*B N"]:
    """Log-probabilities of some logits of each distribution, which stand at `places`; None: of all
    of them. They are rounded as `log_softmax` does."""
    largest, temperature = summary.largest[..., None], summary.temperature[..., None]
    if not may_be_zero:
        return (logits / temperature - largest) - summary.log_total[..., None]
    if places is None:
        places = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    hot = temperature > 0
    only = jnp.where(places == summary.place[..., None], 0, -jnp.inf).astype(logits.dtype)
    shifted = jnp.where(hot, logits / jnp.where(hot, temperature, 1) - largest, only)
    return shifted - summary.log_total[..., None]
