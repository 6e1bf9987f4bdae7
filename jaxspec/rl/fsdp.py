"""Collectives of weights and gradients (FSDP).

A weight is gathered when it is used. Its gradient is summed and scattered again. On CPUs these
collectives are ordered. Experts are not gathered over the axis `expert`: tokens are sent to them
(`models/moe.py`). Their gradients cover the tokens of all members, and are summed over `data`
only.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxspec.kernels.order import CollectiveOrder
from jaxspec.mesh import DATA, ROWS, TENSOR, entry_axes, shard_map_tensor
from jaxspec.models.decoder import Decoder, Layers
from jaxspec.models.lora import AdaptedDecoder, attach_lora
from jaxspec.state import Pack, PyTree

NetworkPair = tuple[PyTree, PyTree]
"""Values of policy and draft: networks, their gradients or their specs."""

OUTSIDE = ("embedding", "norm", "head")
"""Names of a decoder's weights outside its layers."""


@dataclasses.dataclass(frozen=True)
class WeightShards:
    """Shards of the weights of policy and draft, and their collectives.

    Methods run inside a `shard_map` that is manual over the row axes.
    """

    specs: NetworkPair
    """`PartitionSpec` of every leaf."""
    dtype: str
    """Data type of matrix products."""
    order: CollectiveOrder

    def map_specs(self, select: Callable[[NetworkPair], NetworkPair]) -> "WeightShards":
        """Returns the shards of a part of the networks, such as the trained weights."""
        return dataclasses.replace(self, specs=select(self.specs))

    # ---- forward: gathering

    def gather_layer(self, layer: Layers) -> Layers:
        """Gathers one of the policy's layers over the row axes."""
        # Specs are those of the stacked layers, so each has the layer axis as its first.
        stacked = attach_lora(self.specs[0]).layers
        return jax.tree.map(
            lambda leaf, spec: _gather_weight(leaf, P(*tuple(spec)[1:]), self.dtype), layer, stacked
        )

    def gather_outside_layers(self, policy: Decoder | AdaptedDecoder, draft: PyTree) -> NetworkPair:
        """Gathers all but the policy's layers over the row axes."""
        # Layers are gathered one by one as they run, so only one is held at a time.
        # Mapping the identity copies the modules, so `setattr` leaves the arguments unchanged.
        policy, policy_specs = (
            jax.tree.map(lambda leaf: leaf, network) for network in (policy, self.specs[0])
        )
        decoder, decoder_specs = (
            network if isinstance(network, Decoder) else network.base
            for network in (policy, policy_specs)
        )
        for name in OUTSIDE:
            setattr(
                decoder,
                name,
                self._gather_network(
                    {name: getattr(decoder, name)}, {name: getattr(decoder_specs, name)}
                )[name],
            )
        return policy, self._gather_network(draft, self.specs[1])

    def _gather_network(self, network: PyTree, specs: PyTree) -> PyTree:
        """Gathers a network's weights over the row axes."""
        # Embeddings and heads keep the master type, since gradients of many chunks add up in it.

        def gather_leaf(path: Any, leaf: Array, spec: P) -> Array:
            return _gather_weight(
                leaf,
                spec,
                self.dtype,
                keeps_master_dtype=bool(_path_names(path) & {"embedding", "head"}),
            )

        return jax.tree_util.tree_map_with_path(gather_leaf, network, specs)

    # ---- backward: adding up

    def sum_gradients(self, gradients: NetworkPair) -> NetworkPair:
        """Sums a pass's gradients over the shards."""
        # Split weights are summed already: every micro-batch reduce-scatters their gradients.
        return jax.tree.map(
            lambda leaf, spec: (
                lax.psum(leaf, _replicated_axes(spec)) if _replicated_axes(spec) else leaf
            ),
            gradients,
            self.specs,
        )

    def order_draft_backward(
        self, hidden: Float[Array, "1 T D"], draft: PyTree
    ) -> tuple[Float[Array, "1 T D"], PyTree]:
        """Returns its arguments. In the backward pass, orders the draft before the policy."""
        # Once the draft's backward pass is done, its activations are free before the policy's
        # layers need memory.

        def backward(_: None, cotangents: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            hidden_gradient, gradients = cotangents
            leaves, structure = jax.tree.flatten(gradients)
            # Only floats: integer leaves have cotangents of type float0, which no barrier takes.
            float_indices = [
                index
                for index, leaf in enumerate(leaves)
                if jnp.issubdtype(leaf.dtype, jnp.floating)
            ]
            if self.order.is_needed:
                # On CPUs a barrier is removed before the program runs, so data must order it.
                specs = jax.tree.leaves(self.specs[1])
                results = [(leaves[index], specs[index]) for index in float_indices]
                return self.order.run_after_shards(hidden_gradient, results), gradients
            hidden_gradient, ordered_leaves = lax.optimization_barrier(
                (hidden_gradient, [leaves[index] for index in float_indices])
            )
            for index, leaf in zip(float_indices, ordered_leaves, strict=True):
                leaves[index] = leaf
            return hidden_gradient, jax.tree.unflatten(structure, leaves)

        pass_through = jax.custom_vjp(lambda hidden, draft: (hidden, draft))
        pass_through.defvjp(lambda hidden, draft: ((hidden, draft), None), backward)
        return pass_through(hidden, draft)

    # ---- the order on CPUs

    def gather_after(self, networks: NetworkPair, result: Array) -> NetworkPair:
        """Returns the networks, which are gathered only once `result` exists.

        This covers all but the policy's layers.
        """
        # Otherwise the compiler hoists loop-invariant gathers above `result`.
        return self._run_outside_layers_after([(result, P())], networks)

    def scatter_after_layers(self, gradients: NetworkPair) -> NetworkPair:
        """Returns gradients, which outside layers are scattered only after those of layers."""
        layer_gradients = [
            (leaf, spec) for leaf, spec, is_layer in self._iterate_leaves(gradients) if is_layer
        ]
        return self._run_outside_layers_after(layer_gradients, gradients)

    def read_after_gathering(self, pack: Pack, networks: NetworkPair) -> Pack:
        """Returns the pack, which is read only once weights outside layers are gathered."""
        gathered = [(leaf, spec) for _, leaf, spec in self._iterate_gathered(networks)]
        return pack._replace(tokens=self.order.run_after_shards(pack.tokens, gathered))

    def _run_outside_layers_after(
        self, results: list[tuple[Array, P]], pair: NetworkPair
    ) -> NetworkPair:
        """Orders collectives outside the policy's layers after `results`."""
        leaves, structure = jax.tree.flatten(pair)
        gathered = {index: leaf for index, leaf, _ in self._iterate_gathered(pair)}
        ordered = self.order.run_after_shards(gathered, results)
        return jax.tree.unflatten(
            structure, [ordered.get(index, leaf) for index, leaf in enumerate(leaves)]
        )

    def _iterate_gathered(self, pair: NetworkPair) -> Iterator[tuple[int, Array, P]]:
        """Yields index, leaf and spec of the weights outside layers that are gathered."""
        for index, (leaf, spec, is_layer) in enumerate(self._iterate_leaves(pair)):
            if not is_layer and _weight_split(spec).mesh_axes:
                yield index, leaf, spec

    def _iterate_leaves(self, pair: NetworkPair) -> Iterator[tuple[Array, P, bool]]:
        """Yields each leaf, its spec, and a layer flag.

        The flag is true in the policy's layers.
        """
        specs = jax.tree.leaves(self.specs)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(pair), specs, strict=True
        ):
            yield leaf, spec, path[0].idx == 0 and not _path_names(path) & set(OUTSIDE)


def _path_names(path: Any) -> set[Any]:
    return {getattr(key, "name", getattr(key, "key", None)) for key in path}


def _gather_weight(leaf: Array, spec: P, dtype: str, keeps_master_dtype: bool = False) -> Array:
    """Gathers a weight in `dtype`, the type of matrix products.

    Its gradient is summed over the shards, scattered, and in the weight's own type. With
    `keeps_master_dtype` the gathered value has that type too. Integers are returned unchanged.
    """
    is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return (
        _gather_with_vjp(leaf, spec, dtype, leaf.dtype.name, keeps_master_dtype)
        if is_floating
        else leaf
    )


def _all_gather(
    leaf: Array, spec: P, dtype: str, master_dtype: str, keeps_master_dtype: bool
) -> Array:
    axis, mesh_axes = _weight_split(spec)
    # Cast before gathering: bfloat16 halves the traffic of float32 weights.
    gather = partial(lax.all_gather, axis_name=mesh_axes, axis=axis, tiled=True)
    value = _run_collective(gather, leaf.astype(dtype), spec)
    return value.astype(master_dtype) if keeps_master_dtype else value


def _all_gather_forward(
    leaf: Array, spec: P, dtype: str, master_dtype: str, keeps_master_dtype: bool
) -> tuple[Array, None]:
    return _all_gather(leaf, spec, dtype, master_dtype, keeps_master_dtype), None


def _all_gather_backward(
    spec: P, dtype: str, master_dtype: str, keeps_master_dtype: bool, _: None, gradient: Array
) -> tuple[Array]:
    axis, mesh_axes = _weight_split(spec)
    # Cast before summing, since shards add up in the master type.
    scatter = partial(lax.psum_scatter, axis_name=mesh_axes, scatter_dimension=axis, tiled=True)
    return (_run_collective(scatter, gradient.astype(master_dtype), spec),)


_gather_with_vjp = jax.custom_vjp(_all_gather, nondiff_argnums=(1, 2, 3, 4))
_gather_with_vjp.defvjp(_all_gather_forward, _all_gather_backward)


def _run_collective(collective: Callable[[Array], Array], leaf: Array, spec: P) -> Array:
    """Runs a collective on a leaf if shards gather it, else returns the leaf."""
    if not _weight_split(spec).mesh_axes:
        return leaf
    if TENSOR not in tuple(spec):
        return collective(leaf)
    # Left to itself the compiler would gather the leaf over `tensor` first, so each member of
    # `tensor` runs the collective on its own part.
    tensor_spec = P(*(TENSOR if axis == TENSOR else None for axis in spec))
    return shard_map_tensor(collective, tensor_spec, tensor_spec)(leaf)


class _WeightSplit(NamedTuple):
    """Split of a weight over shards that gather it."""

    axis: int
    """Axis of the weight that is split."""
    mesh_axes: tuple[str, ...]
    """Mesh axes of the split. Empty if shards hold the weight whole, or their own experts."""


def _weight_split(spec: P) -> _WeightSplit:
    """Returns the split of a weight that has this spec."""
    # Small weights of experts are split over `expert` only, and so never gathered.
    for axis, entry in enumerate(spec):
        if DATA in entry_axes(entry):
            return _WeightSplit(axis, entry_axes(entry))
    return _WeightSplit(0, ())


def _replicated_axes(spec: P) -> tuple[str, ...]:
    """Returns the row axes over which a weight is replicated."""
    split_axes = {axis for entry in spec for axis in entry_axes(entry)}
    return tuple(axis for axis in ROWS if axis not in split_axes)
