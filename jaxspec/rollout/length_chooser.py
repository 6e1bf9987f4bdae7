"""How many tokens the next round drafts: the length of most expected tokens a second, by what was
accepted so far and a measured cost table.

Chosen before anything is drafted, from earlier rounds only, by the same arithmetic on every
process: sampling stays exact, and `tensor` peers agree. Now and then the next longer draft is
tried, for at most `SHARE` of the seconds that the best rounds took.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.models.attention import BLOCK
from jaxspec.state import AcceptanceEstimate, LengthChooser, Statistics

LOOPS = 3
"""Loops of ever fewer slots that a cost table has room for."""
SHARE = 0.01
"""Seconds that trying longer drafts may cost, over those of the rounds that seemed best."""
KEEP = 0.5
"""Weight of what was known before each call in which drafts were offered: draft and policy move."""
HOPE, WEIGHT = 0.8, 1.0
"""Conditional acceptance of a draft of which nothing is known, and how many drafts' word that is
worth."""


def contexts(longest: int) -> tuple[int, ...]:
    """Last position of each context bucket: four times as long as the one before, and the longest
    there can be."""
    ends = [BLOCK * 4**power for power in range(12) if BLOCK * 4**power < longest]
    return (*ends, longest)


def unmeasured(lengths: tuple[int, ...], longest: int) -> LengthChooser:
    """Nothing known of rows of up to `longest` tokens: no cost, and no draft ever offered."""
    none = jnp.zeros((lengths[-1],), jnp.float32)
    estimate = AcceptanceEstimate(
        offered_in_turn=none, accepted=none, seconds_to_lose=jnp.zeros((), jnp.float32)
    )
    return LengthChooser(
        acceptance=estimate,
        round_cost=jnp.zeros((len(lengths), LOOPS, len(contexts(longest))), jnp.float32),
    )


def update(chooser: LengthChooser, statistics: Statistics) -> LengthChooser:
    """Adds a call, over all rows of the mesh."""
    before = chooser.acceptance
    offered_in_turn, accepted = (
        jnp.sum(leaf, axis=0, dtype=jnp.float32)
        for leaf in (statistics.offered_in_turn, statistics.accepted)
    )
    drafted = offered_in_turn[0] > 0
    # A call that drafted has spent what there was; plain rounds earn, as many as a row took on
    # average, which is fewer than its shard's.
    plain = jnp.mean((statistics.rounds - statistics.drafted[:, 0]).astype(jnp.float32))
    fresh = AcceptanceEstimate(
        offered_in_turn=jnp.where(
            drafted, KEEP * before.offered_in_turn + offered_in_turn, before.offered_in_turn
        ),
        accepted=jnp.where(drafted, KEEP * before.accepted + accepted, before.accepted),
        seconds_to_lose=jnp.where(
            drafted, 0, before.seconds_to_lose + SHARE * chooser.round_cost[0, 0, 0] * plain
        ),
    )
    return chooser.replace(acceptance=fresh)


def expected_tokens(estimate: AcceptanceEstimate, lengths: tuple[int, ...]) -> Float[Array, " A"]:
    """Tokens a round of each length is expected to keep, its next_token included.

    Depths never reached are taken to do as well as the one before: a length is tried when that
    would make it pay.
    """
    rates, before = [], jnp.float32(HOPE)
    for depth in range(estimate.accepted.shape[0]):
        before = (estimate.accepted[depth] + WEIGHT * before) / (
            estimate.offered_in_turn[depth] + WEIGHT
        )
        rates.append(before)
    by_depth = 1 + jnp.concatenate(
        [jnp.zeros((1,), jnp.float32), jnp.cumsum(jnp.cumprod(jnp.stack(rates)))]
    )
    return by_depth[np.asarray(lengths)]


class Choice(NamedTuple):
    """What the next round drafts, by what is known before it and nothing else: where a slice of
    generation ends must not matter."""

    place: Int[Array, ""]
    """In the lengths, ascending: the best, or the next longer one when there are seconds to lose
    on it."""
    seconds_to_lose: Float[Array, ""]
    """What is left of them once the round is made: earned by the best, spent by the longer one."""


def choose(
    estimate: AcceptanceEstimate, cost: Float[Array, " A"], lengths: tuple[int, ...]
) -> Choice:
    """The length of the next round.

    Args:
      estimate: of the draft's acceptance so far.
      cost: seconds of a round of each length, at the slots and the context of the next one.
      lengths: that are compiled, ascending.
    """
    best = jnp.argmax(expected_tokens(estimate, lengths) / cost).astype(jnp.int32)
    longer = jnp.minimum(best + 1, len(lengths) - 1)
    extra = jnp.maximum(cost[longer] - cost[best], 0)  # as if it kept no more than the best
    tries = (longer > best) & (estimate.seconds_to_lose >= extra)
    left = jnp.where(
        tries, estimate.seconds_to_lose - extra, estimate.seconds_to_lose + SHARE * cost[best]
    )
    return Choice(jnp.where(tries, longer, best), left)
