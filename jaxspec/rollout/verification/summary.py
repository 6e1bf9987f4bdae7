"""Distributions as a few numbers, from which each of their log-probabilities follows."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Summary(NamedTuple):
    """Of softmax(logits / temperature); at temperature 0, all mass is on the largest logit."""

    largest: Float[Array, "*B"]
    """The largest logit."""
    place: Int[Array, "*B"]
    """Where it stands, the first time; 0 if no temperature can be 0."""
    temperature: Float[Array, "*B"]
    log_total: Float[Array, "*B"]
    """Logarithm of the sum of exp((logits - largest) / temperature). It is NaN where no token is
    possible, or a logit over the temperature overflows."""

    def at(self, *index: slice | Int[Array, "..."]) -> "Summary":
        """That of some of the distributions."""
        return Summary(*(part[index] for part in self))


class Moments(NamedTuple):
    """Sums over distributions that the same reduction gives."""

    entropy: Float[Array, "*B"]
    """In nats."""
    outside: Float[Array, "*B"]
    """Probability of the tokens outside the draft's vocabulary, or any other that was named."""


def summarize(
    logits: Float[Array, "*B V"],
    temperature: Float[Array, "*#B"] | float = 1.0,
    may_be_zero: bool = False,
    outside: Bool[Array, " V"] | None = None,
) -> tuple[Summary, Moments]:
    """Summarizes distributions in two reductions, without holding an array over the vocabulary.

    Args:
      logits: processed but for the temperature.
      temperature: one for all, or one for each.
      may_be_zero: whether a temperature can be 0.
      outside: tokens whose probability to sum, such as those that a draft does not have.
    """
    largest, dtype = jnp.max(logits, axis=-1), logits.dtype
    place = jnp.zeros(largest.shape, jnp.int32)
    if may_be_zero:
        place = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    each = jnp.broadcast_to(jnp.asarray(temperature, dtype), largest.shape)
    return total_up(
        logits, Summary(largest, place, each, jnp.zeros_like(largest)), may_be_zero, outside
    )


def total_up(
    logits: Float[Array, "*B V"],
    summary: Summary,
    may_be_zero: bool,
    outside: Bool[Array, " V"] | None = None,
) -> tuple[Summary, Moments]:
    """Completes a summary whose `log_total` is 0; see `summarize`."""
    shifted = logprobs_by(summary, logits, may_be_zero)
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    moment = jnp.sum(jnp.where(weights > 0, weights * shifted, 0), axis=-1)
    mass = jnp.zeros_like(total)
    if outside is not None:
        mass = jnp.sum(jnp.where(outside, weights, 0), axis=-1) / total
    log_total = jnp.log(total)
    hot = summary.temperature > 0
    overflows = hot & ~jnp.isfinite(summary.largest / jnp.where(hot, summary.temperature, 1))
    entropy = log_total - moment / total
    log_total = jnp.where(overflows, jnp.nan, log_total)
    return summary._replace(log_total=log_total), Moments(entropy, mass)


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
        return (logits - largest) / temperature - summary.log_total[..., None]
    if places is None:
        places = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    hot = temperature > 0
    tempered = (logits - largest) / jnp.where(hot, temperature, 1)
    # of NaNs, the first is the largest
    certain = jnp.where(logits > -jnp.inf, 0, jnp.nan).astype(logits.dtype)
    only = jnp.where(places == summary.place[..., None], certain, -jnp.inf)
    return jnp.where(hot, tempered, only) - summary.log_total[..., None]
