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
from jaxspec.mesh import DATA, ROWS, TENSOR, named, on_each_member
from jaxspec.models.decoder import Decoder, Layers
from jaxspec.models.lora import AdaptedDecoder, attach_lora
from jaxspec.state import PyTree

Pair = tuple[PyTree, PyTree]
"""Something of the policy, and the same of the draft."""

OUTSIDE = ("embedding", "norm", "head")
"""A decoder's weights outside its layers."""


@dataclasses.dataclass(frozen=True)
class Shards:
    """A pair's weights on one shard of rows, inside a `shard_map` that is manual over what splits
    them."""

    splits: Pair
    """How every leaf is split over the mesh: trees of `PartitionSpec`."""
    dtype: str
    """Of products."""
    ordered: bool
    """Whether this mesh needs an order among collectives (`order.needs_ordering`)."""

    def of(self, part: Callable[[Pair], Pair]) -> "Shards":
        """The shards of a part of the pair, such as a policy's layers."""
        return dataclasses.replace(self, splits=part(self.splits))

    # ---- forward: gathering

    def layer_whole(self, layer: Layers) -> Layers:
        """One of the policy's layers whole over `data`: its leaves are split as in the stack of
        layers, whose first axis is gone."""
        stacked = attach_lora(self.splits[0]).layers
        return jax.tree.map(
            lambda leaf, spec: _whole(leaf, P(*tuple(spec)[1:]), self.dtype), layer, stacked
        )

    def outside_whole(self, policy: Decoder | AdaptedDecoder, draft: PyTree) -> Pair:
        """Policy and draft with everything whole over `data` but the policy's layers, which are
        made whole one by one as they run."""
        policy, split = (
            jax.tree.map(lambda leaf: leaf, network) for network in (policy, self.splits[0])
        )
        decoder, by = (
            network if isinstance(network, Decoder) else network.base for network in (policy, split)
        )
        for name in OUTSIDE:
            setattr(
                decoder,
                name,
                self._network_whole({name: getattr(decoder, name)}, {name: getattr(by, name)})[
                    name
                ],
            )
        return policy, self._network_whole(draft, self.splits[1])

    def _network_whole(self, network: PyTree, splits: PyTree) -> PyTree:
        """Weights whole over `data`. Embeddings and heads keep the master type, in which chunks of
        positions add up their gradients."""

        def one(path: Any, leaf: Array, spec: P) -> Array:
            return _whole(leaf, spec, self.dtype, wide=bool(_names(path) & {"embedding", "head"}))

        return jax.tree_util.tree_map_with_path(one, network, splits)

    # ---- backward: adding up

    def summed(self, gradients: Pair) -> Pair:
        """A pass's gradients added up over the shards. Of what is split, every micro-batch has
        added up the shards' parts already."""
        return jax.tree.map(
            lambda leaf, spec: lax.psum(leaf, _shared(spec)) if _shared(spec) else leaf,
            gradients,
            self.splits,
        )

    def draft_first(
        self, hidden: Float[Array, "1 T D"], draft: PyTree
    ) -> tuple[Float[Array, "1 T D"], PyTree]:
        """The policy's last hidden states and the draft as they are; in the backward pass the
        policy's layers come after the draft's, of which then nothing is kept any more."""

        def backward(_: None, cotangents: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            above, gradients = cotangents
            leaves, structure = jax.tree.flatten(gradients)
            weights = [
                number
                for number, leaf in enumerate(leaves)
                if jnp.issubdtype(leaf.dtype, jnp.floating)
            ]
            if self.ordered:
                specs = jax.tree.leaves(self.splits[1])
                return order_after(
                    above, [signal_ready(leaves[number], specs[number]) for number in weights]
                ), gradients
            above, done = lax.optimization_barrier((above, [leaves[number] for number in weights]))
            for number, leaf in zip(weights, done, strict=True):
                leaves[number] = leaf
            return above, jax.tree.unflatten(structure, leaves)

        join = jax.custom_vjp(lambda hidden, draft: (hidden, draft))
        join.defvjp(lambda hidden, draft: ((hidden, draft), None), backward)
        return join(hidden, draft)

    # ---- the order on CPUs

    def gathered(self, networks: Pair) -> list[ReadySignal]:
        """Where an order is needed, signs that everything outside the policy's layers has been
        gathered."""
        outside = [
            (leaf, spec)
            for leaf, spec, inside in self._leaves(networks)
            if not inside and _split(spec).over
        ]
        return [signal_ready(leaf, spec) for leaf, spec in outside] if self.ordered else []

    def layers_learnt(self, gradients: Pair) -> list[ReadySignal]:
        """Where an order is needed, signs that the gradients of the policy's layers are there."""
        return (
            [signal_ready(leaf, spec) for leaf, spec, inside in self._leaves(gradients) if inside]
            if self.ordered
            else []
        )

    def tied(self, pair: Pair, signs: list[ReadySignal]) -> Pair:
        """The pair, of which what goes between shards outside the policy's layers comes after all
        of what `signs` are of."""
        if not signs:
            return pair
        tied = [
            leaf if inside or not _split(spec).over else order_after(leaf, signs)
            for leaf, spec, inside in self._leaves(pair)
        ]
        return jax.tree.unflatten(jax.tree.structure(pair), tied)

    def _leaves(self, pair: Pair) -> Iterator[tuple[Array, P, bool]]:
        """The leaves of policy and draft, with how each is split, and whether it is in the policy's
        layers."""
        specs = jax.tree.leaves(self.splits)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(pair), specs, strict=True
        ):
            yield leaf, spec, path[0].idx == 0 and not _names(path) & set(OUTSIDE)


def _names(path: Any) -> set[Any]:
    return {getattr(key, "name", getattr(key, "key", None)) for key in path}


def _whole(leaf: Array, spec: P, dtype: str, wide: bool = False) -> Array:
    """A weight in the type of products, whole over `data`; its gradient comes out as the weight
    went in: in the weight's type, added up over the shards and split. `wide`: the value keeps the
    weight's type after the gathering."""
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return _gathered(leaf, spec, dtype, leaf.dtype.name, wide) if floating else leaf


def _gather(leaf: Array, spec: P, dtype: str, master: str, wide: bool) -> Array:
    axis, over = _split(spec)
    gather = partial(lax.all_gather, axis_name=over, axis=axis, tiled=True)
    value = _between_shards(gather, leaf.astype(dtype), spec)
    return value.astype(master) if wide else value


def _gathered_forward(
    leaf: Array, spec: P, dtype: str, master: str, wide: bool
) -> tuple[Array, None]:
    return _gather(leaf, spec, dtype, master, wide), None


def _gathered_backward(
    spec: P, dtype: str, master: str, wide: bool, _: None, gradient: Array
) -> tuple[Array]:
    axis, over = _split(spec)
    scatter = partial(lax.psum_scatter, axis_name=over, scatter_dimension=axis, tiled=True)
    return (_between_shards(scatter, gradient.astype(master), spec),)


_gathered = jax.custom_vjp(_gather, nondiff_argnums=(1, 2, 3, 4))
_gathered.defvjp(_gathered_forward, _gathered_backward)


def _between_shards(collective: Callable[[Array], Array], leaf: Array, spec: P) -> Array:
    """A collective on a leaf that is split over shards; on each member of `tensor` alone, since
    left to the compiler such a leaf would be made whole over `tensor` first."""
    if not _split(spec).over:
        return leaf
    if TENSOR not in tuple(spec):
        return collective(leaf)
    peers = P(*(TENSOR if axis == TENSOR else None for axis in spec))
    return on_each_member(collective, peers, peers)(leaf)


class _Split(NamedTuple):
    """How a weight is split over shards that each need it whole."""

    axis: int
    """Which of its own."""
    over: tuple[str, ...]
    """Axes of the mesh; none: every shard has it whole, or its own experts of it."""


def _split(spec: P) -> _Split:
    for axis, entry in enumerate(spec):
        if DATA in named(entry):
            return _Split(axis, named(entry))
    return _Split(0, ())


def _shared(spec: P) -> tuple[str, ...]:
    """Axes of the mesh along which shards have the same of a weight."""
    split = {axis for entry in spec for axis in named(entry)}
    return tuple(axis for axis in ROWS if axis not in split)
