"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) for a frozen decoder."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import format_value
from jaxspec.inputs.spec import LoraConfig, ModelSpec
from jaxspec.mesh import logical_axes
from jaxspec.models.decoder import Decoder, master_dtype
from jaxspec.models.layers import LowRankWeight, cast_floats


class AdapterTarget(NamedTuple):
    """Weight that can have an adapter."""

    module: str
    """Module of a Hugging Face layer that has the weight."""
    weight: str
    """Attribute name in `Layers`."""
    equation: str
    """Einsum equation from adapters a and b to the change of the weight; R is the rank."""

    @property
    def input_axes(self) -> int:
        """Number of input axes of the weight."""
        # Axes of `a` are the layers, the inputs and R.
        return self.equation.index("R") - 1

    @property
    def axis_count(self) -> int:
        """Number of axes of the weight, with that of the layers."""
        return len(self.equation.split("->")[1])


TARGETS = {
    "q_proj": AdapterTarget("self_attn", "query", "LDR,LRNH->LDNH"),
    "k_proj": AdapterTarget("self_attn", "key", "LDR,LRMH->LDMH"),
    "v_proj": AdapterTarget("self_attn", "value", "LDR,LRMH->LDMH"),
    "o_proj": AdapterTarget("self_attn", "output", "LNHR,LRD->LNHD"),
    "gate_proj": AdapterTarget("mlp", "gate", "LDR,LRF->LDF"),
    "up_proj": AdapterTarget("mlp", "up", "LDR,LRF->LDF"),
    "down_proj": AdapterTarget("mlp", "down", "LFR,LRD->LFD"),
}
"""Targets by their names in PEFT."""


WeightChanges = dict[str, tuple[Array | np.ndarray, ...]]
"""Adapters by target: a, b and scale of all layers.

They are stacked like `Layers`, and padded to the largest rank. Layers without adapters have zeros.
"""


class FrozenWeight(nnx.Variable):
    """Weight that is not trained."""


class Adapters(nnx.Module):
    """Adapters of each target NAME: `NAME_a` [L inputs R] and `NAME_b` [L R outputs].

    As in PEFT, `NAME_a` starts with a uniform distribution and `NAME_b` with zeros.
    """

    # With `NAME_b` zero, fresh adapters do not change the decoder.

    def __init__(self, base: Decoder, names: tuple[str, ...], rank: int, key: Key[Array, ""]):
        dtype = master_dtype(base.config)
        for name, adapter_key in zip(names, jax.random.split(key, len(names)), strict=True):
            depth, inputs, outputs = axis_sizes(base, name)
            # PEFT's kaiming_uniform_ with a = sqrt(5) has this bound.
            bound = float(np.prod(inputs)) ** -0.5
            a = jax.random.uniform(adapter_key, (depth, *inputs, rank), dtype, -bound, bound)
            b = jnp.zeros((depth, rank, *outputs), dtype)
            # Sharded like their weight, so that a device computes the change of its own shard.
            axes = getattr(base.layers, TARGETS[name].weight).axes
            input_end = 1 + TARGETS[name].input_axes
            setattr(self, f"{name}_a", nnx.Param(a, axes=(*axes[:input_end], None)))
            setattr(self, f"{name}_b", nnx.Param(b, axes=(axes[0], None, *axes[input_end:])))


class AdaptedDecoder(nnx.Module):
    """Frozen decoder with trainable adapters.

    `merge_lora` merges them into a plain decoder.
    """

    def __init__(self, base: Decoder, lora: LoraConfig, key: Key[Array, ""]):
        """Initializes adapters, and casts the base.

        The base gets the model's own type.

        Raises:
          ConfigError: `lora.targets` has a weight that the decoder does not have.
        """
        self.names = choose_targets(lora.targets, base.config, "lora.targets")
        self.scale = lora.alpha / lora.rank
        # Weights that are not updated need no master copy.
        self.base = _convert_variables(
            FrozenWeight, cast_floats(base, jnp.dtype(base.config.dtype))
        )
        self.adapters = Adapters(base, self.names, lora.rank, key)

    @property
    def config(self) -> ModelSpec:
        """Architecture of the base."""
        return self.base.config


def choose_targets(names: tuple[str, ...], model: ModelSpec, setting: str) -> tuple[str, ...]:
    """Returns the given targets, each once, or all by default.

    `setting` is the name of the setting in error messages.

    Raises:
      ConfigError: `names` has a target that the decoder does not have.
    """
    # Adapters of experts are not supported, which leaves the attention.
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
    """Merges adapters into a decoder: W + alpha / rank * a b.

    Merged weights have the type of the adapters. With a `key` they are rounded stochastically to
    the type of the base. A decoder without adapters is returned unchanged.
    """
    if isinstance(network, Decoder):
        return network
    decoder = _convert_variables(nnx.Param, network.base)
    for index, name in enumerate(network.names):
        weight, merged_weight = _merge_weight(network, name)
        if key is not None:
            # A key for each target, so that their rounding errors are independent.
            merged_weight = round_stochastically(
                merged_weight, weight.dtype, jax.random.fold_in(key, index)
            )
        _replace_weight(decoder, name, merged_weight)
    return decoder


def _merge_weight(network: AdaptedDecoder, name: str) -> tuple[Array, Array]:
    """Returns base weight and merged weight of a target."""
    # Sums are in the adapters' type, as the base's type would round small changes away.
    a, b = (getattr(network.adapters, f"{name}_{side}")[...] for side in "ab")
    weight = getattr(network.base.layers, TARGETS[name].weight)[...]
    change = jnp.einsum(TARGETS[name].equation, a, b) * np.asarray(network.scale, a.dtype)
    return weight, weight.astype(a.dtype) + change


def round_stochastically(
    values: Float[Array, "*B"], dtype: jnp.dtype, key: Key[Array, ""]
) -> Float[Array, "*B"]:
    """Rounds float32 to bfloat16 at random.

    Rounding keeps the mean. Other types are cast.
    """
    # Rounding to nearest would lose changes of less than half a unit in the last place. These are
    # nearly all changes of an adapter after its first updates.
    if dtype != jnp.bfloat16 or values.dtype != jnp.float32:
        return values.astype(dtype)
    # Noise in the 16 bits that bfloat16 drops carries into the others with the right probability.
    noise = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + noise
    rounded = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    # The noise, or the dropped bits, could turn NaN into another value.
    return jnp.where(jnp.isfinite(values), rounded, values.astype(dtype))


def measure_retention(network: AdaptedDecoder, dtype: jnp.dtype) -> Float[Array, ""]:
    """Returns the share of changes that survives rounding.

    Merged weights are rounded to `dtype`. The change after rounding is projected on the change
    before. The result is 1 if nothing changed.
    """
    float_info, retained, total = jnp.finfo(dtype), 0.0, 0.0
    for name in network.names:
        weight, merged_weight = _merge_weight(network, name)
        base_weight = weight.astype(merged_weight.dtype)
        # The compiler may remove a cast to a narrower type and back.
        rounded = jax.lax.reduce_precision(merged_weight, float_info.nexp, float_info.nmant)
        change, rounded_change = merged_weight - base_weight, rounded - base_weight
        retained, total = (
            retained + jnp.sum(rounded_change * change),
            total + jnp.sum(change * change),
        )
    return jnp.where(total > 0, retained / jnp.where(total > 0, total, 1), 1)


def attach_lora(network: Decoder | AdaptedDecoder) -> Decoder:
    """Returns a decoder that applies unmerged adapters.

    A decoder without adapters is returned unchanged.
    """
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
    """Copies a decoder, converting its variables to `kind`."""
    return jax.tree.map(
        lambda variable: kind(variable[...], axes=logical_axes(variable)),
        network,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )


def _add_adapter(
    decoder: Decoder, name: str, a: Array, b: Array, scale: Float[Array, " L"]
) -> None:
    """Adds one target's adapters to its weight in place."""
    target = TARGETS[name]
    weight = getattr(decoder.layers, target.weight)[...]
    # Scales layer by layer, as each may have its own scale.
    change = jnp.einsum(target.equation, a, b) * scale.reshape(-1, *(1,) * (weight.ndim - 1))
    _replace_weight(decoder, name, weight + change.astype(weight.dtype))


def _replace_weight(decoder: Decoder, name: str, value: Array) -> None:
    """Replaces the value of a target's weight in place."""
    attribute = TARGETS[name].weight
    axes = logical_axes(getattr(decoder.layers, attribute))
    setattr(decoder.layers, attribute, nnx.Param(value, axes=axes))


def axis_sizes(decoder: Decoder, name: str) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Returns the axis sizes of a target's weight.

    They are the number of layers, the input sizes and the output sizes.
    """
    target = TARGETS[name]
    depth, *sizes = getattr(decoder.layers, target.weight).shape
    return depth, tuple(sizes[: target.input_axes]), tuple(sizes[target.input_axes :])


def add_changes(network: Decoder, changes: WeightChanges) -> Decoder:
    """Adds changes to a decoder's weights."""
    # `_add_adapter` works in place, so it gets a copy of the module.
    decoder = jax.tree.map(lambda leaf: leaf, network)
    for name, (a, b, scale) in changes.items():
        _add_adapter(decoder, name, jnp.asarray(a), jnp.asarray(b), jnp.asarray(scale))
    return decoder
