"""Optimizers, gradients of what a network learns, and the update that refuses non-finite ones."""

from collections.abc import Collection, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from jaxspec.models import layers
from jaxspec.models.layers import LOGICAL_AXES
from jaxspec.models.lora import TARGETS
from jaxspec.state import NetworkState, PyTree

Metrics = dict[str, Num[Array, ""]]
MAX_SKIPPED_IN_ROW = 3
"""Non-finite updates in a row that end a training."""


SOUND, SKIPPED, BROKEN = range(3)
"""Conditions of a learner: its last update went through, it was skipped, or there are numbers that
are not finite."""


class Diverged(RuntimeError):
    """A training that is not worth going on with, or that ended without a result."""


def require_progress(skipped_in_row: float, name: str, last_update: str, remedy: str) -> None:
    """Ends a training whose updates are no longer finite.

    Raises:
      Diverged: says of which network (`name`), `after` which update, and where to `look`.
    """
    if skipped_in_row >= MAX_SKIPPED_IN_ROW:
        raise Diverged(
            f"the {name}'s loss or gradient was not finite in {MAX_SKIPPED_IN_ROW} updates in a"
            f" row, the last after {last_update}. {remedy}"
        )


class AdamConstants(NamedTuple):
    """Constants of AdamW; the defaults are those of drafts and of warm starts."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    decays_matrices_only: bool = False
    """Whether weight decay leaves norms, biases and embeddings as they are."""


DEFAULT_ADAM = AdamConstants()


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    grad_clip: float,
    weight_decay: float = 0.0,
    adam: AdamConstants = DEFAULT_ADAM,
) -> optax.GradientTransformation:
    """Clips by global norm, then updates by AdamW."""
    adam_update = _unclipped_adamw(learning_rate, weight_decay, adam)
    return optax.chain(optax.clip_by_global_norm(grad_clip), adam_update)


def _unclipped_adamw(
    learning_rate: optax.ScalarOrSchedule, weight_decay: float, adam: AdamConstants
) -> optax.GradientTransformation:
    mask = _decay_mask if adam.decays_matrices_only else None
    return optax.adamw(
        learning_rate, adam.b1, adam.b2, adam.eps, weight_decay=weight_decay, mask=mask
    )


def _decay_mask(weights: PyTree) -> PyTree:
    """Says which weights are matrices, but for embeddings: the others set a scale, or are looked
    up one by one."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _attribute_name(path) in (*_MATRIX_AXES, "head", "router"), weights
    )


UPDATE_RMS = 0.2
"""Root mean square of a matrix's update by Muon over the learning rate: about that of AdamW, whose
learning rates then serve (Moonlight, arXiv 2502.16982, section 2.2)."""


def muon(
    learning_rate: optax.ScalarOrSchedule,
    grad_clip: float,
    weight_decay: float = 0.0,
    adam: AdamConstants = DEFAULT_ADAM,
) -> optax.GradientTransformation:
    """Global-norm clip, then Muon for the matrices of layers and adapters, each orthogonalised by
    itself, and AdamW for all else: embedding, head, norms, biases, routers.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    matrix_optimizer = optax.contrib.muon(
        learning_rate,
        weight_decay=weight_decay,
        muon_weight_dimension_numbers=matrix_dimension_numbers,
        consistent_rms=UPDATE_RMS,
    )
    optimizers_by_label: dict[Hashable, optax.GradientTransformation] = {
        "muon": matrix_optimizer,
        "adamw": _unclipped_adamw(learning_rate, weight_decay, adam),
    }
    return optax.chain(
        optax.clip_by_global_norm(grad_clip),
        optax.partition(optimizers_by_label, param_labels=_label_optimizers),
    )


def _build_matrix_axes() -> dict[str, optax.contrib.MuonDimensionNumbers]:
    """Input and output axes of every matrix, by the attribute that holds it; the others (layers,
    experts) count its copies."""
    axes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = dict.fromkeys(
        ("expert_gate", "expert_up", "expert_down"), ((2,), (3,))
    )
    for name, target in TARGETS.items():
        input_end = 1 + target.input_axes
        axis_count = len(LOGICAL_AXES[target.weight])
        axes[target.weight] = tuple(range(1, input_end)), tuple(range(input_end, axis_count))
        axes[f"{name}_a"] = tuple(range(1, input_end)), (input_end,)
        axes[f"{name}_b"] = (1,), tuple(range(2, 2 + axis_count - input_end))
    return {
        name: optax.contrib.MuonDimensionNumbers(*matrix_axes) for name, matrix_axes in axes.items()
    }


_MATRIX_AXES = _build_matrix_axes()


def matrix_dimension_numbers(weights: PyTree) -> PyTree:
    """Which axes of each weight are those of a matrix; None for what is none."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _MATRIX_AXES.get(_attribute_name(path)), weights
    )


def _label_optimizers(weights: PyTree) -> PyTree:
    """By which optimizer each weight is updated."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "muon" if _attribute_name(path) in _MATRIX_AXES else "adamw", weights
    )


def _attribute_name(path: Any) -> str:
    """The attribute that holds a weight; the last name is that of the array in its variable."""
    return [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][-2]


def with_state_dtype(
    dtype: str, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The optimizer with its state, but for counts and Muon's coefficients, kept in a narrower type
    between updates, which compute in the type of the weights."""

    def cast_state(state: PyTree, target_dtype: Any) -> PyTree:
        def cast_leaf(path: Any, leaf: Array) -> Array:
            return (
                leaf
                if getattr(path[-1], "name", "") == "ns_coeffs"
                else layers.cast_floats(leaf, target_dtype)
            )

        return jax.tree_util.tree_map_with_path(cast_leaf, state)

    def init(params: PyTree) -> PyTree:
        return cast_state(optimizer.init(params), dtype)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        master_dtype = jax.tree.leaves(updates)[0].dtype
        changes, state = optimizer.update(updates, cast_state(state, master_dtype), params)
        return changes, cast_state(state, dtype)

    return optax.GradientTransformation(init, update)


def freeze_weights(
    names: Collection[str], optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The optimizer for all weights but those of these attributes, which stay as they are."""

    def label_weights(weights: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "frozen" if _attribute_name(path) in names else "trained", weights
        )

    optimizers_by_label: dict[Hashable, optax.GradientTransformation] = {
        "trained": optimizer,
        "frozen": optax.set_to_zero(),
    }
    return optax.partition(optimizers_by_label, param_labels=label_weights)


def update_count(state: PyTree) -> Int[Array, ""]:
    """Updates that an optimizer has made."""
    # AdamW, its schedule and Muon all count them
    return optax.tree.get_all_with_path(state, "count")[0][1]


class OffloadedOptimizer(optax.GradientTransformation):
    """An optimizer whose state lies in host memory between updates; scalars stay where they are."""


def move_to_device(state: PyTree) -> PyTree:
    """An optimizer's state on the device, inside a program."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if leaf.ndim else leaf, state
    )


def move_to_host(state: PyTree) -> PyTree:
    """It back in host memory."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim else leaf, state
    )


def warmup_schedule(
    kind: str, peak: float, warmup_steps: int, steps: int, floor: float = 0.0
) -> optax.Schedule:
    """Linear warm-up to `peak`, then `constant`, `linear` or `cosine`.

    The last two end at `floor` times the peak after all `steps`.
    """

    def rate(count: Any) -> Any:
        warmup = jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))
        remaining = jnp.clip((steps - count) / max(steps - warmup_steps, 1), 0.0, 1.0)
        decay = {
            "constant": jnp.ones_like(remaining),
            "linear": remaining,
            "cosine": (1 - jnp.cos(jnp.pi * remaining)) / 2,
        }[kind]
        return peak * warmup * (floor + (1 - floor) * decay)

    return rate


def cosine_schedule(peak: float, steps: int) -> optax.Schedule:
    """A twentieth of the steps of warm-up, then cosine decay to a tenth of `peak`."""
    return optax.warmup_cosine_decay_schedule(
        peak / 20, peak, max(1, steps // 20), max(2, steps), peak / 10
    )


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def trainable_parameters(network: PyTree) -> PyTree:
    """The network with None in place of every variable that is not trained (a vocabulary map); all
    others keep their paths."""
    return jax.tree.map(
        lambda node: None if _is_variable(node) and not isinstance(node, nnx.Param) else node,
        network,
        is_leaf=_is_variable,
    )


def replace_parameters(network: PyTree, weights: PyTree) -> PyTree:
    """The network with its trained leaves from `weights`, a tree as `parameters` gives it."""
    return jax.tree.map(
        lambda node, weight: node if weight is None else weight,
        network,
        weights,
        is_leaf=_is_variable,
    )


def init_state(network: PyTree, optimizer: optax.GradientTransformation) -> NetworkState:
    """A learner that has learnt nothing yet; the optimizer's state covers only what is trained."""
    # two buffers: one could not be donated twice
    skipped, skipped_in_row = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return NetworkState(
        network=network,
        optimizer=optimizer.init(trainable_parameters(network)),
        skipped=skipped,
        skipped_in_row=skipped_in_row,
    )


def check_condition(state: NetworkState) -> Int[Array, ""]:
    """SOUND, SKIPPED or BROKEN: whether training can go on from here, by the weights, the
    optimizer's state and the last update."""
    floats = [
        leaf
        for leaf in jax.tree.leaves(move_to_device(state))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    is_finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))
    return jnp.where(is_finite, jnp.where(state.skipped_in_row > 0, SKIPPED, SOUND), BROKEN).astype(
        jnp.int32
    )


def apply_update(
    network_state: NetworkState,
    gradients: PyTree,
    loss: Float[Array, ""],
    optimizer: optax.GradientTransformation,
    enabled: Bool[Array, ""] | bool = True,
) -> tuple[NetworkState, Float[Array, ""]]:
    """Applies one update where it is `wanted` and returns the gradient's norm; a non-finite loss or
    gradient changes only the count of skipped updates.

    Old and new numbers are chosen between one by one: in a branch they would be held twice, and XLA
    moves nothing to the host in one. The state of an `OffloadedOptimizer` is fetched when the
    gradient is there.
    """
    norm = optax.tree.norm(gradients)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    weights, optimizer_state = trainable_parameters(network_state.network), network_state.optimizer
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer_state = move_to_device(optimizer_state)
    changes, state = optimizer.update(gradients, optimizer_state, weights)
    new, old = (optax.apply_updates(weights, changes), state), (weights, optimizer_state)
    weights, state = jax.tree.map(
        lambda new, old: jnp.where(is_finite & enabled, new, old), new, old
    )
    if isinstance(optimizer, OffloadedOptimizer):
        state = move_to_host(state)
    skipped = (enabled & ~is_finite).astype(jnp.int32)
    skipped_in_row = jnp.where(
        enabled, (network_state.skipped_in_row + 1) * skipped, network_state.skipped_in_row
    )
    network = replace_parameters(network_state.network, weights)
    return (
        network_state.replace(
            network=network,
            optimizer=state,
            skipped=network_state.skipped + skipped,
            skipped_in_row=skipped_in_row,
        ),
        norm,
    )


class MetricSums(NamedTuple):
    """Metrics of the updates so far, by name."""

    sums: Metrics
    """Over the updates that had a number."""
    counts: Metrics
    """How many updates had one."""

    def add_update(self, metrics: Metrics) -> "MetricSums":
        present = {name: ~jnp.isnan(value) for name, value in metrics.items()}
        values = {name: jnp.where(present[name], value, 0) for name, value in metrics.items()}
        return jax.tree.map(
            lambda total, value: total + value.astype(total.dtype),
            self,
            MetricSums(values, present),
        )

    def to_means(self) -> Metrics:
        return {
            name: jnp.where(count > 0, self.sums[name] / jnp.maximum(count, 1), jnp.nan)
            for name, count in self.counts.items()
        }
