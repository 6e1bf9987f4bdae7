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

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

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
Values = TypeVar("Values")
"""Any tree of arrays."""
Early = TypeVar("Early")
Late = TypeVar("Late")


@dataclasses.dataclass(frozen=True)
class CollectiveOrder:
    """Order of a mesh's collectives.

    Where the runtime needs no order, methods return their values unchanged.
    """

    mesh: Mesh

    @property
    def is_needed(self) -> bool:
        """Whether programs must order their collectives."""
        # The deadlock is one of XLA's CPU runtime. Accelerators and single devices need no order.
        return self.mesh.size > 1 and not has_accelerators(self.mesh)

    def run_after(self, values: Values, results: Any) -> Values:
        """Returns `values`, which are read only once all leaves of `results` exist."""
        return self.run_after_shards(
            values, [(leaf, REPLICATED) for leaf in jax.tree.leaves(results)]
        )

    def run_after_shards(self, values: Values, shards: Sequence[tuple[Array, P]]) -> Values:
        """Returns `values`, which are read only once all `shards` exist.

        Each has its spec. If one names `tensor`, the caller must be inside `shard_map_rows`.
        """
        if not self.is_needed:
            return values
        return add_dependency(values, [signal_ready(leaf, spec) for leaf, spec in shards])

    def run_after_networks(self, values: Values, networks: Any) -> Values:
        """Returns `values`, which are read only once all weights exist.

        The weights are sharded by `ROLLOUT_RULES`.
        """
        if not self.is_needed:
            return values

        def signal_shards(networks: Any) -> ReadySignal:
            # Empty leaves have no element to depend on.
            leaves = [leaf for leaf in jax.tree.leaves(networks) if leaf.size]
            return jnp.all(jnp.stack(list(map(signal_ready, leaves))))

        layout = assign_shardings(self.mesh, networks, ROLLOUT_RULES)
        specs = jax.tree.map(lambda sharding: sharding.spec, layout)
        signal_networks = jax.shard_map(
            signal_shards, mesh=self.mesh, in_specs=(specs,), out_specs=P(), check_vma=False
        )
        return add_dependency(values, [signal_networks(networks)])

    def put_in_order(self, early: Early, late: Late) -> tuple[Early, Late]:
        """Returns both values, of which `late` is read only once `early` exists.

        The backward pass has the reverse order: gradients of `early` wait for those of `late`.
        """
        return _put_in_order(early, late) if self.is_needed else (early, late)


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


def add_dependency(values: Values, signals: list[ReadySignal]) -> Values:
    """Returns `values`, with a data dependency on `signals`.

    Operations on the result, collectives included, start only once the signals are available.
    """
    if not signals:
        return values
    all_ready = jnp.all(jnp.stack(signals))
    return jax.tree.map(lambda leaf: jnp.where(all_ready, leaf, jnp.zeros_like(leaf)), values)


@jax.custom_vjp
def _put_in_order(early: Early, late: Late) -> tuple[Early, Late]:
    return early, add_dependency(late, list(map(signal_ready, jax.tree.leaves(early))))


def _put_in_order_backward(_: None, gradients: tuple[Early, Late]) -> tuple[Early, Late]:
    early, late = gradients
    return add_dependency(early, list(map(signal_ready, jax.tree.leaves(late)))), late


_put_in_order.defvjp(lambda early, late: (_put_in_order(early, late), None), _put_in_order_backward)
