"""The `Draft` protocol: what the engine asks of anything that proposes tokens."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.decoder import Decoder
from jaxspec.state import PyTree

Sampler = Callable[[Float[Array, "B V"], int], tuple[Int[Array, " B"], Float[Array, "B V"]]]
"""(draft logits, offset in the block) -> (tokens, log-probabilities they were drawn from)."""


class Proposal(NamedTuple):
    """K tokens for each row, and the distributions they were sampled from."""

    tokens: Int[Array, "B K"]
    logprobs: Float[Array, "B K V"]


class Kept(NamedTuple):
    """What a round committed: the verified block, of which each row keeps the first `length` positions."""

    tokens: Int[Array, "B K1"]
    """Token following each block position (the drafts kept, then next_token)."""
    taps: Float[Array, "B K1 C"]
    """The target's own taps at each block position."""
    positions: Int[Array, "B K1"]
    length: Int[Array, " B"]


class Draft(NamedTuple):
    """Pure functions over an explicit state; `network` is whatever the draft learns, `target` lends its embedding.

    prefill(network, target, prompt tokens [n P], lengths [n], taps [n P C], slots) -> state of n rows
    repeat(state, times) -> state with each row repeated for its group
    propose(network, target, state, sample) -> (state, Proposal)
    commit(state, kept) -> state
    """

    length: int
    prefill: Callable[..., PyTree]
    repeat: Callable[[PyTree, int], PyTree]
    propose: Callable[[PyTree, Decoder, PyTree, Sampler], tuple[PyTree, Proposal]]
    commit: Callable[[PyTree, Kept], PyTree]


def block_positions(first: Int[Array, " B"], count: int) -> Int[Array, "B T"]:
    """Consecutive positions from each row's first."""
    return first[:, None] + jnp.arange(count, dtype=first.dtype)
