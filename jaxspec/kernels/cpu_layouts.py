"""Layouts of weights that XLA's CPU kernels are fast with, and products with them; each gives the
numbers of `plain_product`, its twin."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

BLOCK_OUTPUTS, PART_INPUTS = 64, 128
"""Outputs of a block: as many as XLA's float32 kernels for AVX-512 make at once, 32 and 128 are
slower. Inputs of a part, likewise."""
BLOCK_LOOP_ROWS = 16
"""Rows from which on a product takes the blocks of a `BlockedParam` weight one by one: at once,
each needs a copy of all rows."""
RIGHT_OPERAND_ROWS = 256
"""Rows from which on a product has a `TransposedParam` weight on the right: on the left, rows and
results are transposed too."""


class TransposedParam(nnx.Param):
    """A weight as [*out, in]: the left operand of its product, which is faster on a CPU where few
    rows meet a large weight."""


class BlockedParam(nnx.Param):
    """A weight as [C, in, w], for products of few rows: blocks of w outputs, the last filled up
    with zeros; `outputs` has their shape."""

    outputs: tuple[int, ...]


class SplitParam(nnx.Param):
    """A weight as [C, in/C, *out], for products of one row, which are the sums of those of its
    parts."""


# ---- products


def layout_product(
    x: Float[Array, "B T *I"], weight: nnx.Variable, input_axes: int, wide_output: bool = False
) -> Float[Array, "B T *O"]:
    """The product of the last `input_axes` axes of x with a weight [*in, *out], however it lies;
    `wide_output` keeps it in at least float32."""
    kernel, count, dtype = weight[...], x.shape[0] * x.shape[1], _result_dtype(x, wide_output)
    matmul = partial(jnp.matmul, preferred_element_type=dtype)
    if isinstance(weight, BlockedParam):
        rows = x.reshape(count, -1)
        if count < BLOCK_LOOP_ROWS:
            repeated = jnp.broadcast_to(rows, (len(kernel), *rows.shape))
            result = jnp.einsum("cbi,ciw->cbw", repeated, kernel, preferred_element_type=dtype)
        else:
            result = jax.lax.map(lambda block: matmul(rows, block), kernel)
        result = result.transpose(1, 0, 2).reshape(count, -1)[:, : math.prod(weight.outputs)]
        return result.reshape(*x.shape[:2], *weight.outputs)
    if isinstance(weight, SplitParam):
        output_shape = kernel.shape[2:]
        if count == 1:
            operands = x.reshape(len(kernel), -1), kernel.reshape(*kernel.shape[:2], -1)
            result = jnp.einsum("ci,cio->co", *operands, preferred_element_type=dtype)
            result = result.sum(axis=0, dtype=dtype)
        else:
            result = matmul(x.reshape(count, -1), kernel.reshape(-1, math.prod(output_shape)))
        return result.reshape(*x.shape[:2], *output_shape)
    if not isinstance(weight, TransposedParam):
        return plain_product(x, kernel.astype(x.dtype), input_axes, wide_output)
    rows, flat = x.reshape(count, -1), kernel.reshape(-1, kernel.shape[-1])
    if count >= RIGHT_OPERAND_ROWS:
        return matmul(rows, flat.T).reshape(*x.shape[:2], *kernel.shape[:-1])
    # Barriers: XLA would fold the transposes into the product, which undoes it.
    result = jax.lax.optimization_barrier(matmul(flat, jax.lax.optimization_barrier(rows.T)))
    return result.T.reshape(*x.shape[:2], *kernel.shape[:-1])


def _result_dtype(x: Array, wide_output: bool) -> np.dtype:
    """Type of a product of `x`."""
    return np.promote_types(x.dtype, np.float32) if wide_output else x.dtype


def _tensordot(
    x: Float[Array, "B T *I"], kernel: Float[Array, "*K"], input_axes: int, wide_output: bool
) -> Float[Array, "B T *O"]:
    return jnp.tensordot(
        x, kernel, axes=input_axes, preferred_element_type=_result_dtype(x, wide_output)
    )


def _tensordot_forward(
    x: Array, kernel: Array, input_axes: int, wide_output: bool
) -> tuple[Array, tuple[Array, Array]]:
    return _tensordot(x, kernel, input_axes, wide_output), (x, kernel)


def _tensordot_backward(
    input_axes: int, wide_output: bool, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, kernel = residuals
    gradient = gradient.astype(x.dtype)  # the products of the backward pass are of the model's type
    row_axes, output_axes = tuple(range(x.ndim - input_axes)), tuple(range(input_axes, kernel.ndim))
    x_gradient = jnp.tensordot(
        gradient, kernel, axes=(tuple(range(len(row_axes), gradient.ndim)), output_axes)
    )
    return x_gradient, jnp.tensordot(x, gradient, axes=(row_axes, row_axes))


# The gradient for the kernel is written as [*in, *out]: of what jax.grad makes of it, a transposed
# product transposed, XLA for CPU copies the larger factor column by column.
plain_product = jax.custom_vjp(_tensordot, nondiff_argnums=(2, 3))
"""The product of the last axes of x [B T *I] with a weight as it is, [*in, *out]: the twin of all
layouts."""
plain_product.defvjp(_tensordot_forward, _tensordot_backward)


def wide_product(x: Float[Array, "B T I"], kernel: Float[Array, "I O"]) -> Float[Array, "B T O"]:
    """A product that is added up and kept in at least float32."""
    kernel = kernel.astype(x.dtype)
    # JAX's own gradient would multiply float32 with the narrow type.
    return jnp.einsum("BTI,IO->BTO", x, kernel) if is_wide(x) else plain_product(x, kernel, 1, True)


def is_wide(x: Array) -> bool:
    """Whether its type is at least float32."""
    return x.dtype == np.promote_types(x.dtype, np.float32)


# ---- layouts


def transpose_weight(weight: nnx.Variable, lead_axes: int, input_axes: int) -> TransposedParam:
    """[lead, *in, *out] as [lead, *out, in]."""
    kernel = weight[...]
    flat = kernel.reshape(*kernel.shape[:lead_axes], -1, *kernel.shape[lead_axes + input_axes :])
    return TransposedParam(jnp.moveaxis(flat, lead_axes, -1))


def split_weight(weight: nnx.Param, lead_axes: int, input_axes: int) -> nnx.Param:
    """[lead, *in, *out] as [lead, C, in/C, *out]; as it was where parts do not divide the
    inputs."""
    kernel = weight[...]
    if math.prod(kernel.shape[lead_axes : lead_axes + input_axes]) % PART_INPUTS:
        return weight
    return SplitParam(
        kernel.reshape(
            *kernel.shape[:lead_axes], -1, PART_INPUTS, *kernel.shape[lead_axes + input_axes :]
        )
    )


def block_weight(weight: nnx.Variable, lead_axes: int, input_axes: int) -> BlockedParam:
    """[lead, *in, *out] as [lead, C, in, w]."""
    kernel = weight[...]
    outputs = kernel.shape[lead_axes + input_axes :]
    flat = kernel.reshape(*kernel.shape[:lead_axes], -1, math.prod(outputs))
    padded = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % BLOCK_OUTPUTS)])
    blocks = padded.reshape(*flat.shape[:-1], -1, BLOCK_OUTPUTS)
    return BlockedParam(jnp.moveaxis(blocks, -2, lead_axes), outputs=outputs)
