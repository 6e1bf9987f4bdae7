"""The policy: a decoder of the Qwen and Llama families, used for prefill, verification, logprobs and training alike."""

from typing import Any, NamedTuple

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
from jaxspec.models.moe import mixture
from jaxspec.models.rope import RotaryTable, rotary_table, rotate


class Forward(NamedTuple):
    """What one forward pass returns."""

    hidden: Float[Array, "B T D"]
    """After the final norm; `Decoder.logits` turns it into logits."""
    taps: Float[Array, "B T C"] | None
    """Residual stream at the tap boundaries, side by side; None when not asked for."""
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

    def __init__(self, config: ModelConfig, key: Key[Array, ""], streams: int = 1):
        """Random weights; the layers are spread evenly over `streams` residual streams."""
        dtype, depth = master_dtype(config), config.layers
        keys = iter(jax.random.split(key, 7))
        d, n, m, h, f = config.embed, config.heads, config.kv_heads, config.head_size, config.ffn
        residual = (2 * depth / streams) ** -0.5  # keeps the residual stream's variance independent of depth
        self.attention_norm = nnx.Param(jnp.ones((depth, d), dtype))
        self.query = dense(next(keys), (depth, d, n, h), d, dtype)
        self.key = dense(next(keys), (depth, d, m, h), d, dtype)
        self.value = dense(next(keys), (depth, d, m, h), d, dtype)
        family = config.family

        def optional(wanted: bool, fill: int, *shape: int) -> Any:  # flax marks what may be None
            return nnx.data(nnx.Param(jnp.full((depth, *shape), fill, dtype)) if wanted else None)

        self.query_norm = optional(family.query_key_norm, 1, h)
        self.key_norm = optional(family.query_key_norm, 1, h)
        self.query_bias = optional(family.attention_bias, 0, n, h)
        self.key_bias = optional(family.attention_bias, 0, m, h)
        self.value_bias = optional(family.attention_bias, 0, m, h)
        self.output = dense(next(keys), (depth, n, h, d), n * h, dtype, residual)
        self.output_bias = optional(family.output_bias, 0, d)
        self.ffn_norm = nnx.Param(jnp.ones((depth, d), dtype))
        if family.experts:
            e = family.experts
            self.router = dense(jax.random.fold_in(key, 7), (depth, d, e), d, dtype)
            self.expert_gate = dense(next(keys), (depth, e, d, f), d, dtype)
            self.expert_up = dense(next(keys), (depth, e, d, f), d, dtype)
            self.expert_down = dense(next(keys), (depth, e, f, d), f, dtype, residual)
        else:
            self.gate = dense(next(keys), (depth, d, f), d, dtype)
            self.up = dense(next(keys), (depth, d, f), d, dtype)
            self.down = dense(next(keys), (depth, f, d), f, dtype, residual)

    def at(self, layer: int) -> "Layers":
        """The weights of one layer."""
        return jax.tree.map(lambda leaf: leaf[layer], self)


def project_heads(
    normed: Float[Array, "B T D"], layer: Layers, table: RotaryTable, eps: float
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T M H"], Float[Array, "B T M H"]]:
    """Rotated queries and keys, and values, of the normed input of one layer."""
    query = _product(normed, layer.query, layer.query_bias)
    key = _product(normed, layer.key, layer.key_bias)
    if layer.query_norm is not None and layer.key_norm is not None:
        query = rms_norm(query, layer.query_norm[...], eps)
        key = rms_norm(key, layer.key_norm[...], eps)
    return rotate(query, table), rotate(key, table), _product(normed, layer.value, layer.value_bias)


def _product(x: Float[Array, "B T D"], weight: nnx.Param, bias: nnx.Param | None) -> Float[Array, "B T N H"]:
    heads = jnp.einsum("BTD,DNH->BTNH", x, weight[...])
    return heads if bias is None else heads + bias[...]


def finish_layer(
    residual: Float[Array, "B T D"], attended: Float[Array, "B T N H"], layer: Layers, config: ModelConfig
) -> Float[Array, "B T D"]:
    """What follows attention in one layer: its output product and the feed-forward layer, each added to the stream."""
    joined = jnp.einsum("BTNH,NHD->BTD", attended, layer.output[...])
    x = residual + (joined if layer.output_bias is None else joined + layer.output_bias[...])
    normed, family = rms_norm(x, layer.ffn_norm[...], config.norm_eps), config.family
    if family.experts:
        experts = layer.router[...], layer.expert_gate[...], layer.expert_up[...], layer.expert_down[...]
        return x + mixture(normed, *experts, family.experts_per_token, family.normalize_experts)
    return x + swiglu(normed, layer.gate[...], layer.up[...], layer.down[...])


class Decoder(nnx.Module):
    """Grouped-query attention, rotary positions, SwiGLU, RMSNorm, tied or untied head (Qwen3, arXiv 2505.09388; Llama 3, arXiv 2407.21783).

    `config.family` says what the families differ in: norms of queries and keys, biases, experts.
    """

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        dtype = master_dtype(config)
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        self.config = config
        self.embedding = dense(embed_key, (config.vocab, config.embed), config.embed, dtype)
        self.layers = Layers(config, layers_key)
        self.norm = nnx.Param(jnp.ones((config.embed,), dtype))
        self.head = nnx.data(None if config.tied else dense(head_key, (config.embed, config.vocab), config.embed, dtype))

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: KVCache | None = None, taps: tuple[int, ...] = ()
    ) -> Forward:
        """Runs a block of tokens; with a cache the block is appended to it at `positions`, without one it attends causally to itself.

        `taps` are boundaries at which the residual stream is wanted: numbers of layers applied, 0 to all, ascending.
        """
        config = self.config
        x = self.embedding[...][tokens]
        table = rotary_table(positions, config, x.dtype)
        mask = up_to_position(positions, tokens.shape[1] if cache is None else cache.keys.shape[2])
        # Where layer i writes its input; the last entry is never read.
        slots = [taps.index(layer) if layer in taps else len(taps) for layer in range(config.layers)]
        tapped = jnp.zeros((len(taps) + 1 if taps else 0, *x.shape), x.dtype)

        def layer(carry, xs):
            x, cache, tapped = carry
            weights, index, slot = xs
            if taps:
                tapped = lax.dynamic_update_index_in_dim(tapped, x, slot, 0)
            normed = rms_norm(x, weights.attention_norm[...], config.norm_eps)
            query, key, value = project_heads(normed, weights, table, config.norm_eps)
            if cache is None:
                attended = attend(query, key, value, mask)
            else:
                cache = extend(cache, index, positions, key, value)
                attended = attend(query, cache.keys[index], cache.values[index], mask)
            return (finish_layer(x, attended, weights, config), cache, tapped), None

        body = jax.checkpoint(layer) if config.remat else layer
        indices = jnp.arange(config.layers, dtype=jnp.int32), jnp.asarray(slots, jnp.int32)
        (x, cache, tapped), _ = lax.scan(body, (x, cache, tapped), (self.layers, *indices))
        parts = [x if boundary == config.layers else tapped[slot] for slot, boundary in enumerate(taps)]
        joined = jnp.concatenate(parts, axis=-1) if taps else None
        return Forward(rms_norm(x, self.norm[...], config.norm_eps), joined, cache)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in at least float32, of final-norm hidden states."""
        if self.head is None:
            logits = jnp.einsum("BTD,VD->BTV", hidden, self.embedding[...])
        else:
            logits = jnp.einsum("BTD,DV->BTV", hidden, self.head[...])
        return logits.astype(np.promote_types(logits.dtype, np.float32))
