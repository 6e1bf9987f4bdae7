"""Trees of arrays: their names, layouts and digests."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxspec.inputs.checked import ConfigError
from jaxspec.processes import roles
from jaxspec.state import PyTree

_MAX_DIFFERENCES = 5
"""Maximum number of differences in an error message."""
_STRIDE = 0x9E3779B1
"""Odd factor of positions in digests, so that equal elements at different positions differ."""

ArrayLayout = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each array, by name."""


def leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves by dotted path. None is no leaf.

    Raises:
      ValueError: two leaves have the same path.
    """
    # Paths have no names of Python classes, so that renaming a class keeps files readable.
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named_leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves
    }
    if len(named_leaves) != len(leaves):
        raise ValueError(
            f"{len(leaves)} arrays share {len(named_leaves)} names; rename keys with dots, which"
            " clash with nested ones"
        )
    return named_leaves


def array_layout(leaves: Mapping[str, Any]) -> ArrayLayout:
    """Returns shapes and dtypes of named leaves."""
    return {name: (tuple(leaf.shape), np.dtype(leaf.dtype).name) for name, leaf in leaves.items()}


def require_same_layout(
    source: str, stored: ArrayLayout, expected: ArrayLayout, remedy: str
) -> None:
    """Checks that two layouts are equal.

    Raises:
      ConfigError: they differ. The message names the first arrays that do.
    """
    differences = [f"{name} is missing" for name in sorted(expected.keys() - stored.keys())]
    differences += [
        f"{name} is not part of this run" for name in sorted(stored.keys() - expected.keys())
    ]
    for name in sorted(expected.keys() & stored.keys()):
        if stored[name] != expected[name]:
            (shape, dtype), (expected_shape, expected_dtype) = stored[name], expected[name]
            differences.append(
                f"{name} is {dtype}{list(shape)}, this run needs"
                f" {expected_dtype}{list(expected_shape)}"
            )
    if differences:
        hidden = differences[_MAX_DIFFERENCES:]
        shown = "; ".join(differences[:_MAX_DIFFERENCES]) + (
            f"; and {len(hidden)} more" if hidden else ""
        )
        raise ConfigError(f"{source} was written by another config: {shown}. {remedy}")


def gather_to_process_0(tree: PyTree) -> PyTree:
    """Gathers a tree of arrays on process 0's host.

    All processes call it. Processes other than 0 get None for each leaf.
    """

    def gather_leaf(leaf: Any) -> np.ndarray | None:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            assert isinstance(leaf.sharding, NamedSharding), "as all arrays of several processes"
            # Arrays are replicated on the devices one at a time, so that only one is held in full.
            leaf = jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, jax.P()))
        return np.asarray(leaf) if jax.process_index() == 0 else None

    return jax.tree.map(gather_leaf, tree)


def digest_arrays(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """Computes a digest of 32 bits per array.

    It is the same on any mesh and in every process. All processes call it together. A change of a
    single element of up to 32 bits always changes the digest. Any other change is missed with a
    probability of 2^-32. Arrays are not gathered.
    """
    # NumPy needs no compilation.
    is_local = roles.member_count() == 1 and all(
        device.platform == "cpu" for leaf in leaves.values() for device in leaf.devices()
    )
    if is_local:
        return {name: int(_digest_array(np, np.asarray(leaf))) for name, leaf in leaves.items()}
    meshes = [
        leaf.sharding.mesh for leaf in leaves.values() if isinstance(leaf.sharding, NamedSharding)
    ]
    replicated = NamedSharding(meshes[0], jax.P()) if meshes else None
    device_digests = _compile_digests(replicated)(list(leaves.values()))
    return {
        name: int(digest)
        for name, digest in zip(leaves, jax.device_get(device_digests), strict=True)
    }


@functools.cache
def _compile_digests(replicated: NamedSharding | None) -> Any:
    return jax.jit(
        lambda arrays: [_digest_array(jnp, array) for array in arrays], out_shardings=replicated
    )


def _digest_array(library: Any, array: Any) -> Any:
    """Returns the digest of an array.

    It is the sum modulo 2^32 of all elements, each mixed with its position by the final steps of
    MurmurHash3. `library` is NumPy or `jax.numpy`.
    """
    array = library.atleast_1d(array)
    # The steps of mixing have 32 bits, so wider elements are split into several.
    mixed = array.view(np.dtype(f"uint{8 * min(4, array.dtype.itemsize)}")).astype(np.uint32)
    for axis, size in enumerate(mixed.shape):
        stride = np.uint32(math.prod(mixed.shape[axis + 1 :]) * _STRIDE % 2**32)
        # The position in the flattened array is added axis by axis. A reshape to one axis would
        # gather a sharded array.
        mixed = (
            mixed
            + library.arange(size, dtype=np.uint32).reshape([-1] + [1] * (mixed.ndim - axis - 1))
            * stride
        )
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    # A sum does not depend on the order, so that shards can be summed independently.
    return library.sum(mixed, dtype=np.uint32)
