"""How weights and gradients go between shards in the learner's pass (FSDP): a weight is gathered
when it is used, its gradient is added up and split again, and on CPUs all of it keeps an order.

Experts stay where they are on the axis `expert`: tokens go to them (`models/moe.py`), so that their
gradients are of all its members' tokens, and are added up over `data` alone."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxspec.kernels.order import ReadySignal, order_after, signal_ready
from jaxspec.mesh import DATA, ROWS, TENSOR, entry_axes, shard_map_tensor
from jaxspec.models.decoder import Decoder, Layers
from jaxspec.models.lora import AdaptedDecoder, attach_lora
from jaxspec.state import PyTree

NetworkPair = tuple[PyTree, PyTree]
"""Something of the policy, and the same of the draft."""

OUTSIDE = ("embedding", "norm", "head")
"""A decoder's weights outside its layers."""


@dataclasses.dataclass(frozen=True)
class WeightShards:
    """A pair's weights on one shard of rows, inside a `shard_map` that is manual over what splits
    them."""

    specs: NetworkPair
    """How every leaf is split over the mesh: trees of `PartitionSpec`."""
    dtype: str
    """Of products."""
    needs_order: bool
    """Whether this mesh needs an order among collectives (`order.needs_ordering`)."""

    def map_specs(self, select: Callable[[NetworkPair], NetworkPair]) -> "WeightShards":
        """The shards of a part of the pair, such as a policy's layers."""
        return dataclasses.replace(self, specs=select(self.specs))

    # ---- forward: gathering

    def gather_layer(self, layer: Layers) -> Layers:
        """One of the policy's layers whole over `data`: its leaves are split as in the stack of
        layers, whose first axis is gone."""
        stacked = attach_lora(self.specs[0]).layers
        return jax.tree.map(
            lambda leaf, spec: _gather_weight(leaf, P(*tuple(spec)[1:]), self.dtype), layer, stacked
        )

    def gather_outside_layers(self, policy: Decoder | AdaptedDecoder, draft: PyTree) -> NetworkPair:
        """Policy and draft with everything whole over `data` but the policy's layers, which are
        made whole one by one as they run."""
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
        """Weights whole over `data`. Embeddings and heads keep the master type, in which chunks of
        positions add up their gradients."""

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
        """A pass's gradients added up over the shards. Of what is split, every micro-batch has
        added up the shards' parts already."""
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
        """The policy's last hidden states and the draft as they are; in the backward pass the
        policy's layers come after the draft's, of which then nothing is kept any more."""

        def backward(_: None, cotangents: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            hidden_gradient, gradients = cotangents
            leaves, structure = jax.tree.flatten(gradients)
            float_indices = [
                index
                for index, leaf in enumerate(leaves)
                if jnp.issubdtype(leaf.dtype, jnp.floating)
            ]
            if self.needs_order:
                specs = jax.tree.leaves(self.specs[1])
                return order_after(
                    hidden_gradient,
                    [signal_ready(leaves[index], specs[index]) for index in float_indices],
                ), gradients
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

    def signal_gathering(self, networks: NetworkPair) -> list[ReadySignal]:
        """Where an order is needed, signs that everything outside the policy's layers has been
        gathered."""
        outside_leaves = [
            (leaf, spec)
            for leaf, spec, is_layer in self._iterate_leaves(networks)
            if not is_layer and _weight_split(spec).mesh_axes
        ]
        return (
            [signal_ready(leaf, spec) for leaf, spec in outside_leaves] if self.needs_order else []
        )

    def signal_layer_gradients(self, gradients: NetworkPair) -> list[ReadySignal]:
        """Where an order is needed, signs that the gradients of the policy's layers are there."""
        return (
            [
                signal_ready(leaf, spec)
                for leaf, spec, is_layer in self._iterate_leaves(gradients)
                if is_layer
            ]
            if self.needs_order
            else []
        )

    def order_collectives(self, pair: NetworkPair, signals: list[ReadySignal]) -> NetworkPair:
        """The pair, of which what goes between shards outside the policy's layers comes after all
        of what `signals` are of."""
        if not signals:
            return pair
        ordered_leaves = [
            leaf if is_layer or not _weight_split(spec).mesh_axes else order_after(leaf, signals)
            for leaf, spec, is_layer in self._iterate_leaves(pair)
        ]
        return jax.tree.unflatten(jax.tree.structure(pair), ordered_leaves)

    def _iterate_leaves(self, pair: NetworkPair) -> Iterator[tuple[Array, P, bool]]:
        """The leaves of policy and draft, with how each is split, and whether it is in the policy's
        layers."""
        specs = jax.tree.leaves(self.specs)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(pair), specs, strict=True
        ):
            yield leaf, spec, path[0].idx == 0 and not _path_names(path) & set(OUTSIDE)


def _path_names(path: Any) -> set[Any]:
    return {getattr(key, "name", getattr(key, "key", None)) for key in path}


def _gather_weight(leaf: Array, spec: P, dtype: str, keeps_master_dtype: bool = False) -> Array:
    """A weight in the type of products, whole over `data`; its gradient comes out as the weight
    went in: in the weight's type, added up over the shards and split. `keeps_master_dtype`: the
    value keeps the weight's type after the gathering."""
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
    scatter = partial(lax.psum_scatter, axis_name=mesh_axes, scatter_dimension=axis, tiled=True)
    return (_run_collective(scatter, gradient.astype(master_dtype), spec),)


_gather_with_vjp = jax.custom_vjp(_all_gather, nondiff_argnums=(1, 2, 3, 4))
_gather_with_vjp.defvjp(_all_gather_forward, _all_gather_backward)


def _run_collective(collective: Callable[[Array], Array], leaf: Array, spec: P) -> Array:
    """A collective on a leaf that is split over shards; on each member of `tensor` alone, since
    left to the compiler such a leaf would be made whole over `tensor` first."""
    if not _weight_split(spec).mesh_axes:
        return leaf
    if TENSOR not in tuple(spec):
        return collective(leaf)
    tensor_spec = P(*(TENSOR if axis == TENSOR else None for axis in spec))
    return shard_map_tensor(collective, tensor_spec, tensor_spec)(leaf)


class _WeightSplit(NamedTuple):
    """How a weight is split over shards that each need it whole."""

    axis: int
    """Which of its own."""
    mesh_axes: tuple[str, ...]
    """Axes of the mesh; none: every shard has it whole, or its own experts of it."""


def _weight_split(spec: P) -> _WeightSplit:
    for axis, entry in enumerate(spec):
        if DATA in entry_axes(entry):
            return _WeightSplit(axis, entry_axes(entry))
    return _WeightSplit(0, ())


def _replicated_axes(spec: P) -> tuple[str, ...]:
    """Axes of the mesh along which shards have the same of a weight."""
    split_axes = {axis for entry in spec for axis in entry_axes(entry)}
    return tuple(axis for axis in ROWS if axis not in split_axes)
