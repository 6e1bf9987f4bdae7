"""Causal attention of packed texts on NVIDIA GPUs by the kernels of tokamax: what `attend_visible`
does elsewhere in plain JAX.

All that is known here of tokamax's private parts stands in this file; `pyproject.toml` pins the
releases that have them.
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
MAX_HEAD_SIZE = 128
"""Larger heads do not fit the shared memory of the backward kernel on Blackwell (from 256 on)."""
MAX_TRITON_LENGTH = 24576
"""Positions up to which Triton's kernels are taken, more than a micro-batch has: their backward
pass reads a mask of all pairs (here 576 MiB)."""


class _Tokamax(NamedTuple):
    implementations: Any
    """By name. What tokamax exports goes by the name `mosaic` and would fall back, unasked, to all
    scores at once."""
    mask: Any
    """Its mask class, which what tokamax exports cannot be given: the only way to say where a
    query's text starts."""


@functools.cache
def _import_tokamax() -> _Tokamax | None:
    """None where it is not installed. It is imported when first wanted: that takes seconds, and on
    a CPU nobody needs it."""
    try:
        from tokamax._src.ops.attention import api, base  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        message = (
            "the learner's attention runs in plain JAX, without GPU kernels: those of tokamax,"
            " which the extras cuda12 and cuda13"
        )
        warnings.warn(
            f"{message} bring where Python is 3.12 or newer, cannot be imported ({error})",
            stacklevel=2,
        )
        return None
    # It writes a warning of a page for each shape that it has not timed on this card, at every
    # trace.
    logging.getLogger("absl").addFilter(
        lambda record: not record.getMessage().startswith("Autotuning cache miss")
    )
    return _Tokamax(api.IMPLEMENTATIONS, base.Mask)


def choose_implementation(
    query: Float[Array, "B T N H"], key: Float[Array, "B T M H"]
) -> str | None:
    """The kernels that attend on the GPUs of the mesh in scope; None: none do."""
    if not has_gpus_in_scope():
        return None
    mesh = jax.sharding.get_abstract_mesh()
    # Neither is split by itself: other axes than `tensor` must be manual here, and a head's queries
    # stay with its keys.
    split_axes = {axis: mesh.shape[axis] for axis in mesh.auto_axes if mesh.shape[axis] > 1}
    splits_by_head = split_axes.keys() <= {TENSOR} and key.shape[2] % split_axes.get(TENSOR, 1) == 0
    if not splits_by_head or query.dtype != jnp.bfloat16 or query.shape[-1] > MAX_HEAD_SIZE:
        return None
    # Kernels are written for a generation, and tokamax asks the default device for its own.
    default = backend.get_default_device()
    if default.device_kind != device_kind_in_scope():
        return None
    capability = float(default.compute_capability)
    if 9 <= capability < 11:
        implementation = MOSAIC
    # On Ampere, Ada and the small Blackwell cards Mosaic's kernels have no backward pass; before
    # them, there is no bfloat16.
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
    """Attention of each query to the keys from `first` to its own position, by one of tokamax's
    implementations.

    Gradients pass through it; a log-sum-exp would come without one, so it is not offered.
    """
    tokamax = _import_tokamax()
    assert tokamax is not None, "whoever names an implementation has found it"

    def run_kernel(query: Array, key: Array, value: Array, first: Array) -> Array:
        mask = tokamax.mask(k_start=first[:, None], is_causal=True)
        return tokamax.implementations[implementation](query, key, value, mask=mask)

    by_head = P(None, None, TENSOR)
    return shard_map_tensor(run_kernel, (by_head,) * 3 + (P(),), by_head)(query, key, value, first)
