"""Causal attention by tokamax's kernels for NVIDIA GPUs.

`attend_visible` is the equivalent in plain JAX. Only this file uses private modules of tokamax, and
`pyproject.toml` pins the releases that have them.
"""

import functools
import logging
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import backend
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxspec.mesh import TENSOR, device_kind_in_scope, has_gpus_in_scope, shard_map_tensor

MOSAIC, TRITON = "mosaic_gpu", "triton"
# On Blackwell, heads of 256 do not fit the shared memory of the backward kernel.
MAX_HEAD_SIZE = 128
"""Largest head size for which the kernels are used."""
# The backward pass of these kernels reads a mask of all pairs of positions, which takes 576 MiB at
# this length. Micro-batches are shorter.
MAX_TRITON_LENGTH = 24576
"""Largest number of positions for which the Triton kernels are used."""


class _Tokamax(NamedTuple):
    """Private objects of tokamax."""

    # The exported function would silently fall back to an implementation that holds all scores.
    implementations: Any
    """Attention implementations by name."""
    # Only this class can state where a query's text starts. The exported function does not take it.
    mask: Any
    """Class of attention masks."""


@functools.cache
def _import_tokamax() -> _Tokamax | None:
    """Imports tokamax on first use.

    Returns None and warns if the import fails.
    """
    # The import takes seconds, which a run on a CPU should not pay.
    try:
        from tokamax._src.ops.attention import api, base  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        message = (
            "the learner's attention runs in plain JAX, without GPU kernels: cannot import tokamax"
        )
        warnings.warn(
            f"{message} ({error}); install the extra cuda12 or cuda13 with Python 3.12 or newer",
            stacklevel=2,
        )
        return None
    # Without the filter, each trace logs a page-long warning for every shape that tokamax has not
    # timed on this card.
    logging.getLogger("absl").addFilter(
        lambda record: not record.getMessage().startswith("Autotuning cache miss")
    )
    return _Tokamax(api.IMPLEMENTATIONS, base.Mask)


def choose_implementation(
    query: Float[Array, "B T N H"], key: Float[Array, "B T M H"]
) -> str | None:
    """Chooses kernels for the mesh in scope.

    Returns the name of an implementation, or None if none supports these shapes and GPUs.
    """
    if not has_gpus_in_scope():
        return None
    mesh = jax.sharding.get_abstract_mesh()
    # The compiler cannot split a kernel. Mesh axes other than `tensor` must therefore be manual
    # here, and `tensor` must divide the KV heads, as queries need their keys on the same device.
    split_axes = {axis: mesh.shape[axis] for axis in mesh.auto_axes if mesh.shape[axis] > 1}
    splits_by_head = split_axes.keys() <= {TENSOR} and key.shape[2] % split_axes.get(TENSOR, 1) == 0
    if not splits_by_head or query.dtype != jnp.bfloat16 or query.shape[-1] > MAX_HEAD_SIZE:
        return None
    # Each kernel is for one GPU generation, and tokamax looks at the default device only.
    default = backend.get_default_device()
    if default.device_kind != device_kind_in_scope():
        return None
    capability = float(default.compute_capability)
    if 9 <= capability < 11:
        implementation = MOSAIC
    # On Ampere, Ada and small Blackwell cards the Mosaic kernels have no backward pass. Older cards
    # (below 8) have no bfloat16.
    elif capability >= 8 and query.shape[1] <= MAX_TRITON_LENGTH:
        implementation = TRITON
    else:
        return None
    tokamax = _import_tokamax()
    return implementation if tokamax and implementation in tokamax.implementations else None


def attend_causal(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T M H"],
    value: Float[Array, "B T M H"],
    first: Int[Array, "B T"],
    implementation: str,
) -> Float[Array, "B T N H"]:
    """Computes causal attention within texts.

    Each query attends to the keys from `first` to its own position. The result is differentiable.
    `implementation` comes from `choose_implementation`.
    """
    # Does not return the log-sum-exp, as tokamax computes no gradient for it.
    tokamax = _import_tokamax()
    assert tokamax is not None, "choose_implementation names none without tokamax"

    def run_kernel(query: Array, key: Array, value: Array, first: Array) -> Array:
        mask = tokamax.mask(k_start=first[:, None], is_causal=True)
        return tokamax.implementations[implementation](query, key, value, mask=mask)

    by_head = P(None, None, TENSOR)
    return shard_map_tensor(run_kernel, (by_head,) * 3 + (P(),), by_head)(query, key, value, first)
