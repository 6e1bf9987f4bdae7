"""Training-time test of drafts.

The network of `recurrent.py` runs over full texts. Each depth reads the network's own outputs of
the depth before. Source: EAGLE-3, arXiv 2503.01840.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxspec.drafts.base import Unroll
from jaxspec.drafts.recurrent import Network
from jaxspec.kernels.chunks import map_masked_positions
from jaxspec.kernels.segment_attention import attend_visible
from jaxspec.models.decoder import Decoder, DecoderOutput
from jaxspec.state import Pack


class _KeyValues(NamedTuple):
    """Keys and values of one layer."""

    key: Float[Array, "B T M H"]
    value: Float[Array, "B T M H"]


class _Entries(NamedTuple):
    """Draft positions in packed texts, one entry each."""

    hidden: Float[Array, "B T D"]
    embedded: Float[Array, "B T A D"]
    """Embedding of the token that each entry reads, by depth."""
    positions: Int[Array, "B T"]
    """Position in the entry's own text."""
    text_starts: Int[Array, "B T"]
    """Index in the sequence at which that text starts."""
    indices: Int[Array, "B T"]
    """Index of the entry in the sequence."""
    deep_states: dict[int, list[_KeyValues]]
    """Keys and values of deeper states, by layer."""


def unroll_hidden(
    network: Network, target: Decoder, forward: DecoderOutput, pack: Pack, depths: int
) -> Float[Array, "B T A D"]:
    """Returns the inputs of the draft's head, by depth.

    Each is at the position of the label that it predicts. They are zero where the context is too
    short, and may be zero outside the loss mask. Attention sees the layer's true positions and the
    entry's own deeper states.

    Args:
      network: The draft. Depth i runs layer stack i mod `network.depth`.
      target: The policy, which provides its embedding. It gets no gradient.
      forward: The policy's pass over the pack, with aux hidden states if the draft uses them.
      pack: Packed texts. Attention stays inside each text.
      depths: Number of depths of the unroll.

    Source: EAGLE-3, arXiv 2503.01840 (training-time test).
    """
    target, forward = jax.lax.stop_gradient((target, forward))
    features = forward.taps if network.with_taps else forward.hidden
    assert features is not None, "the policy's pass was run without taps"
    embedded = network.embed_tokens(target, pack.tokens).astype(features.dtype)
    # At depth d, entry t is at position t+d, reads token t+1+d and predicts the label at t+1+d,
    # as the target does at that position.
    token_inputs = jnp.stack([_shift_left(embedded, depth + 1) for depth in range(depths)], axis=2)
    indices = jnp.broadcast_to(jnp.arange(pack.tokens.shape[1], dtype=jnp.int32), pack.tokens.shape)
    entries = _Entries(
        network.to_hidden(features), token_inputs, pack.positions, pack.text_start, indices, {}
    )
    # The first depth of each stack makes the true keys, which all later depths attend to. Later
    # depths make no true keys, so they can be skipped where the loss mask is off.
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
        # Estimated activations per entry, by which `map_masked_positions` sizes its chunks.
        width = (
            (3 * network.config.ffn + 4 * network.config.embed) * network.stack * len(deep_depths)
        )
        if network.config.family.experts:  # all devices must exchange tokens in the same chunks
            deep_outputs = run_deep((network, true_states), *leaves)
        else:
            deep_outputs = map_masked_positions(
                run_deep, (network, true_states), width, *leaves, mask=mask
            )
        outputs += [deep_outputs[:, :, index] for index in range(len(deep_depths))]
    return jnp.stack(
        [_shift_right(hidden, depth + 1) for depth, hidden in enumerate(outputs)], axis=2
    )


def _run_depths(
    network: Network, true_states: dict[int, _KeyValues], entries: _Entries, depths: range
) -> tuple[list[Float[Array, "B T D"]], _Entries, dict[int, _KeyValues]]:
    """Runs entries through some depths.

    Returns the outputs by depth, and the entries after the last depth. Also returns all true keys
    and values so far, by layer.
    """
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
            # The first depth of a stack reads true features, later ones the draft's own outputs.
            if depth == stack_index:
                true_states[layer], deep_states[layer] = key_values, []
            if depth:
                deep_states[layer] = [*deep_states[layer], key_values]
            # Entry t of stack k reads the output of position t-k of the first stack, so true keys
            # are visible up to there.
            last = entries.indices - stack_index
            attention = _attend_diagonal(
                heads.query, true_states[layer], deep_states[layer], entries.text_starts, last
            )
            hidden = network.layer_output(layer, heads.residual, attention)
        outputs.append(hidden)
    return outputs, entries._replace(hidden=hidden, deep_states=deep_states), true_states


def _shift_left(array: Shaped[Array, "B T ..."], offset: int) -> Shaped[Array, "B T ..."]:
    """Shifts left by `offset`, padding with zeros."""
    # A text shorter than the offset becomes all zeros.
    sides = [(0, 0), (0, min(offset, array.shape[1]))] + [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array[:, offset:], sides)


def _shift_right(array: Float[Array, "B T D"], offset: int) -> Float[Array, "B T D"]:
    """Shifts right by `offset`, padding with zeros."""
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
    """Attends to true entries and own deeper states.

    True entries are visible from `first` to `last`.
    """
    # One softmax over both parts: they are computed apart and merged by log-sum-exp. An entry
    # sees no deeper state of another entry, so these need one dot product each.
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
    # Depth d last read a policy hidden state 1 + d positions before the label it predicts.
    min_context=lambda depths: 1 + jnp.arange(depths, dtype=jnp.int32),
    hidden_states=unroll_hidden,
    logits=lambda network, target, hidden: network.logits(target, hidden),
    vocabulary=lambda network: None if network.vocabulary is None else network.vocabulary[...],
)
