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

from jaxspec.mesh import ROLLOUT_RULES, TENSOR, assign_shardings, has_accelerators, shard_map_tensor

REPLICATED = P()
ReadySignal = Bool[Array, ""]
"""True, once something is there."""


def needs_ordering(mesh: Mesh) -> bool:
    """Whether a program for this mesh must keep the order by itself."""
    return mesh.size > 1 and not has_accelerators(mesh)


def signal_ready(leaf: Array, spec: P = REPLICATED) -> ReadySignal:
    """A sign of `leaf`; where `spec` splits it over `tensor`, inside a `shard_map` that is manual
    over `data`."""

    def signal_shard(shard: Array) -> ReadySignal:
        # of an integer the compiler knows that it equals itself
        value = shard[(0,) * shard.ndim].astype(np.float32)
        return (value == value) | (value != value)  # always; the compiler does not see it

    if TENSOR not in tuple(spec):
        return signal_shard(leaf)
    # Each member looks at its own part, and finds what the others find.
    shard_spec = P(*(TENSOR if axis == TENSOR else None for axis in spec))
    return shard_map_tensor(signal_shard, shard_spec, P())(leaf)


def signal_all_ready(
    tree: Any, mesh: Mesh, axes: Mapping[str, tuple[str | None, ...]]
) -> ReadySignal:
    """Returns a sign of all leaves of `tree`, which lie as generation reads them."""

    def signal_local(tree: Any) -> ReadySignal:
        return jnp.all(
            jnp.stack([signal_ready(leaf) for leaf in jax.tree.leaves(tree) if leaf.size])
        )

    layout = assign_shardings(mesh, tree, axes, ROLLOUT_RULES)
    specs = jax.tree.map(lambda sharding: sharding.spec, layout)
    return jax.shard_map(
        signal_local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
    )(tree)


def order_after(value: Array, signals: list[ReadySignal]) -> Array:
    """The value with a data dependency on `signals`: what is made of it, collectives included,
    starts only when the arrays that these were computed of exist."""
    return (
        jnp.where(jnp.all(jnp.stack(signals)), value, jnp.zeros_like(value)) if signals else value
    )


@jax.custom_vjp
def enforce_order(early: tuple[Array, ...], late: Array) -> tuple[tuple[Array, ...], Array]:
    """All as they are: whatever is made of `late` comes after `early`, and in the backward pass the
    other way round."""
    return early, order_after(late, list(map(signal_ready, early)))


def _enforce_order_backward(
    _: None, cotangents: tuple[tuple[Array, ...], Array]
) -> tuple[tuple[Array, ...], Array]:
    early, late = cotangents
    return tuple(order_after(value, [signal_ready(late)]) for value in early), late


enforce_order.defvjp(
    lambda early, late: (enforce_order(early, late), None), _enforce_order_backward
)
