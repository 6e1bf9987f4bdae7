"""The GPU kernels' mask and gradients against the plain twins, where they run; and for which
devices and arrays they are taken."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxspec.kernels import tokamax_attention
from jaxspec.kernels.segment_attention import attend_segments, attend_visible
from jaxspec.kernels.tokamax_attention import MOSAIC, TRITON, attend_causal, choose_implementation
from jaxspec.mesh import DATA, TENSOR, make_mesh
from tests import dense

STARTS = (0, 30, 31, 95)
"""Where the texts of a row start: one has a single position."""


def inputs(length: int, size: int = 16, dtype: Any = np.float32, rows: int = 2) -> list[jax.Array]:
    """Query, key, value, a cotangent of the output, and the first position that each query sees:
    other texts in every row."""
    random = np.random.default_rng(0)
    made = [
        jnp.asarray(random.normal(size=(rows, length, heads, size)), dtype)
        for heads in (4, 2, 2, 4)
    ]
    starts = [
        np.unique(np.minimum(np.array(STARTS) * (row + 1), length - 1)) for row in range(rows)
    ]
    first = [row[np.searchsorted(row, np.arange(length), side="right") - 1] for row in starts]
    return [*made, jnp.asarray(np.stack(first), jnp.int32)]


def differentiated(attend: Callable) -> Callable:
    """A compiled function that returns the output and the gradients of query, key and value."""

    def run(query: Any, key: Any, value: Any, cotangent: Any, first: Any) -> list[jax.Array]:
        output, pull = jax.vjp(lambda *leaves: attend(*leaves, first), query, key, value)
        return [output, *pull(cotangent)]

    return jax.jit(run)


def twin(query: Any, key: Any, value: Any, first: Any) -> Any:
    own = jnp.broadcast_to(jnp.arange(first.shape[1], dtype=first.dtype), first.shape)
    return attend_visible(query, key, value, first, own)[0]


def oracle(query: Any, key: Any, value: Any, first: Any) -> Any:
    slots = jnp.arange(first.shape[1], dtype=first.dtype)
    return dense.attend(query, key, value, (slots >= first[:, :, None]) & (slots <= slots[:, None]))


NAMES = "output", "d_query", "d_key", "d_value"


def assert_near(found: list[Any], wanted: list[Any], bound: float) -> None:
    """Within a share of each array's largest entry."""
    for name, ours, theirs in zip(NAMES, found, wanted, strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.abs(ours - theirs).max() <= bound * np.abs(theirs).max(), name


# ---- what the mask means


@pytest.mark.parametrize("tensor", [1, 2])
def test_tokamaxs_mask_is_that_of_packed_texts(tensor: int) -> None:
    """By its implementation in plain JAX, which reads the same mask; heads apart where they are
    split over `tensor`."""
    pytest.importorskip("tokamax")
    arrays = inputs(130)

    def attend(*leaves: Any) -> Any:
        return attend_causal(*leaves, implementation="xla")

    run = jax.shard_map(
        attend,
        mesh=make_mesh(2, tensor),
        in_specs=P(DATA),
        out_specs=P(DATA),
        axis_names={DATA},
        check_vma=False,
    )
    with jax.numpy_dtype_promotion("standard"):
        found = differentiated(run)(*arrays)
    assert_near(found, differentiated(twin)(*arrays), 1e-5)
    assert_near(found, differentiated(oracle)(*arrays), 1e-5)


# ---- on a GPU


@pytest.mark.accelerator
@pytest.mark.parametrize(("length", "size"), [(1024, 128), (1001, 64), (300, 96)])
def test_kernels_give_the_values_and_gradients_of_the_plain_twins(length: int, size: int) -> None:
    """Within 2% of each array's largest entry: weights are rounded to 8 bits."""
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if not gpus:
        pytest.skip("needs a GPU")
    arrays = inputs(length, size, jnp.bfloat16)
    chosen = []

    def attend(*leaves: Any) -> Any:
        chosen.append(choose_implementation(*leaves[:2]))
        return attend_segments(*leaves)

    run = jax.shard_map(
        attend,
        mesh=make_mesh(1, 1),
        in_specs=P(DATA),
        out_specs=P(DATA),
        axis_names={DATA},
        check_vma=False,
    )
    with jax.numpy_dtype_promotion("standard"):
        found = differentiated(run)(*arrays)
    if chosen[0] is None:
        pytest.skip("there are no kernels for this GPU, or tokamax is not installed")
    assert_near(found, differentiated(twin)(*arrays), 0.02)
    wide = [leaf.astype(np.float32) for leaf in arrays[:4]]
    assert_near(found, differentiated(oracle)(*wide, arrays[4]), 0.02)


# ---- the choice


class Device(NamedTuple):
    device_kind: str
    compute_capability: str


class Asked(NamedTuple):
    """What is asked for in a program for 4 GPUs."""

    kind: str = "NVIDIA H200"
    default: str = "NVIDIA H200"
    """The kind of the default device."""
    capability: str = "9.0"
    dtype: Any = jnp.bfloat16
    size: int = 128
    length: int = 512
    tensor: int = 1
    manual: tuple[str, ...] = (DATA,)
    installed: tuple[str, ...] = (MOSAIC, TRITON)


def choice(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> str | None:
    device = jax.sharding.AbstractDevice(device_kind=asked.kind, num_cores=None, platform="gpu")
    mesh = AbstractMesh(
        (4 // asked.tensor, asked.tensor),
        (DATA, TENSOR),
        (AxisType.Auto,) * 2,
        abstract_device=device,
    )
    monkeypatch.setattr(
        tokamax_attention.backend,
        "get_default_device",
        lambda: Device(asked.default, asked.capability),
    )
    tokamax = (
        tokamax_attention._Tokamax(dict.fromkeys(asked.installed), None)
        if asked.installed
        else None
    )
    monkeypatch.setattr(tokamax_attention, "_import_tokamax", lambda: tokamax)
    query, key = (
        jax.ShapeDtypeStruct((4, asked.length, heads, asked.size), asked.dtype) for heads in (8, 2)
    )
    chosen = []

    def look(query: Any, key: Any) -> Any:
        chosen.append(choose_implementation(query, key))
        return query

    by_row = P(DATA) if DATA in asked.manual else P()
    run = jax.shard_map(
        look,
        mesh=mesh,
        in_specs=by_row,
        out_specs=by_row,
        axis_names=set(asked.manual),
        check_vma=False,
    )
    jax.jit(run).trace(query, key)
    return chosen[0]


@pytest.mark.parametrize(
    ("asked", "kernels"),
    [
        (Asked(), MOSAIC),
        (Asked(kind="NVIDIA GB200", default="NVIDIA GB200", capability="10.0"), MOSAIC),
        (Asked(kind="NVIDIA GB300", default="NVIDIA GB300", capability="10.3", tensor=2), MOSAIC),
        (
            Asked(kind="NVIDIA A100-SXM4-80GB", default="NVIDIA A100-SXM4-80GB", capability="8.0"),
            TRITON,
        ),
        (Asked(kind="NVIDIA L40S", default="NVIDIA L40S", capability="8.9"), TRITON),
        (
            Asked(
                kind="NVIDIA GeForce RTX 5090", default="NVIDIA GeForce RTX 5090", capability="12.0"
            ),
            TRITON,
        ),
        (Asked(kind="NVIDIA L40S", default="NVIDIA L40S", capability="8.9", length=32768), None),
        (Asked(kind="NVIDIA T4", default="NVIDIA T4", capability="7.5"), None),
        (
            Asked(kind="AMD Instinct MI300X", default="AMD Instinct MI300X", capability="gfx942"),
            None,
        ),
        (Asked(default="cpu"), None),
        (Asked(default="NVIDIA H100 80GB HBM3"), None),
        (Asked(dtype=jnp.float32), None),
        (Asked(size=256), None),
        (Asked(tensor=4), None),  # more peers than heads of keys
        (Asked(manual=(TENSOR,)), None),  # rows that the compiler would have to split
        (Asked(installed=(TRITON,)), None),
        (Asked(installed=()), None),
    ],
    ids=str,
)
def test_kernels_are_taken_for_what_they_are_written_for(
    asked: Asked, kernels: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choice(asked, monkeypatch) == kernels


def test_elsewhere_it_is_the_blocked_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and where no mesh is in scope."""
    arrays = inputs(130)
    monkeypatch.delattr(tokamax_attention, "attend_causal")
    run = jax.shard_map(
        attend_segments,
        mesh=make_mesh(2, 1),
        in_specs=P(DATA),
        out_specs=P(DATA),
        axis_names={DATA},
        check_vma=False,
    )
    wanted = differentiated(twin)(*arrays)
    for attend in (attend_segments, run):
        assert_near(differentiated(attend)(*arrays), wanted, 1e-6)


def test_a_gpu_without_tokamax_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # The package, not a module of it, which an earlier test may have left there as an attribute.
    monkeypatch.setitem(sys.modules, "tokamax._src.ops.attention", None)
    tokamax_attention._import_tokamax.cache_clear()
    with pytest.warns(UserWarning, match="the learner's attention runs in plain JAX"):
        assert tokamax_attention._import_tokamax() is None
    assert tokamax_attention._import_tokamax() is None
    tokamax_attention._import_tokamax.cache_clear()
