"""How the weights of a network lie for generation: products that read the same input are fused,
layers unrolled, and on a CPU large weights transposed or cut (`kernels/cpu_layouts.py`)."""

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
from jaxspec.mesh import ROLLOUT_RULES, TENSOR, assign_shardings, keep_row_axes
from jaxspec.models.decoder import Decoder, Layers
from jaxspec.models.layers import LOGICAL_AXES

_INPUT_AXES = {"qkv": 1, "output": 2, "gate_up": 1, "down": 1}
"""Axes of a layer's products that are summed over."""
_ALL_PRODUCTS = (*_INPUT_AXES, "head")


class WeightLayout(NamedTuple):
    """How a network's weights lie for generation."""

    fused: bool = False
    """Queries, keys and values side by side, and gate and up: one product each."""
    unrolled: bool = False
    """Layers one by one instead of stacked: XLA copies what it slices out of a stack on a CPU, and
    on GPUs runs no loop over layers inside a CUDA graph."""
    transposed: tuple[str, ...] = ()
    """Products whose weights are `TransposedParam`: names of fused ones, or `head`."""
    blocked: tuple[str, ...] = ()
    """Products whose weights are `BlockedParam`, likewise."""
    split: tuple[str, ...] = ()
    """Products whose weights are `SplitParam`, likewise."""


def fastest_layout(
    config: ModelSpec, tensor: int, threads: int, tokens: Sequence[int]
) -> WeightLayout:
    """The fastest known layout for passes over each of these numbers of `tokens` on every data
    shard, of `tensor` devices, or of one that is a CPU with so many `threads` (0: any others).

    Measured on two cores of an x86 CPU (AVX-512) in float32, from a width of 256 on (at 128 all of
    it is slower): transposed weights make products of 2 to 32 tokens up to 1.5 times as fast.
    Blocks make those of 2 to 15 tokens 1.2 to 2.3 times as fast as transposed weights where a
    device is one thread; XLA uses one thread for them. Of one token, the feed-forward layer's last
    product gains by transposed weights, the others from a width of 512 on by parts: 1.2 to 1.5
    times as fast; where several tokens meet the same weights in turn with one, parts cost these
    nothing if there are two threads, and half their speed if there is one.
    """
    if config.kv_heads % tensor:
        return WeightLayout()
    if threads == 0 or config.embed < 256:
        return WeightLayout(fused=True, unrolled=True)
    if max(tokens) == 1 or (min(tokens) == 1 and threads > 1):
        split = (
            tuple(name for name in _ALL_PRODUCTS if name != "down") if config.embed >= 512 else ()
        )
        return WeightLayout(fused=True, unrolled=True, transposed=("down",), split=split)
    if max(tokens) < BLOCK_LOOP_ROWS and threads == 1:
        return WeightLayout(fused=True, unrolled=True, blocked=_ALL_PRODUCTS)
    return WeightLayout(fused=True, unrolled=True, transposed=_ALL_PRODUCTS)


def shard_specs(mesh: Mesh, networks: Any) -> Any:
    """How weights that generation reads are split over what splits rows: every shard has all of
    them, but of the experts its own."""
    sharding_tree = assign_shardings(mesh, networks, LOGICAL_AXES, ROLLOUT_RULES)
    return jax.tree.map(lambda sharding: keep_row_axes(sharding.spec), sharding_tree)


def apply_layout(network: Any, layout: WeightLayout) -> Any:
    """The network with its layers (those of a draft too) laid out; the products are the same."""
    if not layout.fused:
        return network

    def fuse_node(node: Any) -> Any:
        return _fuse_layers(node, layout) if isinstance(node, Layers) else node

    network = jax.tree.map(fuse_node, network, is_leaf=lambda node: isinstance(node, Layers))

    def unroll_node(node: Any) -> Any:
        return _unroll_decoder(node, layout) if isinstance(node, Decoder) else node

    return jax.tree.map(unroll_node, network, is_leaf=lambda node: isinstance(node, Decoder))


def pad_vocabulary(network: Any, mesh: Mesh) -> Any:
    """The network with rows of zeros in every decoder's vocabulary, as many as make it split over
    `tensor`; `Decoder.logits` leaves out what they give."""

    def pad_weight(weight: nnx.Variable, axis: int, padding: int) -> nnx.Param:
        # Training keeps it whole over `tensor`, so that a device has all of it once it is gathered.
        full_weight = jax.lax.with_sharding_constraint(weight[...], NamedSharding(mesh, P()))
        widths = [(0, padding if dimension == axis else 0) for dimension in range(full_weight.ndim)]
        return nnx.Param(jnp.pad(full_weight, widths))

    def pad_node(node: Any) -> Any:
        padding = -node.config.vocab % mesh.shape[TENSOR] if isinstance(node, Decoder) else 0
        if not padding:
            return node
        node = jax.tree.map(lambda leaf: leaf, node)
        node.embedding = pad_weight(node.embedding, 0, padding)
        if node.head is not None:
            node.head = pad_weight(node.head, 1, padding)
        return node

    return jax.tree.map(pad_node, network, is_leaf=lambda node: isinstance(node, Decoder))


def _fuse_layers(layers: Layers, layout: WeightLayout) -> Layers:
    """Stacked layers with their products fused; the first axis is a layer's place everywhere."""
    # the module is changed below, and its caller's is not to be
    layers = jax.tree.map(lambda leaf: leaf, layers)
    kv_heads = layers.key.shape[2]

    def group_by_kv_head(query: nnx.Variable, key: nnx.Variable, value: nnx.Variable) -> nnx.Param:
        """[..., N, H] and twice [..., M, H] as [..., M, R + 2, H]."""
        grouped = query[...].reshape(*query.shape[:-2], kv_heads, -1, query.shape[-1])
        return nnx.Param(
            jnp.concatenate([grouped, key[...][..., None, :], value[...][..., None, :]], axis=-2)
        )

    layers.qkv = group_by_kv_head(layers.query, layers.key, layers.value)
    if layers.query_bias is not None:
        layers.qkv_bias = group_by_kv_head(layers.query_bias, layers.key_bias, layers.value_bias)
    if layers.query_norm is not None and layers.key_norm is not None:
        queries = jnp.repeat(layers.query_norm[...][:, None], layers.qkv.shape[-2] - 2, axis=1)
        layers.qk_norm = nnx.Param(
            jnp.concatenate([queries, layers.key_norm[...][:, None]], axis=1)
        )
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
        layers.gate_up = nnx.Param(jnp.stack([layers.gate[...], layers.up[...]], axis=2))
        for name in ("gate", "up"):
            setattr(layers, name, nnx.data(None))
    for name, inputs in _INPUT_AXES.items():
        if getattr(layers, name, None) is not None:
            setattr(layers, name, _convert_weight(getattr(layers, name), name, 1, inputs, layout))
    return layers


def _convert_weight(
    weight: nnx.Param, name: str, lead_axes: int, input_axes: int, layout: WeightLayout
) -> nnx.Param:
    """A weight [lead, *in, *out] as the layout has it."""
    if name in layout.transposed:
        return transpose_weight(weight, lead_axes, input_axes)
    if name in layout.split:
        return split_weight(weight, lead_axes, input_axes)
    return block_weight(weight, lead_axes, input_axes) if name in layout.blocked else weight


def _unroll_decoder(decoder: Decoder, layout: WeightLayout) -> Decoder:
    decoder = jax.tree.map(lambda leaf: leaf, decoder)
    if layout.unrolled and isinstance(decoder.layers, Layers):
        layers = nnx.List(
            [decoder.layers.select_layer(index) for index in range(decoder.config.layers)]
        )
        setattr(decoder, "layers", layers)  # noqa: B010 - a fresh decoder's are stacked, as its class says
    if decoder.head is not None:
        decoder.head = _convert_weight(decoder.head, "head", 0, 1, layout)
    return decoder
