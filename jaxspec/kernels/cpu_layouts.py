"""Weight layouts for fast products on CPUs.

Each product is equivalent to `plain_product` with the original weight.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

# XLA's float32 kernels for AVX-512 compute 64 outputs at once. Blocks of 32 or 128 are slower.
BLOCK_OUTPUTS, PART_INPUTS = 64, 128
"""Outputs of a block of a `BlockedParam`, and inputs of a part of a `SplitParam`."""
# A product with all blocks at once copies the rows for each block, which is cheap if rows are few.
BLOCK_LOOP_ROWS = 16
"""Number of rows from which the blocks of a `BlockedParam` are multiplied one by one."""
# As the left operand, the weight needs transposed rows and gives transposed results.
RIGHT_OPERAND_ROWS = 256
"""Number of rows from which a `TransposedParam` is the right operand of its product."""


class TransposedParam(nnx.Param):
    """Weight stored as [*out, in].

    On a CPU, products of a few rows with a large weight are faster with the weight on the left.
    """


class BlockedParam(nnx.Param):
    """Weight stored as [C, in, w].

    This layout is for products of a few rows. It has C blocks of w outputs. The last block is
    padded with zeros.
    """

    outputs: tuple[int, ...]
    """Shape of the outputs, without padding."""


class SplitParam(nnx.Param):
    """Weight stored as [C, in/C, *out].

    This layout is for products of one row. The products of the C parts are added up.
    """


# ---- products


def layout_product(
    x: Float[Array, "B T *I"], weight: nnx.Variable, input_axes: int, wide_output: bool = False
) -> Float[Array, "B T *O"]:
    """Multiplies `x` by a weight in any layout.

    The weight is [*in, *out] in the plain layout. The product sums over the last `input_axes` axes
    of `x`. With `wide_output` the result is kept in at least float32.
    """
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
        # Parts speed up products of a single row only.
        if count == 1:
            operands = x.reshape(len(kernel), -1), kernel.reshape(*kernel.shape[:2], -1)
            result = jnp.einsum("ci,cio->co", *operands, preferred_element_type=dtype)
            result = result.sum(axis=0, dtype=dtype)
        else:
            result = matmul(x.reshape(count, -1), kernel.reshape(-1, math.prod(output_shape)))
        return result.reshape(*x.shape[:2], *output_shape)
    if not isinstance(weight, TransposedParam):
        # Master weights may have a wider type than the activations.
        return plain_product(x, kernel.astype(x.dtype), input_axes, wide_output)
    rows, flat = x.reshape(count, -1), kernel.reshape(-1, kernel.shape[-1])
    if count >= RIGHT_OPERAND_ROWS:
        return matmul(rows, flat.T).reshape(*x.shape[:2], *kernel.shape[:-1])
    # Without the barriers XLA would fold the transposes into the product, and so undo the layout.
    result = jax.lax.optimization_barrier(matmul(flat, jax.lax.optimization_barrier(rows.T)))
    return result.T.reshape(*x.shape[:2], *kernel.shape[:-1])


def _result_dtype(x: Array, wide_output: bool) -> np.dtype:
    """Returns the result type of a product."""
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
    # A float32 gradient would make both products float32, which is slow for a bfloat16 model.
    gradient = gradient.astype(x.dtype)
    row_axes, output_axes = tuple(range(x.ndim - input_axes)), tuple(range(input_axes, kernel.ndim))
    x_gradient = jnp.tensordot(
        gradient, kernel, axes=(tuple(range(len(row_axes), gradient.ndim)), output_axes)
    )
    return x_gradient, jnp.tensordot(x, gradient, axes=(row_axes, row_axes))


# The custom gradient computes the weight's gradient directly as [*in, *out]. `jax.grad` would
# transpose a product, for which XLA's CPU backend copies the larger factor column by column.
plain_product = jax.custom_vjp(_tensordot, nondiff_argnums=(2, 3))
"""Multiplies the last axes of x [B T *I] by a weight in the original layout [*in, *out]."""
plain_product.defvjp(_tensordot_forward, _tensordot_backward)


def wide_product(x: Float[Array, "B T I"], kernel: Float[Array, "I O"]) -> Float[Array, "B T O"]:
    """Multiplies `x` by a weight, with results in at least float32."""
    kernel = kernel.astype(x.dtype)
    # For narrow types, JAX's own gradient would multiply float32 by the narrow type.
    return jnp.einsum("BTI,IO->BTO", x, kernel) if is_wide(x) else plain_product(x, kernel, 1, True)


def is_wide(x: Array) -> bool:
    """Returns whether `x` is float32 or wider."""
    return x.dtype == np.promote_types(x.dtype, np.float32)


# ---- layouts


def transpose_weight(weight: nnx.Variable, lead_axes: int, input_axes: int) -> TransposedParam:
    """Converts a weight [lead, *in, *out] to [lead, *out, in]."""
    kernel = weight[...]
    flat = kernel.reshape(*kernel.shape[:lead_axes], -1, *kernel.shape[lead_axes + input_axes :])
    return TransposedParam(jnp.moveaxis(flat, lead_axes, -1))


def split_weight(weight: nnx.Param, lead_axes: int, input_axes: int) -> nnx.Param:
    """Converts a weight [lead, *in, *out] to [lead, C, in/C, *out].

    Returns the weight unchanged if `PART_INPUTS` does not divide the number of inputs.
    """
    kernel = weight[...]
    if math.prod(kernel.shape[lead_axes : lead_axes + input_axes]) % PART_INPUTS:
        return weight
    return SplitParam(
        kernel.reshape(
            *kernel.shape[:lead_axes], -1, PART_INPUTS, *kernel.shape[lead_axes + input_axes :]
        )
    )


def block_weight(weight: nnx.Variable, lead_axes: int, input_axes: int) -> BlockedParam:
    """Converts a weight [lead, *in, *out] to [lead, C, in, w]."""
    kernel = weight[...]
    outputs = kernel.shape[lead_axes + input_axes :]
    flat = kernel.reshape(*kernel.shape[:lead_axes], -1, math.prod(outputs))
    padded = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % BLOCK_OUTPUTS)])
    blocks = padded.reshape(*flat.shape[:-1], -1, BLOCK_OUTPUTS)
    return BlockedParam(jnp.moveaxis(blocks, -2, lead_axes), outputs=outputs)
