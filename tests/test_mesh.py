"""Meshes, and the rules that place weights on them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxspec import mesh as meshes
from jaxspec.mesh import ROWS
from jaxspec.rl import optimizers
from tests.conftest import small_mesh, trimmed


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)])
def test_meshes_have_auto_axes_in_order(data: int, tensor: int) -> None:
    mesh = small_mesh(data, tensor)
    assert dict(mesh.shape) == {"data": data, "expert": 1, "tensor": tensor}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    # Tensor peers are neighbours: they talk in every layer.
    assert [[device.id for device in row] for row in mesh.devices[:, 0]] == [
        [tensor * row + place for place in range(tensor)] for row in range(data)
    ]


def test_members_that_hold_experts_are_nearer_than_data_shards() -> None:
    mesh = small_mesh(2, 2, 2)
    numbers = np.vectorize(lambda device: device.id)(mesh.devices)
    np.testing.assert_array_equal(numbers, np.arange(8).reshape(2, 2, 2))
    assert meshes.row_shard_count(mesh) == 4


@pytest.mark.parametrize(
    ("shape", "axes", "wanted"),
    [
        # experts stay with their members, which do not split the width then
        ((8, 4, 6), ("experts", "embed", "ffn"), ("expert", "data", "tensor")),
        ((8, 8, 6), ("heads", "embed", None), ("tensor", ("data", "expert"))),
        ((6, 6), ("embed", "ffn"), ("data", "tensor")),  # by 2, not by 4
        ((4, 8, 6, 8), (None, "experts", "ffn", "embed"), (None, "expert", "tensor", "data")),
    ],
)
def test_experts_and_rows_share_an_axis(shape: Any, axes: Any, wanted: Any) -> None:
    mesh = small_mesh(2, 2, 2)
    weight = nnx.Param(jnp.zeros(shape), axes=axes)
    placed = meshes.assign_shardings(mesh, weight, meshes.TRAIN_RULES)
    assert trimmed(placed.get_raw_value().spec) == wanted
    alone = meshes.assign_shardings(mesh, weight, meshes.TRAIN_RULES, shard_above=10**6)
    kept = tuple(axis if axis in ("expert", "tensor") else None for axis in wanted)
    assert trimmed(alone.get_raw_value().spec) == trimmed(P(*kept)), (
        "small ones keep their experts apart"
    )


def spec_of(
    shape: tuple[int, ...], axes: tuple[str | None, ...], rules: meshes.Rules, **options: Any
) -> P:
    weight = nnx.Param(jnp.zeros(shape), axes=axes)
    placed = meshes.assign_shardings(small_mesh(4, 2), weight, rules, **options)
    return placed.get_raw_value().spec


@pytest.mark.parametrize(
    ("shape", "axes", "rules", "wanted"),
    [
        ((8, 6), ("embed", "ffn"), meshes.TRAIN_RULES, (ROWS, "tensor")),
        ((8, 6), ("embed", "ffn"), meshes.ROLLOUT_RULES, (None, "tensor")),
        # 4 shards do not divide 5
        ((5, 6), ("embed", "ffn"), meshes.TRAIN_RULES, (None, "tensor")),
        ((8, 5), ("embed", "vocab"), meshes.TRAIN_RULES, (ROWS,)),
        (
            (3, 8, 2, 5),
            (None, "embed", "kv_heads", None),
            meshes.TRAIN_RULES,
            (None, ROWS, "tensor"),
        ),
        (
            (8, 2, 5),  # one layer of a stack
            ("layers", "embed", "kv_heads", None),
            meshes.TRAIN_RULES,
            (ROWS, "tensor"),
        ),
        ((8, 6), (None, None), meshes.TRAIN_RULES, ()),
    ],
)
def test_logical_axes_become_mesh_axes_where_they_fit(
    shape: Any, axes: Any, rules: meshes.Rules, wanted: Any
) -> None:
    assert trimmed(spec_of(shape, axes, rules)) == wanted


@pytest.mark.parametrize(
    "axes",
    [
        None,
        (),
        ("embed",),
        ("layers", "embed", "ffn", None),
        (None, "embed", "ffn"),  # only `layers` may be absent
        ("embed", "fnn"),
    ],
)
def test_a_weight_that_does_not_say_its_axes_is_refused(axes: Any) -> None:
    """It would lie whole on every device, and nothing would tell."""
    stated = {} if axes is None else {"axes": axes}
    network = nnx.Dict(first=nnx.Dict(gate=nnx.Param(jnp.zeros((8, 6)), **stated)))
    message = r"the weight first\.gate of shape \(8, 6\) has the logical axes .* nnx\.Param"
    with pytest.raises(ValueError, match=message):
        meshes.assign_shardings(small_mesh(4, 2), network, meshes.ROLLOUT_RULES)
    with pytest.raises(ValueError, match=message):
        meshes.require_weights(network)


def test_a_network_has_no_weights_but_variables() -> None:
    """An array that is no variable has no axes; counts of optimizers may be such."""
    network = {"first": nnx.Param(jnp.zeros((8, 6)), axes=("embed", None)), "gate": jnp.zeros(8)}
    with pytest.raises(ValueError, match=r"the weight gate of shape \(8,\)"):
        meshes.require_weights(network)
    placed = meshes.assign_shardings(small_mesh(4, 2), network, meshes.TRAIN_RULES)
    assert placed["gate"].spec == P()


@pytest.mark.parametrize("made", [optimizers.adamw, optimizers.muon])
def test_moments_keep_the_axes_of_their_weights(made: Any) -> None:
    """Also those of a stack; an optimizer that leaves a weight to another has nothing to place."""
    layers = nnx.Dict(
        gate=nnx.Param(jnp.zeros((2, 8, 6)), axes=("layers", "embed", "ffn")),
        norm=nnx.Param(jnp.zeros((2, 8)), axes=("layers", None)),
    )
    state = jax.eval_shape(lambda: optimizers.init_state(layers, made(0.1, 1.0)))
    placed = meshes.assign_shardings(small_mesh(4, 2), state, meshes.TRAIN_RULES)
    specs = {
        (leaf.shape, trimmed(sharding.spec))
        for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(placed), strict=True)
        if leaf.ndim > 1
    }
    assert specs == {((2, 8, 6), (None, ROWS, "tensor")), ((2, 8), ())}


@pytest.mark.parametrize(("above", "wanted"), [(48, (ROWS, "tensor")), (49, (None, "tensor"))])
def test_small_weights_are_not_sharded_over_data(above: int, wanted: Any) -> None:
    assert (
        trimmed(spec_of((8, 6), ("embed", "ffn"), meshes.TRAIN_RULES, shard_above=above)) == wanted
    )


def test_rows_and_replicas() -> None:
    mesh = small_mesh(4, 2)
    rows = jax.device_put(jnp.arange(16).reshape(8, 2), meshes.row_sharding(mesh))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 2)}
    assert meshes.replicated_sharding(mesh).is_fully_replicated


@pytest.mark.parametrize(("data", "tensor"), [(8, 1), (4, 2), (1, 1)])
def test_shards_and_their_members_see_their_own_part(data: int, tensor: int) -> None:
    """And a `tensor` axis of one device is not in the program: it would be in every line."""
    mesh, rows = small_mesh(data, tensor), jnp.arange(32.0).reshape(8, 4)

    def of_a_member(part: jax.Array) -> jax.Array:
        return part * part.shape[1]

    def of_a_shard(rows: jax.Array) -> jax.Array:
        split = P(None, "tensor")
        return meshes.shard_map_tensor(of_a_member, split, split)(rows) + rows.shape[0]

    run = jax.jit(meshes.shard_map_rows(mesh, of_a_shard, P("data"), P("data")))
    np.testing.assert_array_equal(run(rows), np.asarray(rows) * (4 // tensor) + 8 // data)
    program = run.lower(rows).as_text()
    assert tensor > 1 or "sharding_constraint" not in program, program
