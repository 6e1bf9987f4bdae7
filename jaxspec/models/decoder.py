"""The policy: a decoder of the Qwen and Llama families, used for prefill, verification, logprobs
and training alike."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.inputs.spec import ModelSpec
from jaxspec.kernels.segment_attention import attend_segments
from jaxspec.kernels.visible import causal_mask
from jaxspec.models.attention import attend_cache
from jaxspec.models.cache import (
    KVCache,
    LayerIndex,
    join_layers,
    locate_block,
    split_layers,
    write_block,
)
from jaxspec.models.contiguous import empty_cache
from jaxspec.models.layers import (
    CastHead,
    apply_weight,
    head_logits,
    init_dense,
    rms_norm,
    swiglu,
)
from jaxspec.models.moe import Traffic, mixture_of_experts
from jaxspec.models.rope import RotaryTable, rotary_table, rotate_heads


class DecoderOutput(NamedTuple):
    """What one forward pass returns."""

    hidden: Float[Array, "B T D"]
    """After the final norm; `Decoder.logits` turns it into logits."""
    taps: Float[Array, "B T C"] | None
    """Residual stream at the tap boundaries, side by side; None when not asked for."""
    cache: KVCache | None
    traffic: Traffic | None
    """Of the layers with experts; None if no tokens are counted."""


def master_dtype(config: ModelSpec) -> jnp.dtype:
    """Type in which weights are kept and updated."""
    return jnp.dtype("float64" if config.dtype == "float64" else "float32")


def tap_boundaries(layers: int) -> tuple[int, int, int]:
    """Numbers of layers applied where EAGLE-3 reads the residual stream: 2, L//2, L-3 as in its
    published heads (Li et al., arXiv 2503.01840); models of less than 8 layers, for which no head
    is published, are read at 1, L//2, L-1."""
    return (2, layers // 2, layers - 3) if layers >= 8 else (1, layers // 2, layers - 1)


class Layers(nnx.Module):
    """All decoder layers, stacked along a first axis and scanned; `models/weight_layout.py` joins
    some of their weights for generation."""

    qkv: nnx.Variable | None = None
    """Instead of query, key and value: [D, M, R + 2, H], for each KV head its R queries, its key
    and its value; biases, norms likewise."""
    qkv_bias: nnx.Variable | None = None
    qk_norm: nnx.Variable | None = None
    """[R + 1, H]: of the queries and the key."""
    gate_up: nnx.Variable | None = None
    """Instead of gate and up: [D, 2, F]."""
    place: Int[Array, ""] | None = None
    """Index of this layer in the stack that its experts are read from."""

    def __init__(self, config: ModelSpec, key: Key[Array, ""], streams: int = 1):
        """Random weights; the layers are spread evenly over `streams` residual streams."""
        dtype, depth = master_dtype(config), config.layers
        keys = iter(jax.random.split(key, 7))
        d, n, m, h, f = config.embed, config.heads, config.kv_heads, config.head_size, config.ffn
        # keeps the residual stream's variance independent of depth
        residual = (2 * depth / streams) ** -0.5
        self.attention_norm = nnx.Param(jnp.ones((depth, d), dtype))
        self.query = init_dense(next(keys), (depth, d, n, h), d, dtype)
        self.key = init_dense(next(keys), (depth, d, m, h), d, dtype)
        self.value = init_dense(next(keys), (depth, d, m, h), d, dtype)
        family = config.family

        def init_param(enabled: bool, fill: int, *shape: int) -> Any:  # flax marks what may be None
            return nnx.data(nnx.Param(jnp.full((depth, *shape), fill, dtype)) if enabled else None)

        self.query_norm = init_param(family.query_key_norm, 1, h)
        self.key_norm = init_param(family.query_key_norm, 1, h)
        self.query_bias = init_param(family.attention_bias, 0, n, h)
        self.key_bias = init_param(family.attention_bias, 0, m, h)
        self.value_bias = init_param(family.attention_bias, 0, m, h)
        self.output = init_dense(next(keys), (depth, n, h, d), n * h, dtype, residual)
        self.output_bias = init_param(family.output_bias, 0, d)
        self.ffn_norm = nnx.Param(jnp.ones((depth, d), dtype))
        if family.experts:
            e = family.experts
            self.router = init_dense(jax.random.fold_in(key, 7), (depth, d, e), d, dtype)
            self.expert_gate = init_dense(next(keys), (depth, e, d, f), d, dtype)
            self.expert_up = init_dense(next(keys), (depth, e, d, f), d, dtype)
            self.expert_down = init_dense(next(keys), (depth, e, f, d), f, dtype, residual)
        else:
            self.gate = init_dense(next(keys), (depth, d, f), d, dtype)
            self.up = init_dense(next(keys), (depth, d, f), d, dtype)
            self.down = init_dense(next(keys), (depth, f, d), f, dtype, residual)

    def select_layer(self, layer: int) -> "Layers":
        """The weights of one layer."""
        return jax.tree.map(lambda leaf: leaf[layer], self)


def project_heads(
    normed: Float[Array, "B T D"], layer: Layers, table: RotaryTable, eps: float
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T M H"], Float[Array, "B T M H"]]:
    """Rotated queries and keys, and values, of the normed input of one layer."""
    if layer.qkv is not None:
        return _project_fused(normed, layer.qkv, layer, table, eps)
    query = _add_bias(apply_weight(normed, layer.query), layer.query_bias)
    key = _add_bias(apply_weight(normed, layer.key), layer.key_bias)
    if layer.query_norm is not None and layer.key_norm is not None:
        query = rms_norm(query, layer.query_norm[...], eps)
        key = rms_norm(key, layer.key_norm[...], eps)
    return (
        rotate_heads(query, table),
        rotate_heads(key, table),
        _add_bias(apply_weight(normed, layer.value), layer.value_bias),
    )


def _project_fused(
    normed: Float[Array, "B T D"],
    weight: nnx.Variable,
    layer: Layers,
    table: RotaryTable,
    eps: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T M H"], Float[Array, "B T M H"]]:
    """Query, key and value by one product with the fused weights."""
    heads = _add_bias(apply_weight(normed, weight), layer.qkv_bias)
    query_key, value = heads[:, :, :, :-1], heads[:, :, :, -1]
    if layer.qk_norm is not None:
        query_key = rms_norm(query_key, layer.qk_norm[...], eps)
    query_key = rotate_heads(
        query_key.reshape(*query_key.shape[:2], -1, query_key.shape[-1]), table
    ).reshape(query_key.shape)
    query, key = query_key[:, :, :, :-1], query_key[:, :, :, -1]
    return query.reshape(*query.shape[:2], -1, query.shape[-1]), key, value


def _add_bias(heads: Float[Array, "B T *H"], bias: nnx.Variable | None) -> Float[Array, "B T *H"]:
    return heads if bias is None else heads + bias[...]


def finish_layer(
    residual: Float[Array, "B T D"],
    attended: Float[Array, "B T N H"],
    layer: Layers,
    config: ModelSpec,
    traffic_mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Traffic | None]:
    """What follows attention in one layer: its output product and the feed-forward layer, each
    added to the stream.

    Also returns the traffic of the tokens in `traffic_mask` to experts, if there are experts.
    """
    x = residual + _add_bias(apply_weight(attended, layer.output, 2), layer.output_bias)
    normed, family = rms_norm(x, layer.ffn_norm[...], config.norm_eps), config.family
    if family.experts:
        experts = layer.expert_gate[...], layer.expert_up[...], layer.expert_down[...]
        expert_output, traffic = mixture_of_experts(
            normed,
            layer.router[...],
            experts,
            family.experts_per_token,
            family.normalize_experts,
            layer.place,
            traffic_mask,
        )
        return x + expert_output, traffic
    if layer.gate_up is not None:
        gate_up = apply_weight(normed, layer.gate_up)
        gate, up = gate_up[:, :, 0], gate_up[:, :, 1]
        # SiLU with its division last, which XLA never repeats: a multiplication would be, for every
        # block of a `BlockedParam` weight. For generation only, as the gradient is NaN where the
        # exponential is infinite.
        return x + apply_weight(gate * up / (1 + jnp.exp(-gate)), layer.down), None
    return x + swiglu(normed, layer.gate, layer.up, layer.down), None


def _keep_weights(layer: Layers) -> Layers:
    return layer


class Decoder(nnx.Module):
    """Grouped-query attention, rotary positions, SwiGLU, RMSNorm, tied or untied head (Qwen3, arXiv
    2505.09388; Llama 3, arXiv 2407.21783).

    `config.family` says what the families differ in: norms of queries and keys, biases, experts.
    """

    def __init__(self, config: ModelSpec, key: Key[Array, ""]):
        dtype = master_dtype(config)
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        self.config = config
        self.embedding = init_dense(embed_key, (config.vocab, config.embed), config.embed, dtype)
        self.layers = Layers(config, layers_key)
        self.norm = nnx.Param(jnp.ones((config.embed,), dtype))
        self.head = nnx.data(
            None
            if config.tied
            else init_dense(head_key, (config.embed, config.vocab), config.embed, dtype)
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | None = None,
        taps: tuple[int, ...] = (),
        first: Int[Array, "B T"] | None = None,
        prepare_layer: Callable[[Layers], Layers] = _keep_weights,
        traffic_mask: Bool[Array, "B T"] | None = None,
    ) -> DecoderOutput:
        """Runs a block of tokens.

        With a cache the block is written at its positions and attends to all up to its
        own; without one it attends causally to itself, each token from the place `first` on, where
        its text starts (None: the first place of the block).

        Args:
          tokens: the block.
          positions: of each token in its text.
          cache: keys and values of what precedes the block.
          taps: boundaries at which the residual stream is wanted: numbers of layers applied, 0 to
            all, ascending.
          first: see above.
          prepare_layer: what a layer's weights go through when the layer is run, inside the loop
            over layers: there a learner casts and gathers them, so that no more than one layer is
            whole at a time.
          traffic_mask: tokens whose way to experts is measured; without a cache.
        """
        config = self.config
        x = self.embedding[...][tokens].astype(self.norm.dtype)
        table = rotary_table(positions, config, x.dtype)
        text_starts = jnp.zeros_like(tokens) if first is None else first
        addresses = None if cache is None else locate_block(cache, positions)

        def run_layer(
            x: Float[Array, "B T D"], cache: KVCache | None, weights: Layers, index: LayerIndex
        ) -> tuple[Any, Any, Traffic | None]:
            weights = prepare_layer(weights)
            normed = rms_norm(x, weights.attention_norm[...], config.norm_eps)
            query, key, value = project_heads(normed, weights, table, config.norm_eps)
            if cache is None or addresses is None:
                attended = attend_segments(query, key, value, text_starts)
            else:
                cache = write_block(cache, index, addresses, key, value)
                attended = attend_cache(query, cache, index, causal_mask(positions))
            x, traffic = finish_layer(x, attended, weights, config, traffic_mask)
            return x, cache, traffic

        if isinstance(self.layers, Layers):
            x, cache, streams, traffic = _run_stack(run_layer, self.layers, x, cache, taps, config)
        else:
            run_compiled = jax.jit(run_layer, static_argnums=3)  # traced once for all layers
            streams, traffic = {}, None
            caches = [None] * config.layers if cache is None else split_layers(cache)
            new_caches = []
            for index, (weights, layer_cache) in enumerate(zip(self.layers, caches, strict=True)):
                streams[index] = x
                x, layer_cache, _ = run_compiled(x, layer_cache, weights, 0)
                new_caches.append(layer_cache)
            streams[config.layers] = x
            cache = None if cache is None else join_layers(new_caches)
        features = (
            jnp.concatenate([streams[boundary] for boundary in taps], axis=-1) if taps else None
        )
        return DecoderOutput(rms_norm(x, self.norm[...], config.norm_eps), features, cache, traffic)

    def empty_cache(self, rows: int, positions: int) -> KVCache:
        """A cache for this model, of its type."""
        config, stacked = self.config, isinstance(self.layers, Layers)
        return empty_cache(
            config.layers,
            rows,
            positions,
            config.kv_heads,
            config.head_size,
            self.embedding[...].dtype,
            stacked,
        )

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in at least float32, of final-norm hidden states."""
        if self.head is None:
            logits = head_logits(hidden, self.embedding, by_rows=True)
        else:
            logits = head_logits(hidden, self.head)
        if logits.shape[-1] > self.config.vocab:  # by rows that make it split evenly
            logits = logits[:, :, : self.config.vocab]
        return logits


def cast_head(network: Any, dtype: str) -> Any:
    """A network whose head is cast to the type of products once, for many calls of `logits`.

    A network without a head of its own, or with one of that type, comes back as it is.
    """
    tied = isinstance(network, Decoder) and network.head is None
    master = network.embedding if tied else getattr(network, "head", None)
    if master is None or master.dtype == jnp.dtype(dtype):
        return network
    network = jax.tree.map(lambda leaf: leaf, network)
    network.head = CastHead(master, dtype, by_rows=tied)
    return network


def extract_head(decoder: Decoder) -> Decoder:
    """The decoder without its layers: all that `logits` reads."""
    head_only: Any = jax.tree.map(lambda leaf: leaf, decoder)
    head_only.layers = nnx.data(None)
    if head_only.head is not None:
        head_only.embedding = nnx.data(None)
    return head_only


def _is_saveable(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a value is kept for the backward pass: all are but what was gathered or cast, weights
    above all."""
    return primitive.name not in ("all_gather", "convert_element_type")


_EXPERT_NAMES = ("expert_gate", "expert_up", "expert_down")


def _expert_weights(layers: Layers) -> tuple[nnx.Variable, ...]:
    """Gate, up and down of all experts; none where there are no experts."""
    return tuple(getattr(layers, name) for name in _EXPERT_NAMES if hasattr(layers, name))


def _replace_experts(
    layers: Layers, experts: tuple[Any, ...], place: Int[Array, ""] | None = None
) -> Layers:
    layers = jax.tree.map(lambda leaf: leaf, layers)
    for name, weight in zip(_EXPERT_NAMES, experts, strict=True):
        setattr(layers, name, nnx.data(weight))
    layers.place = nnx.data(place)
    return layers


def _run_stack(
    run_layer: Callable,
    layers: Layers,
    x: Float[Array, "B T D"],
    cache: KVCache | None,
    taps: tuple[int, ...],
    config: ModelSpec,
) -> tuple[Float[Array, "B T D"], KVCache | None, dict[int, Float[Array, "B T D"]], Traffic | None]:
    """Runs stacked layers one after the other; also returns the residual stream at each of the
    `taps`, and the layers' traffic.

    With a cache experts stay in their stack, of which the layer reads those that it needs. What
    a scan takes of a stack is copied, all experts of a layer with it.
    """
    experts = () if cache is None else _expert_weights(layers)
    if experts:
        layers = _replace_experts(layers, (None, None, None))
    # Where layer i writes its input; the last entry is never read.
    tap_rows = [taps.index(index) if index in taps else len(taps) for index in range(config.layers)]
    streams = jnp.zeros((len(taps) + 1 if taps else 0, *x.shape), x.dtype)

    def scan_layer(carry, xs):
        x, cache, streams = carry
        weights, index, tap_row = xs
        if experts:
            weights = _replace_experts(weights, experts, index)
        if taps:
            streams = lax.dynamic_update_index_in_dim(streams, x, tap_row, 0)
        x, cache, traffic = run_layer(x, cache, weights, index)
        return (x, cache, streams), traffic

    # A layer's gathered weights are never kept for the backward pass, which gathers them again.
    body = jax.checkpoint(scan_layer, policy=None if config.remat else _is_saveable)
    indices = jnp.arange(config.layers, dtype=jnp.int32), jnp.asarray(tap_rows, jnp.int32)
    (x, cache, streams), traffic = lax.scan(body, (x, cache, streams), (layers, *indices))
    return (
        x,
        cache,
        {
            boundary: x if boundary == config.layers else streams[tap_row]
            for tap_row, boundary in enumerate(taps)
        },
        traffic,
    )
