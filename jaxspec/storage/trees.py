"""Trees of arrays on their way to disk: leaves by name, how two layouts differ, and digests of what
the arrays hold."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxspec.inputs.checked import ConfigError
from jaxspec.state import PyTree

_SHOWN_DIFFERENCES = 5
_STRIDE = 0x9E3779B1
"""An odd number: elements of the same bits at different places are different."""

Layout = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each array, by name."""


def named(tree: PyTree) -> dict[str, Any]:
    """Leaves by dotted path, so that files depend on no Python class; None is no leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(found) != len(leaves):
        raise ValueError(
            f"{len(leaves)} arrays share {len(found)} names; keys with dots in them clash with"
            " nested ones"
        )
    return found


def layout(leaves: Mapping[str, Any]) -> Layout:
    """Shapes and dtypes of named leaves."""
    return {name: (tuple(leaf.shape), np.dtype(leaf.dtype).name) for name, leaf in leaves.items()}


def require_same(where: str, stored: Layout, wanted: Layout, remedy: str) -> None:
    """Raises ConfigError that names the arrays in which two layouts differ."""
    differences = [f"{name} is missing" for name in sorted(wanted.keys() - stored.keys())]
    differences += [
        f"{name} is not part of this run" for name in sorted(stored.keys() - wanted.keys())
    ]
    for name in sorted(wanted.keys() & stored.keys()):
        if stored[name] != wanted[name]:
            (shape, dtype), (wanted_shape, wanted_dtype) = stored[name], wanted[name]
            differences.append(
                f"{name} is {dtype}{list(shape)}, this run needs {wanted_dtype}{list(wanted_shape)}"
            )
    if differences:
        more = differences[_SHOWN_DIFFERENCES:]
        shown = "; ".join(differences[:_SHOWN_DIFFERENCES]) + (
            f"; and {len(more)} more" if more else ""
        )
        raise ConfigError(f"{where} was written by another config: {shown}. {remedy}")


def brought_together(tree: PyTree) -> PyTree:
    """The arrays of a tree in process 0, whole, on the host; nothing elsewhere, though all
    processes call it: one array after the other is made whole on the devices."""

    def one(leaf: Any) -> np.ndarray | None:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            assert isinstance(leaf.sharding, NamedSharding), "as all arrays of several processes"
            leaf = jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, jax.P()))
        return np.asarray(leaf) if jax.process_index() == 0 else None

    return jax.tree.map(one, tree)


def digests(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """A number of 32 bits for each array, the same on any mesh and in every process, which all call
    this together.

    A change of a single element of up to 32 bits gives another number, any other change does but
    for one chance in 2^32. Arrays are summed up where they are, without being gathered; those of a
    lone process on CPUs by NumPy, which needs no compiler.
    """
    here = jax.process_count() == 1 and all(
        device.platform == "cpu" for leaf in leaves.values() for device in leaf.devices()
    )
    if here:
        return {name: int(_digest(np, np.asarray(leaf))) for name, leaf in leaves.items()}
    meshes = [
        leaf.sharding.mesh for leaf in leaves.values() if isinstance(leaf.sharding, NamedSharding)
    ]
    everywhere = NamedSharding(meshes[0], jax.P()) if meshes else None
    made = _compiled(everywhere)(list(leaves.values()))
    return {name: int(number) for name, number in zip(leaves, jax.device_get(made), strict=True)}


@functools.cache
def _compiled(everywhere: NamedSharding | None) -> Any:
    return jax.jit(
        lambda arrays: [_digest(jnp, array) for array in arrays], out_shardings=everywhere
    )


def _digest(library: Any, array: Any) -> Any:
    """The sum modulo 2^32 of an array's bits, each element mixed with its place in the whole array:
    the last steps of MurmurHash3."""
    array = library.atleast_1d(array)
    mixed = array.view(np.dtype(f"uint{8 * min(4, array.dtype.itemsize)}")).astype(np.uint32)
    for axis, size in enumerate(mixed.shape):
        stride = np.uint32(math.prod(mixed.shape[axis + 1 :]) * _STRIDE % 2**32)
        mixed = (
            mixed
            + library.arange(size, dtype=np.uint32).reshape([-1] + [1] * (mixed.ndim - axis - 1))
            * stride
        )
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return library.sum(mixed, dtype=np.uint32)
