"""Weights arranged for generation: products joined that read the same input, layers apart, and on a
CPU large weights turned or cut."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.config.settings import ModelConfig
from jaxspec.models.decoder import Decoder, Layers
from jaxspec.models.layers import FEW, Blocked, Split, Transposed

_INPUTS = {"heads": 1, "output": 2, "gate_up": 1, "down": 1}
"""Axes of a layer's products that are summed over."""
_EVERY = (*_INPUTS, "head")
BLOCK, PART = 64, 128
"""Outputs of a block: as many as XLA's float32 kernels for AVX-512 make at once, 32 and 128 are
slower. Inputs of a part, likewise."""


class Arrangement(NamedTuple):
    """How a network's weights lie for generation."""

    joined: bool = False
    """Queries, keys and values side by side, and gate and up: one product each."""
    apart: bool = False
    """Layers one by one instead of stacked: XLA copies what it slices out of a stack, on a CPU and,
    as programs compiled for H100 show, on GPUs."""
    transposed: tuple[str, ...] = ()
    """Products whose weights are `Transposed`: names of joined ones, or `head`."""
    blocked: tuple[str, ...] = ()
    """Products whose weights are `Blocked`, likewise."""
    split: tuple[str, ...] = ()
    """Products whose weights are `Split`, likewise."""


def best(config: ModelConfig, tensor: int, threads: int, tokens: Sequence[int]) -> Arrangement:
    """The fastest known arrangement for passes over each of these numbers of `tokens` on every data
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
        return Arrangement()
    if threads == 0 or config.embed < 256:
        return Arrangement(joined=True, apart=True)
    if max(tokens) == 1 or (min(tokens) == 1 and threads > 1):
        split = tuple(name for name in _EVERY if name != "down") if config.embed >= 512 else ()
        return Arrangement(joined=True, apart=True, transposed=("down",), split=split)
    if max(tokens) < FEW and threads == 1:
        return Arrangement(joined=True, apart=True, blocked=_EVERY)
    return Arrangement(joined=True, apart=True, transposed=_EVERY)


def arranged(network: Any, arrangement: Arrangement) -> Any:
    """The network with its layers (those of a draft too) arranged; the products are the same."""
    if not arrangement.joined:
        return network

    def one(node: Any) -> Any:
        return _joined(node, arrangement) if isinstance(node, Layers) else node

    network = jax.tree.map(one, network, is_leaf=lambda node: isinstance(node, Layers))

    def decoder(node: Any) -> Any:
        return _apart(node, arrangement) if isinstance(node, Decoder) else node

    return jax.tree.map(decoder, network, is_leaf=lambda node: isinstance(node, Decoder))


def _joined(layers: Layers, arrangement: Arrangement) -> Layers:
    """Stacked layers with their products joined; the first axis is a layer's place everywhere."""
    # the module is changed below, and its caller's is not to be
    layers = jax.tree.map(lambda leaf: leaf, layers)
    kv_heads = layers.key.shape[2]

    def by_kv_head(query: nnx.Variable, key: nnx.Variable, value: nnx.Variable) -> nnx.Param:
        """[..., N, H] and twice [..., M, H] as [..., M, R + 2, H]."""
        grouped = query[...].reshape(*query.shape[:-2], kv_heads, -1, query.shape[-1])
        return nnx.Param(
            jnp.concatenate([grouped, key[...][..., None, :], value[...][..., None, :]], axis=-2)
        )

    layers.heads = by_kv_head(layers.query, layers.key, layers.value)
    if layers.query_bias is not None:
        layers.heads_bias = by_kv_head(layers.query_bias, layers.key_bias, layers.value_bias)
    if layers.query_norm is not None and layers.key_norm is not None:
        queries = jnp.repeat(layers.query_norm[...][:, None], layers.heads.shape[-2] - 2, axis=1)
        layers.heads_norm = nnx.Param(
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
    for name, inputs in _INPUTS.items():
        if getattr(layers, name, None) is not None:
            setattr(layers, name, _laid_out(getattr(layers, name), name, 1, inputs, arrangement))
    return layers


def _laid_out(
    weight: nnx.Param, name: str, lead: int, inputs: int, arrangement: Arrangement
) -> nnx.Param:
    """A weight [lead, *in, *out] as the arrangement has it."""
    if name in arrangement.transposed:
        return _transposed(weight, lead, inputs)
    if name in arrangement.split:
        return _split(weight, lead, inputs)
    return _blocked(weight, lead, inputs) if name in arrangement.blocked else weight


def _transposed(weight: nnx.Variable, lead: int, inputs: int) -> Transposed:
    """[lead, *in, *out] as [lead, *out, in]."""
    kernel = weight[...]
    flat = kernel.reshape(*kernel.shape[:lead], -1, *kernel.shape[lead + inputs :])
    return Transposed(jnp.moveaxis(flat, lead, -1))


def _split(weight: nnx.Param, lead: int, inputs: int) -> nnx.Param:
    """[lead, *in, *out] as [lead, C, in/C, *out]; as it was where parts do not divide the
    inputs."""
    kernel = weight[...]
    if math.prod(kernel.shape[lead : lead + inputs]) % PART:
        return weight
    return Split(kernel.reshape(*kernel.shape[:lead], -1, PART, *kernel.shape[lead + inputs :]))


def _blocked(weight: nnx.Variable, lead: int, inputs: int) -> Blocked:
    """[lead, *in, *out] as [lead, C, in, w]."""
    kernel = weight[...]
    outputs = kernel.shape[lead + inputs :]
    flat = kernel.reshape(*kernel.shape[:lead], -1, math.prod(outputs))
    wide = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % BLOCK)])
    blocks = wide.reshape(*flat.shape[:-1], -1, BLOCK)
    return Blocked(jnp.moveaxis(blocks, -2, lead), outputs=outputs)


def _apart(decoder: Decoder, arrangement: Arrangement) -> Decoder:
    decoder = jax.tree.map(lambda leaf: leaf, decoder)
    if arrangement.apart and isinstance(decoder.layers, Layers):
        layers = nnx.List([decoder.layers.at(index) for index in range(decoder.config.layers)])
        setattr(decoder, "layers", layers)  # noqa: B010 - a fresh decoder's are stacked, as its class says
    if decoder.head is not None:
        decoder.head = _laid_out(decoder.head, "head", 0, 1, arrangement)
    return decoder
