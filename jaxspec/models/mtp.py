"""Native multi-token prediction: whole decoder layers behind the target, as DeepSeek-V3 (arXiv
2412.19437, 2.2) and MiMo train them."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.decoder import Decoder, Layers, finish_layer, master_dtype, project_heads
from jaxspec.models.layers import AttentionInputs, init_dense, rms_norm
from jaxspec.models.rope import rotary_table


class Mtp(nnx.Module):
    """Draft position t sees the target's final-norm hidden state of position t and token t+1, and
    predicts token t+2.

    Embedding and head are the target's. Deeper steps feed the previous layer's post-final-norm
    output instead (unlike EAGLE-3); step i runs layer i mod `depth`.
    """

    with_taps = False
    vocabulary = None
    stack = 1

    def __init__(
        self,
        config: ModelSpec,
        key: Key[Array, ""],
        layers: int = 1,
        embedding_first: bool = True,
    ):
        """Random weights; each of the `layers`, of the kind that `config` says, projects
        [embedding, hidden], or [hidden, embedding] as MiMo-7B does."""
        dtype, d = master_dtype(config), config.embed
        project_key, layers_key = jax.random.split(key)
        self.config = dataclasses.replace(config, layers=layers)
        self.depth = layers
        self.embedding_first = embedding_first
        self.embedding_norm = nnx.Param(jnp.ones((layers, d), dtype))
        self.hidden_norm = nnx.Param(jnp.ones((layers, d), dtype))
        self.project = init_dense(project_key, (layers, 2 * d, d), 2 * d, dtype)
        self.layers = Layers(self.config, layers_key, streams=layers)
        self.norm = nnx.Param(jnp.ones((layers, d), dtype))

    def embed_tokens(self, target: Decoder, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """The target's embeddings of tokens."""
        return target.embedding[...][tokens]

    def to_hidden(self, features: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The target's final-norm hidden states are the first ones."""
        return features

    def attention_inputs(
        self,
        layer: int,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
    ) -> AttentionInputs:
        """Queries, keys and values of the layer's projected input, rotated to `positions`; that
        input is the residual."""
        eps, weights = self.config.norm_eps, self.layers.select_layer(layer)
        inputs = [
            rms_norm(embedded, self.embedding_norm[layer], eps),
            rms_norm(hidden, self.hidden_norm[layer], eps),
        ]
        layer_input = jnp.concatenate(inputs if self.embedding_first else inputs[::-1], axis=-1)
        x = jnp.einsum("BTC,CD->BTD", layer_input, self.project[layer])
        table = rotary_table(positions, self.config, x.dtype)
        return AttentionInputs(
            *project_heads(rms_norm(x, weights.attention_norm[...], eps), weights, table, eps), x
        )

    def layer_output(
        self, layer: int, residual: Float[Array, "B T D"], attended: Float[Array, "B T N H"]
    ) -> Float[Array, "B T D"]:
        """The rest of the layer with its final norm; the output is the next depth's hidden
        state."""
        output, _ = finish_layer(residual, attended, self.layers.select_layer(layer), self.config)
        return rms_norm(output, self.norm[layer], self.config.norm_eps)

    def logits(self, target: Decoder, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of post-norm outputs by the target's head, in at least float32."""
        return target.logits(hidden)
