"""Layouts of weights that XLA's CPU kernels are fast with, and products with them; each gives the
numbers of `plain`, its twin."""

import math

import jax
import jax.numpy as jnp
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


def times(x: Float[Array, "B T *I"], weight: nnx.Variable, inputs: int) -> Float[Array, "B T *O"]:
    """The product of the last `inputs` axes of x with a weight [*in, *out], however it lies."""
    kernel, count = weight[...], x.shape[0] * x.shape[1]
    if isinstance(weight, Blocked):
        rows = x.reshape(count, -1)
        if count < FEW:
            made = jnp.einsum(
                "cbi,ciw->cbw", jnp.broadcast_to(rows, (len(kernel), *rows.shape)), kernel
            )
        else:
            made = jax.lax.map(lambda block: rows @ block, kernel)
        made = made.transpose(1, 0, 2).reshape(count, -1)[:, : math.prod(weight.outputs)]
        return made.reshape(*x.shape[:2], *weight.outputs)
    if isinstance(weight, Split):
        outputs = kernel.shape[2:]
        if count == 1:
            made = jnp.einsum(
                "ci,cio->co", x.reshape(len(kernel), -1), kernel.reshape(*kernel.shape[:2], -1)
            ).sum(axis=0, dtype=x.dtype)
        else:
            made = x.reshape(count, -1) @ kernel.reshape(-1, math.prod(outputs))
        return made.reshape(*x.shape[:2], *outputs)
    if not isinstance(weight, Transposed):
        return plain(x, kernel.astype(x.dtype), inputs)
    rows, flat = x.reshape(count, -1), kernel.reshape(-1, kernel.shape[-1])
    if count >= MANY:
        return (rows @ flat.T).reshape(*x.shape[:2], *kernel.shape[:-1])
    # Barriers: XLA would fold the transposes into the product, which undoes it.
    made = jax.lax.optimization_barrier(flat @ jax.lax.optimization_barrier(rows.T))
    return made.T.reshape(*x.shape[:2], *kernel.shape[:-1])


def _tensordot(
    x: Float[Array, "B T *I"], kernel: Float[Array, "*K"], inputs: int
) -> Float[Array, "B T *O"]:
    return jnp.tensordot(x, kernel, axes=inputs)


def _tensordot_forward(x: Array, kernel: Array, inputs: int) -> tuple[Array, tuple[Array, Array]]:
    return jnp.tensordot(x, kernel, axes=inputs), (x, kernel)


def _tensordot_backward(
    inputs: int, residuals: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, kernel = residuals
    rows, outputs = tuple(range(x.ndim - inputs)), tuple(range(inputs, kernel.ndim))
    of_x = jnp.tensordot(gradient, kernel, axes=(tuple(range(len(rows), gradient.ndim)), outputs))
    return of_x, jnp.tensordot(x, gradient, axes=(rows, rows))


# The gradient for the kernel is written as [*in, *out]: of what jax.grad makes of it, a transposed
# product transposed, XLA for CPU copies the larger factor column by column.
plain = jax.custom_vjp(_tensordot, nondiff_argnums=(2,))
"""The product of the last axes of x [B T *I] with a weight as it is, [*in, *out]: the twin of all
layouts."""
plain.defvjp(_tensordot_forward, _tensordot_backward)


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
