"""The policy network: a decoder of the Qwen and Llama families."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.inputs.spec import ModelSpec
from jaxspec.kernels.segment_attention import attend_segments
from jaxspec.kernels.visible import causal_mask
from jaxspec.mesh import LogicalAxes
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
    StackInit,
    apply_weight,
    head_logits,
    init_dense,
    rms_norm,
    swiglu,
)
from jaxspec.models.moe import AnyTraffic, NoTraffic, mixture_of_experts
from jaxspec.models.rope import RotaryTable, rotary_table, rotate_heads


class DecoderOutput(NamedTuple):
    """Outputs of a forward pass."""

    hidden: Float[Array, "B T D"]
    """Hidden states after the final norm, the input of `Decoder.logits`."""
    taps: Float[Array, "B T C"] | None
    """Residual stream at the tap boundaries, concatenated; None without taps."""
    cache: KVCache | None
    traffic: AnyTraffic
    """Traffic to experts; none without experts or `traffic_mask`."""


def master_dtype(config: ModelSpec) -> jnp.dtype:
    """Returns the type of stored weights."""
    return jnp.dtype("float64" if config.dtype == "float64" else "float32")


def tap_boundaries(layers: int) -> tuple[int, int, int]:
    """Returns EAGLE-3's default tap boundaries.

    Boundaries are numbers of layers applied: 2, L//2, L-3, as in published heads (Li et al., arXiv
    2503.01840). Models of less than 8 layers, which have no published heads, use 1, L//2, L-1.
    """
    return (2, layers // 2, layers - 3) if layers >= 8 else (1, layers // 2, layers - 1)


class Layers(nnx.Module):
    """Weights of all decoder layers, stacked.

    The first axis is the layer. `models/weight_layout.py` sets the fused weights, for generation.
    """

    qkv: nnx.Variable | None = None
    """Fused query, key and value [D, M, R + 2, H]: R queries, key and value of each KV head."""
    qkv_bias: nnx.Variable | None = None
    qk_norm: nnx.Variable | None = None
    """Fused norms of the queries and the key [R + 1, H]."""
    gate_up: nnx.Variable | None = None
    """Fused gate and up [D, 2, F]."""
    place: Int[Array, ""] | None = None
    """Index of this layer if its experts are those of the whole stack."""

    def __init__(self, config: ModelSpec, key: Key[Array, ""], streams: int = 1):
        """Initializes random layers, split evenly over `streams` residual streams."""
        dtype, depth, family = master_dtype(config), config.layers, config.family
        init = StackInit(iter(jax.random.split(key, 7)), depth, dtype)
        d, n, m, h, f = config.embed, config.heads, config.kv_heads, config.head_size, config.ffn
        # Keeps the variance of the residual stream independent of depth.
        residual = (2 * depth / streams) ** -0.5

        # `nnx.data` marks the attribute as data even if it is None.
        def fill_if(enabled: bool, value: int, shape: Sequence[int], axes: LogicalAxes) -> Any:
            return nnx.data(init.fill(value, shape, axes) if enabled else None)

        self.attention_norm = init.fill(1, (d,), (None,))
        self.query = init.draw((d, n, h), ("embed", "heads", None), d)
        self.key = init.draw((d, m, h), ("embed", "kv_heads", None), d)
        self.value = init.draw((d, m, h), ("embed", "kv_heads", None), d)
        self.query_norm = fill_if(family.query_key_norm, 1, (h,), (None,))
        self.key_norm = fill_if(family.query_key_norm, 1, (h,), (None,))
        self.query_bias = fill_if(family.attention_bias, 0, (n, h), ("heads", None))
        self.key_bias = fill_if(family.attention_bias, 0, (m, h), ("kv_heads", None))
        self.value_bias = fill_if(family.attention_bias, 0, (m, h), ("kv_heads", None))
        self.output = init.draw((n, h, d), ("heads", None, "embed"), n * h, residual)
        self.output_bias = fill_if(family.output_bias, 0, (d,), (None,))
        self.ffn_norm = init.fill(1, (d,), (None,))
        if family.experts:
            e = family.experts
            router_init = init._replace(keys=iter([jax.random.fold_in(key, 7)]))
            self.router = router_init.draw((d, e), ("embed", None), d)
            self.expert_gate = init.draw((e, d, f), ("experts", "embed", "ffn"), d)
            self.expert_up = init.draw((e, d, f), ("experts", "embed", "ffn"), d)
            self.expert_down = init.draw((e, f, d), ("experts", "ffn", "embed"), f, residual)
        else:
            self.gate = init.draw((d, f), ("embed", "ffn"), d)
            self.up = init.draw((d, f), ("embed", "ffn"), d)
            self.down = init.draw((f, d), ("ffn", "embed"), f, residual)

    def select_layer(self, layer: int) -> "Layers":
        """Selects the weights of one layer."""
        return jax.tree.map(lambda leaf: leaf[layer], self)


def project_heads(
    normed: Float[Array, "B T D"], layer: Layers, table: RotaryTable, eps: float
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T M H"], Float[Array, "B T M H"]]:
    """Computes rotated queries and keys, and values."""
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
    """Projects like `project_heads`, with fused weights."""
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
) -> tuple[Float[Array, "B T D"], AnyTraffic]:
    """Runs a layer after attention: output projection and feed-forward layer.

    Also returns the traffic of the tokens in `traffic_mask`, if the layer has experts.
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
        # SiLU with the division last: XLA would repeat a multiplication for each block of a
        # `BlockedParam`, but not a division. This form is for generation only, as its gradient is
        # NaN if the exponential is infinite.
        return x + apply_weight(gate * up / (1 + jnp.exp(-gate)), layer.down), NoTraffic()
    return x + swiglu(normed, layer.gate, layer.up, layer.down), NoTraffic()


def _keep_weights(layer: Layers) -> Layers:
    return layer


class Decoder(nnx.Module):
    """Decoder with GQA, RoPE, SwiGLU and RMSNorm.

    Its head may be tied to the embedding. See Qwen3 (arXiv 2505.09388) and Llama 3 (arXiv
    2407.21783). `config.family` selects query and key norms, biases and experts.
    """

    def __init__(self, config: ModelSpec, key: Key[Array, ""]):
        dtype = master_dtype(config)
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        self.config = config
        v, d = config.vocab, config.embed
        self.embedding = init_dense(embed_key, (v, d), ("vocab", "embed"), d, dtype)
        self.layers = Layers(config, layers_key)
        self.norm = nnx.Param(jnp.ones((d,), dtype), axes=(None,))
        head = None if config.tied else init_dense(head_key, (d, v), ("embed", "vocab"), d, dtype)
        self.head = nnx.data(head)

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

        With a cache, the block is written to it, and attends to all positions up to its own.
        Without one, it attends causally to itself.

        Args:
          tokens: Token ids.
          positions: Position of each token in its text.
          cache: Keys and values of earlier positions.
          taps: Boundaries of the returned taps, as ascending numbers of layers applied.
          first: Index in the block where each token's text starts; None for 0. Without a cache.
          prepare_layer: Maps a layer's weights before the layer runs.
          traffic_mask: Tokens whose traffic to experts is measured. Without a cache.
        """
        config = self.config
        x = self.embedding[...][tokens].astype(self.norm.dtype)
        table = rotary_table(positions, config, x.dtype)
        text_starts = jnp.zeros_like(tokens) if first is None else first
        addresses = None if cache is None else locate_block(cache, positions)

        def run_layer(
            x: Float[Array, "B T D"], cache: KVCache | None, weights: Layers, index: LayerIndex
        ) -> tuple[Any, Any, AnyTraffic]:
            # Inside the loop, so that a learner holds only one gathered layer at a time.
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
            # With `jit` the layer is traced once for all layers.
            run_compiled = jax.jit(run_layer, static_argnums=3)
            streams, new_caches, traffic = {}, [], NoTraffic()
            caches = [None] * config.layers if cache is None else split_layers(cache)
            for index, (weights, layer_cache) in enumerate(zip(self.layers, caches, strict=True)):
                streams[index] = x
                x, layer_cache, _ = run_compiled(x, layer_cache, weights, 0)
                new_caches.append(layer_cache)
            streams[config.layers] = x
            cache = None if cache is None else join_layers(new_caches)
        features = jnp.concatenate([streams[tap] for tap in taps], axis=-1) if taps else None
        return DecoderOutput(rms_norm(x, self.norm[...], config.norm_eps), features, cache, traffic)

    def empty_cache(self, rows: int, positions: int) -> KVCache:
        """Returns a cache of zeros for this model."""
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
        """Computes logits of final-norm hidden states, in at least float32."""
        if self.head is None:
            logits = head_logits(hidden, self.embedding, by_rows=True)
        else:
            logits = head_logits(hidden, self.head)
        # `pad_vocabulary` may have added rows to split the vocabulary evenly.
        if logits.shape[-1] > self.config.vocab:
            logits = logits[:, :, : self.config.vocab]
        return logits


def cast_head(network: Any, dtype: str) -> Any:
    """Casts a network's head once, for many calls.

    A network without a head, or with one of type `dtype`, is returned unchanged.
    """
    tied = isinstance(network, Decoder) and network.head is None
    master = network.embedding if tied else getattr(network, "head", None)
    if master is None or master.dtype == jnp.dtype(dtype):
        return network
    network = jax.tree.map(lambda leaf: leaf, network)
    network.head = CastHead(master, dtype, by_rows=tied)
    return network


def extract_head(decoder: Decoder) -> Decoder:
    """Returns a decoder without layers, and without an embedding that is not its head."""
    head_only: Any = jax.tree.map(lambda leaf: leaf, decoder)
    head_only.layers = nnx.data(None)
    if head_only.head is not None:
        head_only.embedding = nnx.data(None)
    return head_only


def _is_saveable(primitive: Any, *_: Any, **__: Any) -> bool:
    """Returns whether a value is stored for the backward pass."""
    # Gathered and cast values, mostly weights, are recomputed. Storing those of all layers would
    # undo the sharding.
    return primitive.name not in ("all_gather", "convert_element_type")


_EXPERT_NAMES = ("expert_gate", "expert_up", "expert_down")


def _expert_weights(layers: Layers) -> tuple[nnx.Variable, ...]:
    """Returns the weights of all experts, if any."""
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
) -> tuple[Float[Array, "B T D"], KVCache | None, dict[int, Float[Array, "B T D"]], AnyTraffic]:
    """Scans stacked layers.

    Also returns the residual stream at each of the `taps`, and the traffic of the layers.
    """
    # A scan copies each layer that it reads, with all its experts. Generation therefore keeps the
    # experts out of the scan, and reads only those that it needs.
    experts = () if cache is None else _expert_weights(layers)
    if experts:
        layers = _replace_experts(layers, (None, None, None))
    # Layer i writes its input to row `tap_rows[i]`. All inputs that are not taps share a last row.
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

    # The backward pass gathers weights again in any case.
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
