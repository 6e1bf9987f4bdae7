"""Layouts of weights that XLA's CPU kernels are fast with, and products with them; each gives the
numbers of `plain`, its twin."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

BLOCK, PART = 64, 128
"""Outputs of a block: as many as XLA's float32 kernels for AVX-512 make at once, 32 and 128 are
slower. Inputs of a part, likewise."""
FEW = 16
"""Rows from which on a product takes the blocks of a `Blocked` weight one by one: at once, each
needs a copy of all rows."""
MANY = 256
"""Rows from which on a product has a `Transposed` weight on the right: on the left, rows and
results are transposed too."""


class Transposed(nnx.Param):
    """A weight as [*out, in]: the left operand of its product, which is faster on a CPU where few
    rows meet a large weight."""


class Blocked(nnx.Param):
    """A weight as [C, in, w], for products of few rows: blocks of w outputs, the last filled up
    with zeros; `outputs` has their shape."""

    outputs: tuple[int, ...]


class Split(nnx.Param):
    """A weight as [C, in/C, *out], for products of one row, which are the sums of those of its
    parts."""


# ---- products


def times(
    x: Float[Array, "B T *I"], weight: nnx.Variable, inputs: int, wide: bool = False
) -> Float[Array, "B T *O"]:
    """The product of the last `inputs` axes of x with a weight [*in, *out], however it lies; `wide`
    keeps it in at least float32."""
    kernel, count, dtype = weight[...], x.shape[0] * x.shape[1], _result(x, wide)
    matmul = partial(jnp.matmul, preferred_element_type=dtype)
    if isinstance(weight, Blocked):
        rows = x.reshape(count, -1)
        if count < FEW:
            repeated = jnp.broadcast_to(rows, (len(kernel), *rows.shape))
            made = jnp.einsum("cbi,ciw->cbw", repeated, kernel, preferred_element_type=dtype)
        else:
            made = jax.lax.map(lambda block: matmul(rows, block), kernel)
        made = made.transpose(1, 0, 2).reshape(count, -1)[:, : math.prod(weight.outputs)]
        return made.reshape(*x.shape[:2], *weight.outputs)
    if isinstance(weight, Split):
        outputs = kernel.shape[2:]
        if count == 1:
            parts = x.reshape(len(kernel), -1), kernel.reshape(*kernel.shape[:2], -1)
            made = jnp.einsum("ci,cio->co", *parts, preferred_element_type=dtype)
            made = made.sum(axis=0, dtype=dtype)
        else:
            made = matmul(x.reshape(count, -1), kernel.reshape(-1, math.prod(outputs)))
        return made.reshape(*x.shape[:2], *outputs)
    if not isinstance(weight, Transposed):
        return plain(x, kernel.astype(x.dtype), inputs, wide)
    rows, flat = x.reshape(count, -1), kernel.reshape(-1, kernel.shape[-1])
    if count >= MANY:
        return matmul(rows, flat.T).reshape(*x.shape[:2], *kernel.shape[:-1])
    # Barriers: XLA would fold the transposes into the product, which undoes it.
    made = jax.lax.optimization_barrier(matmul(flat, jax.lax.optimization_barrier(rows.T)))
    return made.T.reshape(*x.shape[:2], *kernel.shape[:-1])


def _result(x: Array, wide: bool) -> np.dtype:
    """Type of a product of `x`."""
    return np.promote_types(x.dtype, np.float32) if wide else x.dtype


def _tensordot(
    x: Float[Array, "B T *I"], kernel: Float[Array, "*K"], inputs: int, wide: bool
) -> Float[Array, "B T *O"]:
    return jnp.tensordot(x, kernel, axes=inputs, preferred_element_type=_result(x, wide))


def _tensordot_forward(
    x: Array, kernel: Array, inputs: int, wide: bool
) -> tuple[Array, tuple[Array, Array]]:
    return _tensordot(x, kernel, inputs, wide), (x, kernel)


def _tensordot_backward(
    inputs: int, wide: bool, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, kernel = residuals
    gradient = gradient.astype(x.dtype)  # the products of the backward pass are of the model's type
    rows, outputs = tuple(range(x.ndim - inputs)), tuple(range(inputs, kernel.ndim))
    of_x = jnp.tensordot(gradient, kernel, axes=(tuple(range(len(rows), gradient.ndim)), outputs))
    return of_x, jnp.tensordot(x, gradient, axes=(rows, rows))


# The gradient for the kernel is written as [*in, *out]: of what jax.grad makes of it, a transposed
# product transposed, XLA for CPU copies the larger factor column by column.
plain = jax.custom_vjp(_tensordot, nondiff_argnums=(2, 3))
"""The product of the last axes of x [B T *I] with a weight as it is, [*in, *out]: the twin of all
layouts."""
plain.defvjp(_tensordot_forward, _tensordot_backward)


def wide_product(x: Float[Array, "B T I"], kernel: Float[Array, "I O"]) -> Float[Array, "B T O"]:
    """A product that is added up and kept in at least float32."""
    kernel = kernel.astype(x.dtype)
    # JAX's own gradient would multiply float32 with the narrow type.
    return jnp.einsum("BTI,IO->BTO", x, kernel) if is_wide(x) else plain(x, kernel, 1, True)


def is_wide(x: Array) -> bool:
    """Whether its type is at least float32."""
    return x.dtype == np.promote_types(x.dtype, np.float32)


# ---- layouts


def transposed(weight: nnx.Variable, lead: int, inputs: int) -> Transposed:
    """[lead, *in, *out] as [lead, *out, in]."""
    kernel = weight[...]
    flat = kernel.reshape(*kernel.shape[:lead], -1, *kernel.shape[lead + inputs :])
    return Transposed(jnp.moveaxis(flat, lead, -1))


def split(weight: nnx.Param, lead: int, inputs: int) -> nnx.Param:
    """[lead, *in, *out] as [lead, C, in/C, *out]; as it was where parts do not divide the
    inputs."""
    kernel = weight[...]
    if math.prod(kernel.shape[lead : lead + inputs]) % PART:
        return weight
    return Split(kernel.reshape(*kernel.shape[:lead], -1, PART, *kernel.shape[lead + inputs :]))


def blocked(weight: nnx.Variable, lead: int, inputs: int) -> Blocked:
    """[lead, *in, *out] as [lead, C, in, w]."""
    kernel = weight[...]
    outputs = kernel.shape[lead + inputs :]
    flat = kernel.reshape(*kernel.shape[:lead], -1, math.prod(outputs))
    wide = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % BLOCK)])
    blocks = wide.reshape(*flat.shape[:-1], -1, BLOCK)
    return Blocked(jnp.moveaxis(blocks, -2, lead), outputs=outputs)
