"""Collectives of compiled programs, by kind, axis and bytes, on a mesh of any number of axes."""

import math
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

from jaxspec.compiled.collectives import (
    bytes_sent,
    collective_axes,
    collective_kind,
    devices_per_group,
    parse_device_groups,
)
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
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [(0, 1), (2, 3)]),
        ("replica_groups=mesh['a'=4] {'a':(2)2,'a':(1)2}", [(0, 2, 1, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b','a'}", [(0, 2, 1, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,0,2) {'b'}", [(3, 1), (0, 2)]),
        ("source_target_pairs={{0,3},{3,0}}", [(0, 3), (3, 0)]),
    ],
)
def test_groups_however_they_are_written(written: str, found: list[tuple[int, ...]]) -> None:
    assert parse_device_groups(f", channel_id=1, {written}, use_global_device_ids=true", 4) == found


def test_middle_factors_of_several_axes() -> None:
    """Of a = 2 x 2 x 2 the factor in the middle, and the last of b = 2 x 2."""
    written = "replica_groups=mesh['a'=8,'b'=4] {'a':(2)2,'b':(2)2}"
    found = parse_device_groups(written, 32)
    ids = np.arange(32).reshape(2, 2, 2, 2, 2)
    assert found == [
        tuple(ids[first, :, last, left].ravel().tolist())
        for first, last, left in np.ndindex(2, 2, 2)
    ]


@pytest.mark.parametrize("written", ["replica_groups=@mesh<a=4> {a}", "source_target_pairs=[4,2]"])
def test_groups_of_an_unknown_form_are_refused(written: str) -> None:
    with pytest.raises(ValueError, match="unknown form"):
        parse_device_groups(f", {written}, to_apply=%add", 4)


@pytest.mark.parametrize(
    ("sizes", "split", "summed", "axes", "devices"),
    [
        ((8,), ("a",), 1, ("a",), 4),
        ((8,), ("a",), 0, ("a",), 2),
        ((2, 4), ("b",), 1, ("b",), 2),
        ((2, 4), ("b",), 0, ("b",), 2),
        ((2, 4), ("a", "b"), 1, ("b",), 4),
        ((4, 2), ("a", "b"), 0, ("a",), 2),
        ((4, 2), ("a", "b"), 1, ("a", "b"), 4),
    ],
)
def test_sums_over_part_of_an_axis(
    sizes: tuple[int, ...],
    split: tuple[str, ...],
    summed: int,
    axes: tuple[str, ...],
    devices: int,
) -> None:
    """Rows are 2 x the rest, so that a sum over either spans a factor of an axis, or parts of two.

    XLA writes these groups by the axes of a mesh of its own.
    """
    shape = dict(zip("ab", sizes, strict=False))
    grid = np.array(jax.devices()[:8]).reshape(sizes)
    mesh = Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(sizes))
    rows = math.prod(shape[name] for name in split)
    given = jax.ShapeDtypeStruct((rows, 16), jnp.float32, sharding=NamedSharding(mesh, P(split)))

    def add(x: jax.Array) -> jax.Array:
        return x.reshape(2, rows // 2, 16).sum(summed)

    run = jax.jit(add, out_shardings=NamedSharding(mesh, P()))
    program = Program(run.lower(given).compile().as_text() or "")
    operations = program.instructions_by_name[program.entry].values()
    (reduction,) = (each for each in operations if collective_kind(each) == "all-reduce")
    assert "mesh[" in reduction.attributes
    assert collective_axes(reduction, shape) == axes
    assert devices_per_group(reduction, 8) == devices
    rows_of = np.arange(8).reshape(sizes)
    if "a" in shape and "a" not in split:
        rows_of = rows_of.T  # devices that differ in `a` alone have the same rows
    expected = np.moveaxis(rows_of.reshape(2, rows // 2, -1), summed, -1).reshape(-1, devices)
    found = parse_device_groups(reduction.attributes, 8)
    assert {frozenset(group) for group in found} == {frozenset(each) for each in expected.tolist()}


def test_a_permutation_crosses_an_axis_even_if_few_of_its_pairs_do() -> None:
    mesh = {"data": 2, "tensor": 16}
    pairs = ",".join(f"{{{device},{(device + 1) % 32}}}" for device in range(32))
    text = f"""
ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  ROOT %next = f32[4]{{0}} collective-permute(%a), source_target_pairs={{{pairs}}}
}}
"""
    op = Program(text).instructions_by_name["main"]["next"]
    assert collective_axes(op, mesh) == ("data", "tensor")


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
