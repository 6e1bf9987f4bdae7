"""States to save, on meshes, and the checkpoints of some steps."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.drafts import draft_temperature, schedule
from jaxspec.state import AbsentNetwork, GeneratorState, LearnerState, NetworkState, TrainState
from jaxspec.storage.checkpoint import Checkpoints


class Network(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.embed = nnx.Param(jax.random.normal(key, (16, 8)))
        self.layers = nnx.Dict(norm=nnx.Param(jnp.arange(16.0).astype(jnp.bfloat16)))


def a_state(seed: int = 0) -> TrainState:
    network = Network(jax.random.key(seed))
    optimizer = optax.adamw(
        1e-3, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
    ).init(network)  # pyright: ignore[reportArgumentType]
    policy = NetworkState(
        network=network, optimizer=optimizer, skipped=jnp.int32(3), skipped_in_row=jnp.int32(0)
    )
    learner = LearnerState(
        policy=policy,
        draft=AbsentNetwork(),
        online=jnp.bool_(True),
        version=jnp.int32(5),
        recompute=jnp.bool_(False),
    )
    return TrainState(
        learner=learner,
        generator=GeneratorState(
            overlap_by_factor=draft_temperature.init_overlap(8, (0.0, 1.0)),
            trend=schedule.init_trend(),
        ),
    )


def on_mesh(tree: Any, devices: int) -> tuple[Any, Any]:
    """The tree on a mesh of so many devices, rows of matrices sharded, and its abstract twin."""
    mesh = jax.make_mesh(
        (devices,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    placed = jax.tree.map(
        lambda leaf: jax.device_put(
            leaf, NamedSharding(mesh, PartitionSpec("data") if leaf.ndim > 1 else PartitionSpec())
        ),
        tree,
    )
    return placed, jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), placed
    )


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def with_steps(folder: Path, *steps: int) -> tuple[Checkpoints, Any]:
    """Checkpoints of these steps, and what is restored from them."""
    placed, abstract = on_mesh({"x": jnp.arange(64.0)}, 2)
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, placed, {})
    checkpoints.wait_until_saved()
    return checkpoints, abstract
