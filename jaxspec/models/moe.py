"""Mixture-of-experts feed-forward layer (Shazeer et al., arXiv 1701.06538)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.kernels.cpu_layouts import wide_product
from jaxspec.kernels.exchange import all_to_all_counts, all_to_all_rows
from jaxspec.kernels.grouped import ExpertWeights, expert_swiglu
from jaxspec.mesh import TENSOR, shard_map_tensor, sum_over_tensor

# So many bytes hold more tokens than matrix products need to be fast.
MAX_RECEIVED_BYTES = 2**27
"""Largest size of the tokens that can arrive at an expert shard at once."""


class Routing(NamedTuple):
    """Experts of each token, and their weights."""

    expert_ids: Int[Array, "T k"]
    weights: Float[Array, "T k"]


class Traffic(NamedTuple):
    """Expert load and router entropy, summed over tokens.

    Fields have one entry for each of L layers.
    """

    tokens: Float[Array, "*L all"]
    """Number of tokens of each expert."""
    entropy: Float[Array, "*L"]
    """Sum of the entropies of the router's distributions, in nats."""

    def to_metrics(self, count: Float[Array, ""]) -> dict[str, Float[Array, ""]]:
        """Returns metrics, averaged over layers. The entropy is per token, of `count` tokens."""
        # A load of 1 is that of an expert if tokens are spread evenly.
        load = self.tokens / jnp.mean(self.tokens, axis=-1, keepdims=True)
        return {
            "experts/load_min": jnp.mean(jnp.min(load, axis=-1)),
            "experts/load_max": jnp.mean(jnp.max(load, axis=-1)),
            "experts/entropy": jnp.mean(self.entropy) / count,
        }


class NoTraffic(NamedTuple):
    """Traffic of a network without experts, or that is not measured."""

    def to_metrics(self, count: Float[Array, ""]) -> dict[str, Float[Array, ""]]:
        """Returns no metrics."""
        del count
        return {}


AnyTraffic = Traffic | NoTraffic


def mixture_of_experts(
    x: Float[Array, "B T D"],
    router: Float[Array, "D all"],
    experts: ExpertWeights,
    experts_per_token: int,
    normalize: bool,
    layer: Int[Array, ""] | None = None,
    traffic_mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], AnyTraffic]:
    """Computes the weighted sum of each token's likeliest experts.

    The router and its softmax are in at least float32 (Qwen3, arXiv 2505.09388). No token is
    dropped. If `experts` has fewer experts than the router, each member of the mesh axis `expert`
    holds its share of them. Tokens are then sent to the members of their experts, and back.

    Args:
      x: Inputs of the layer.
      router: Weight of the router.
      experts: Gate, up and down projections of the experts of this member.
      experts_per_token: Number of experts of each token.
      normalize: Whether the weights of a token are scaled to sum to 1.
      layer: Index into `experts` if they are those of a stack of layers.
      traffic_mask: Tokens whose traffic is measured; None for no measurement.

    Returns:
      The outputs, and the traffic of the tokens in `traffic_mask`.
    """
    tokens = x.reshape(-1, x.shape[-1])
    scores = wide_product(tokens[None], router)[0]
    weights, expert_ids = lax.top_k(jax.nn.softmax(scores, axis=-1), experts_per_token)
    traffic = (
        NoTraffic()
        if traffic_mask is None
        else _measure_traffic(scores, expert_ids, traffic_mask.reshape(-1))
    )
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    expert_shards = router.shape[1] // experts[0].shape[-3]

    def run_shard(
        tokens: Array, routing: Routing, experts: ExpertWeights, layer: Int[Array, ""] | None
    ) -> Array:
        """Runs a slice of the experts' width."""
        if expert_shards == 1:
            outputs = expert_swiglu(tokens, *routing, experts, layer=layer)
        else:
            outputs = _exchange_in_pieces(tokens, routing, experts, expert_shards, layer)
        # Adds up the slices only after tokens have returned to their own member, which has fewer
        # tokens than arrive at its experts.
        return sum_over_tensor(outputs.astype(tokens.dtype))

    lead_axes = () if layer is None else (None,)
    columns, rows = P(*lead_axes, None, None, TENSOR), P(*lead_axes, None, TENSOR)
    run_experts = shard_map_tensor(run_shard, (P(), P(), (columns, columns, rows), P()), P())
    return run_experts(tokens, Routing(expert_ids, weights), experts, layer).reshape(
        x.shape
    ), traffic


def _measure_traffic(
    scores: Float[Array, "T all"], expert_ids: Int[Array, "T k"], traffic_mask: Bool[Array, " T"]
) -> Traffic:
    """Measures the traffic of one layer."""
    # Only a metric, so no gradient is needed.
    scores = lax.stop_gradient(scores)
    token_counts = jnp.broadcast_to(traffic_mask[:, None], expert_ids.shape).astype(scores.dtype)
    logprobs = jax.nn.log_softmax(scores, axis=-1)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return Traffic(
        tokens=jnp.zeros(scores.shape[-1:], scores.dtype).at[expert_ids].add(token_counts),
        entropy=jnp.sum(jnp.where(traffic_mask, entropy, 0)),
    )


def _exchange_in_pieces(
    tokens: Float[Array, "T D"],
    routing: Routing,
    experts: ExpertWeights,
    expert_shards: int,
    layer: Int[Array, ""] | None,
) -> Float[Array, "T D"]:
    """Runs `_exchange_tokens` on pieces of tokens."""
    # In the worst case, all tokens of all shards arrive at one shard. Pieces bound their size.
    count, piece_count = len(tokens), -(-expert_shards * tokens.nbytes // MAX_RECEIVED_BYTES)
    if piece_count == 1:
        return _exchange_tokens(tokens, routing, experts, expert_shards, layer)
    piece_size = -(-count // piece_count)
    padding, no_expert = piece_count * piece_size - count, expert_shards * experts[0].shape[-3]
    expert_ids = jnp.pad(routing.expert_ids, ((0, padding), (0, 0)), constant_values=no_expert)
    leaves = tokens, routing.weights
    padded = [jnp.pad(leaf, ((0, padding), (0, 0))) for leaf in leaves]
    pieces = [
        leaf.reshape(piece_count, piece_size, -1) for leaf in (padded[0], expert_ids, padded[1])
    ]

    # The backward pass sends tokens again, so that received tokens need not be stored.
    @jax.checkpoint
    def run_piece(piece: tuple[Array, Array, Array]) -> Float[Array, "t D"]:
        return _exchange_tokens(
            piece[0], Routing(piece[1], piece[2]), experts, expert_shards, layer
        )

    outputs = lax.map(run_piece, tuple(pieces))
    return outputs.reshape(-1, outputs.shape[-1])[:count]


def _exchange_tokens(
    tokens: Float[Array, "T D"],
    routing: Routing,
    experts: ExpertWeights,
    expert_shards: int,
    layer: Int[Array, ""] | None,
) -> Float[Array, "T D"]:
    """Runs tokens on the shards of their experts.

    Each of the `expert_shards` members of `expert` has its own tokens and experts. A token is sent
    once to each shard that has any of its experts. The weighted sum over that shard comes back.
    """
    local_count = experts[0].shape[-3]
    owner = routing.expert_ids // local_count
    shard_ids = jnp.arange(expert_shards, dtype=owner.dtype)[:, None, None]
    is_sent = jnp.any(owner == shard_ids, axis=2)  # [X, T]
    rows = jnp.argsort(~is_sent, axis=1, stable=True)  # sent tokens first
    send_counts = jnp.sum(is_sent, axis=1, dtype=jnp.int32)
    receive_counts = all_to_all_counts(send_counts)
    # Expert numbers of the receiver and weights are sent in one array, to save a collective.
    routing_rows = jnp.concatenate(
        [
            (routing.expert_ids[rows] - shard_ids * local_count).astype(routing.weights.dtype),
            routing.weights[rows],
        ],
        axis=2,
    )
    received_tokens, received_routing = (
        all_to_all_rows(rows_to_send, send_counts, receive_counts)
        for rows_to_send in (tokens[rows], routing_rows)
    )
    local_ids, weights = jnp.split(received_routing, 2, axis=2)
    # Experts of other shards, and all of unused rows, become `local_count`, which is no expert.
    expert_ids = jnp.where(
        _leading_rows(receive_counts, received_routing)
        & (local_ids >= 0)
        & (local_ids < local_count),
        local_ids,
        local_count,
    )
    flat_inputs = [
        leaf.reshape(-1, leaf.shape[2])
        for leaf in (received_tokens, expert_ids.astype(jnp.int32), weights)
    ]
    outputs = expert_swiglu(
        flat_inputs[0], flat_inputs[1], flat_inputs[2], experts, expert_shards, layer
    )
    returned_rows = all_to_all_rows(
        outputs.astype(tokens.dtype).reshape(received_tokens.shape), receive_counts, send_counts
    )
    # Rows that were not sent may hold anything, so they are zeroed before the sum.
    returned_rows = jnp.where(_leading_rows(send_counts, returned_rows), returned_rows, 0).astype(
        outputs.dtype
    )
    return jnp.zeros(tokens.shape, outputs.dtype).at[rows].add(returned_rows)


def _leading_rows(counts: Int[Array, " X"], rows: Float[Array, "X n D"]) -> Bool[Array, "X n 1"]:
    """Masks the first `counts[x]` rows of shard x."""
    return (jnp.arange(rows.shape[1], dtype=jnp.int32) < counts[:, None])[..., None]
