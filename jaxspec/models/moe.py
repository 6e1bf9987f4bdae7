"""A feed-forward layer of many experts, of which each token passes through a few (Shazeer et al.,
arXiv 1701.06538)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.kernels.cpu_layouts import wide_product
from jaxspec.kernels.exchange import arriving, exchanged
from jaxspec.kernels.grouped import Weights, swiglu_of_experts
from jaxspec.mesh import TENSOR, on_each_member, summed_over_members

PART_BYTES = 2**27
"""Of what can arrive at a holder at once: more than keep its products busy."""


class Routed(NamedTuple):
    """Which experts each token passes through."""

    chosen: Int[Array, "T k"]
    weights: Float[Array, "T k"]


class Traffic(NamedTuple):
    """Where the routers of L layers send tokens: sums over the tokens that count."""

    tokens: Float[Array, "*L all"]
    """Tokens that pass through each expert."""
    entropy: Float[Array, "*L"]
    """Entropy of the routers' distributions, in nats."""

    def metrics(self, count: Float[Array, ""]) -> dict[str, Float[Array, ""]]:
        """Means over the layers, of `count` tokens."""
        load = self.tokens / jnp.mean(self.tokens, axis=-1, keepdims=True)
        return {
            "experts/load_min": jnp.mean(jnp.min(load, axis=-1)),
            "experts/load_max": jnp.mean(jnp.max(load, axis=-1)),
            "experts/entropy": jnp.mean(self.entropy) / count,
        }


def mixture(
    x: Float[Array, "B T D"],
    router: Float[Array, "D all"],
    experts: Weights,
    per_token: int,
    normalize: bool,
    layer: Int[Array, ""] | None = None,
    counted: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Traffic | None]:
    """Sum of the SwiGLU layers of each token's `per_token` likeliest experts, weighted by their
    probabilities; no token is dropped.

    `normalize` makes the weights of a token sum to 1. The router's scores are kept, and their
    softmax taken, in at least float32 (Qwen3, arXiv 2505.09388).

    Where `experts` are fewer than the router's, every member of the mesh axis `expert` is a
    holder of so many of them, and tokens go to those that hold theirs, and back.

    With `layer`, `experts` are those of a stack of layers, of which this is one.

    Also returns the traffic of the tokens that are `counted`.
    """
    tokens = x.reshape(-1, x.shape[-1])
    scores = wide_product(tokens[None], router)[0]
    weights, chosen = lax.top_k(jax.nn.softmax(scores, axis=-1), per_token)
    traffic = None if counted is None else _measure(scores, chosen, counted.reshape(-1))
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    holders = router.shape[1] // experts[0].shape[-3]

    def of_width(
        tokens: Array, routed: Routed, experts: Weights, layer: Int[Array, ""] | None
    ) -> Array:
        """Of a part of the experts' width, on each member of `tensor`; all are added up at home,
        where there are fewer tokens than have arrived at a holder."""
        if holders == 1:
            outputs = swiglu_of_experts(tokens, *routed, experts, layer=layer)
        else:
            outputs = _in_parts(tokens, routed, experts, holders, layer)
        return summed_over_members(outputs.astype(tokens.dtype))

    front = () if layer is None else (None,)
    columns, rows = P(*front, None, None, TENSOR), P(*front, None, TENSOR)
    run = on_each_member(of_width, (P(), P(), (columns, columns, rows), P()), P())
    return run(tokens, Routed(chosen, weights), experts, layer).reshape(x.shape), traffic


def _measure(
    scores: Float[Array, "T all"], chosen: Int[Array, "T k"], counted: Bool[Array, " T"]
) -> Traffic:
    """The traffic of one layer; nothing is learned from it."""
    scores = lax.stop_gradient(scores)
    ones = jnp.broadcast_to(counted[:, None], chosen.shape).astype(scores.dtype)
    logs = jax.nn.log_softmax(scores, axis=-1)
    entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
    return Traffic(
        tokens=jnp.zeros(scores.shape[-1:], scores.dtype).at[chosen].add(ones),
        entropy=jnp.sum(jnp.where(counted, entropy, 0)),
    )


def _in_parts(
    tokens: Float[Array, "T D"],
    routed: Routed,
    experts: Weights,
    holders: int,
    layer: Int[Array, ""] | None,
) -> Float[Array, "T D"]:
    """`_among_holders` of some tokens at a time, so that what arrives stays small."""
    count, parts = len(tokens), -(-holders * tokens.nbytes // PART_BYTES)
    if parts == 1:
        return _among_holders(tokens, routed, experts, holders, layer)
    size = -(-count // parts)
    missing, nowhere = parts * size - count, holders * experts[0].shape[-3]
    chosen = jnp.pad(routed.chosen, ((0, missing), (0, 0)), constant_values=nowhere)
    rest = tokens, routed.weights
    padded = [jnp.pad(leaf, ((0, missing), (0, 0))) for leaf in rest]
    split = [leaf.reshape(parts, size, -1) for leaf in (padded[0], chosen, padded[1])]

    # for the backward pass tokens are sent again, and not kept where they arrived
    @jax.checkpoint
    def part(one: tuple[Array, Array, Array]) -> Float[Array, "t D"]:
        return _among_holders(one[0], Routed(one[1], one[2]), experts, holders, layer)

    outputs = lax.map(part, tuple(split))
    return outputs.reshape(-1, outputs.shape[-1])[:count]


def _among_holders(
    tokens: Float[Array, "T D"],
    routed: Routed,
    experts: Weights,
    holders: int,
    layer: Int[Array, ""] | None,
) -> Float[Array, "T D"]:
    """The same where each of the `holders` of `expert` has tokens and experts of its own.

    A token goes once to every holder of one of its experts, with all that it needs there,
    and comes back as the weighted sum of those.
    """
    here = experts[0].shape[-3]
    owner = routed.chosen // here
    numbers = jnp.arange(holders, dtype=owner.dtype)[:, None, None]
    goes = jnp.any(owner == numbers, axis=2)  # [X, T]
    rows = jnp.argsort(~goes, axis=1, stable=True)  # first those that go there
    leave = jnp.sum(goes, axis=1, dtype=jnp.int32)
    arrive = arriving(leave)
    # the experts of a token by the receiver's own numbers, and their weights
    ticket = jnp.concatenate(
        [(routed.chosen[rows] - numbers * here).astype(routed.weights.dtype), routed.weights[rows]],
        axis=2,
    )
    received, tickets = (exchanged(sent, leave, arrive) for sent in (tokens[rows], ticket))
    number, weights = jnp.split(tickets, 2, axis=2)
    chosen = jnp.where(_first(arrive, tickets) & (number >= 0) & (number < here), number, here)
    flat = [
        leaf.reshape(-1, leaf.shape[2]) for leaf in (received, chosen.astype(jnp.int32), weights)
    ]
    outputs = swiglu_of_experts(flat[0], flat[1], flat[2], experts, holders, layer)
    back = exchanged(outputs.astype(tokens.dtype).reshape(received.shape), arrive, leave)
    back = jnp.where(_first(leave, back), back, 0).astype(outputs.dtype)
    return jnp.zeros(tokens.shape, outputs.dtype).at[rows].add(back)


def _first(counts: Int[Array, " X"], rows: Float[Array, "X n D"]) -> Bool[Array, "X n 1"]:
    """Which rows are among the first `counts` of each holder."""
    return (jnp.arange(rows.shape[1], dtype=jnp.int32) < counts[:, None])[..., None]
