"""The training-time test of drafts that feed themselves: the network of `recurrent` run over whole
texts, each depth on its own states of the depth before."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxspec.drafts.base import Unroll
from jaxspec.drafts.recurrent import Network
from jaxspec.kernels.chunks import map_masked
from jaxspec.kernels.segment_attention import attend_visible
from jaxspec.models.decoder import Decoder, DecoderOutput
from jaxspec.state import Pack


class _KeysValues(NamedTuple):
    """Keys and values of one layer, at positions or of entries."""

    key: Float[Array, "B T M H"]
    value: Float[Array, "B T M H"]


class _Entries(NamedTuple):
    """Entries of packed texts, each at a position of its own."""

    hidden: Float[Array, "B T D"]
    embedded: Float[Array, "B T A D"]
    """Of the token that it reads at each depth."""
    positions: Int[Array, "B T"]
    """Places in their own text."""
    first: Int[Array, "B T"]
    """Where in the sequence that text starts."""
    place: Int[Array, "B T"]
    """Where in the sequence they stand themselves."""
    own: dict[int, list[_KeysValues]]
    """Their deeper states, by layer."""


def unrolled(
    network: Network, target: Decoder, forward: DecoderOutput, pack: Pack, depths: int
) -> Float[Array, "B T A D"]:
    """What the draft's head reads, by depth, at the position whose label it then predicts.

    It is zero where a text is too short, and may be where no label is learnt.

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
    embedded = network.embed_tokens(target, pack.tokens).astype(features.dtype)
    # Entry t stands at slot t+depth, reads token t+1+depth and predicts the label of t+1+depth, as
    # the target does there.
    reads = jnp.stack([_earlier(embedded, depth + 1) for depth in range(depths)], axis=2)
    place = jnp.broadcast_to(jnp.arange(pack.tokens.shape[1], dtype=jnp.int32), pack.tokens.shape)
    entries = _Entries(network.to_hidden(features), reads, pack.positions, pack.first, place, {})
    # Each turn's first depth gives the keys that its others attend to; later ones give none, so
    # that they need not be run where no label is learnt.
    shallow = min(depths, network.depth)
    true: dict[int, _KeysValues] = {}
    outputs, entries, true = _run(network, true, entries, range(shallow))
    if depths > shallow:
        deep = range(shallow, depths)

        def deeper(networks: Any, *leaves: Array) -> Float[Array, "B T A D"]:
            network, true = networks
            entries = jax.tree.unflatten(form, leaves)
            return jnp.stack(_run(network, true, entries, deep)[0], axis=2)

        leaves, form = jax.tree.flatten(entries)
        wanted = jnp.any(jnp.stack([_earlier(pack.chosen, depth + 1) for depth in deep]), axis=0)
        width = (3 * network.config.ffn + 4 * network.config.embed) * network.stack * len(deep)
        if network.config.family.experts:  # for which devices exchange tokens, all at once
            found = deeper((network, true), *leaves)
        else:
            found = map_masked(deeper, (network, true), width, *leaves, mask=wanted)
        outputs += [found[:, :, number] for number in range(len(deep))]
    return jnp.stack([_later(hidden, depth + 1) for depth, hidden in enumerate(outputs)], axis=2)


def _run(
    network: Network, true: dict[int, _KeysValues], entries: _Entries, depths: range
) -> tuple[list[Float[Array, "B T D"]], _Entries, dict[int, _KeysValues]]:
    """Runs entries through some depths: what they give by depth, the entries after the last one,
    and the true keys and values by layer, with those that the depths add."""
    hidden, own, true, outputs = entries.hidden, dict(entries.own), dict(true), []
    for depth in depths:
        turn = depth % network.depth
        for layer in range(turn * network.stack, (turn + 1) * network.stack):
            heads = network.attention_inputs(
                layer, hidden, entries.embedded[:, :, depth], entries.positions + depth
            )
            seen = _KeysValues(heads.key, heads.value)
            if depth == turn:
                true[layer], own[layer] = seen, []
            if depth:
                own[layer] = [*own[layer], seen]
            last = entries.place - turn
            attended = _attend_diagonal(heads.query, true[layer], own[layer], entries.first, last)
            hidden = network.layer_output(layer, heads.residual, attended)
        outputs.append(hidden)
    return outputs, entries._replace(hidden=hidden, own=own), true


def _earlier(array: Shaped[Array, "B T ..."], by: int) -> Shaped[Array, "B T ..."]:
    """Position t gets what stood at t + by; zeros come in at the end."""
    sides = [(0, 0), (0, min(by, array.shape[1]))] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array[:, by:], sides)


def _later(array: Float[Array, "B T D"], by: int) -> Float[Array, "B T D"]:
    """Position t gets what stood at t - by; zeros come in at the start."""
    return jnp.pad(
        array[:, : max(array.shape[1] - by, 0)], ((0, 0), (min(by, array.shape[1]), 0), (0, 0))
    )


def _attend_diagonal(
    query: Float[Array, "B T N H"],
    true: _KeysValues,
    own: list[_KeysValues],
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

    def score(step: _KeysValues) -> Float[Array, "B T N"]:
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
