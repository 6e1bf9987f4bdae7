"""Data dependencies that order collectives on CPUs.

XLA's CPU runtime starts each operation once its inputs exist. A collective inside a loop or
conditional may therefore run in parallel with one outside. Devices may run the two in different
orders, and then wait for each other forever. Data dependencies before and after such loops prevent
this deadlock.
"""

# Not `lax.optimization_barrier`: XLA has removed it by the time the program runs.
#
# Not a transform of the traced program either. It would have to guess where the compiler adds
# collectives of its own over `tensor`. Programs for 4 x 2 devices then compile half as long again.

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
"""True, available only once the arrays that it depends on exist."""


def needs_ordering(mesh: Mesh) -> bool:
    """Whether programs must order their collectives."""
    # The deadlock is one of XLA's CPU runtime. Accelerators and single devices need no order.
    return mesh.size > 1 and not has_accelerators(mesh)


def signal_ready(leaf: Array, spec: P = REPLICATED) -> ReadySignal:
    """Returns a signal that depends on `leaf`.

    If `spec` splits `leaf` over `tensor`, the caller must be inside `shard_map_rows`.
    """

    def signal_shard(shard: Array) -> ReadySignal:
        # The compiler knows that an integer equals itself, but a float may be NaN.
        value = shard[(0,) * shard.ndim].astype(np.float32)
        # Always true, but the compiler does not simplify it, so that the dependency remains.
        return (value == value) | (value != value)

    if TENSOR not in tuple(spec):
        return signal_shard(leaf)
    # Each member reads its own shard. The signal is True on all members, hence replicated.
    shard_spec = P(*(TENSOR if axis == TENSOR else None for axis in spec))
    return shard_map_tensor(signal_shard, shard_spec, P())(leaf)


def signal_all_ready(tree: Any, mesh: Mesh) -> ReadySignal:
    """Returns a signal that depends on all leaves.

    They are sharded by `ROLLOUT_RULES`.
    """

    def signal_local(tree: Any) -> ReadySignal:
        # Empty leaves have no element to depend on.
        return jnp.all(
            jnp.stack([signal_ready(leaf) for leaf in jax.tree.leaves(tree) if leaf.size])
        )

    layout = assign_shardings(mesh, tree, ROLLOUT_RULES)
    specs = jax.tree.map(lambda sharding: sharding.spec, layout)
    return jax.shard_map(
        signal_local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
    )(tree)


def order_after(value: Array, signals: list[ReadySignal]) -> Array:
    """Returns `value`, with a data dependency on `signals`.

    Operations on the result, collectives included, start only once the signals are available.
    """
    return (
        jnp.where(jnp.all(jnp.stack(signals)), value, jnp.zeros_like(value)) if signals else value
    )


@jax.custom_vjp
def enforce_order(early: tuple[Array, ...], late: Array) -> tuple[tuple[Array, ...], Array]:
    """Orders operations on `late` after `early`; returns both unchanged.

    The backward pass has the reverse order: gradients of `early` wait for that of `late`.
    """
    return early, order_after(late, list(map(signal_ready, early)))


def _enforce_order_backward(
    _: None, cotangents: tuple[tuple[Array, ...], Array]
) -> tuple[tuple[Array, ...], Array]:
    early, late = cotangents
    return tuple(order_after(value, [signal_ready(late)]) for value in early), late


enforce_order.defvjp(
    lambda early, late: (enforce_order(early, late), None), _enforce_order_backward
)
