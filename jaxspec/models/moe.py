"""A feed-forward layer of many experts, of which each token passes through a few (Shazeer et al.,
arXiv 1701.06538)."""

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

MAX_RECEIVED_BYTES = 2**27
"""Of what can arrive at a holder at once: more than keep its products busy."""


class Routing(NamedTuple):
    """Which experts each token passes through."""

    expert_ids: Int[Array, "T k"]
    weights: Float[Array, "T k"]


class Traffic(NamedTuple):
    """Where the routers of L layers send tokens: sums over the tokens that count."""

    tokens: Float[Array, "*L all"]
    """Tokens that pass through each expert."""
    entropy: Float[Array, "*L"]
    """Entropy of the routers' distributions, in nats."""

    def to_metrics(self, count: Float[Array, ""]) -> dict[str, Float[Array, ""]]:
        """Means over the layers, of `count` tokens."""
        load = self.tokens / jnp.mean(self.tokens, axis=-1, keepdims=True)
        return {
            "experts/load_min": jnp.mean(jnp.min(load, axis=-1)),
            "experts/load_max": jnp.mean(jnp.max(load, axis=-1)),
            "experts/entropy": jnp.mean(self.entropy) / count,
        }


def mixture_of_experts(
    x: Float[Array, "B T D"],
    router: Float[Array, "D all"],
    experts: ExpertWeights,
    experts_per_token: int,
    normalize: bool,
    layer: Int[Array, ""] | None = None,
    traffic_mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Traffic | None]:
    """Sum of the SwiGLU layers of each token's `experts_per_token` likeliest experts, weighted by
    their probabilities; no token is dropped.

    `normalize` makes the weights of a token sum to 1. The router's scores are kept, and their
    softmax taken, in at least float32 (Qwen3, arXiv 2505.09388).

    Where `experts` are fewer than the router's, every member of the mesh axis `expert` is a
    holder of so many of them, and tokens go to those that hold theirs, and back.

    With `layer`, `experts` are those of a stack of layers, of which this is one.

    Also returns the traffic of the tokens in `traffic_mask`.
    """
    tokens = x.reshape(-1, x.shape[-1])
    scores = wide_product(tokens[None], router)[0]
    weights, expert_ids = lax.top_k(jax.nn.softmax(scores, axis=-1), experts_per_token)
    traffic = (
        None
        if traffic_mask is None
        else _measure_traffic(scores, expert_ids, traffic_mask.reshape(-1))
    )
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    expert_shards = router.shape[1] // experts[0].shape[-3]

    def run_shard(
        tokens: Array, routing: Routing, experts: ExpertWeights, layer: Int[Array, ""] | None
    ) -> Array:
        """Of a part of the experts' width, on each member of `tensor`; all are added up at home,
        where there are fewer tokens than have arrived at a holder."""
        if expert_shards == 1:
            outputs = expert_swiglu(tokens, *routing, experts, layer=layer)
        else:
            outputs = _run_in_pieces(tokens, routing, experts, expert_shards, layer)
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
    """The traffic of one layer; nothing is learned from it."""
    scores = lax.stop_gradient(scores)
    token_counts = jnp.broadcast_to(traffic_mask[:, None], expert_ids.shape).astype(scores.dtype)
    logprobs = jax.nn.log_softmax(scores, axis=-1)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return Traffic(
        tokens=jnp.zeros(scores.shape[-1:], scores.dtype).at[expert_ids].add(token_counts),
        entropy=jnp.sum(jnp.where(traffic_mask, entropy, 0)),
    )


def _run_in_pieces(
    tokens: Float[Array, "T D"],
    routing: Routing,
    experts: ExpertWeights,
    expert_shards: int,
    layer: Int[Array, ""] | None,
) -> Float[Array, "T D"]:
    """`_exchange_tokens` of some tokens at a time, so that what arrives stays small."""
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

    # for the backward pass tokens are sent again, and not kept where they arrived
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
    """The same where each of the `expert_shards` of `expert` has tokens and experts of its own.

    A token goes once to every holder of one of its experts, with all that it needs there,
    and comes back as the weighted sum of those.
    """
    local_count = experts[0].shape[-3]
    owner = routing.expert_ids // local_count
    shard_ids = jnp.arange(expert_shards, dtype=owner.dtype)[:, None, None]
    is_sent = jnp.any(owner == shard_ids, axis=2)  # [X, T]
    rows = jnp.argsort(~is_sent, axis=1, stable=True)  # first those that go there
    send_counts = jnp.sum(is_sent, axis=1, dtype=jnp.int32)
    receive_counts = all_to_all_counts(send_counts)
    # the experts of a token by the receiver's own numbers, and their weights
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
    returned_rows = jnp.where(_leading_rows(send_counts, returned_rows), returned_rows, 0).astype(
        outputs.dtype
    )
    return jnp.zeros(tokens.shape, outputs.dtype).at[rows].add(returned_rows)


def _leading_rows(counts: Int[Array, " X"], rows: Float[Array, "X n D"]) -> Bool[Array, "X n 1"]:
    """Which rows are among the first `counts` of each holder."""
    return (jnp.arange(rows.shape[1], dtype=jnp.int32) < counts[:, None])[..., None]
