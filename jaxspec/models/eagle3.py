"""The EAGLE-3 head (Li et al., arXiv 2503.01840): a few layers over the target's taps and the next
token's embedding."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxspec.inputs.spec import FamilySpec, HeadSpec, ModelSpec
from jaxspec.models.decoder import Decoder, Layers, finish_layer, master_dtype, project_heads
from jaxspec.models.layers import AttentionInputs, head_logits, init_dense, rms_norm
from jaxspec.models.rope import rotary_table


class VocabularyMap(nnx.Variable):
    """Ids of the target's tokens that a draft can propose, int32, ascending; it travels with the
    weights but is never trained."""


class DraftEmbedding(nnx.Variable):
    """An embedding table that a draft brings along; it travels with the weights but is never
    trained."""


def llama_head_spec(target: ModelSpec, ffn: int = 0) -> ModelSpec:
    """The decoder of a head that is made for `target`: one dense Llama layer of its sizes; `ffn` 0:
    as wide as one token's feed-forward."""
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
    """How many of the target's hidden states a head reads side by side."""
    return (len(head.taps) or 3) if head.use_taps else 1


class FirstLayer(Layers):
    """The layer that reads [norm(embedding), norm(hidden)], twice the width of its stream; a stack
    of one, for the same logical axes."""

    def __init__(self, config: ModelSpec, keys: Iterator[Key[Array, ""]]):
        dtype, family = master_dtype(config), config.family
        d, n, m, h, f = config.embed, config.heads, config.kv_heads, config.head_size, config.ffn

        def init_param(enabled: bool, fill: int, *shape: int) -> Any:  # flax marks what may be None
            return nnx.data(nnx.Param(jnp.full((1, *shape), fill, dtype)) if enabled else None)

        self.embedding_norm = nnx.Param(jnp.ones((1, d), dtype))
        self.hidden_norm = nnx.Param(jnp.ones((1, d), dtype))
        self.query = init_dense(next(keys), (1, 2 * d, n, h), 2 * d, dtype)
        self.key = init_dense(next(keys), (1, 2 * d, m, h), 2 * d, dtype)
        self.value = init_dense(next(keys), (1, 2 * d, m, h), 2 * d, dtype)
        self.query_norm = init_param(family.query_key_norm, 1, h)
        self.key_norm = init_param(family.query_key_norm, 1, h)
        self.query_bias = init_param(family.attention_bias, 0, n, h)
        self.key_bias = init_param(family.attention_bias, 0, m, h)
        self.value_bias = init_param(family.attention_bias, 0, m, h)
        self.output = init_dense(next(keys), (1, n, h, d), n * h, dtype)
        self.output_bias = init_param(family.output_bias, 0, d)
        self.ffn_norm = nnx.Param(jnp.ones((1, d), dtype))
        self.gate = init_dense(next(keys), (1, d, f), d, dtype)
        self.up = init_dense(next(keys), (1, d, f), d, dtype)
        self.down = init_dense(next(keys), (1, f, d), f, dtype)


class Eagle3(nnx.Module):
    """Draft position t sees the taps of position t and token t+1, and predicts token t+2.

    The embedding is the target's, or a fixed one of its own. `fuse` is applied to true taps only;
    deeper steps feed the previous step's output instead, before the final norm (after it with
    `norm_output`). `HeadSpec` says how published heads differ.
    """

    def __init__(
        self,
        config: ModelSpec,
        head: HeadSpec,
        target: ModelSpec,
        key: Key[Array, ""],
        vocab: int = 0,
    ):
        """Random weights for the head's own decoder `config`; `vocab` rows in the head (0: the
        target's whole vocabulary)."""
        dtype, d = master_dtype(config), config.embed
        keys = iter(jax.random.split(key, 9))
        width = tap_count(head) * target.embed

        def init_param(enabled: bool, *shape: int) -> Any:  # flax marks what may be None
            return nnx.data(nnx.Param(jnp.ones(shape, dtype)) if enabled else None)

        self.config = dataclasses.replace(config, vocab=target.vocab)
        self.form = head
        self.with_taps = head.use_taps
        self.depth = 1
        self.stack = config.layers
        fuse = init_dense(next(keys), (width, d), width, dtype)
        self.fuse = nnx.data(fuse if head.use_taps else None)
        self.taps_norm = init_param(head.norm_before_fuse, width)
        self.tap_norms = init_param(head.fuse_norms, tap_count(head), target.embed)
        self.first = FirstLayer(config, keys)
        deeper_config = dataclasses.replace(config, layers=max(config.layers - 1, 1))
        self.layers = nnx.data(
            Layers(deeper_config, jax.random.fold_in(key, 9)) if config.layers > 1 else None
        )
        self.norm = nnx.Param(jnp.ones((d,), dtype))
        self.head = init_dense(next(keys), (d, vocab or target.vocab), d, dtype)
        embedding = (
            DraftEmbedding(
                init_dense(jax.random.fold_in(key, 10), (target.vocab, d), d, dtype)[...]
            )
            if head.own_embedding
            else None
        )
        self.embedding = nnx.data(embedding)
        self.vocabulary = nnx.data(
            VocabularyMap(jnp.arange(vocab, dtype=jnp.int32)) if vocab else None
        )

    def embed_tokens(self, target: Decoder, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Embeddings of tokens: the target's, unless the head has its own."""
        return (target.embedding if self.embedding is None else self.embedding)[...][tokens]

    def to_hidden(self, features: Float[Array, "B T C"]) -> Float[Array, "B T D"]:
        """Joins the taps into one hidden state."""
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
        """Queries, keys and values, rotated to `positions`, and the residual.

        Layer 0 reads [norm(embedding), norm(hidden)]; its residual is `hidden` as it is, unless
        `norm_before_residual`.
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
        """The rest of a layer; what the last one gives is the next depth's hidden state."""
        output, _ = finish_layer(residual, attended, self._layer_weights(layer), self.config)
        return (
            self._apply_final_norm(output)
            if self.form.norm_output and layer + 1 == self.stack
            else output
        )

    def _apply_final_norm(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return rms_norm(hidden, self.norm[...], self.config.norm_eps)

    def logits(self, target: Decoder, hidden: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Logits over the draft's own vocabulary, in at least float32, of the last layer's output.

        `target` lends nothing here.
        """
        normed = hidden if self.form.norm_output else self._apply_final_norm(hidden)
        return head_logits(normed, self.head) * self.form.logit_scale


def with_vocabulary(network: Eagle3, ids: np.ndarray) -> Eagle3:
    """The network with `ids` as the tokens of its head's rows, which must be trained (again) for
    them; on the host, never in a jit.

    Raises:
      ValueError: the network has the whole vocabulary, or `ids` are not as many as its rows,
        ascending and inside the target's vocabulary.
    """
    rows, vocab = network.head.shape[-1], network.config.vocab
    if network.vocabulary is None:
        raise ValueError(
            f"a draft with the whole vocabulary of {vocab} tokens takes no map; it was given"
            f" {ids.size} ids"
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

    def replace_map(leaf: nnx.Variable) -> nnx.Variable:
        return (
            VocabularyMap(jax.device_put(ids.astype(np.int32), leaf[...].sharding))
            if isinstance(leaf, VocabularyMap)
            else leaf
        )

    return jax.tree.map(replace_map, network, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
