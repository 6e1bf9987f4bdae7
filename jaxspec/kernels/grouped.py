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

MIN_BLOCK_PAIRS, MAX_BLOCK_PAIRS = 8, 1024
"""Pairs of a block: fewer do not fill a product's tile, more do not make it faster."""

ExpertWeights = tuple[Float[Array, "*L E D F"], Float[Array, "*L E D F"], Float[Array, "*L E F D"]]
"""Of the experts' gates, of what is gated, and of the way back; maybe of a stack of L layers."""


class _PairBlocks(NamedTuple):
    """Pairs by expert, dealt into blocks of one expert each."""

    pair_order: Int[Array, " n"]
    """Numbers of pairs, those of an expert side by side."""
    expert_starts: Int[Array, " E1"]
    """Where the pairs of each expert begin in `order`, and where the last one's end."""
    block_size: int
    typical_blocks: int
    """Blocks that an expert usually has."""

    @property
    def block_counts(self) -> Int[Array, " E"]:
        """How many blocks each expert has."""
        return -(-(self.expert_starts[1:] - self.expert_starts[:-1]) // self.block_size)

    def take_block(
        self, expert: Int[Array, ""], index: Int[Array, ""]
    ) -> tuple[Int[Array, " b"], Bool[Array, " b"]]:
        """The pairs of one of an expert's blocks, and which of them there are."""
        positions = (
            self.expert_starts[expert]
            + index * self.block_size
            + jnp.arange(self.block_size, dtype=jnp.int32)
        )
        valid = positions < self.expert_starts[expert + 1]
        return jnp.take(self.pair_order, positions, mode="clip"), valid


def _group_pairs(
    expert_ids: Int[Array, "T k"], expert_count: int, expert_shards: int
) -> _PairBlocks:
    pair_experts = expert_ids.reshape(-1)
    pair_order = jnp.argsort(pair_experts, stable=True).astype(jnp.int32)
    boundaries = jnp.arange(expert_count + 1, dtype=pair_experts.dtype)
    expert_starts = jnp.searchsorted(
        pair_experts[pair_order], boundaries, method="compare_all"
    ).astype(jnp.int32)
    # about the pairs that an expert has, as a power of two
    typical_pairs = max(1.0, pair_experts.size / (expert_count * expert_shards))
    block_size = min(max(MIN_BLOCK_PAIRS, 2 ** round(math.log2(typical_pairs))), MAX_BLOCK_PAIRS)
    return _PairBlocks(pair_order, expert_starts, block_size, math.ceil(typical_pairs / block_size))


def _loop_with_hint(typical_count: int, count: Int[Array, ""], body: Any, initial: Any) -> Any:
    """A loop that says in its name how many turns it usually has, since nothing else of a program
    does."""
    with jax.named_scope(f"usually_{typical_count}_turns"):
        return lax.fori_loop(0, count, body, initial)


def expert_swiglu(
    tokens: Float[Array, "T D"],
    expert_ids: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    experts: ExpertWeights,
    expert_shards: int = 1,
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "T D"]:
    """The sum of each token's SwiGLU layers (Shazeer, arXiv 2002.05202) with their `weights`, in at
    least float32.

    Args:
      tokens: what passes through.
      expert_ids: the experts of each token; the number of experts for none.
      weights: of each of them.
      experts: gate, up and down; with a part of F, the sum of all parts' results is that of the
        whole.
      expert_shards: of so many who hold experts these are one; the others have as many of the
        pairs.
      layer: of a stack of layers, whose `experts` have one more axis in front. It has no gradient.
    """
    if layer is not None:
        return _run_blocks(tokens, expert_ids, weights, experts, expert_shards, layer)
    return _expert_swiglu(tokens, expert_ids, weights, experts, expert_shards)


def _run_blocks(
    tokens: Array,
    expert_ids: Array,
    weights: Array,
    experts: ExpertWeights,
    expert_shards: int,
    layer: Int[Array, ""] | None,
) -> Array:
    count, per_token = expert_ids.shape
    local_count = experts[0].shape[-3]
    blocks = _group_pairs(expert_ids, local_count, expert_shards)
    block_ends = jnp.cumsum(blocks.block_counts, dtype=jnp.int32)

    def add_block(block_index: Int[Array, ""], total: Float[Array, "T D"]) -> Float[Array, "T D"]:
        expert = jnp.sum(block_ends <= block_index, dtype=jnp.int32)
        pairs, valid = blocks.take_block(
            expert, block_index - (block_ends - blocks.block_counts)[expert]
        )
        # one expert of a stack: a layer of it would be copied with all its experts
        index = expert if layer is None else (layer, expert)
        gate, up, down = (weight[index] for weight in experts)
        x = tokens[pairs // per_token]
        outputs = (jax.nn.silu(x @ gate) * (x @ up)) @ down
        share = weights.reshape(-1)[pairs].astype(total.dtype)
        target_rows = jnp.where(valid, pairs // per_token, count)  # beyond the tokens: dropped
        return total.at[target_rows].add(outputs.astype(total.dtype) * share[:, None], mode="drop")

    zeros = jnp.zeros(tokens.shape, np.promote_types(tokens.dtype, np.float32))
    return _loop_with_hint(local_count * blocks.typical_blocks, block_ends[-1], add_block, zeros)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _expert_swiglu(
    tokens: Array, expert_ids: Array, weights: Array, experts: ExpertWeights, expert_shards: int
) -> Array:
    return _run_blocks(tokens, expert_ids, weights, experts, expert_shards, None)


def _backward(
    expert_shards: int,
    residuals: tuple[Array, Array, Array, ExpertWeights],
    gradient: Float[Array, "T D"],
) -> tuple[Array, None, Array, ExpertWeights]:
    """Gradients of tokens, weights and experts; what a block's layers were is computed again."""
    tokens, expert_ids, weights, experts = residuals
    count, per_token = expert_ids.shape
    blocks = _group_pairs(expert_ids, len(experts[0]), expert_shards)
    accum_dtype, dtype = gradient.dtype, tokens.dtype

    def differentiate_expert(sums: tuple[Array, Array], inputs: Any) -> tuple[Any, Any]:
        expert, (gate, up, down) = inputs

        def add_block(
            block_index: Int[Array, ""], gradients: tuple[Array, ...]
        ) -> tuple[Array, ...]:
            d_tokens, d_weights, d_gate, d_up, d_down = gradients
            pairs, valid = blocks.take_block(expert, block_index)
            # what fills the last block up is of other experts' tokens, which may not be finite
            x, d_rows = (
                jnp.where(valid[:, None], rows[pairs // per_token], 0)
                for rows in (tokens, gradient)
            )
            hidden, pullback = jax.vjp(
                lambda gate_output, up_output: jax.nn.silu(gate_output) * up_output,
                x @ gate,
                x @ up,
            )
            d_share = jnp.sum(d_rows * (hidden @ down).astype(accum_dtype), axis=1)
            share = jnp.where(valid, weights.reshape(-1)[pairs].astype(accum_dtype), 0)
            d_outputs = (d_rows * share[:, None]).astype(dtype)
            d_gate_output, d_up_output = pullback(d_outputs @ down.T)
            d_x = (d_gate_output @ gate.T + d_up_output @ up.T).astype(accum_dtype)
            return (
                d_tokens.at[jnp.where(valid, pairs // per_token, count)].add(d_x, mode="drop"),
                d_weights.at[jnp.where(valid, pairs, expert_ids.size)].set(d_share, mode="drop"),
                d_gate + _weight_gradient(x, d_gate_output, accum_dtype),
                d_up + _weight_gradient(x, d_up_output, accum_dtype),
                d_down + _weight_gradient(hidden, d_outputs, accum_dtype),
            )

        zeros = [jnp.zeros(weight.shape, accum_dtype) for weight in (gate, up, down)]
        *new_sums, d_gate, d_up, d_down = _loop_with_hint(
            blocks.typical_blocks, blocks.block_counts[expert], add_block, (*sums, *zeros)
        )
        d_expert_weights = d_gate.astype(dtype), d_up.astype(dtype), d_down.astype(dtype)
        return tuple(new_sums), d_expert_weights

    expert_indices = jnp.arange(len(experts[0]), dtype=jnp.int32)
    zeros = jnp.zeros(tokens.shape, accum_dtype), jnp.zeros(expert_ids.size, accum_dtype)
    (d_tokens, d_shares), d_experts = lax.scan(
        differentiate_expert, zeros, (expert_indices, experts)
    )
    d_weights = d_shares.reshape(weights.shape).astype(weights.dtype)
    return d_tokens.astype(dtype), None, d_weights, d_experts


def _weight_gradient(
    x: Float[Array, "b I"], gradient: Float[Array, "b O"], accum_dtype: Any
) -> Array:
    return jnp.einsum("bI,bO->IO", x, gradient, preferred_element_type=accum_dtype)


def _forward(
    tokens: Array, expert_ids: Array, weights: Array, experts: ExpertWeights, expert_shards: int
) -> tuple[Array, tuple[Array, Array, Array, ExpertWeights]]:
    return _expert_swiglu(tokens, expert_ids, weights, experts, expert_shards), (
        tokens,
        expert_ids,
        weights,
        experts,
    )


_expert_swiglu.defvjp(_forward, _backward)
