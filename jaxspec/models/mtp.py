"""Native multi-token prediction: whole decoder layers behind the target, as DeepSeek-V3 (arXiv 2412.19437, 2.2) and MiMo train them."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxspec.config import ModelConfig
from jaxspec.models.decoder import Decoder, master_dtype
from jaxspec.models.layers import Heads, dense, rms_norm, swiglu
from jaxspec.models.rope import rotary_table, rotate


class Mtp(nnx.Module):
    """Draft slot t sees the target's final-norm hidden state of position t and token t+1, and predicts token t+2.

    Embedding and head are the target's. Deeper steps feed the previous layer's post-final-norm output instead (unlike EAGLE-3); step i
    runs layer i mod `depth`.
    """

    with_taps = False
    vocabulary = None

    def __init__(self, config: ModelConfig, key: Key[Array, ""], layers: int = 1, embedding_first: bool = True, ffn: int = 0):
        """Random weights; each of the `layers` projects [embedding, hidden], or [hidden, embedding] as MiMo-7B does.

        `ffn` is the feed-forward width; 0: the target's.
        """
        dtype = master_dtype(config)
        keys = iter(jax.random.split(key, 8))
        d, n, m, h, f = config.embed, config.heads, config.kv_heads, config.head_size, ffn or config.ffn
        residual = 2**-0.5  # each layer adds two branches to a stream of its own
        self.config = config
        self.depth = layers
        self.embedding_first = embedding_first
        self.embedding_norm = nnx.Param(jnp.ones((layers, d), dtype))
        self.hidden_norm = nnx.Param(jnp.ones((layers, d), dtype))
        self.project = dense(next(keys), (layers, 2 * d, d), 2 * d, dtype)
        self.attention_norm = nnx.Param(jnp.ones((layers, d), dtype))
        self.query = dense(next(keys), (layers, d, n, h), d, dtype)
        self.key = dense(next(keys), (layers, d, m, h), d, dtype)
        self.value = dense(next(keys), (layers, d, m, h), d, dtype)
        self.query_norm = nnx.Param(jnp.ones((layers, h), dtype))
        self.key_norm = nnx.Param(jnp.ones((layers, h), dtype))
        self.output = dense(next(keys), (layers, n, h, d), n * h, dtype, residual)
        self.ffn_norm = nnx.Param(jnp.ones((layers, d), dtype))
        self.gate = dense(next(keys), (layers, d, f), d, dtype)
        self.up = dense(next(keys), (layers, d, f), d, dtype)
        self.down = dense(next(keys), (layers, f, d), f, dtype, residual)
        self.norm = nnx.Param(jnp.ones((layers, d), dtype))

    def read(self, features: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The target's final-norm hidden states are the first ones."""
        return features

    def heads(self, layer: int, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Heads:
        """Queries, keys and values of the layer's projected input, rotated to `positions`; that input is the residual."""
        eps = self.config.norm_eps
        parts = [rms_norm(embedded, self.embedding_norm[layer], eps), rms_norm(hidden, self.hidden_norm[layer], eps)]
        joined = jnp.concatenate(parts if self.embedding_first else parts[::-1], axis=-1)
        x = jnp.einsum("BTC,CD->BTD", joined, self.project[layer])
        normed = rms_norm(x, self.attention_norm[layer], eps)
        query = rms_norm(jnp.einsum("BTD,DNH->BTNH", normed, self.query[layer]), self.query_norm[layer], eps)
        key = rms_norm(jnp.einsum("BTD,DMH->BTMH", normed, self.key[layer]), self.key_norm[layer], eps)
        table = rotary_table(positions, self.config, x.dtype)
        return Heads(rotate(query, table), rotate(key, table), jnp.einsum("BTD,DMH->BTMH", normed, self.value[layer]), x)

    def finish(self, layer: int, residual: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """The rest of the layer with its final norm; the output is the next depth's hidden state."""
        eps = self.config.norm_eps
        x = residual + jnp.einsum("BTNH,NHD->BTD", attended, self.output[layer])
        normed = rms_norm(x, self.ffn_norm[layer], eps)
        x = x + swiglu(normed, self.gate[layer], self.up[layer], self.down[layer])
        return rms_norm(x, self.norm[layer], eps)

    def draft_logits(self, target: Decoder, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits of post-norm outputs by the target's head, in at least float32."""
        return target.logits(hidden)

    def logits(self, target: Decoder, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The same: the draft has the target's vocabulary."""
        return self.draft_logits(target, hidden)
