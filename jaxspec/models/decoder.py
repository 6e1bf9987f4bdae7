"""The policy: a Qwen3 decoder used for prefill, verification, logprobs and training alike."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jaxspec.config import ModelConfig
from jaxspec.models.attention import attend, up_to_position
from jaxspec.models.kv import KVCache, extend
from jaxspec.models.layers import dense, rms_norm, swiglu
from jaxspec.models.rope import rotary_table, rotate


class Forward(NamedTuple):
    """What one forward pass returns."""

    hidden: Float[Array, "B T D"]
    """After the final norm; `Decoder.logits` turns it into logits."""
    taps: Float[Array, "B T D3"] | None
    """Residual stream at the three tap boundaries, side by side; None when not asked for."""
    cache: KVCache | None


def master_dtype(config: ModelConfig) -> jnp.dtype:
    """Type in which weights are kept and updated."""
    return jnp.dtype("float64" if config.dtype == "float64" else "float32")


def tap_boundaries(layers: int) -> tuple[int, int, int]:
    """Numbers of layers applied where EAGLE-3 reads the residual stream: 2, L//2, L-3 as in its published heads (Li et al.,
    arXiv 2503.01840); models of less than 8 layers, for which no head is published, are read at 1, L//2, L-1."""
    return (2, layers // 2, layers - 3) if layers >= 8 else (1, layers // 2, layers - 1)


class Layers(nnx.Module):
    """All decoder layers, stacked along a first axis and scanned."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        dtype, depth = master_dtype(config), config.layers
        keys = iter(jax.random.split(key, 7))
        d, n, m, h, f = config.embed, config.heads, config.kv_heads, config.head_size, config.ffn
        residual = (2 * depth) ** -0.5  # keeps the residual stream's variance independent of depth
        self.attention_norm = nnx.Param(jnp.ones((depth, d), dtype))
        self.query = dense(next(keys), (depth, d, n, h), d, dtype)
        self.key = dense(next(keys), (depth, d, m, h), d, dtype)
        self.value = dense(next(keys), (depth, d, m, h), d, dtype)
        self.query_norm = nnx.Param(jnp.ones((depth, h), dtype))
        self.key_norm = nnx.Param(jnp.ones((depth, h), dtype))
        self.output = dense(next(keys), (depth, n, h, d), n * h, dtype, residual)
        self.ffn_norm = nnx.Param(jnp.ones((depth, d), dtype))
        self.gate = dense(next(keys), (depth, d, f), d, dtype)
        self.up = dense(next(keys), (depth, d, f), d, dtype)
        self.down = dense(next(keys), (depth, f, d), f, dtype, residual)


class Decoder(nnx.Module):
    """Qwen3 (arXiv 2505.09388): grouped-query attention with query/key norm, rotary positions, SwiGLU, RMSNorm, tied or untied head."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        dtype = master_dtype(config)
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        self.config = config
        self.embedding = dense(embed_key, (config.vocab, config.embed), config.embed, dtype)
        self.layers = Layers(config, layers_key)
        self.norm = nnx.Param(jnp.ones((config.embed,), dtype))
        self.head = nnx.data(None if config.tied else dense(head_key, (config.embed, config.vocab), config.embed, dtype))

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: KVCache | None = None, with_taps: bool = False
    ) -> Forward:
        """Runs a block of tokens; with a cache the block is appended to it at `positions`, without one it attends causally to itself."""
        config = self.config
        x = self.embedding[...][tokens]
        table = rotary_table(positions, config.head_size, config.rope_theta, x.dtype)
        mask = up_to_position(positions, tokens.shape[1] if cache is None else cache.keys.shape[2])
        # Where layer i writes its input; entry 3 is never read.
        slots = [3] * config.layers
        if with_taps:
            for slot, boundary in enumerate(tap_boundaries(config.layers)):
                slots[boundary] = slot
        taps = jnp.zeros((4 if with_taps else 0, *x.shape), x.dtype)

        def layer(carry, xs):
            x, cache, taps = carry
            weights, index, slot = xs
            if with_taps:
                taps = lax.dynamic_update_index_in_dim(taps, x, slot, 0)
            normed = rms_norm(x, weights.attention_norm[...], config.norm_eps)
            query = rms_norm(jnp.einsum("BTD,DNH->BTNH", normed, weights.query[...]), weights.query_norm[...], config.norm_eps)
            key = rms_norm(jnp.einsum("BTD,DMH->BTMH", normed, weights.key[...]), weights.key_norm[...], config.norm_eps)
            value = jnp.einsum("BTD,DMH->BTMH", normed, weights.value[...])
            query, key = rotate(query, table), rotate(key, table)
            if cache is None:
                attended = attend(query, key, value, mask)
            else:
                cache = extend(cache, index, positions, key, value)
                attended = attend(query, cache.keys[index], cache.values[index], mask)
            x = x + jnp.einsum("BTNH,NHD->BTD", attended, weights.output[...])
            normed = rms_norm(x, weights.ffn_norm[...], config.norm_eps)
            x = x + swiglu(normed, weights.gate[...], weights.up[...], weights.down[...])
            return (x, cache, taps), None

        body = jax.checkpoint(layer) if config.remat else layer
        indices = jnp.arange(config.layers, dtype=jnp.int32), jnp.asarray(slots, jnp.int32)
        (x, cache, taps), _ = lax.scan(body, (x, cache, taps), (self.layers, *indices))
        joined = jnp.concatenate([taps[0], taps[1], taps[2]], axis=-1) if with_taps else None
        return Forward(rms_norm(x, self.norm[...], config.norm_eps), joined, cache)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in at least float32, of final-norm hidden states."""
        if self.head is None:
            logits = jnp.einsum("BTD,VD->BTV", hidden, self.embedding[...])
        else:
            logits = jnp.einsum("BTD,DV->BTV", hidden, self.head[...])
        return logits.astype(np.promote_types(logits.dtype, np.float32))
