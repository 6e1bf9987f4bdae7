"""EAGLE-3 draft head (Li et al., arXiv 2503.01840).

A few layers read the target's taps and the next token's embedding.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxspec.inputs.spec import FamilySpec, HeadSpec, ModelSpec
from jaxspec.mesh import LogicalAxes
from jaxspec.models.decoder import Decoder, Layers, finish_layer, master_dtype, project_heads
from jaxspec.models.layers import AttentionInputs, StackInit, head_logits, init_dense, rms_norm
from jaxspec.models.rope import rotary_table


class VocabularyMap(nnx.Variable):
    """Token ids that a draft can propose.

    They are int32 and ascending. The map is stored with the weights, but never trained.
    """


class DraftEmbedding(nnx.Variable):
    """Embedding table of a draft.

    It is stored with the weights, but never trained.
    """


def llama_head_spec(target: ModelSpec, ffn: int = 0) -> ModelSpec:
    """Describes a new head for `target`.

    The head is one dense Llama layer of the target's sizes. With `ffn` 0 its feed-forward width is
    the target's, times the experts per token.
    """
    family = target.family
    width = ffn or target.ffn * (family.experts_per_token if family.experts else 1)
    return dataclasses.replace(
        target,
        path="",
        layers=1,
        ffn=width,
        family=FamilySpec(model_type="llama", query_key_norm=False),
    )


def tap_count(head: HeadSpec) -> int:
    """Returns the number of hidden states a head reads."""
    return (len(head.taps) or 3) if head.use_taps else 1


class FirstLayer(Layers):
    """First layer of a head.

    It reads [norm(embedding), norm(hidden)], twice the width of the residual stream. Weights are a
    stack of one layer.
    """

    def __init__(self, config: ModelSpec, keys: Iterator[Key[Array, ""]]):
        init, family = StackInit(keys, 1, master_dtype(config)), config.family
        d, n, m, h, f = config.embed, config.heads, config.kv_heads, config.head_size, config.ffn

        # `nnx.data` marks the attribute as data even if it is None.
        def fill_if(enabled: bool, value: int, shape: Sequence[int], axes: LogicalAxes) -> Any:
            return nnx.data(init.fill(value, shape, axes) if enabled else None)

        self.embedding_norm = init.fill(1, (d,), (None,))
        self.hidden_norm = init.fill(1, (d,), (None,))
        self.query = init.draw((2 * d, n, h), ("embed", "heads", None), 2 * d)
        self.key = init.draw((2 * d, m, h), ("embed", "kv_heads", None), 2 * d)
        self.value = init.draw((2 * d, m, h), ("embed", "kv_heads", None), 2 * d)
        self.query_norm = fill_if(family.query_key_norm, 1, (h,), (None,))
        self.key_norm = fill_if(family.query_key_norm, 1, (h,), (None,))
        self.query_bias = fill_if(family.attention_bias, 0, (n, h), ("heads", None))
        self.key_bias = fill_if(family.attention_bias, 0, (m, h), ("kv_heads", None))
        self.value_bias = fill_if(family.attention_bias, 0, (m, h), ("kv_heads", None))
        self.output = init.draw((n, h, d), ("heads", None, "embed"), n * h)
        self.output_bias = fill_if(family.output_bias, 0, (d,), (None,))
        self.ffn_norm = init.fill(1, (d,), (None,))
        self.gate = init.draw((d, f), ("embed", "ffn"), d)
        self.up = init.draw((d, f), ("embed", "ffn"), d)
        self.down = init.draw((f, d), ("ffn", "embed"), f)


class Eagle3(nnx.Module):
    """EAGLE-3 draft head.

    Draft position t reads the taps at t and token t+1, and predicts token t+2. Deeper steps read
    the previous step's output instead of fused taps. That output is taken before the final norm, or
    after it with `norm_output`. The embedding is the target's, or a fixed one of the head.
    `HeadSpec` describes how published heads differ.
    """

    def __init__(
        self,
        config: ModelSpec,
        head: HeadSpec,
        target: ModelSpec,
        key: Key[Array, ""],
        vocab: int = 0,
    ):
        """Initializes random weights.

        Args:
          config: Architecture of the head's layers.
          head: Form of the head.
          target: Architecture of the target.
          key: Random key.
          vocab: Size of the draft vocabulary. 0 = the target's whole vocabulary.
        """
        dtype, d = master_dtype(config), config.embed
        keys = iter(jax.random.split(key, 9))
        width = tap_count(head) * target.embed

        # `nnx.data` marks the attribute as data even if it is None.
        def init_norm(enabled: bool, *shape: int) -> Any:
            norm = nnx.Param(jnp.ones(shape, dtype), axes=(None,) * len(shape))
            return nnx.data(norm if enabled else None)

        self.config = dataclasses.replace(config, vocab=target.vocab)
        self.form = head
        self.with_taps = head.use_taps
        self.depth = 1
        self.stack = config.layers
        fuse = init_dense(next(keys), (width, d), (None, "embed"), width, dtype)
        self.fuse = nnx.data(fuse if head.use_taps else None)
        self.taps_norm = init_norm(head.norm_before_fuse, width)
        self.tap_norms = init_norm(head.fuse_norms, tap_count(head), target.embed)
        self.first = FirstLayer(config, keys)
        deeper_config = dataclasses.replace(config, layers=max(config.layers - 1, 1))
        self.layers = nnx.data(
            Layers(deeper_config, jax.random.fold_in(key, 9)) if config.layers > 1 else None
        )
        self.norm = nnx.Param(jnp.ones((d,), dtype), axes=(None,))
        head_shape = d, vocab or target.vocab
        self.head = init_dense(next(keys), head_shape, ("embed", "vocab"), d, dtype)
        embedding = None
        if head.own_embedding:
            axes, embedding_key = ("vocab", "embed"), jax.random.fold_in(key, 10)
            table = init_dense(embedding_key, (target.vocab, d), axes, d, dtype)
            embedding = DraftEmbedding(table[...], axes=axes)
        self.embedding = nnx.data(embedding)
        ids = jnp.arange(vocab, dtype=jnp.int32)
        self.vocabulary = nnx.data(VocabularyMap(ids, axes=(None,)) if vocab else None)

    def embed_tokens(self, target: Decoder, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Embeds tokens.

        Uses the head's embedding if it has one, else the target's.
        """
        return (target.embedding if self.embedding is None else self.embedding)[...][tokens]

    def to_hidden(self, features: Float[Array, "B T C"]) -> Float[Array, "B T D"]:
        """Fuses the taps into one hidden state, which a head without taps reads directly."""
        eps = self.config.norm_eps
        if self.fuse is None:
            return features
        if self.tap_norms is not None:
            taps = jnp.split(features, self.tap_norms.shape[0], axis=-1)
            features = jnp.concatenate(
                [
                    rms_norm(tap_features, self.tap_norms[tap], eps)
                    for tap, tap_features in enumerate(taps)
                ],
                axis=-1,
            )
        if self.taps_norm is not None:
            features = rms_norm(features, self.taps_norm[...], eps)
        return jnp.einsum("BTC,CD->BTD", features, self.fuse[...])

    def _layer_weights(self, layer: int) -> Layers:
        """Selects the weights of a layer."""
        return (
            self.first.select_layer(0)
            if layer == 0 or self.layers is None
            else self.layers.select_layer(layer - 1)
        )

    def attention_inputs(
        self,
        layer: int,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
    ) -> AttentionInputs:
        """Projects to queries, keys and values.

        Queries and keys are rotated to `positions`. Layer 0 reads [norm(embedding), norm(hidden)].
        Its residual is `hidden`, normalized with `norm_before_residual` only.
        """
        weights, eps = self._layer_weights(layer), self.config.norm_eps
        table = rotary_table(positions, self.config, hidden.dtype)
        if isinstance(weights, FirstLayer):
            normed = rms_norm(hidden, weights.hidden_norm[...], eps)
            layer_input = jnp.concatenate(
                [rms_norm(embedded, weights.embedding_norm[...], eps), normed], axis=-1
            )
            hidden = normed if self.form.norm_before_residual else hidden
        else:
            layer_input = rms_norm(hidden, weights.attention_norm[...], eps)
        return AttentionInputs(*project_heads(layer_input, weights, table, eps), hidden)

    def layer_output(
        self, layer: int, residual: Float[Array, "B T D"], attended: Float[Array, "B T N H"]
    ) -> Float[Array, "B T D"]:
        """Runs a layer after attention.

        The last layer's output is the hidden state of the next depth.
        """
        output, _ = finish_layer(residual, attended, self._layer_weights(layer), self.config)
        return (
            self._apply_final_norm(output)
            if self.form.norm_output and layer + 1 == self.stack
            else output
        )

    def _apply_final_norm(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return rms_norm(hidden, self.norm[...], self.config.norm_eps)

    def logits(self, target: Decoder, hidden: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Computes logits over the draft vocabulary.

        They are in at least float32. `target` is unused: drafts share this interface.
        """
        # With `norm_output`, `layer_output` has already applied the final norm.
        normed = hidden if self.form.norm_output else self._apply_final_norm(hidden)
        return head_logits(normed, self.head) * self.form.logit_scale


def with_vocabulary(network: Eagle3, ids: np.ndarray) -> Eagle3:
    """Replaces the vocabulary map of a draft.

    The head's rows must then be trained for these tokens. Runs on the host, not under `jit`.

    Raises:
      ValueError: The network has no vocabulary map, or `ids` does not fit. It must have one id of
        the target's vocabulary for each row of the head, in ascending order.
    """
    rows, vocab = network.head.shape[-1], network.config.vocab
    if network.vocabulary is None:
        raise ValueError(
            f"the draft has the whole vocabulary of {vocab} tokens, so it takes no vocabulary map;"
            f" got one of {ids.size} ids"
        )
    if ids.shape != (rows,):
        raise ValueError(
            f"the draft's head has {rows} rows, but the vocabulary map has shape {ids.shape}"
        )
    descents = np.flatnonzero(ids[1:] <= ids[:-1])
    if descents.size:
        raise ValueError(
            f"ids of the vocabulary map must ascend: entry {descents[0]} is {ids[descents[0]]}, the"
            f" next one {ids[descents[0] + 1]}"
        )
    if ids[0] < 0 or ids[-1] >= vocab:
        raise ValueError(
            f"ids of the vocabulary map are {ids[0]}..{ids[-1]}, but the target's vocabulary is"
            f" 0..{vocab - 1}"
        )

    # Only the map changes. It keeps the sharding of the old one.
    def replace_map(leaf: nnx.Variable) -> nnx.Variable:
        return (
            leaf.copy(jax.device_put(ids.astype(np.int32), leaf[...].sharding))
            if isinstance(leaf, VocabularyMap)
            else leaf
        )

    return jax.tree.map(replace_map, network, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
