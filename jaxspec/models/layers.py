"""Building blocks of networks."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxspec.kernels.cpu_layouts import is_wide, layout_product, plain_product
from jaxspec.mesh import LAYERS, LogicalAxes, logical_axes


class AttentionInputs(NamedTuple):
    """Inputs of attention in a draft layer.

    Queries and keys are already rotated.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T M H"]
    value: Float[Array, "B T M H"]
    residual: Float[Array, "B T D"]
    """Residual stream, to which the layer adds its output."""


class LowRankWeight(nnx.Module):
    """Weight with a low-rank adapter.

    Its product is x @ base + scale * (x @ a) @ b.
    """

    def __init__(self, base: nnx.Variable, a: nnx.Variable, b: nnx.Variable, scale: float):
        self.base, self.a, self.b, self.scale = base, a, b, scale


class CastHead(nnx.Module):
    """Head cast to the type of its products.

    Its gradient goes to the `master` weight, in the type of the master.
    """

    def __init__(self, master: nnx.Variable, dtype: str, by_rows: bool = False):
        """Casts `master`: [V, D] with `by_rows`, else [D, V]."""
        self.master, self.by_rows = master, by_rows
        # Gradients go to the master through `_cast_logits`, so the cast itself needs none.
        cast = jax.lax.stop_gradient(master[...]).astype(dtype)
        self.cast = nnx.Variable(cast, axes=logical_axes(master))


Weight = nnx.Variable | LowRankWeight
"""Weight in any layout that `apply_weight` supports."""


def apply_weight(
    x: Float[Array, "B T *I"], weight: Weight, input_axes: int = 1
) -> Float[Array, "B T *O"]:
    """Multiplies the last axes of x by a weight.

    The weight is [*in, *out] in the plain layout, with `input_axes` axes to sum over.
    """
    if isinstance(weight, LowRankWeight):
        adapter_output = apply_weight(apply_weight(x, weight.a, input_axes), weight.b)
        return apply_weight(x, weight.base, input_axes) + adapter_output * np.asarray(
            weight.scale, adapter_output.dtype
        )
    return layout_product(x, weight, input_axes)


def head_logits(
    hidden: Float[Array, "B T D"], head: nnx.Variable | CastHead, by_rows: bool = False
) -> Float[Array, "B T V"]:
    """Computes logits in at least float32.

    With `by_rows` the head is an embedding [V, D]. Sums are also in at least float32.
    """
    if isinstance(head, CastHead):
        master = head.master[...]
        return _cast_logits(hidden, head.cast[...], master, head.by_rows, master.dtype.name)
    if not by_rows:
        return layout_product(hidden, head, 1, wide_output=True)
    kernel = head[...].astype(hidden.dtype)
    # For wide types, JAX's own gradient is fine: nothing is cast.
    if is_wide(hidden):
        return jnp.einsum("BTD,VD->BTV", hidden, kernel)
    return plain_product(hidden, kernel.T, 1, True)


def _multiply_cast_head(
    hidden: Array, kernel: Array, master: Array, by_rows: bool, dtype: str
) -> Float[Array, "B T V"]:
    return plain_product(hidden, kernel.T if by_rows else kernel, 1, True)


def _multiply_cast_head_forward(
    hidden: Array, kernel: Array, master: Array, by_rows: bool, dtype: str
) -> tuple[Array, tuple[Array, Array]]:
    return _multiply_cast_head(hidden, kernel, master, by_rows, dtype), (hidden, kernel)


def _multiply_cast_head_backward(
    by_rows: bool, dtype: str, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, None, Array]:
    hidden, kernel = residuals
    gradient, kernel = gradient.astype(hidden.dtype), kernel.astype(hidden.dtype)
    axes = "VD" if by_rows else "DV"
    hidden_gradient = jnp.einsum(f"BTV,{axes}->BTD", gradient, kernel)
    # The result has the type in which gradients of chunks are summed. One kernel can then multiply
    # and add to the gradient of the previous chunks.
    master_gradient = jnp.einsum(f"BTD,BTV->{axes}", hidden, gradient, preferred_element_type=dtype)
    return hidden_gradient, None, master_gradient


_cast_logits = jax.custom_vjp(_multiply_cast_head, nondiff_argnums=(3, 4))
"""Computes logits with a cast head. The master only receives the gradient."""
_cast_logits.defvjp(_multiply_cast_head_forward, _multiply_cast_head_backward)


def cast_floats(network: Any, dtype: Any) -> Any:
    """Casts floating-point leaves to `dtype`."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
        network,
    )


def init_dense(
    key: Key[Array, ""],
    shape: Sequence[int],
    axes: LogicalAxes,
    fan_in: int,
    dtype: jnp.dtype,
    scale: float = 1.0,
) -> nnx.Param:
    """Draws a normal weight with the given logical axes.

    Its standard deviation is `scale / sqrt(fan_in)`.
    """
    value = jax.random.normal(key, tuple(shape), dtype) * (scale * fan_in**-0.5)
    return nnx.Param(value, axes=axes)


class StackInit(NamedTuple):
    """Initializer of the weights of stacked layers.

    Shapes and logical axes are those of a single layer.
    """

    keys: Iterator[Key[Array, ""]]
    """Keys of the drawn weights, in order."""
    depth: int
    """Number of layers."""
    dtype: jnp.dtype

    def draw(
        self, shape: Sequence[int], axes: LogicalAxes, fan_in: int, scale: float = 1.0
    ) -> nnx.Param:
        """Draws a normal weight, like `init_dense`."""
        stack = (self.depth, *shape), (LAYERS, *axes)
        return init_dense(next(self.keys), *stack, fan_in, self.dtype, scale)

    def fill(self, value: int, shape: Sequence[int], axes: LogicalAxes) -> nnx.Param:
        """Makes a constant weight."""
        stack = jnp.full((self.depth, *shape), value, self.dtype)
        return nnx.Param(stack, axes=(LAYERS, *axes))


def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, "*W D"], eps: float
) -> Float[Array, "*B D"]:
    """Applies RMS normalization (Zhang & Sennrich, arXiv 1910.07467).

    Normalizes in at least float32, and casts back before the weight is applied.
    """
    # The custom gradient writes sums as products with ones. XLA's CPU kernels take five times as
    # long for the gradient of `jax.grad`.
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
    # Does not merge leading axes: XLA would gather an axis that is split over devices to merge it.
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
    # "highest" prevents GPUs from rounding the operands to TF32.
    return jnp.matmul(
        rows, jnp.full((rows.shape[-1], 1), 1 / rows.shape[-1], rows.dtype), precision="highest"
    )


_custom_rms_norm = jax.custom_vjp(_norm_rows, nondiff_argnums=(2,))
_custom_rms_norm.defvjp(_norm_forward, _norm_backward)


def swiglu(
    x: Float[Array, "B T D"], gate: Weight, up: Weight, down: Weight
) -> Float[Array, "B T D"]:
    """Applies a gated feed-forward layer (Shazeer, arXiv 2002.05202)."""
    return apply_weight(jax.nn.silu(apply_weight(x, gate)) * apply_weight(x, up), down)
