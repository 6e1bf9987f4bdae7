"""The kernel against its plain twin, interpreted on a CPU; and what becomes of it when programs are
lowered for GPUs that are not there."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxspec.kernels import paged_attention
from jaxspec.kernels.visible import AttentionMask, causal_mask
from jaxspec.mesh import AXES, DATA, make_mesh
from jaxspec.models.attention import attend_cache
from jaxspec.models.cache import KVCache, locate_block, write_block
from jaxspec.models.contiguous import empty_cache
from jaxspec.models.paged import PAGED, empty_pages

LAYERS, KV_HEADS = 2, 2
BF16 = jnp.dtype(jnp.bfloat16)


class Case(NamedTuple):
    name: str
    lengths: tuple[int, ...]
    """Tokens of each row before its block."""
    block: int = 4
    shared: int = 2
    """Query heads a head of keys and values."""
    size: int = 128
    page: int = 64
    stacked: bool = True
    first: int = 0
    period: int = 1
    drafted: int = 0
    """Slots after the true ones, of which every `period`-th is seen."""

    def __str__(self) -> str:
        return self.name

    @property
    def visible(self) -> AttentionMask:
        own = jnp.asarray(self.lengths, jnp.int32)[:, None] + jnp.arange(
            self.block, dtype=jnp.int32
        )
        return AttentionMask(self.first, own - self.drafted, own, self.period)


CASES = [
    Case("rows of one page and of five", (3, 60, 250)),
    Case("one query, wide pages", (200, 130), block=1, page=128),
    Case("layers apart, small heads", (70, 64), size=64, stacked=False),
    Case("turns of a draft", (70, 130), first=1, period=2, drafted=3, shared=4),
    Case("as many queries as fit", (65, 30), block=8, shared=8),
]
LONG = Case("more pages than blocks", (5000, 17, 1200, 2600, 3), shared=4)


def cache_of(case: Case, dtype: Any = BF16) -> KVCache:
    """Random keys and values as far as each row goes, in pages all over the pool; what nobody has
    written is not a number."""
    random, rows = np.random.default_rng(0), len(case.lengths)
    longest = max(case.lengths) + case.block
    of_row = -(-longest // case.page) + 1
    pages = rows * of_row + 2
    cache = empty_cache(LAYERS, pages, case.page, KV_HEADS, case.size, dtype, case.stacked)
    cache = empty_pages(cache, pages, case.page)
    cache = cache.replace(keys=jax.tree.map(lambda leaf: leaf + jnp.nan, cache.keys))
    table = random.permutation(pages)[: rows * of_row].reshape(rows, of_row)
    held = -(-(np.array(case.lengths) + case.block) // case.page)
    # no page where none is needed
    table = np.where(np.arange(of_row) < held[:, None], table, pages)
    cache = cache.replace(table=jnp.asarray(table, jnp.int32))
    slots = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32), (rows, longest))
    slots = jnp.where(slots < jnp.asarray(case.lengths)[:, None] + case.block, slots, 2**30)
    keys, values = (
        jnp.asarray(random.normal(size=(rows, longest, KV_HEADS, case.size)), dtype)
        for _ in range(2)
    )
    for layer in range(LAYERS):
        cache = write_block(
            cache, layer, locate_block(cache, slots), keys * (layer + 1), values - layer
        )
    return cache


def query_of(case: Case) -> jax.Array:
    shape = len(case.lengths), case.block, KV_HEADS * case.shared, case.size
    return jnp.asarray(np.random.default_rng(1).normal(size=shape) * 2, jnp.bfloat16)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernel is taken, and runs on this machine."""
    # there is no public name for it yet
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    taken, parts = [], paged_attention.attend_pages
    monkeypatch.setattr(paged_attention, "has_hopper_gpus", lambda: True)
    monkeypatch.setattr(
        paged_attention, "attend_pages", lambda *arrays: taken.append(1) or parts(*arrays)
    )
    yield params.force_gpu_interpret_mode
    assert taken


@pytest.mark.parametrize(
    "case",
    [
        CASES[0],
        pytest.param(CASES[1], marks=pytest.mark.slow),
        *(pytest.param(case, marks=pytest.mark.sweep) for case in CASES[2:]),
    ],
    ids=str,
)
def test_it_is_the_attention_of_its_plain_twin(case: Case, interpreted: Any) -> None:
    """Up to the rounding of weights to bfloat16, which both do."""
    with interpreted():
        assert_like_its_twin(case, jax.jit)


def test_a_row_whose_pages_are_in_one_part_is_not_joined(
    interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "THREAD_BLOCKS", 1)
    with interpreted():
        assert_like_its_twin(CASES[1], jax.jit)


def assert_like_its_twin(case: Case, compiled: Callable[[Callable], Callable]) -> None:
    cache, query = cache_of(case), query_of(case)
    layer = 1 if isinstance(cache.keys, tuple) else jnp.int32(1)
    wide = cache.replace(
        **{
            name: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), getattr(cache, name))
            for name in ("keys", "values")
        }
    )
    wanted = jax.jit(lambda query, cache: attend_cache(query, cache, layer, case.visible))(
        query.astype(jnp.float32), wide
    )
    found = compiled(lambda query, cache: attend_cache(query, cache, layer, case.visible))(
        query, cache
    )
    assert found.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(wanted)).all()
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=0.02, atol=0.03)


@pytest.mark.accelerator
@pytest.mark.parametrize("case", [*CASES, LONG], ids=str)
def test_on_a_gpu_it_is_the_attention_of_its_plain_twin(case: Case) -> None:
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("needs a GPU")
    here = []

    def on_the_gpu(function: Callable) -> Callable:
        def shard(*arrays: Any) -> jax.Array:
            here.append(paged_attention.has_hopper_gpus())
            return function(*arrays)

        mesh = make_mesh(1, 1)
        return jax.jit(
            jax.shard_map(shard, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        )

    assert_like_its_twin(case, on_the_gpu)
    if not here[0]:
        pytest.skip("the kernel is for Hopper GPUs, and this is none")


@pytest.mark.slow
def test_a_key_that_is_not_a_number_spoils_those_who_see_it_only(interpreted: Any) -> None:
    case = CASES[0]
    cache, query = cache_of(case), query_of(case)
    spoiled = jnp.full((3, 1, KV_HEADS, case.size), jnp.nan, jnp.bfloat16)
    # the third position of the second row's block
    at = jnp.asarray([[2**30], [62], [2**30]], jnp.int32)
    cache = write_block(cache, 0, locate_block(cache, at), spoiled, spoiled)
    with interpreted():
        found = jax.jit(
            lambda query, cache: attend_cache(query, cache, jnp.int32(0), case.visible)
        )(query, cache)
    finite = np.isfinite(np.asarray(found, np.float32)).all(axis=(2, 3))
    np.testing.assert_array_equal(finite, [[True] * 4, [True, True, False, False], [True] * 4])


def lowered(case: Case, kind: str, tensor: int = 1, dtype: Any = BF16) -> str:
    """A program for GPUs of a kind, of which there need not be any."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="cuda")
    mesh = AbstractMesh((2, 1, tensor), AXES, (AxisType.Auto,) * len(AXES), abstract_device=device)
    cache = jax.eval_shape(lambda: cache_of(case, dtype))
    rows = jax.ShapeDtypeStruct((2 * len(case.lengths), *query_of(case).shape[1:]), dtype)
    positions = jax.ShapeDtypeStruct(rows.shape[:2], jnp.int32)
    pools = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (leaf.shape[0], 2 * leaf.shape[1], *leaf.shape[2:]), leaf.dtype
        ),
        cache.keys,
    )
    values = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (leaf.shape[0], 2 * leaf.shape[1], *leaf.shape[2:]), leaf.dtype
        ),
        cache.values,
    )
    table = jax.ShapeDtypeStruct((2 * cache.table.shape[0], cache.table.shape[1]), jnp.int32)

    def shard(
        query: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, positions: jax.Array
    ) -> jax.Array:
        held = KVCache(keys=keys, values=values, table=table, layout=PAGED)
        return attend_cache(query, held, jnp.int32(1), causal_mask(positions))

    by_page = P(None, DATA)
    program = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(P(DATA), by_page, by_page, P(DATA), P(DATA)),
        out_specs=P(DATA),
        axis_names={DATA},
        check_vma=False,
    )
    return (
        jax.jit(program)
        .trace(rows, pools, values, table, positions)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_it_is_lowered_for_hopper(case: Case, tensor: int) -> None:
    assert "mosaic_gpu" in lowered(case, "NVIDIA H100 80GB HBM3", tensor)


@pytest.mark.parametrize(
    ("block", "shared", "rows"), [(1, 4, 8), (4, 2, 8), (4, 4, 16), (8, 8, 64)]
)
def test_it_writes_real_queries_in_tiles_of_eight(block: int, shared: int, rows: int) -> None:
    """A product has 64 rows, of which plain decoding of a model like Qwen3-8B has four queries."""
    case = CASES[0]._replace(block=block, shared=shared)
    text = lowered(case, "NVIDIA H100 80GB HBM3")
    (call,) = [line for line in text.splitlines() if "mosaic_gpu" in line and "->" in line]
    written = re.findall(r"tensor<3x2x\d+x(\d+)(?:x128)?xf32>", call.split("->")[-1])
    assert written == [str(rows)] * 3


@pytest.mark.parametrize(
    ("kind", "changes", "dtype"),
    [
        ("NVIDIA GB200", {}, BF16),
        ("NVIDIA H100 80GB HBM3", {"page": 16}, BF16),
        ("NVIDIA H100 80GB HBM3", {"size": 80}, BF16),
        ("NVIDIA H100 80GB HBM3", {"block": 9, "shared": 8}, BF16),
        ("NVIDIA H100 80GB HBM3", {}, jnp.dtype(jnp.float32)),
    ],
)
def test_what_it_is_not_for_is_left_to_the_twin(
    kind: str, changes: dict[str, Any], dtype: Any
) -> None:
    assert "mosaic_gpu" not in lowered(CASES[0]._replace(**changes), kind, 1, dtype)
