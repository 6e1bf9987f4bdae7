"""Meshes, the rules that place weights on them, and how a job finds its devices."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxspec import mesh as meshes
from jaxspec.inputs.checked import ConfigError
from jaxspec.mesh import ROWS
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
    placed = meshes.assign_shardings(
        mesh, _One(jnp.zeros(shape)), {"weight": axes}, meshes.TRAIN_RULES
    )
    assert trimmed(placed.weight.spec) == wanted
    alone = meshes.assign_shardings(
        mesh, _One(jnp.zeros(shape)), {"weight": axes}, meshes.TRAIN_RULES, shard_above=10**6
    )
    kept = tuple(axis if axis in ("expert", "tensor") else None for axis in wanted)
    assert trimmed(alone.weight.spec) == trimmed(P(*kept)), "small ones keep their experts apart"


def spec_of(
    shape: tuple[int, ...], axes: tuple[str | None, ...], rules: meshes.Rules, **options: Any
) -> P:
    placed = meshes.assign_shardings(
        small_mesh(4, 2), _One(jnp.zeros(shape)), {"weight": axes}, rules, **options
    )
    return placed.weight.spec


@jax.tree_util.register_pytree_with_keys_class
class _One:
    """A tree with a single attribute, `weight`."""

    def __init__(self, weight: Any):
        self.weight = weight

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        return [(jax.tree_util.GetAttrKey("weight"), self.weight)], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "_One":
        return cls(*children)


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
        ((8,), ("embed", "ffn"), meshes.TRAIN_RULES, ()),  # not the rank its entry describes
        ((8, 6), (), meshes.TRAIN_RULES, ()),
    ],
)
def test_logical_axes_become_mesh_axes_where_they_fit(
    shape: Any, axes: Any, rules: meshes.Rules, wanted: Any
) -> None:
    assert trimmed(spec_of(shape, axes, rules)) == wanted


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


class Device(NamedTuple):
    """What `holders` asks of a device."""

    id: int
    process_index: int


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_every_row_is_owned_once_also_where_tensor_spans_processes(
    monkeypatch: pytest.MonkeyPatch, tensor: int
) -> None:
    """Four processes of two devices each."""
    rows, shards = 16, 8 // tensor
    width = rows // shards
    indices = {
        Device(number, number // 2): (
            slice(number // tensor * width, (number // tensor + 1) * width),
        )
        for number in range(8)
    }
    monkeypatch.setattr(
        meshes, "row_sharding", lambda _: SimpleNamespace(devices_indices_map=lambda _: indices)
    )
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    copies, owners = meshes.locate_rows(small_mesh(8 // tensor, tensor), rows)
    np.testing.assert_array_equal(copies.sum(axis=0), max(1, tensor // 2))
    np.testing.assert_array_equal(owners, copies.argmax(axis=0))
    # The first of a shard's devices is on the process of this number.
    np.testing.assert_array_equal(owners, np.repeat(np.arange(shards) * tensor // 2, width))


# ---- devices


def devices_with(**environment: str) -> tuple[int, str | None]:
    """Devices and NPROC after `prepare_devices(3)` in a process of its own."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "NPROC")
    }
    program = "import json, os, jax; from jaxspec.mesh import prepare_devices; prepare_devices(3); "
    program += "print(json.dumps([jax.device_count(), os.environ.get('NPROC')]))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    count, threads = json.loads(found.stdout)
    return count, threads


def test_cpu_devices_follow_the_mesh_unless_the_environment_says_otherwise() -> None:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    assert devices_with() == (3, str(max(1, cores // 3)))
    assert devices_with(JAXSPEC_LOCAL_DEVICES="2", XLA_FLAGS=" ") == (2, str(max(1, cores // 2)))
    assert devices_with(XLA_FLAGS="--xla_force_host_platform_device_count=5") == (5, None)
    assert devices_with(JAX_NUM_CPU_DEVICES="4") == (4, None)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "JAXSPEC_LOCAL_DEVICES",
            "abc",
            "JAXSPEC_LOCAL_DEVICES is 'abc'; give a whole number, 1 or more",
        ),
        ("JAXSPEC_LOCAL_DEVICES", "0", "JAXSPEC_LOCAL_DEVICES is '0'"),
        ("JAXSPEC_LOCAL_DEVICES", "-2", "JAXSPEC_LOCAL_DEVICES is '-2'"),
        ("NPROC", "many", "NPROC is 'many'"),
        ("NPROC", "0", "NPROC is '0'"),
        ("JAX_NUM_CPU_DEVICES", "0", "JAX_NUM_CPU_DEVICES is '0'"),
        ("XLA_FLAGS", "garbage", "XLA_FLAGS starts with .'garbage'.: neither a flag .* nor a file"),
        (
            "XLA_FLAGS",
            "--xla_force_host_platform_device_count=abc",
            "device_count=abc; give a whole number",
        ),
        (
            "XLA_FLAGS",
            "--xla_force_host_platform_device_count=0",
            "device_count=0; give a whole number",
        ),
        *(
            (name, "1000000", f"{name} is '1000000'.*at most 512")
            for name in ("JAX_NUM_CPU_DEVICES", "JAXSPEC_LOCAL_DEVICES")
        ),
        (
            "XLA_FLAGS",
            "--xla_force_host_platform_device_count=1000000",
            "device_count=1000000; give a whole number.*at most 512",
        ),
    ],
)
def test_numbers_of_devices_that_make_no_sense_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    for other in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "NPROC", "JAXSPEC_LOCAL_DEVICES"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # the tests' own devices stay
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=said):
        meshes.prepare_devices(2)


@pytest.mark.parametrize(
    "error",
    [AssertionError(), RuntimeError("Unable to initialize backend 'cuda': none\nand a page more")],
)
def test_a_device_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What JAX raises for JAX_PLATFORMS=cuda without and with the plug-in."""

    def missing() -> int:
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "device_count", missing)
    with pytest.raises(
        ConfigError,
        match=(
            r"^JAX_PLATFORMS is 'cuda', and there is no such device here.*; unset"
            r" JAX_PLATFORMS[^\n]*$"
        ),
    ):
        meshes.count_devices()
