"""Parts of the networks, and the logical axes of every weight by name."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

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
    "expert_gate": (None, None, "embed", "ffn"),
    "expert_up": (None, None, "embed", "ffn"),
    "expert_down": (None, None, "ffn", "embed"),
    "fuse": (None, "embed"),
    "project": (None, None, "embed"),
}
"""Axes of each weight that is sharded, by attribute name; the first axis of a layer's weights is
its place in the stack."""


class Heads(NamedTuple):
    """Rotated queries and keys, and values, of a block in a draft layer, and the stream that the
    layer adds its output to."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B T M H"]
    value: Float[Array, "B T M H"]
    residual: Float[Array, "B T D"]


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


class LowRank(nnx.Module):
    """A weight with an adapter beside it: its product is x @ base + scale * (x @ a) @ b."""

    def __init__(self, base: nnx.Variable, a: nnx.Variable, b: nnx.Variable, scale: float):
        self.base, self.a, self.b, self.scale = base, a, b, scale


Weight = nnx.Variable | LowRank
"""What `product` takes, however it lies."""
FEW = 16
"""Rows from which on a product takes the blocks of a `Blocked` weight one by one: at once, each
needs a copy of all rows."""
MANY = 256
"""Rows from which on a product has a `Transposed` weight on the right: on the left, rows and
results are transposed too."""


def product(x: Float[Array, "B T *I"], weight: Weight, inputs: int = 1) -> Float[Array, "B T *O"]:
    """The product of the last `inputs` axes of x with a weight [*in, *out] however it lies."""
    if isinstance(weight, LowRank):
        adapted = product(product(x, weight.a, inputs), weight.b)
        return product(x, weight.base, inputs) + adapted * np.asarray(weight.scale, adapted.dtype)
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
        return _times(x, kernel.astype(x.dtype), inputs)
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
    inputs: int, kept: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, kernel = kept
    rows, outputs = tuple(range(x.ndim - inputs)), tuple(range(inputs, kernel.ndim))
    of_x = jnp.tensordot(gradient, kernel, axes=(tuple(range(len(rows), gradient.ndim)), outputs))
    return of_x, jnp.tensordot(x, gradient, axes=(rows, rows))


# The gradient for the kernel is written as [*in, *out]: of what jax.grad makes of it, a transposed
# product transposed, XLA for CPU copies the larger factor column by column.
_times = jax.custom_vjp(_tensordot, nondiff_argnums=(2,))
_times.defvjp(_tensordot_forward, _tensordot_backward)


def cast(network: Any, dtype: Any) -> Any:
    """The network with its floating leaves in `dtype`."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
        network,
    )


def dense(
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
    return _rms_norm(x, weight, eps)


def _norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight


def _norm_forward(x: Array, weight: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    return _norm(x, weight, eps), (x, weight)


def _norm_backward(eps: float, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    # Axes stay apart: one that is split over devices would be gathered to be merged with another.
    x, weight = kept
    rows = x.astype(np.promote_types(x.dtype, np.float32))
    rate = jax.lax.rsqrt(_row_means(rows * rows) + eps)
    unit = rows * rate
    incoming = (gradient * weight).astype(rows.dtype)
    of_x = rate * (incoming - unit * _row_means(incoming * unit))
    by_row = gradient.astype(rows.dtype) * unit
    lead = by_row.shape[: by_row.ndim - weight.ndim]
    of_weight = jnp.tensordot(
        jnp.ones(lead, rows.dtype), by_row, axes=len(lead), precision="highest"
    )
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


def _row_means(rows: Float[Array, "*B D"]) -> Float[Array, "*B 1"]:
    return jnp.matmul(
        rows, jnp.full((rows.shape[-1], 1), 1 / rows.shape[-1], rows.dtype), precision="highest"
    )


_rms_norm = jax.custom_vjp(_norm, nondiff_argnums=(2,))
_rms_norm.defvjp(_norm_forward, _norm_backward)


def swiglu(
    x: Float[Array, "B T D"], gate: Weight, up: Weight, down: Weight
) -> Float[Array, "B T D"]:
    """Gated feed-forward layer (Shazeer, arXiv 2002.05202)."""
    return product(jax.nn.silu(product(x, gate)) * product(x, up), down)
