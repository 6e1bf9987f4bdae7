"""The `Draft` protocol: what generation asks of anything that proposes tokens."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.models.cache import KVCache
from jaxspec.state import PyTree

Sampler = Callable[[Float[Array, "B V"], int], Int[Array, " B"]]
"""(draft logits over the target's vocabulary, offset in the block) -> tokens."""


class Proposal(NamedTuple):
    """Tokens for each row, and the logits they were drawn from."""

    tokens: Int[Array, "B K"]
    logits: Float[Array, "B K V"] | None
    """None: nothing was drawn, the tokens follow from the prefix alone; a single row says so with
    one finite logit a position."""
    offered: Int[Array, " B"]
    """How many of them are offered, 0..K: a function of the prefix, never of a token that was
    drawn; the rest is not looked at."""


class Context(NamedTuple):
    """What is committed: all that a draft may depend on. R rows, of which B are in slots; rows of a
    group are adjacent."""

    tokens: Int[Array, "R S"]
    """Prompt and response so far of every row; zeros beyond its end."""
    lengths: Int[Array, " B"]
    """Tokens of each slot's row that it may look at; 0 where no row is running."""
    row: slice | Int[Array, " B"] = slice(None)
    """The row in each slot; a slice: slot b has row b."""
    row_lengths: Int[Array, " R"] | None = None
    """Tokens of every row; None: `lengths`."""

    def rows(self) -> Int[Array, " B"]:
        """The row in each slot; for an empty slot, the last one."""
        if isinstance(self.row, slice):
            return jnp.arange(len(self.lengths), dtype=jnp.int32)
        return jnp.minimum(self.row, len(self.tokens) - 1)

    def at(self, positions: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Tokens at some positions of each slot's row; beyond its buffer, the last one there."""
        if isinstance(self.row, slice):
            return jnp.take_along_axis(self.tokens, positions, axis=1, mode="clip")
        return self.tokens[self.rows()[:, None], jnp.clip(positions, 0, self.tokens.shape[1] - 1)]

    def texts(self) -> Int[Array, "B S"]:
        """The whole row of each slot."""
        return self.tokens if isinstance(self.row, slice) else self.tokens[self.rows()]


class Kept(NamedTuple):
    """What a round committed: the verified block, of which each row keeps the first `length`
    positions."""

    tokens: Int[Array, "B K1"]
    """Token following each block position (the drafts kept, then next_token)."""
    features: Float[Array, "B K1 C"]
    """What the target's own pass gives at each block position: its taps for a draft that has
    `taps`, else its final-norm hidden states."""
    positions: Int[Array, "B K1"]
    length: Int[Array, " B"]


class Draft(NamedTuple):
    """Pure functions over an explicit state; `network` is whatever the draft learns, `target` lends
    its embedding and head.

    The first axis of everything in a state is rows, which may be repeated, moved and exchanged.
    A draft's keys and values are not in its state: they lie beside the target's, in the same
    layout.

    empty_cache(network, rows, positions) -> a cache for the draft's own layers; None: it has none
    prefill(network, target, prompts of n groups, features [n P C], cache) -> (state of n rows,
    cache) catch_up(network, target, state, cache, context) -> (state, cache); before a round in
    which nothing is proposed propose(network, target, state, cache, context, sample, length) ->
    (state, cache, Proposal of `length` tokens, 1 to K) commit(state, kept) -> state; a block of one
    position is that of a round in which nothing was proposed

    What it proposes is a function of the text alone: rounds of other lengths, or of none, leave no
    trace in it.
    """

    length: int
    """The most tokens a round (K)."""
    taps: tuple[int, ...]
    """Boundaries at which it reads the target's residual stream; none: it reads the final-norm
    hidden states."""
    draws: bool
    """Whether some of its tokens are drawn from logits."""
    empty_cache: Callable[[PyTree, int, int], KVCache | None]
    prefill: Callable[..., tuple[PyTree, KVCache | None]]
    catch_up: Callable[..., tuple[PyTree, KVCache | None]]
    propose: Callable[..., tuple[PyTree, KVCache | None, Proposal]]
    commit: Callable[[PyTree, Kept], PyTree]


def block_positions(first: Int[Array, " B"], count: int) -> Int[Array, "B T"]:
    """Consecutive positions from each row's first."""
    return first[:, None] + jnp.arange(count, dtype=first.dtype)
