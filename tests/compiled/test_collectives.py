"""Collectives of compiled programs, by kind, axis and bytes, on a mesh of any number of axes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.compiled.collectives import bytes_sent, collective_kind, parse_device_groups
from jaxspec.compiled.counts import Collective, Cost, CostCounter
from jaxspec.compiled.text import Program

SHAPE = {"data": 2, "expert": 2, "tensor": 2}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    devices = np.array(jax.devices()[:8]).reshape(tuple(SHAPE.values()))
    return Mesh(devices, tuple(SHAPE), axis_types=(AxisType.Auto,) * 3)


def cost(mesh: Mesh, body: Callable[[jax.Array], jax.Array]) -> Cost:
    """Of a function of each device's 4 x 16 numbers."""
    run = jax.shard_map(body, mesh=mesh, in_specs=P(tuple(SHAPE)), out_specs=P(), check_vma=False)
    layout = NamedSharding(mesh, P(tuple(SHAPE)))
    given = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=layout)
    program = Program(jax.jit(run).lower(given).compile().as_text() or "")
    return CostCounter(program, SHAPE).count_computation(program.entry)


def gathered(axis: Any, x: jax.Array) -> jax.Array:
    return lax.all_gather(x, axis, tiled=True)


SIZE = 4 * 16 * 4
PASSED = [(0, 1), (1, 0)]


@pytest.mark.parametrize(
    ("body", "kind", "axes", "size"),
    [
        (partial(gathered, "tensor"), "all-gather", ("tensor",), SIZE),
        (partial(gathered, "expert"), "all-gather", ("expert",), SIZE),
        (partial(gathered, ("data", "tensor")), "all-gather", ("data", "tensor"), 3 * SIZE),
        (lambda x: lax.psum(x, "data"), "all-reduce", ("data",), SIZE),
        (lambda x: lax.psum(x, tuple(SHAPE)), "all-reduce", tuple(SHAPE), 2 * SIZE * 7 // 8),
        (
            lambda x: lax.psum_scatter(x, "expert", scatter_dimension=0, tiled=True),
            "reduce-scatter",
            ("expert",),
            SIZE // 2,
        ),
        (
            lambda x: lax.all_to_all(x, "expert", 0, 0, tiled=True),
            "all-to-all",
            ("expert",),
            SIZE // 2,
        ),
        (lambda x: lax.ppermute(x, "data", PASSED), "collective-permute", ("data",), SIZE),
    ],
)
def test_kind_axes_and_bytes(
    mesh: Mesh, body: Callable, kind: str, axes: tuple[str, ...], size: int
) -> None:
    found = cost(mesh, body)
    assert found.collectives == {Collective(kind, axes): 1}
    assert found.bytes_sent == {Collective(kind, axes): size}


def test_in_a_loop_they_count_as_often_as_it_runs(mesh: Mesh) -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 5, lambda _, y: lax.psum(y, "tensor") * 0.5, x)

    assert cost(mesh, body).collectives == {Collective("all-reduce", ("tensor",)): 5}


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("replica_groups={{0,2},{1,3}}", [(0, 2), (1, 3)]),
        ("replica_groups={}", [(0, 1, 2, 3)]),
        ("replica_groups=[2,2]<=[4]", [(0, 1), (2, 3)]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['data'=2,'tensor'=2] {'data'}", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['data'=2,'tensor'=2] {'tensor'}", [(0, 1), (2, 3)]),
        ("source_target_pairs={{0,3},{3,0}}", [(0, 3), (3, 0)]),
    ],
)
def test_groups_however_they_are_written(written: str, found: list[tuple[int, ...]]) -> None:
    assert parse_device_groups(f", channel_id=1, {written}, use_global_device_ids=true", 4) == found


def test_one_that_is_begun_gives_its_last_results() -> None:
    """Before them it lists what it takes; an all-reduce lists nothing."""
    text = """
ENTRY %main (a: f32[4]) -> f32[8] {
  %a = f32[4]{0} parameter(0)
  %gather = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), replica_groups={{0,1}}, dimensions={0}
  %sum = f32[4]{0} all-reduce-start(%a), replica_groups={{0,1}}, to_apply=%add
  ROOT %out = f32[8]{0} all-gather-done(%gather)
}
"""
    lines = Program(text).instructions_by_name["main"]
    assert [bytes_sent(lines[name], 2) for name in ("gather", "sum")] == [16, 16]
    assert [collective_kind(each) for each in lines.values()] == [
        "",
        "all-gather",
        "all-reduce",
        "",
    ]
