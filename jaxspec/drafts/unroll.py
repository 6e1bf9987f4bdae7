"""The training-time test of drafts that feed themselves: the network of `recurrent` run over whole
texts, each depth on its own states of the depth before."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.drafts.base import Unroll
from jaxspec.drafts.recurrent import Network
from jaxspec.kernels.segment_attention import attend_visible
from jaxspec.models.decoder import Decoder, Forward
from jaxspec.models.layers import Heads
from jaxspec.state import Pack


def unrolled(
    network: Network, target: Decoder, forward: Forward, pack: Pack, depths: int
) -> Float[Array, "B T A D"]:
    """What the draft's head reads, by depth, at the position whose label it then predicts; zeros
    where a text is too short.

    Args:
      network: the draft; depth i of EAGLE-3 and MTP runs the layers of its turn i mod
        `network.depth`.
      target: the policy, which lends its embedding; no gradient reaches it.
      forward: the policy's own pass over the pack, with taps where the draft reads them.
      pack: texts side by side; the draft's attention stays inside each.
      depths: of the unroll.

    Source: EAGLE-3, arXiv 2503.01840 (training-time test); attention sees the layer's true slots
    and the entry's own deeper states.
    """
    target, forward = jax.lax.stop_gradient((target, forward))
    features = forward.taps if network.with_taps else forward.hidden
    assert features is not None, "the policy's pass was run without taps"
    embedded = network.embed(target, pack.tokens).astype(features.dtype)
    index = jnp.broadcast_to(jnp.arange(pack.tokens.shape[1], dtype=jnp.int32), pack.tokens.shape)
    hidden = network.read(features)
    true: dict[int, Heads] = {}
    own: dict[int, list[Heads]] = {}
    outputs = []
    for depth in range(depths):
        # Entry t stands at slot t+depth, reads token t+1+depth and predicts the label of t+1+depth,
        # as the target does there.
        turn = depth % network.depth
        for layer in range(turn * network.stack, (turn + 1) * network.stack):
            heads = network.heads(
                layer, hidden, _earlier(embedded, depth + 1), pack.positions + depth
            )
            if depth == turn:
                true[layer], own[layer] = heads, []
            if depth:
                own[layer] = [*own[layer], heads]
            attended = _attend_diagonal(
                heads.query, true[layer], own[layer], pack.first, index - turn
            )
            hidden = network.finish(layer, heads.residual, attended)
        outputs.append(_later(hidden, depth + 1))
    return jnp.stack(outputs, axis=2)


def _earlier(array: Float[Array, "B T D"], by: int) -> Float[Array, "B T D"]:
    """Position t gets what stood at t + by; zeros come in at the end."""
    return jnp.pad(array[:, by:], ((0, 0), (0, min(by, array.shape[1])), (0, 0)))


def _later(array: Float[Array, "B T D"], by: int) -> Float[Array, "B T D"]:
    """Position t gets what stood at t - by; zeros come in at the start."""
    return jnp.pad(
        array[:, : max(array.shape[1] - by, 0)], ((0, 0), (min(by, array.shape[1]), 0), (0, 0))
    )


def _attend_diagonal(
    query: Float[Array, "B T N H"],
    true: Heads,
    own: list[Heads],
    first: Int[Array, "B T"],
    last: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Joint softmax over the true entries from `first` to `last`, and the own states of each entry
    alone: merged by log-sum-exp."""
    attended, total = attend_visible(query, true.key, true.value, first, last)
    if not own:
        return attended
    rows, length, count, size = query.shape
    grouped = query.reshape(rows, length, true.key.shape[2], -1, size)

    def score(step: Heads) -> Float[Array, "B T N"]:
        scores = jnp.einsum(
            "BTMRH,BTMH->BTMR", grouped, step.key, preferred_element_type=total.dtype
        )
        return scores.reshape(rows, length, count) * np.asarray(size**-0.5, total.dtype)

    parts = jnp.stack([total, *map(score, own)], axis=-1)
    weights = jax.nn.softmax(parts, axis=-1).astype(query.dtype)
    merged = attended * weights[..., :1]
    for number, step in enumerate(own, start=1):
        value = jnp.repeat(step.value, count // step.value.shape[2], axis=2)
        merged = merged + value * weights[..., number, None]
    return merged


UNROLL = Unroll(
    depths=lambda steps: steps,
    # Depth d has read the policy's hidden state 1 + d positions before the one whose label it
    # predicts.
    before=lambda depths: 1 + jnp.arange(depths, dtype=jnp.int32),
    hidden=unrolled,
    logits=lambda network, target, hidden: network.logits(target, hidden),
    vocabulary=lambda network: None if network.vocabulary is None else network.vocabulary[...],
)
