"""Parts of the networks, and the logical axes of every weight by name."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxspec.kernels.cpu_layouts import is_wide, layout_product, plain_product

LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", "embed"),
    "head": ("embed", "vocab"),
    "query": (None, "embed", "heads", None),
    "key": (None, "embed", "kv_heads", None),
    "value": (None, "embed", "kv_heads", None),
    "output": (None, "heads", None, "embed"),
    "gate": (None, "embed", "ffn"),
    "up": (None, "embed", "ffn"),
    "down": (None, "ffn", "embed"),
    "query_bias": (None, "heads", None),
    "key_bias": (None, "kv_heads", None),
    "value_bias": (None, "kv_heads", None),
    "router": (None, "embed", None),
    "expert_gate": (None, "experts", "embed", "ffn"),
    "expert_up": (None, "experts", "embed", "ffn"),
    "expert_down": (None, "experts", "ffn", "embed"),
    "fuse": (None, "embed"),
    "project": (None, None, "embed"),
}
"""Axes of each weight that is sharded, by attribute name; the first axis of a layer's weights is
its place in the stack."""


class AttentionInputs(NamedTuple):
    """Rotated queries and keys, and values, of a block in a draft layer, and the stream that the
    layer adds its output to."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T M H"]
    value: Float[Array, "B T M H"]
    residual: Float[Array, "B T D"]


class LowRankWeight(nnx.Module):
    """A weight with an adapter beside it: its product is x @ base + scale * (x @ a) @ b."""

    def __init__(self, base: nnx.Variable, a: nnx.Variable, b: nnx.Variable, scale: float):
        self.base, self.a, self.b, self.scale = base, a, b, scale


class CastHead(nnx.Module):
    """A head in the type of products, whose gradient goes to the `master` that it was cast from.

    Chunks of positions read the cast and add up their gradients in the master's type.
    """

    def __init__(self, master: nnx.Variable, dtype: str, by_rows: bool = False):
        """Casts once; `by_rows` says that the master is an embedding [V, D], not a head [D, V]."""
        self.master, self.by_rows = master, by_rows
        self.cast = nnx.Variable(jax.lax.stop_gradient(master[...]).astype(dtype))


Weight = nnx.Variable | LowRankWeight
"""What `apply_weight` takes, however it lies."""


def apply_weight(
    x: Float[Array, "B T *I"], weight: Weight, input_axes: int = 1
) -> Float[Array, "B T *O"]:
    """The product of the last `input_axes` axes of x with a weight [*in, *out] however it lies."""
    if isinstance(weight, LowRankWeight):
        adapter_output = apply_weight(apply_weight(x, weight.a, input_axes), weight.b)
        return apply_weight(x, weight.base, input_axes) + adapter_output * np.asarray(
            weight.scale, adapter_output.dtype
        )
    return layout_product(x, weight, input_axes)


def head_logits(
    hidden: Float[Array, "B T D"], head: nnx.Variable | CastHead, by_rows: bool = False
) -> Float[Array, "B T V"]:
    """Products with a head, added up and kept in at least float32; `by_rows`: it is an embedding
    [V, D]."""
    if isinstance(head, CastHead):
        master = head.master[...]
        return _cast_logits(hidden, head.cast[...], master, head.by_rows, master.dtype.name)
    if not by_rows:
        return layout_product(hidden, head, 1, wide_output=True)
    kernel = head[...].astype(hidden.dtype)
    if is_wide(hidden):
        return jnp.einsum("BTD,VD->BTV", hidden, kernel)
    return plain_product(hidden, kernel.T, 1, True)


def _cast_product(
    hidden: Array, kernel: Array, master: Array, by_rows: bool, dtype: str
) -> Float[Array, "B T V"]:
    return plain_product(hidden, kernel.T if by_rows else kernel, 1, True)


def _cast_forward(
    hidden: Array, kernel: Array, master: Array, by_rows: bool, dtype: str
) -> tuple[Array, tuple[Array, Array]]:
    return _cast_product(hidden, kernel, master, by_rows, dtype), (hidden, kernel)


def _cast_backward(
    by_rows: bool, dtype: str, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, None, Array]:
    hidden, kernel = residuals
    gradient, kernel = gradient.astype(hidden.dtype), kernel.astype(hidden.dtype)
    axes = "VD" if by_rows else "DV"
    hidden_gradient = jnp.einsum(f"BTV,{axes}->BTD", gradient, kernel)
    # The type of the sum, so that one kernel multiplies and adds to what chunks before gave.
    master_gradient = jnp.einsum(f"BTD,BTV->{axes}", hidden, gradient, preferred_element_type=dtype)
    return hidden_gradient, None, master_gradient


_cast_logits = jax.custom_vjp(_cast_product, nondiff_argnums=(3, 4))
"""Logits by a cast head, of whose master they need the gradient alone."""
_cast_logits.defvjp(_cast_forward, _cast_backward)


def cast_floats(network: Any, dtype: Any) -> Any:
    """The network with its floating leaves in `dtype`."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
        network,
    )


def init_dense(
    key: Key[Array, ""], shape: Sequence[int], fan_in: int, dtype: jnp.dtype, scale: float = 1.0
) -> nnx.Param:
    """A normal weight with standard deviation `scale / sqrt(fan_in)`."""
    return nnx.Param(jax.random.normal(key, tuple(shape), dtype) * (scale * fan_in**-0.5))


def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, "*W D"], eps: float
) -> Float[Array, "*B D"]:
    """Root-mean-square norm in at least float32, cast back before the weight is applied (Zhang &
    Sennrich, arXiv 1910.07467).

    Its gradient is written out with sums as products with ones: of what `jax.grad` makes of it,
    XLA's CPU kernels take five times as long.
    """
    return _custom_rms_norm(x, weight, eps)


def _norm_rows(x: Array, weight: Array, eps: float) -> Array:
    wide_x = x.astype(np.promote_types(x.dtype, np.float32))
    scaled = wide_x * jax.lax.rsqrt(jnp.mean(wide_x * wide_x, axis=-1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight


def _norm_forward(x: Array, weight: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    return _norm_rows(x, weight, eps), (x, weight)


def _norm_backward(
    eps: float, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    # Axes stay apart: one that is split over devices would be gathered to be merged with another.
    x, weight = residuals
    wide_x = x.astype(np.promote_types(x.dtype, np.float32))
    inverse_rms = jax.lax.rsqrt(_row_means(wide_x * wide_x) + eps)
    normed = wide_x * inverse_rms
    normed_gradient = (gradient * weight).astype(wide_x.dtype)
    x_gradient = inverse_rms * (normed_gradient - normed * _row_means(normed_gradient * normed))
    row_gradient = gradient.astype(wide_x.dtype) * normed
    lead_shape = row_gradient.shape[: row_gradient.ndim - weight.ndim]
    weight_gradient = jnp.tensordot(
        jnp.ones(lead_shape, wide_x.dtype), row_gradient, axes=len(lead_shape), precision="highest"
    )
    return x_gradient.astype(x.dtype), weight_gradient.astype(weight.dtype)


def _row_means(rows: Float[Array, "*B D"]) -> Float[Array, "*B 1"]:
    return jnp.matmul(
        rows, jnp.full((rows.shape[-1], 1), 1 / rows.shape[-1], rows.dtype), precision="highest"
    )


_custom_rms_norm = jax.custom_vjp(_norm_rows, nondiff_argnums=(2,))
_custom_rms_norm.defvjp(_norm_forward, _norm_backward)


def swiglu(
    x: Float[Array, "B T D"], gate: Weight, up: Weight, down: Weight
) -> Float[Array, "B T D"]:
    """Gated feed-forward layer (Shazeer, arXiv 2002.05202)."""
    return apply_weight(jax.nn.silu(apply_weight(x, gate)) * apply_weight(x, up), down)
