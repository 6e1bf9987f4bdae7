"""Grouped products of tokens with their experts.

The cost is proportional to the number of tokens. Pairs of a token and one of its experts are sorted
by expert. A loop multiplies one block of pairs of the same expert at a time.
"""

# Not `lax.ragged_dot`: outside TPUs XLA multiplies every row by every expert. For Qwen3 235B this
# makes 128 times the products, and 34 GB of temporaries for 4,096 tokens of one layer.

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Fewer pairs do not fill a tile of a product, and more do not make it faster.
MIN_BLOCK_PAIRS, MAX_BLOCK_PAIRS = 8, 1024
"""Smallest and largest number of pairs of a block."""

ExpertWeights = tuple[Float[Array, "*L E D F"], Float[Array, "*L E D F"], Float[Array, "*L E F D"]]
"""Gate, up and down projections of the experts, optionally of a stack of L layers."""


class _PairBlocks(NamedTuple):
    """Token-expert pairs in blocks of one expert."""

    pair_order: Int[Array, " n"]
    """Indices of the pairs, sorted by expert."""
    expert_starts: Int[Array, " E1"]
    """Start of each expert's pairs in `pair_order`, and the end of the last expert's."""
    block_size: int
    """Number of pairs of a block."""
    typical_blocks: int
    """Number of blocks of an expert if tokens are spread evenly."""

    @property
    def block_counts(self) -> Int[Array, " E"]:
        """Number of blocks of each expert."""
        return -(-(self.expert_starts[1:] - self.expert_starts[:-1]) // self.block_size)

    def take_block(
        self, expert: Int[Array, ""], index: Int[Array, ""]
    ) -> tuple[Int[Array, " b"], Bool[Array, " b"]]:
        """Returns a block of pairs, and which are valid.

        The last block of an expert may be padded with invalid pairs.
        """
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
    """Sorts pairs by expert, in blocks."""
    pair_experts = expert_ids.reshape(-1)
    pair_order = jnp.argsort(pair_experts, stable=True).astype(jnp.int32)
    boundaries = jnp.arange(expert_count + 1, dtype=pair_experts.dtype)
    expert_starts = jnp.searchsorted(
        pair_experts[pair_order], boundaries, method="compare_all"
    ).astype(jnp.int32)
    # Blocks of about the typical number of pairs keep both padding and trip counts low.
    typical_pairs = max(1.0, pair_experts.size / (expert_count * expert_shards))
    block_size = min(max(MIN_BLOCK_PAIRS, 2 ** round(math.log2(typical_pairs))), MAX_BLOCK_PAIRS)
    return _PairBlocks(pair_order, expert_starts, block_size, math.ceil(typical_pairs / block_size))


def _loop_with_hint(typical_count: int, count: Int[Array, ""], body: Any, initial: Any) -> Any:
    """Runs a loop, named by its typical trip count."""
    # `compiled/counts.py` reads the trip count from the name. The program of a dynamic loop does
    # not state it elsewhere.
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
    """Computes the weighted sum of each token's experts.

    Experts are SwiGLU layers (Shazeer, arXiv 2002.05202). The sum is in at least float32.

    Args:
      tokens: Inputs of the experts.
      expert_ids: Experts of each token, from 0. An id equal to their number E means no expert.
      weights: Weights of these experts.
      experts: Gate, up and down projections. With a slice of F, results are partial sums.
      expert_shards: Number of shards that hold experts. `experts` are those of one shard, which is
        expected to get its share of the pairs.
      layer: Index into a stack of layers, whose `experts` have one more leading axis. Results then
        have no gradient.
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
    """Adds up the outputs of all blocks."""
    count, per_token = expert_ids.shape
    local_count = experts[0].shape[-3]
    blocks = _group_pairs(expert_ids, local_count, expert_shards)
    block_ends = jnp.cumsum(blocks.block_counts, dtype=jnp.int32)

    def add_block(block_index: Int[Array, ""], total: Float[Array, "T D"]) -> Float[Array, "T D"]:
        expert = jnp.sum(block_ends <= block_index, dtype=jnp.int32)
        pairs, valid = blocks.take_block(
            expert, block_index - (block_ends - blocks.block_counts)[expert]
        )
        # Indexes one expert of the stack. Indexing the layer first would copy all its experts.
        index = expert if layer is None else (layer, expert)
        gate, up, down = (weight[index] for weight in experts)
        x = tokens[pairs // per_token]
        outputs = (jax.nn.silu(x @ gate) * (x @ up)) @ down
        share = weights.reshape(-1)[pairs].astype(total.dtype)
        # Row `count` is out of bounds, so that the scatter drops the outputs of invalid pairs.
        target_rows = jnp.where(valid, pairs // per_token, count)
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
    """Computes gradients of tokens, weights and experts.

    Activations of the experts are recomputed, one block at a time.
    """
    tokens, expert_ids, weights, experts = residuals
    count, per_token = expert_ids.shape
    blocks = _group_pairs(expert_ids, len(experts[0]), expert_shards)
    accum_dtype, dtype = gradient.dtype, tokens.dtype

    def differentiate_expert(sums: tuple[Array, Array], inputs: Any) -> tuple[Any, Any]:
        expert, (gate, up, down) = inputs

        # One expert at a time, so that only one expert's gradients are held in float32.
        def add_block(
            block_index: Int[Array, ""], gradients: tuple[Array, ...]
        ) -> tuple[Array, ...]:
            d_tokens, d_weights, d_gate, d_up, d_down = gradients
            pairs, valid = blocks.take_block(expert, block_index)
            # Invalid pairs are other experts' tokens, which may not be finite. They must be zero
            # here, as the weight gradients sum over all pairs of a block.
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
        return tuple(new_sums), (d_gate.astype(dtype), d_up.astype(dtype), d_down.astype(dtype))

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
