"""The `Draft` protocol: what the engine asks of anything that proposes tokens."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.decoder import Decoder
from jaxspec.state import PyTree

Sampler = Callable[[Float[Array, "B V"], int], Int[Array, " B"]]
"""(draft logits over the target's vocabulary, offset in the block) -> tokens."""


class Proposal(NamedTuple):
    """Tokens for each row, and the logits they were drawn from."""

    tokens: Int[Array, "B K"]
    logits: Float[Array, "B K V"] | None
    """None: nothing was drawn, the tokens follow from the prefix alone; a single row says so with one finite logit a position."""
    offered: Int[Array, " B"]
    """How many of them are offered, 0..K: a function of the prefix, never of a token that was drawn; the rest is not looked at."""


class Context(NamedTuple):
    """What is committed: all that a draft may depend on. Rows of a group are adjacent."""

    tokens: Int[Array, "B S"]
    """Prompt and response so far; zeros beyond `lengths`."""
    lengths: Int[Array, " B"]


class Kept(NamedTuple):
    """What a round committed: the verified block, of which each row keeps the first `length` positions."""

    tokens: Int[Array, "B K1"]
    """Token following each block position (the drafts kept, then next_token)."""
    features: Float[Array, "B K1 C"]
    """What the target's own pass gives at each block position: its taps for a draft that has `taps`, else its final-norm hidden states."""
    positions: Int[Array, "B K1"]
    length: Int[Array, " B"]


class Draft(NamedTuple):
    """Pure functions over an explicit state; `network` is whatever the draft learns, `target` lends its embedding and head.

    prefill(network, target, prompts of n groups, features [n P C], slots) -> state of n rows
    repeat(state, times) -> state with each row repeated for its group
    propose(network, target, state, context, sample) -> (state, Proposal)
    commit(state, kept) -> state
    """

    length: int
    """Tokens a round (K)."""
    taps: tuple[int, ...]
    """Boundaries at which it reads the target's residual stream; none: it reads the final-norm hidden states."""
    draws: bool
    """Whether some of its tokens are drawn from logits."""
    prefill: Callable[..., PyTree]
    repeat: Callable[[PyTree, int], PyTree]
    propose: Callable[[PyTree, Decoder, PyTree, Context, Sampler], tuple[PyTree, Proposal]]
    commit: Callable[[PyTree, Kept], PyTree]


def block_positions(first: Int[Array, " B"], count: int) -> Int[Array, "B T"]:
    """Consecutive positions from each row's first."""
    return first[:, None] + jnp.arange(count, dtype=first.dtype)
