"""Optimizers, learning rate schedules and updates."""

from collections.abc import Collection, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models import layers
from jaxspec.models.lora import TARGETS
from jaxspec.state import NetworkState, PyTree

MAX_SKIPPED_IN_ROW = 3
"""Number of non-finite updates in a row that ends a training."""


SOUND, SKIPPED, BROKEN = range(3)
"""Conditions of a network: last update applied, last update skipped, state not finite."""


class Diverged(RuntimeError):
    """Error of a training without a usable result."""


def require_progress(skipped_in_row: float, name: str, last_update: str, remedy: str) -> None:
    """Ends a training whose updates are no longer finite.

    Raises:
      Diverged: the last `MAX_SKIPPED_IN_ROW` updates were not finite.
    """
    if skipped_in_row >= MAX_SKIPPED_IN_ROW:
        raise Diverged(
            f"the {name}'s loss or gradient was not finite in {MAX_SKIPPED_IN_ROW} updates in a"
            f" row, the last after {last_update}. {remedy}"
        )


class AdamConstants(NamedTuple):
    """Constants of AdamW. The defaults are those of drafts and warm starts."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    decays_matrices_only: bool = False
    """Whether weight decay skips norms, biases and embeddings."""


DEFAULT_ADAM = AdamConstants()


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    grad_clip: float,
    weight_decay: float = 0.0,
    adam: AdamConstants = DEFAULT_ADAM,
) -> optax.GradientTransformation:
    """Clips by global norm, then updates with AdamW."""
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
    """Masks the weights that decay: all matrices except embeddings."""
    # Other weights set a scale or, like embeddings, are looked up one by one.
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _attribute_name(path) in (*_MATRIX_AXES, "head", "router"), weights
    )


UPDATE_RMS = 0.2
"""Root mean square of a Muon update relative to the learning rate.

It is about that of AdamW, so learning rates carry over. Source: Moonlight, arXiv 2502.16982,
section 2.2.
"""


def muon(
    learning_rate: optax.ScalarOrSchedule,
    grad_clip: float,
    weight_decay: float = 0.0,
    adam: AdamConstants = DEFAULT_ADAM,
) -> optax.GradientTransformation:
    """Clips by global norm, then updates with Muon and AdamW.

    Muon updates the matrices of layers and adapters, each orthogonalized on its own. AdamW updates
    embedding, head, norms, biases and routers.

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
    # Clipped before the partition, so that the norm is that of all weights.
    return optax.chain(
        optax.clip_by_global_norm(grad_clip),
        optax.partition(optimizers_by_label, param_labels=_label_optimizers),
    )


def _build_matrix_axes() -> dict[str, optax.contrib.MuonDimensionNumbers]:
    """Returns the axes of every matrix.

    They are input and output axes, by attribute name. Other axes (layers, experts) number separate
    matrices.
    """
    axes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = dict.fromkeys(
        ("expert_gate", "expert_up", "expert_down"), ((2,), (3,))
    )
    for name, target in TARGETS.items():
        input_end = 1 + target.input_axes
        axis_count = target.axis_count
        axes[target.weight] = tuple(range(1, input_end)), tuple(range(input_end, axis_count))
        axes[f"{name}_a"] = tuple(range(1, input_end)), (input_end,)
        axes[f"{name}_b"] = (1,), tuple(range(2, 2 + axis_count - input_end))
    return {
        name: optax.contrib.MuonDimensionNumbers(*matrix_axes) for name, matrix_axes in axes.items()
    }


_MATRIX_AXES = _build_matrix_axes()


def matrix_dimension_numbers(weights: PyTree) -> PyTree:
    """Returns each weight's matrix axes, or None."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _MATRIX_AXES.get(_attribute_name(path)), weights
    )


def _label_optimizers(weights: PyTree) -> PyTree:
    """Returns the name of each weight's optimizer."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "muon" if _attribute_name(path) in _MATRIX_AXES else "adamw", weights
    )


def _attribute_name(path: Any) -> str:
    """Returns the name of the attribute that holds a weight."""
    # The last name is that of the array inside its variable.
    return [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][-2]


def with_state_dtype(
    dtype: str, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Stores an optimizer's state in a narrower type.

    Counts and Muon's coefficients keep their type. Updates compute in the type of the weights.
    """

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
    """Updates all weights except those of the named attributes."""

    def label_weights(weights: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "frozen" if _attribute_name(path) in names else "trained", weights
        )

    optimizers_by_label: dict[Hashable, optax.GradientTransformation] = {
        "trained": optimizer,
        "frozen": optax.set_to_zero(),
    }
    return optax.partition(optimizers_by_label, param_labels=label_weights)


def count_updates(state: PyTree) -> Int[Array, ""]:
    """Returns the number of updates made."""
    # AdamW, its schedule and Muon each have a counter, all with the same value.
    return optax.tree.get_all_with_path(state, "count")[0][1]


class OffloadedOptimizer(optax.GradientTransformation):
    """Optimizer with its state in host memory.

    The state is there between updates, except scalars.
    """


def move_to_device(state: PyTree) -> PyTree:
    """Moves optimizer state to the device."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if leaf.ndim else leaf, state
    )


def move_to_host(state: PyTree) -> PyTree:
    """Moves optimizer state to host memory."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim else leaf, state
    )


def warmup_schedule(
    kind: str, peak: float, warmup_steps: int, steps: int, floor: float = 0.0
) -> optax.Schedule:
    """Builds a linear warm-up followed by a decay.

    `kind` is `constant`, `linear` or `cosine`. The last two end at `floor` times the peak after
    `steps` updates.
    """

    def rate(count: Any) -> Any:
        # Counted from 1, so that the first update has a learning rate above 0.
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
    """Builds a warm-up followed by cosine decay.

    Warm-up takes 1/20 of the steps. The decay ends at a tenth of `peak`.
    """
    # optax requires the decay to be longer than the warm-up, even in a training of one step.
    return optax.warmup_cosine_decay_schedule(
        peak / 20, peak, max(1, steps // 20), max(2, steps), peak / 10
    )


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def trainable_parameters(network: PyTree) -> PyTree:
    """Replaces variables that are not trained by None.

    Others keep their paths.
    """
    # A vocabulary map is a variable that is not trained.
    return jax.tree.map(
        lambda node: None if _is_variable(node) and not isinstance(node, nnx.Param) else node,
        network,
        is_leaf=_is_variable,
    )


def no_parameters(network: PyTree) -> PyTree:
    """Replaces all variables by None, as those of a network that is not trained."""
    return jax.tree.map(lambda _: None, network, is_leaf=_is_variable)


def replace_parameters(network: PyTree, weights: PyTree) -> PyTree:
    """Replaces a network's trained weights.

    They are given as by `trainable_parameters` or `no_parameters`.
    """
    return jax.tree.map(
        lambda node, weight: node if weight is None else weight,
        network,
        weights,
        is_leaf=_is_variable,
    )


def init_state(network: PyTree, optimizer: optax.GradientTransformation) -> NetworkState:
    """Initializes a network's training state. The optimizer covers trained weights only."""
    # Two buffers, since one could not be donated twice.
    skipped, skipped_in_row = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return NetworkState(
        network=network,
        optimizer=optimizer.init(trainable_parameters(network)),
        skipped=skipped,
        skipped_in_row=skipped_in_row,
    )


def assess_condition(state: NetworkState) -> Int[Array, ""]:
    """Returns SOUND, SKIPPED or BROKEN.

    BROKEN: weights or optimizer state are not finite. SKIPPED: the last update was skipped.
    """
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
    """Applies one update and returns the gradient's norm.

    Nothing changes if not `enabled`. A non-finite loss or gradient changes only the counts of
    skipped updates.
    """
    norm = optax.tree.norm(gradients)
    is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    weights, optimizer_state = trainable_parameters(network_state.network), network_state.optimizer
    # Fetched only now that the gradient is computed, so that the passes have the memory.
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer_state = move_to_device(optimizer_state)
    changes, state = optimizer.update(gradients, optimizer_state, weights)
    new, old = (optax.apply_updates(weights, changes), state), (weights, optimizer_state)
    # Selects old or new values element-wise. A `cond` would hold both copies, and XLA cannot
    # offload inside it.
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
