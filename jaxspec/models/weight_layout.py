"""Weight layouts for generation.

Products with the same input are fused, and layers unrolled. On a CPU, large weights are also
transposed or split (`kernels/cpu_layouts.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.inputs.spec import ModelSpec
from jaxspec.kernels.cpu_layouts import (
    BLOCK_LOOP_ROWS,
    block_weight,
    split_weight,
    transpose_weight,
)
from jaxspec.mesh import (
    LAYERS,
    ROLLOUT_RULES,
    TENSOR,
    assign_shardings,
    keep_row_axes,
    logical_axes,
)
from jaxspec.models.decoder import Decoder, Layers

_INPUT_AXES = {"qkv": 1, "output": 2, "gate_up": 1, "down": 1}
"""Number of axes that each product of a layer sums over."""
_ALL_PRODUCTS = (*_INPUT_AXES, "head")


class WeightLayout(NamedTuple):
    """Layout of a network's weights for generation."""

    fused: bool = False
    """Whether query, key and value are one product, and gate and up another."""
    # On a CPU, XLA copies each layer that it slices out of a stack. On GPUs, it cannot run a loop
    # over layers inside a CUDA graph.
    unrolled: bool = False
    """Whether layers are a list instead of stacked."""
    transposed: tuple[str, ...] = ()
    """Names of products with a `TransposedParam` weight."""
    blocked: tuple[str, ...] = ()
    """Names of products with a `BlockedParam` weight."""
    split: tuple[str, ...] = ()
    """Names of products with a `SplitParam` weight."""


def fastest_layout(
    config: ModelSpec, tensor: int, threads: int, tokens: Sequence[int]
) -> WeightLayout:
    """Chooses the fastest known layout.

    Args:
      config: Architecture of the network.
      tensor: Number of devices over which `tensor` splits weights.
      threads: Number of threads if each data shard is a single CPU device, else 0.
      tokens: Numbers of tokens of the passes, on each data shard.
    """
    # All speeds below were measured on two cores of an x86 CPU (AVX-512), in float32.
    # Fused products need whole KV heads on each device.
    if config.kv_heads % tensor:
        return WeightLayout()
    # At a width of 128, all CPU layouts are slower.
    if threads == 0 or config.embed < 256:
        return WeightLayout(fused=True, unrolled=True)
    # With one token, the last product of the feed-forward layer is faster with transposed weights.
    # The others are 1.2 to 1.5 times as fast with parts, from a width of 512 on. If other passes
    # have several tokens, parts cost them nothing with two threads, but half their speed with one.
    if max(tokens) == 1 or (min(tokens) == 1 and threads > 1):
        split = (
            tuple(name for name in _ALL_PRODUCTS if name != "down") if config.embed >= 512 else ()
        )
        return WeightLayout(fused=True, unrolled=True, transposed=("down",), split=split)
    # With 2 to 15 tokens, blocks are 1.2 to 2.3 times as fast as transposed weights. XLA uses only
    # one thread for them.
    if max(tokens) < BLOCK_LOOP_ROWS and threads == 1:
        return WeightLayout(fused=True, unrolled=True, blocked=_ALL_PRODUCTS)
    # With 2 to 32 tokens, transposed weights are up to 1.5 times as fast as the plain layout.
    return WeightLayout(fused=True, unrolled=True, transposed=_ALL_PRODUCTS)


def shard_specs(mesh: Mesh, networks: Any) -> Any:
    """Returns partition specs of weights over row axes.

    Generation splits experts only. Every shard has all other weights.
    """
    sharding_tree = assign_shardings(mesh, networks, ROLLOUT_RULES)
    return jax.tree.map(lambda sharding: keep_row_axes(sharding.spec), sharding_tree)


def apply_layout(network: Any, layout: WeightLayout) -> Any:
    """Converts a network to a layout.

    Its results stay the same. Layers of a draft are converted too.
    """
    if not layout.fused:
        return network

    def fuse_node(node: Any) -> Any:
        return _fuse_layers(node, layout) if isinstance(node, Layers) else node

    network = jax.tree.map(fuse_node, network, is_leaf=lambda node: isinstance(node, Layers))

    def unroll_node(node: Any) -> Any:
        return _unroll_decoder(node, layout) if isinstance(node, Decoder) else node

    return jax.tree.map(unroll_node, network, is_leaf=lambda node: isinstance(node, Decoder))


def pad_vocabulary(network: Any, mesh: Mesh) -> Any:
    """Pads vocabularies to a multiple of `tensor`.

    The new rows are zeros. `Decoder.logits` drops their logits.
    """

    def pad_weight(weight: nnx.Variable, axis: int, padding: int) -> nnx.Param:
        # Training does not split such a vocabulary over `tensor`. Each device can therefore pad the
        # full weight.
        full_weight = jax.lax.with_sharding_constraint(weight[...], NamedSharding(mesh, P()))
        widths = [(0, padding if dimension == axis else 0) for dimension in range(full_weight.ndim)]
        return nnx.Param(jnp.pad(full_weight, widths), axes=logical_axes(weight))

    def pad_node(node: Any) -> Any:
        padding = -node.config.vocab % mesh.shape[TENSOR] if isinstance(node, Decoder) else 0
        if not padding:
            return node
        # Copies the module, so that the caller's does not change.
        node = jax.tree.map(lambda leaf: leaf, node)
        node.embedding = pad_weight(node.embedding, 0, padding)
        if node.head is not None:
            node.head = pad_weight(node.head, 1, padding)
        return node

    return jax.tree.map(pad_node, network, is_leaf=lambda node: isinstance(node, Decoder))


def _fuse_layers(layers: Layers, layout: WeightLayout) -> Layers:
    """Fuses the products of stacked layers."""
    # Copies the module, so that the caller's does not change.
    layers = jax.tree.map(lambda leaf: leaf, layers)
    kv_heads = layers.key.shape[2]

    def group_by_kv_head(query: nnx.Variable, key: nnx.Variable, value: nnx.Variable) -> nnx.Param:
        """Joins [..., N, H] and two [..., M, H] to [..., M, R + 2, H]."""
        # Grouped by KV head, so that `tensor` splits queries together with their keys and values.
        grouped = query[...].reshape(*query.shape[:-2], kv_heads, -1, query.shape[-1])
        joined = jnp.concatenate([grouped, key[...][..., None, :], value[...][..., None, :]], -2)
        return nnx.Param(joined, axes=(*key.axes[:-1], None, key.axes[-1]))

    layers.qkv = group_by_kv_head(layers.query, layers.key, layers.value)
    if layers.query_bias is not None:
        layers.qkv_bias = group_by_kv_head(layers.query_bias, layers.key_bias, layers.value_bias)
    if layers.query_norm is not None and layers.key_norm is not None:
        # One norm weight per head, because queries and keys are normalized at once.
        queries = jnp.repeat(layers.query_norm[...][:, None], layers.qkv.shape[-2] - 2, axis=1)
        norms = jnp.concatenate([queries, layers.key_norm[...][:, None]], axis=1)
        layers.qk_norm = nnx.Param(norms, axes=(LAYERS, None, None))
    for name in (
        "query",
        "key",
        "value",
        "query_bias",
        "key_bias",
        "value_bias",
        "query_norm",
        "key_norm",
    ):
        setattr(layers, name, nnx.data(None))
    if hasattr(layers, "gate"):
        gate_up = jnp.stack([layers.gate[...], layers.up[...]], axis=2)
        layers.gate_up = nnx.Param(gate_up, axes=(LAYERS, "embed", None, "ffn"))
        for name in ("gate", "up"):
            setattr(layers, name, nnx.data(None))
    for name, inputs in _INPUT_AXES.items():
        if getattr(layers, name, None) is not None:
            setattr(layers, name, _convert_weight(getattr(layers, name), name, 1, inputs, layout))
    return layers


def _convert_weight(
    weight: nnx.Param, name: str, lead_axes: int, input_axes: int, layout: WeightLayout
) -> nnx.Variable:
    """Converts one weight [lead, *in, *out]."""
    if name in layout.transposed:
        converted = transpose_weight(weight, lead_axes, input_axes)
    elif name in layout.split:
        converted = split_weight(weight, lead_axes, input_axes)
    elif name in layout.blocked:
        converted = block_weight(weight, lead_axes, input_axes)
    else:
        return weight
    # These layouts are for shards of a single device, which split no dimension.
    whole_axes = (None,) * (converted.ndim - lead_axes)
    return converted.copy(axes=(*weight.axes[:lead_axes], *whole_axes))


def _unroll_decoder(decoder: Decoder, layout: WeightLayout) -> Decoder:
    """Unrolls a decoder's layers and converts its head."""
    decoder = jax.tree.map(lambda leaf: leaf, decoder)
    if layout.unrolled and isinstance(decoder.layers, Layers):
        layers = nnx.List(
            [decoder.layers.select_layer(index) for index in range(decoder.config.layers)]
        )
        setattr(decoder, "layers", layers)  # noqa: B010 - its type is `Layers`
    if decoder.head is not None:
        head = _convert_weight(decoder.head, "head", 0, 1, layout)
        setattr(decoder, "head", head)  # noqa: B010 - its type is `Param`
    return decoder
