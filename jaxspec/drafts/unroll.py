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


class _KeyValues(NamedTuple):
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
    text_starts: Int[Array, "B T"]
    """Where in the sequence that text starts."""
    indices: Int[Array, "B T"]
    """Where in the sequence they stand themselves."""
    deep_states: dict[int, list[_KeyValues]]
    """Their deeper states, by layer."""


def unroll_hidden(
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
    token_inputs = jnp.stack([_shift_left(embedded, depth + 1) for depth in range(depths)], axis=2)
    indices = jnp.broadcast_to(jnp.arange(pack.tokens.shape[1], dtype=jnp.int32), pack.tokens.shape)
    entries = _Entries(
        network.to_hidden(features), token_inputs, pack.positions, pack.text_start, indices, {}
    )
    # Each turn's first depth gives the keys that its others attend to; later ones give none, so
    # that they need not be run where no label is learnt.
    shallow = min(depths, network.depth)
    true_states: dict[int, _KeyValues] = {}
    outputs, entries, true_states = _run_depths(network, true_states, entries, range(shallow))
    if depths > shallow:
        deep_depths = range(shallow, depths)

        def run_deep(networks: Any, *leaves: Array) -> Float[Array, "B T A D"]:
            network, true_states = networks
            entries = jax.tree.unflatten(structure, leaves)
            return jnp.stack(_run_depths(network, true_states, entries, deep_depths)[0], axis=2)

        leaves, structure = jax.tree.flatten(entries)
        mask = jnp.any(
            jnp.stack([_shift_left(pack.loss_mask, depth + 1) for depth in deep_depths]), axis=0
        )
        width = (
            (3 * network.config.ffn + 4 * network.config.embed) * network.stack * len(deep_depths)
        )
        if network.config.family.experts:  # for which devices exchange tokens, all at once
            deep_outputs = run_deep((network, true_states), *leaves)
        else:
            deep_outputs = map_masked(run_deep, (network, true_states), width, *leaves, mask=mask)
        outputs += [deep_outputs[:, :, index] for index in range(len(deep_depths))]
    return jnp.stack(
        [_shift_right(hidden, depth + 1) for depth, hidden in enumerate(outputs)], axis=2
    )


def _run_depths(
    network: Network, true_states: dict[int, _KeyValues], entries: _Entries, depths: range
) -> tuple[list[Float[Array, "B T D"]], _Entries, dict[int, _KeyValues]]:
    """Runs entries through some depths: what they give by depth, the entries after the last one,
    and the true keys and values by layer, with those that the depths add."""
    hidden, deep_states, true_states, outputs = (
        entries.hidden,
        dict(entries.deep_states),
        dict(true_states),
        [],
    )
    for depth in depths:
        stack_index = depth % network.depth
        for layer in range(stack_index * network.stack, (stack_index + 1) * network.stack):
            heads = network.attention_inputs(
                layer, hidden, entries.embedded[:, :, depth], entries.positions + depth
            )
            key_values = _KeyValues(heads.key, heads.value)
            if depth == stack_index:
                true_states[layer], deep_states[layer] = key_values, []
            if depth:
                deep_states[layer] = [*deep_states[layer], key_values]
            last = entries.indices - stack_index
            attention = _attend_diagonal(
                heads.query, true_states[layer], deep_states[layer], entries.text_starts, last
            )
            hidden = network.layer_output(layer, heads.residual, attention)
        outputs.append(hidden)
    return outputs, entries._replace(hidden=hidden, deep_states=deep_states), true_states


def _shift_left(array: Shaped[Array, "B T ..."], offset: int) -> Shaped[Array, "B T ..."]:
    """Position t gets what stood at t + offset; zeros come in at the end."""
    sides = [(0, 0), (0, min(offset, array.shape[1]))] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array[:, offset:], sides)


def _shift_right(array: Float[Array, "B T D"], offset: int) -> Float[Array, "B T D"]:
    """Position t gets what stood at t - offset; zeros come in at the start."""
    return jnp.pad(
        array[:, : max(array.shape[1] - offset, 0)],
        ((0, 0), (min(offset, array.shape[1]), 0), (0, 0)),
    )


def _attend_diagonal(
    query: Float[Array, "B T N H"],
    true_states: _KeyValues,
    deep_states: list[_KeyValues],
    first: Int[Array, "B T"],
    last: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Joint softmax over the true entries from `first` to `last`, and the own states of each entry
    alone: merged by log-sum-exp."""
    attention, log_sum = attend_visible(query, true_states.key, true_states.value, first, last)
    if not deep_states:
        return attention
    row_count, length, query_heads, head_size = query.shape
    grouped_query = query.reshape(row_count, length, true_states.key.shape[2], -1, head_size)

    def score(state: _KeyValues) -> Float[Array, "B T N"]:
        products = jnp.einsum(
            "BTMRH,BTMH->BTMR", grouped_query, state.key, preferred_element_type=log_sum.dtype
        )
        return products.reshape(row_count, length, query_heads) * np.asarray(
            head_size**-0.5, log_sum.dtype
        )

    log_sums = jnp.stack([log_sum, *map(score, deep_states)], axis=-1)
    weights = jax.nn.softmax(log_sums, axis=-1).astype(query.dtype)
    merged = attention * weights[..., :1]
    for index, state in enumerate(deep_states, start=1):
        value = jnp.repeat(state.value, query_heads // state.value.shape[2], axis=2)
        merged = merged + value * weights[..., index, None]
    return merged


UNROLL = Unroll(
    depth_count=lambda steps: steps,
    # Depth d has read the policy's hidden state 1 + d positions before the one whose label it
    # predicts.
    min_context=lambda depths: 1 + jnp.arange(depths, dtype=jnp.int32),
    hidden_states=unroll_hidden,
    logits=lambda network, target, hidden: network.logits(target, hidden),
    vocabulary=lambda network: None if network.vocabulary is None else network.vocabulary[...],
)
