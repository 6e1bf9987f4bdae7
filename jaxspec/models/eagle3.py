"""The EAGLE-3 head (Li et al., arXiv 2503.01840): one Llama layer over the target's taps and the next token's embedding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxspec.config import ModelConfig
from jaxspec.models.decoder import master_dtype
from jaxspec.models.layers import dense, rms_norm, swiglu
from jaxspec.models.rope import rotary_table, rotate


class Heads(NamedTuple):
    """Rotated queries and keys, and values, of a block."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T M H"]
    value: Float[Array, "B T M H"]


class Eagle3(nnx.Module):
    """Draft slot t sees the taps of position t and token t+1, and predicts token t+2.

    The embedding is the target's. `fuse` is applied to true taps only; deeper steps feed the previous step's pre-norm output instead.
    """

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        dtype = master_dtype(config)
        keys = iter(jax.random.split(key, 9))
        d, n, m, h, f = config.embed, config.heads, config.kv_heads, config.head_size, config.ffn
        self.config = config
        self.fuse = dense(next(keys), (3 * d, d), 3 * d, dtype)
        self.embedding_norm = nnx.Param(jnp.ones((d,), dtype))
        self.hidden_norm = nnx.Param(jnp.ones((d,), dtype))
        # One layer, stacked like the policy's: the logical axes are then the same.
        self.query = dense(next(keys), (1, 2 * d, n, h), 2 * d, dtype)
        self.key = dense(next(keys), (1, 2 * d, m, h), 2 * d, dtype)
        self.value = dense(next(keys), (1, 2 * d, m, h), 2 * d, dtype)
        self.output = dense(next(keys), (1, n, h, d), n * h, dtype)
        self.ffn_norm = nnx.Param(jnp.ones((d,), dtype))
        self.gate = dense(next(keys), (1, d, f), d, dtype)
        self.up = dense(next(keys), (1, d, f), d, dtype)
        self.down = dense(next(keys), (1, f, d), f, dtype)
        self.norm = nnx.Param(jnp.ones((d,), dtype))
        self.head = dense(next(keys), (d, config.vocab), d, dtype)

    def fuse_taps(self, taps: Float[Array, "B T D3"]) -> Float[Array, "B T D"]:
        """Joins the three taps into one hidden state."""
        return jnp.einsum("BTC,CD->BTD", taps, self.fuse[...])

    def heads(self, hidden: Float[Array, "B T D"], embedded: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Heads:
        """Queries, keys and values of [norm(embedding), norm(hidden)], rotated to `positions`."""
        eps = self.config.norm_eps
        joined = jnp.concatenate([rms_norm(embedded, self.embedding_norm[...], eps), rms_norm(hidden, self.hidden_norm[...], eps)], axis=-1)
        table = rotary_table(positions, self.config.head_size, self.config.rope_theta, hidden.dtype)
        query = rotate(jnp.einsum("BTC,CNH->BTNH", joined, self.query[0]), table)
        key = rotate(jnp.einsum("BTC,CMH->BTMH", joined, self.key[0]), table)
        return Heads(query, key, jnp.einsum("BTC,CMH->BTMH", joined, self.value[0]))

    def finish(self, hidden: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """The rest of the layer; its pre-norm output is the next depth's hidden state."""
        x = hidden + jnp.einsum("BTNH,NHD->BTD", attended, self.output[0])
        normed = rms_norm(x, self.ffn_norm[...], self.config.norm_eps)
        return x + swiglu(normed, self.gate[0], self.up[0], self.down[0])

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in at least float32, of pre-norm outputs."""
        logits = jnp.einsum("BTD,DV->BTV", rms_norm(hidden, self.norm[...], self.config.norm_eps), self.head[...])
        return logits.astype(np.promote_types(logits.dtype, np.float32))
