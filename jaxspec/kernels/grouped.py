"""Feed-forward layers of many experts, of which each token passes through a few: products that cost
what their tokens cost.

Pairs of a token and one of its experts are sorted by expert, and go through their expert's weights
in blocks, one after the other, as many as there are. `lax.ragged_dot` does this in one operation,
but outside TPUs XLA multiplies every row with every expert there: 128 times the products for the
235B, and 34 GB of temporaries for 4,096 tokens of one layer.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

SMALLEST, LARGEST = 8, 1024
"""Pairs of a block: fewer do not fill a product's tile, more do not make it faster."""

Weights = tuple[Float[Array, "*L E D F"], Float[Array, "*L E D F"], Float[Array, "*L E F D"]]
"""Of the experts' gates, of what is gated, and of the way back; maybe of a stack of L layers."""


class _Blocks(NamedTuple):
    """Pairs by expert, dealt into blocks of one expert each."""

    order: Int[Array, " n"]
    """Numbers of pairs, those of an expert side by side."""
    starts: Int[Array, " E1"]
    """Where the pairs of each expert begin in `order`, and where the last one's end."""
    size: int
    turns: int
    """Blocks that an expert usually has."""

    @property
    def counts(self) -> Int[Array, " E"]:
        """How many blocks each expert has."""
        return -(-(self.starts[1:] - self.starts[:-1]) // self.size)

    def of(
        self, expert: Int[Array, ""], number: Int[Array, ""]
    ) -> tuple[Int[Array, " b"], Bool[Array, " b"]]:
        """The pairs of one of an expert's blocks, and which of them there are."""
        places = self.starts[expert] + number * self.size + jnp.arange(self.size, dtype=jnp.int32)
        there = places < self.starts[expert + 1]
        return jnp.take(self.order, places, mode="clip"), there


def _dealt(chosen: Int[Array, "T k"], experts: int, holders: int) -> _Blocks:
    pairs = chosen.reshape(-1)
    order = jnp.argsort(pairs, stable=True).astype(jnp.int32)
    numbers = jnp.arange(experts + 1, dtype=pairs.dtype)
    starts = jnp.searchsorted(pairs[order], numbers, method="compare_all").astype(jnp.int32)
    # about the pairs that an expert has, as a power of two
    usual = max(1.0, pairs.size / (experts * holders))
    size = min(max(SMALLEST, 2 ** round(math.log2(usual))), LARGEST)
    return _Blocks(order, starts, size, math.ceil(usual / size))


def _in_turn(usually: int, count: Int[Array, ""], turn: Any, start: Any) -> Any:
    """A loop that says in its name how many turns it usually has, since nothing else of a program
    does."""
    with jax.named_scope(f"usually_{usually}_turns"):
        return lax.fori_loop(0, count, turn, start)


def swiglu_of_experts(
    tokens: Float[Array, "T D"],
    chosen: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    experts: Weights,
    holders: int = 1,
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "T D"]:
    """The sum of each token's SwiGLU layers (Shazeer, arXiv 2002.05202) with their `weights`, in at
    least float32.

    Args:
      tokens: what passes through.
      chosen: the experts of each token; the number of experts for none.
      weights: of each of them.
      experts: gate, up and down; with a part of F, the sum of all parts' results is that of the
        whole.
      holders: of so many who hold experts these are one; the others have as many of the pairs.
      layer: of a stack of layers, whose `experts` have one more axis in front. It has no gradient.
    """
    if layer is not None:
        return _by_blocks(tokens, chosen, weights, experts, holders, layer)
    return _summed(tokens, chosen, weights, experts, holders)


def _by_blocks(
    tokens: Array,
    chosen: Array,
    weights: Array,
    experts: Weights,
    holders: int,
    layer: Int[Array, ""] | None,
) -> Array:
    count, per_token = chosen.shape
    here = experts[0].shape[-3]
    blocks = _dealt(chosen, here, holders)
    ends = jnp.cumsum(blocks.counts, dtype=jnp.int32)

    def add(number: Int[Array, ""], total: Float[Array, "T D"]) -> Float[Array, "T D"]:
        expert = jnp.sum(ends <= number, dtype=jnp.int32)
        pairs, there = blocks.of(expert, number - (ends - blocks.counts)[expert])
        # one expert of a stack: a layer of it would be copied with all its experts
        place = expert if layer is None else (layer, expert)
        gate, up, down = (weight[place] for weight in experts)
        x = tokens[pairs // per_token]
        outputs = (jax.nn.silu(x @ gate) * (x @ up)) @ down
        share = weights.reshape(-1)[pairs].astype(total.dtype)
        rows = jnp.where(there, pairs // per_token, count)  # beyond the tokens: dropped
        return total.at[rows].add(outputs.astype(total.dtype) * share[:, None], mode="drop")

    nothing = jnp.zeros(tokens.shape, np.promote_types(tokens.dtype, np.float32))
    return _in_turn(here * blocks.turns, ends[-1], add, nothing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(tokens: Array, chosen: Array, weights: Array, experts: Weights, holders: int) -> Array:
    return _by_blocks(tokens, chosen, weights, experts, holders, None)


def _backward(
    holders: int, kept: tuple[Array, Array, Array, Weights], gradient: Float[Array, "T D"]
) -> tuple[Array, None, Array, Weights]:
    """Gradients of tokens, weights and experts; what a block's layers were is computed again."""
    tokens, chosen, weights, experts = kept
    count, per_token = chosen.shape
    blocks = _dealt(chosen, len(experts[0]), holders)
    wide, dtype = gradient.dtype, tokens.dtype

    def of_expert(before: tuple[Array, Array], one: Any) -> tuple[Any, Any]:
        expert, (gate, up, down) = one

        def add(number: Int[Array, ""], sums: tuple[Array, ...]) -> tuple[Array, ...]:
            of_tokens, of_weights, of_gate, of_up, of_down = sums
            pairs, there = blocks.of(expert, number)
            # what fills the last block up is of other experts' tokens, which may not be finite
            x, incoming = (
                jnp.where(there[:, None], rows[pairs // per_token], 0)
                for rows in (tokens, gradient)
            )
            inner, pull = jax.vjp(lambda a, b: jax.nn.silu(a) * b, x @ gate, x @ up)
            of_share = jnp.sum(incoming * (inner @ down).astype(wide), axis=1)
            share = jnp.where(there, weights.reshape(-1)[pairs].astype(wide), 0)
            of_outputs = (incoming * share[:, None]).astype(dtype)
            of_a, of_b = pull(of_outputs @ down.T)
            of_x = (of_a @ gate.T + of_b @ up.T).astype(wide)
            return (
                of_tokens.at[jnp.where(there, pairs // per_token, count)].add(of_x, mode="drop"),
                of_weights.at[jnp.where(there, pairs, chosen.size)].set(of_share, mode="drop"),
                of_gate + _over_rows(x, of_a, wide),
                of_up + _over_rows(x, of_b, wide),
                of_down + _over_rows(inner, of_outputs, wide),
            )

        nothing = [jnp.zeros(weight.shape, wide) for weight in (gate, up, down)]
        *after, of_gate, of_up, of_down = _in_turn(
            blocks.turns, blocks.counts[expert], add, (*before, *nothing)
        )
        of_weights = of_gate.astype(dtype), of_up.astype(dtype), of_down.astype(dtype)
        return tuple(after), of_weights

    numbers = jnp.arange(len(experts[0]), dtype=jnp.int32)
    nothing = jnp.zeros(tokens.shape, wide), jnp.zeros(chosen.size, wide)
    (of_tokens, of_shares), of_experts = lax.scan(of_expert, nothing, (numbers, experts))
    of_weights = of_shares.reshape(weights.shape).astype(weights.dtype)
    return of_tokens.astype(dtype), None, of_weights, of_experts


def _over_rows(x: Float[Array, "b I"], gradient: Float[Array, "b O"], wide: Any) -> Array:
    return jnp.einsum("bI,bO->IO", x, gradient, preferred_element_type=wide)


def _forward(
    tokens: Array, chosen: Array, weights: Array, experts: Weights, holders: int
) -> tuple[Array, tuple[Array, Array, Array, Weights]]:
    return _summed(tokens, chosen, weights, experts, holders), (tokens, chosen, weights, experts)


_summed.defvjp(_forward, _backward)
