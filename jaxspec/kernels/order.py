"""An order among the collectives of one program, for CPUs.

XLA's CPU runtime starts whatever has its inputs. Two collectives side by side it starts in one
order on all devices, but a loop (or a conditional) counts as started as soon as it waits: a
collective inside may then run beside one outside, in another order on another device, until all
threads of the machine wait for each other. So wherever loops have collectives, what comes before
and after is tied to them by data; `lax.optimization_barrier` is gone by the time a program runs.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool

from jaxspec.mesh import ROLLOUT_RULES, TENSOR, accelerated, on_each_member, shardings

WHOLE = P()
Sign = Bool[Array, ""]
"""True, once something is there."""


def needed_on(mesh: Mesh) -> bool:
    """Whether a program for this mesh must keep the order by itself."""
    return mesh.size > 1 and not accelerated(mesh)


def computed(leaf: Array, spec: P = WHOLE) -> Sign:
    """A sign of `leaf`; where `spec` splits it over `tensor`, inside a `shard_map` that is manual
    over `data`."""

    def here(part: Array) -> Sign:
        # of an integer the compiler knows that it equals itself
        value = part[(0,) * part.ndim].astype(np.float32)
        return (value == value) | (value != value)  # always; the compiler does not see it

    if TENSOR not in tuple(spec):
        return here(leaf)
    # Each member looks at its own part, and finds what the others find.
    peers = P(*(TENSOR if axis == TENSOR else None for axis in spec))
    return on_each_member(here, peers, P())(leaf)


def all_computed(tree: Any, mesh: Mesh, axes: Mapping[str, tuple[str | None, ...]]) -> Sign:
    """Returns a sign of all leaves of `tree`, which lie as generation reads them."""

    def here(tree: Any) -> Sign:
        return jnp.all(jnp.stack([computed(part) for part in jax.tree.leaves(tree) if part.size]))

    layout = shardings(mesh, tree, axes, ROLLOUT_RULES)
    specs = jax.tree.map(lambda sharding: sharding.spec, layout)
    return jax.shard_map(here, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)(tree)


def after(value: Array, signs: list[Sign]) -> Array:
    """The value with a data dependency on `signs`: what is made of it, collectives included, starts
    only when the arrays that these were computed of exist."""
    return jnp.where(jnp.all(jnp.stack(signs)), value, jnp.zeros_like(value)) if signs else value


@jax.custom_vjp
def sequence(early: tuple[Array, ...], late: Array) -> tuple[tuple[Array, ...], Array]:
    """All as they are: whatever is made of `late` comes after `early`, and in the backward pass the
    other way round."""
    return early, after(late, list(map(computed, early)))


def _backwards(
    _: None, cotangents: tuple[tuple[Array, ...], Array]
) -> tuple[tuple[Array, ...], Array]:
    early, late = cotangents
    return tuple(after(each, [computed(late)]) for each in early), late


sequence.defvjp(lambda early, late: (sequence(early, late), None), _backwards)
