"""Native multi-token prediction (MTP).

Draft layers are full decoder layers, as in DeepSeek-V3 (arXiv 2412.19437, section 2.2) and MiMo.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.decoder import Decoder, Layers, finish_layer, master_dtype, project_heads
from jaxspec.models.layers import AttentionInputs, StackInit, rms_norm
from jaxspec.models.rope import rotary_table


class Mtp(nnx.Module):
    """Multi-token-prediction draft, with the target's embedding and head.

    Draft position t reads the target's final-norm hidden state at t and token t+1, and predicts
    token t+2. Deeper steps read the previous layer's output after its final norm instead, unlike
    EAGLE-3. Step i runs layer i mod `depth`.
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
        """Initializes random weights.

        Args:
          config: Architecture of a layer.
          key: Random key.
          layers: Number of layers.
          embedding_first: Whether layers project [embedding, hidden]. MiMo-7B projects
            [hidden, embedding].
        """
        dtype, d = master_dtype(config), config.embed
        project_key, layers_key = jax.random.split(key)
        self.config = dataclasses.replace(config, layers=layers)
        self.depth = layers
        self.embedding_first = embedding_first
        init = StackInit(iter([project_key]), layers, dtype)
        self.embedding_norm = init.fill(1, (d,), (None,))
        self.hidden_norm = init.fill(1, (d,), (None,))
        self.project = init.draw((2 * d, d), (None, "embed"), 2 * d)
        self.layers = Layers(self.config, layers_key, streams=layers)
        self.norm = init.fill(1, (d,), (None,))

    def embed_tokens(self, target: Decoder, tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Looks up tokens in the target's embedding."""
        return target.embedding[...][tokens]

    def to_hidden(self, features: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the target's final-norm hidden states unchanged."""
        return features

    def attention_inputs(
        self,
        layer: int,
        hidden: Float[Array, "B T D"],
        embedded: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
    ) -> AttentionInputs:
        """Projects to queries, keys and values.

        Queries and keys are rotated to `positions`. The residual is the projected input.
        """
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
        """Runs a layer after attention, and its norm.

        The output is the hidden state of the next depth.
        """
        output, _ = finish_layer(residual, attended, self.layers.select_layer(layer), self.config)
        return rms_norm(output, self.norm[layer], self.config.norm_eps)

    def logits(self, target: Decoder, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Computes logits with the target's head.

        They are in at least float32.
        """
        # `layer_output` has already applied the final norm.
        return target.logits(hidden)
