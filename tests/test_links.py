"""Arrays between two meshes, against the arrays themselves."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.compiled.collectives import KINDS
from jaxspec.links import MeshLink, SameMesh, open_link
from jaxspec.mesh import ROWS, make_mesh
from tests.conftest import small_mesh

Case = tuple[tuple[int, ...], P, P]
SCALAR: Case = ((), P(), P())
EMPTY: Case = ((4, 0), P(), P())


def abstract(arrays: dict[str, Any], shardings: dict[str, NamedSharding]) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=shardings[name])
        for name, array in arrays.items()
    }


@pytest.mark.parametrize(
    ("source", "target", "cases"),
    [
        ((1,), (1,), [((6, 4), P(ROWS), P()), SCALAR, EMPTY]),
        ((2,), (2,), [((6, 4), P(ROWS), P(None, ROWS)), SCALAR]),
        ((3,), (1,), [((6, 4), P(ROWS), P()), ((12,), P(ROWS), P())]),
        ((1,), (3,), [((6, 3), P(), P(ROWS)), ((3, 6), P(), P(None, ROWS))]),
        # Neither count divides the other, so shards are cut into pieces.
        ((3,), (2,), [((6, 4), P(ROWS), P(ROWS)), ((12, 6), P(ROWS), P(None, ROWS))]),
        ((2,), (2, 2), [((6, 4), P(ROWS), P("tensor")), ((5, 3), P(), P())]),
        ((2, 2), (2, 2), [((8, 4), P(ROWS, "tensor"), P("tensor", ROWS))]),
        ((1, 2, 2), (4,), [((4, 8, 4), P("expert", None, "tensor"), P(None, ROWS))]),
    ],
)
@pytest.mark.parametrize("spreads", [False, True])
def test_arrays_arrive_as_they_left_and_each_element_once(
    source: tuple[int, ...], target: tuple[int, ...], cases: list[Case], spreads: bool
) -> None:
    devices, first = jax.devices(), math.prod(source)
    meshes = make_mesh(*source, devices=devices), make_mesh(*target, devices=devices[first:])
    random = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {
        str(i): random.normal(size=shape) for i, (shape, *_) in enumerate(cases)
    }
    arrays["flag"] = random.normal(size=4) > 0
    layouts = [
        {"flag": NamedSharding(mesh, P())}
        | {str(i): NamedSharding(mesh, specs[side]) for i, (_, *specs) in enumerate(cases)}
        for side, mesh in enumerate(meshes)
    ]
    tree = jax.device_put(arrays, layouts[0])
    link = MeshLink(abstract(tree, layouts[0]), abstract(tree, layouts[1]), spreads)
    pack = jax.jit(link.pack).lower(tree).compile()
    unpack = jax.jit(link.unpack, out_shardings=layouts[1]).lower(link.target_layout).compile()
    arrived = unpack(link.move(pack(tree)))
    for name, array in arrays.items():
        np.testing.assert_array_equal(
            np.asarray(arrived[name]), np.asarray(tree[name]), strict=True
        )
        assert arrived[name].sharding == layouts[1][name], array
    # What is not split travels to every device that holds a copy, or is spread there.
    replicas = {
        name: leaf.sharding.num_devices // len({str(index) for index in indices})
        for name, leaf in arrived.items()
        for indices in [leaf.sharding.devices_indices_map(leaf.shape).values()]
    }
    spread = {
        name: spreads and count > 1 and tree[name].ndim > 1 for name, count in replicas.items()
    }
    assert link.bytes == sum(
        leaf.nbytes * (1 if spread[name] else replicas[name]) for name, leaf in tree.items()
    )
    packing, unpacking = f"{pack.as_text()}", f"{unpack.as_text()}"
    assert [name for name in KINDS if f" {name}" in packing] == []
    has_collectives = any(f" {name}" in unpacking for name in KINDS)
    assert has_collectives == any(spread[name] for name in tree if tree[name].size)


def test_replicas_take_turns_to_send() -> None:
    devices = jax.devices()
    source, target = make_mesh(4, devices=devices), make_mesh(4, devices=devices[4:])
    leaf = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(source, P()))
    landing = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(target, P(ROWS)))
    (plan,) = MeshLink(leaf, landing).plans
    assert {copy.source_device for copy in plan.copies} == set(devices[:4])


def test_one_mesh_gives_copies_that_survive_a_donation() -> None:
    sharding = NamedSharding(small_mesh(2), P(ROWS))
    tree = {"w": jax.device_put(jnp.arange(4.0), sharding)}
    link = open_link(abstract(tree, {"w": sharding}), abstract(tree, {"w": sharding}))
    assert isinstance(link, SameMesh)
    packed = jax.jit(link.pack)(tree)
    tree["w"].delete()
    np.testing.assert_array_equal(link.unpack(link.move(packed))["w"], np.arange(4.0))
