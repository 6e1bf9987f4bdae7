"""Optimizers, gradients of what a network learns, and the update that refuses non-finite ones."""

from collections.abc import Collection, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models import layers
from jaxspec.models.layers import LOGICAL_AXES
from jaxspec.models.lora import TARGETS
from jaxspec.state import PyTree, Trained

PATIENCE = 3
"""Non-finite updates in a row that end a training."""


SOUND, SKIPPED, BROKEN = range(3)
"""Conditions of a learner: its last update went through, it was skipped, or there are numbers that
are not finite."""


class Diverged(RuntimeError):
    """A training that is not worth going on with, or that ended without a result."""


def require_progress(skipped_in_row: float, name: str, after: str, look: str) -> None:
    """Ends a training whose updates are no longer finite.

    Raises:
      Diverged: says of which network (`name`), `after` which update, and where to `look`.
    """
    if skipped_in_row >= PATIENCE:
        raise Diverged(
            f"the {name}'s loss or gradient was not finite in {PATIENCE} updates in a row, the last"
            f" after {after}. {look}"
        )


class Adam(NamedTuple):
    """Constants of AdamW; the defaults are those of drafts and of warm starts."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    matrices_alone: bool = False
    """Whether weight decay leaves norms, biases and embeddings as they are."""


ADAM = Adam()


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    grad_clip: float,
    weight_decay: float = 0.0,
    adam: Adam = ADAM,
) -> optax.GradientTransformation:
    """Clips by global norm, then updates by AdamW."""
    by_adam = _adamw(learning_rate, weight_decay, adam)
    return optax.chain(optax.clip_by_global_norm(grad_clip), by_adam)


def _adamw(
    learning_rate: optax.ScalarOrSchedule, weight_decay: float, adam: Adam
) -> optax.GradientTransformation:
    mask = _decayed if adam.matrices_alone else None
    return optax.adamw(
        learning_rate, adam.b1, adam.b2, adam.eps, weight_decay=weight_decay, mask=mask
    )


def _decayed(weights: PyTree) -> PyTree:
    """Says which weights are matrices, but for embeddings: the others set a scale, or are looked
    up one by one."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _attribute(path) in (*_MATRICES, "head", "router"), weights
    )


RMS = 0.2
"""Root mean square of a matrix's update by Muon over the learning rate: about that of AdamW, whose
learning rates then serve (Moonlight, arXiv 2502.16982, section 2.2)."""


def muon(
    learning_rate: optax.ScalarOrSchedule,
    grad_clip: float,
    weight_decay: float = 0.0,
    adam: Adam = ADAM,
) -> optax.GradientTransformation:
    """Global-norm clip, then Muon for the matrices of layers and adapters, each orthogonalised by
    itself, and AdamW for all else: embedding, head, norms, biases, routers.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    of_matrices = optax.contrib.muon(
        learning_rate,
        weight_decay=weight_decay,
        muon_weight_dimension_numbers=matrices,
        consistent_rms=RMS,
    )
    groups: dict[Hashable, optax.GradientTransformation] = {
        "muon": of_matrices,
        "adamw": _adamw(learning_rate, weight_decay, adam),
    }
    return optax.chain(
        optax.clip_by_global_norm(grad_clip), optax.partition(groups, param_labels=_groups)
    )


def _matrix_axes() -> dict[str, optax.contrib.MuonDimensionNumbers]:
    """Input and output axes of every matrix, by the attribute that holds it; the others (layers,
    experts) count its copies."""
    axes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = dict.fromkeys(
        ("expert_gate", "expert_up", "expert_down"), ((2,), (3,))
    )
    for name, target in TARGETS.items():
        split = 1 + target.input_axes
        count = len(LOGICAL_AXES[target.weight])
        axes[target.weight] = tuple(range(1, split)), tuple(range(split, count))
        axes[f"{name}_a"] = tuple(range(1, split)), (split,)
        axes[f"{name}_b"] = (1,), tuple(range(2, 2 + count - split))
    return {name: optax.contrib.MuonDimensionNumbers(*pair) for name, pair in axes.items()}


_MATRICES = _matrix_axes()


def matrices(weights: PyTree) -> PyTree:
    """Which axes of each weight are those of a matrix; None for what is none."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: _MATRICES.get(_attribute(path)), weights
    )


def _groups(weights: PyTree) -> PyTree:
    """By which optimizer each weight is updated."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "muon" if _attribute(path) in _MATRICES else "adamw", weights
    )


def _attribute(path: Any) -> str:
    """The attribute that holds a weight; the last name is that of the array in its variable."""
    return [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][-2]


def kept_in(dtype: str, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with its state, but for counts and Muon's coefficients, kept in a narrower type
    between updates, which compute in the type of the weights."""

    def cast(state: PyTree, to: Any) -> PyTree:
        def one(path: Any, leaf: Array) -> Array:
            return (
                leaf
                if getattr(path[-1], "name", "") == "ns_coeffs"
                else layers.cast_floats(leaf, to)
            )

        return jax.tree_util.tree_map_with_path(one, state)

    def init(params: PyTree) -> PyTree:
        return cast(optimizer.init(params), dtype)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        wide = jax.tree.leaves(updates)[0].dtype
        changes, state = optimizer.update(updates, cast(state, wide), params)
        return changes, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def frozen(
    names: Collection[str], optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The optimizer for all weights but those of these attributes, which stay as they are."""

    def labels(weights: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "frozen" if _attribute(path) in names else "trained", weights
        )

    groups: dict[Hashable, optax.GradientTransformation] = {
        "trained": optimizer,
        "frozen": optax.set_to_zero(),
    }
    return optax.partition(groups, param_labels=labels)


def update_count(state: PyTree) -> Int[Array, ""]:
    """Updates that an optimizer has made."""
    # AdamW, its schedule and Muon all count them
    return optax.tree.get_all_with_path(state, "count")[0][1]


class Offloaded(optax.GradientTransformation):
    """An optimizer whose state lies in host memory between updates; scalars stay where they are."""


def to_device(state: PyTree) -> PyTree:
    """An optimizer's state on the device, inside a program."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if leaf.ndim else leaf, state
    )


def to_host(state: PyTree) -> PyTree:
    """It back in host memory."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Host) if leaf.ndim else leaf, state
    )


def scheduled(
    kind: str, peak: float, warmup_steps: int, steps: int, floor: float = 0.0
) -> optax.Schedule:
    """Linear warm-up to `peak`, then `constant`, `linear` or `cosine`.

    The last two end at `floor` times the peak after all `steps`.
    """

    def rate(count: Any) -> Any:
        risen = jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))
        left = jnp.clip((steps - count) / max(steps - warmup_steps, 1), 0.0, 1.0)
        down = {
            "constant": jnp.ones_like(left),
            "linear": left,
            "cosine": (1 - jnp.cos(jnp.pi * left)) / 2,
        }[kind]
        return peak * risen * (floor + (1 - floor) * down)

    return rate


def cosine(peak: float, steps: int) -> optax.Schedule:
    """A twentieth of the steps of warm-up, then cosine decay to a tenth of `peak`."""
    return optax.warmup_cosine_decay_schedule(
        peak / 20, peak, max(1, steps // 20), max(2, steps), peak / 10
    )


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def parameters(network: PyTree) -> PyTree:
    """The network with None in place of every variable that is not trained (a vocabulary map); all
    others keep their paths."""
    return jax.tree.map(
        lambda node: None if _is_variable(node) and not isinstance(node, nnx.Param) else node,
        network,
        is_leaf=_is_variable,
    )


def with_parameters(network: PyTree, weights: PyTree) -> PyTree:
    """The network with its trained leaves from `weights`, a tree as `parameters` gives it."""
    return jax.tree.map(
        lambda node, weight: node if weight is None else weight,
        network,
        weights,
        is_leaf=_is_variable,
    )


def start(network: PyTree, optimizer: optax.GradientTransformation) -> Trained:
    """A learner that has learnt nothing yet; the optimizer's state covers only what is trained."""
    # two buffers: one could not be donated twice
    skipped, in_row = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return Trained(
        network=network,
        optimizer=optimizer.init(parameters(network)),
        skipped=skipped,
        skipped_in_row=in_row,
    )


def condition(trained: Trained) -> Int[Array, ""]:
    """SOUND, SKIPPED or BROKEN: whether training can go on from here, by the weights, the
    optimizer's state and the last update."""
    floats = [
        leaf
        for leaf in jax.tree.leaves(to_device(trained))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))
    return jnp.where(finite, jnp.where(trained.skipped_in_row > 0, SKIPPED, SOUND), BROKEN).astype(
        jnp.int32
    )


def update(
    trained: Trained,
    gradients: PyTree,
    loss: Float[Array, ""],
    optimizer: optax.GradientTransformation,
    wanted: Bool[Array, ""] | bool = True,
) -> tuple[Trained, Float[Array, ""]]:
    """Applies one update where it is `wanted` and returns the gradient's norm; a non-finite loss or
    gradient changes only the count of skipped updates.

    Old and new numbers are chosen between one by one: in a branch they would be held twice, and XLA
    moves nothing to the host in one. A state that is `Offloaded` is fetched when the gradient is
    there.
    """
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    weights, before = parameters(trained.network), trained.optimizer
    if isinstance(optimizer, Offloaded):
        before = to_device(before)
    changes, state = optimizer.update(gradients, before, weights)
    new, old = (optax.apply_updates(weights, changes), state), (weights, before)
    weights, state = jax.tree.map(lambda new, old: jnp.where(finite & wanted, new, old), new, old)
    if isinstance(optimizer, Offloaded):
        state = to_host(state)
    skipped = (wanted & ~finite).astype(jnp.int32)
    in_row = jnp.where(wanted, (trained.skipped_in_row + 1) * skipped, trained.skipped_in_row)
    network = with_parameters(trained.network, weights)
    return (
        trained.replace(
            network=network,
            optimizer=state,
            skipped=trained.skipped + skipped,
            skipped_in_row=in_row,
        ),
        norm,
    )
