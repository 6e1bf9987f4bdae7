"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) beside a decoder whose own weights stay."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import format_value
from jaxspec.inputs.spec import LoraConfig, ModelSpec
from jaxspec.models.decoder import Decoder, master_dtype
from jaxspec.models.layers import LOGICAL_AXES, LowRankWeight, cast_floats


class AdapterTarget(NamedTuple):
    """A weight that can have an adapter."""

    module: str
    """Where Hugging Face's layer has it."""
    weight: str
    """Its name in the decoder's layers."""
    equation: str
    """Adapters a and b of all layers to the weights' change; R is the rank."""

    @property
    def input_axes(self) -> int:
        """How many axes of the weight, after that of the layers, are its input."""
        return self.equation.index("R") - 1


TARGETS = {
    "q_proj": AdapterTarget("self_attn", "query", "LDR,LRNH->LDNH"),
    "k_proj": AdapterTarget("self_attn", "key", "LDR,LRMH->LDMH"),
    "v_proj": AdapterTarget("self_attn", "value", "LDR,LRMH->LDMH"),
    "o_proj": AdapterTarget("self_attn", "output", "LNHR,LRD->LNHD"),
    "gate_proj": AdapterTarget("mlp", "gate", "LDR,LRF->LDF"),
    "up_proj": AdapterTarget("mlp", "up", "LDR,LRF->LDF"),
    "down_proj": AdapterTarget("mlp", "down", "LFR,LRD->LFD"),
}
"""By PEFT's names."""


WeightChanges = dict[str, tuple[Array | np.ndarray, ...]]
"""By target: A and B of all layers in our layout, of the largest rank, and each layer's scale;
layers without adapters have zeros."""


def _adapter_axes(name: str, target: AdapterTarget) -> dict[str, tuple[str | None, ...]]:
    axes = LOGICAL_AXES[target.weight]
    input_end = 1 + target.input_axes
    return {f"{name}_a": (*axes[:input_end], None), f"{name}_b": (axes[0], None, *axes[input_end:])}


ADAPTER_AXES = {
    name: axes
    for target in TARGETS
    for name, axes in _adapter_axes(target, TARGETS[target]).items()
}
"""Logical axes of the adapters: those of the weights that they change, so that the change is made
where the weight is."""


class FrozenWeight(nnx.Variable):
    """A weight that is not trained."""


class Adapters(nnx.Module):
    """For each target NAME, `NAME_a` [L inputs R], uniform as PEFT starts it, and `NAME_b` [L R
    outputs], zeros: at first, no change."""

    def __init__(self, base: Decoder, names: tuple[str, ...], rank: int, key: Key[Array, ""]):
        dtype = master_dtype(base.config)
        for name, adapter_key in zip(names, jax.random.split(key, len(names)), strict=True):
            depth, inputs, outputs = axis_sizes(base, name)
            bound = float(np.prod(inputs)) ** -0.5  # kaiming_uniform_ with a = sqrt(5)
            a = jax.random.uniform(adapter_key, (depth, *inputs, rank), dtype, -bound, bound)
            b = jnp.zeros((depth, rank, *outputs), dtype)
            setattr(self, f"{name}_a", nnx.Param(a))
            setattr(self, f"{name}_b", nnx.Param(b))


class AdaptedDecoder(nnx.Module):
    """A decoder with adapters, of which only the latter are trained; `merge_lora` makes a plain
    decoder of both."""

    def __init__(self, base: Decoder, lora: LoraConfig, key: Key[Array, ""]):
        """Fresh adapters of `lora.rank` beside a base in the model's own type, since weights that
        nobody updates need no master copy; raises ConfigError for targets that the decoder does not
        have."""
        self.names = choose_targets(lora.targets, base.config, "lora.targets")
        self.scale = lora.alpha / lora.rank
        self.base = _convert_variables(
            FrozenWeight, cast_floats(base, jnp.dtype(base.config.dtype))
        )
        self.adapters = Adapters(base, self.names, lora.rank, key)

    @property
    def config(self) -> ModelSpec:
        """The base's."""
        return self.base.config


def choose_targets(names: tuple[str, ...], model: ModelSpec, setting: str) -> tuple[str, ...]:
    """The targets named, or all that a decoder has; `setting` names them in the ConfigError for
    others."""
    allowed_names = tuple(
        name
        for name, target in TARGETS.items()
        if target.module == "self_attn" or not model.family.experts
    )
    for name in names:
        reason = (
            f" (a decoder with {model.family.experts} experts has adapters on its attention only)"
            if name in TARGETS
            else ""
        )
        require(
            name in allowed_names,
            f"{setting} has {format_value(name)}{reason}; choose from {', '.join(allowed_names)}",
        )
    return tuple(dict.fromkeys(names)) or allowed_names


def merge_lora(network: Decoder | AdaptedDecoder, key: Key[Array, ""] | None = None) -> Decoder:
    """Merges adapters into a decoder: W + alpha / rank * a b. A decoder comes back as it is.

    Merged weights are in the type of the adapters. With a `key` they are rounded to that of the
    base, stochastically.
    """
    if isinstance(network, Decoder):
        return network
    decoder = _convert_variables(nnx.Param, network.base)
    for index, name in enumerate(network.names):
        weight, merged_weight = _merge_weight(network, name)
        if key is not None:
            merged_weight = round_stochastically(
                merged_weight, weight.dtype, jax.random.fold_in(key, index)
            )
        setattr(decoder.layers, TARGETS[name].weight, nnx.Param(merged_weight))
    return decoder


def _merge_weight(network: AdaptedDecoder, name: str) -> tuple[Array, Array]:
    """The base's weight of a target, and the same with its adapters."""
    a, b = (getattr(network.adapters, f"{name}_{side}")[...] for side in "ab")
    weight = getattr(network.base.layers, TARGETS[name].weight)[...]
    change = jnp.einsum(TARGETS[name].equation, a, b) * np.asarray(network.scale, a.dtype)
    return weight, weight.astype(a.dtype) + change


def round_stochastically(
    values: Float[Array, "*B"], dtype: jnp.dtype, key: Key[Array, ""]
) -> Float[Array, "*B"]:
    """Rounds float32 to bfloat16, up or down with chances that keep the mean; casts other types.

    Rounding to nearest would lose what is less than half a unit in the last place: nearly all of
    an adapter after its first updates.
    """
    if dtype != jnp.bfloat16 or values.dtype != jnp.float32:
        return values.astype(dtype)
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + noise
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    # noise would carry the bits of what is not finite into another number
    return jnp.where(jnp.isfinite(values), rounded, values.astype(dtype))


def change_retention(network: AdaptedDecoder, dtype: jnp.dtype) -> Float[Array, ""]:
    """Share of the adapters' change that is left of it in weights rounded to `dtype`.

    It is the change after rounding, projected on the change before; 1 if there is none.
    """
    float_info, retained, total = jnp.finfo(dtype), 0.0, 0.0
    for name in network.names:
        weight, merged_weight = _merge_weight(network, name)
        base_weight = weight.astype(merged_weight.dtype)
        # the compiler may drop a cast to a narrower type and back
        rounded = jax.lax.reduce_precision(merged_weight, float_info.nexp, float_info.nmant)
        change, rounded_change = merged_weight - base_weight, rounded - base_weight
        retained, total = (
            retained + jnp.sum(rounded_change * change),
            total + jnp.sum(change * change),
        )
    return jnp.where(total > 0, retained / jnp.where(total > 0, total, 1), 1)


def attach_lora(network: Decoder | AdaptedDecoder) -> Decoder:
    """A decoder as it is; of one with adapters, the decoder whose products have them beside its
    weights."""
    if isinstance(network, Decoder):
        return network
    decoder = jax.tree.map(lambda leaf: leaf, network.base)
    for name in network.names:
        a, b = (getattr(network.adapters, f"{name}_{side}") for side in "ab")
        weight = TARGETS[name].weight
        adapted_weight = LowRankWeight(getattr(decoder.layers, weight), a, b, network.scale)
        setattr(decoder.layers, weight, adapted_weight)
    return decoder


def _convert_variables(kind: type[nnx.Variable], network: Decoder) -> Decoder:
    """A copy whose weights are variables of that kind."""
    return jax.tree.map(
        lambda variable: kind(variable[...]),
        network,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )


def _add_adapter(
    decoder: Decoder, name: str, a: Array, b: Array, scale: Float[Array, " L"]
) -> None:
    """Adds the adapters of one target to its weight, in a decoder that nobody else has."""
    target = TARGETS[name]
    weight = getattr(decoder.layers, target.weight)[...]
    change = jnp.einsum(target.equation, a, b) * scale.reshape(-1, *(1,) * (weight.ndim - 1))
    setattr(decoder.layers, target.weight, nnx.Param(weight + change.astype(weight.dtype)))


def axis_sizes(decoder: Decoder, name: str) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Layers, input axes and output axes of a target's weight."""
    target = TARGETS[name]
    depth, *sizes = getattr(decoder.layers, target.weight).shape
    return depth, tuple(sizes[: target.input_axes]), tuple(sizes[target.input_axes :])


def add_changes(network: Decoder, changes: WeightChanges) -> Decoder:
    """The decoder with the changes added to its weights."""
    decoder = jax.tree.map(lambda leaf: leaf, network)
    for name, (a, b, scale) in changes.items():
        _add_adapter(decoder, name, jnp.asarray(a), jnp.asarray(b), jnp.asarray(scale))
    return decoder
