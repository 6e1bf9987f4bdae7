"""Attention of packed texts against its plain twin with all scores; its memory and sharding."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from jaxspec.kernels.segment_attention import BLOCK, attend_visible
from jaxspec.mesh import DATA, make_mesh

pytestmark = pytest.mark.usefixtures("x64")


class Case(NamedTuple):
    name: str
    length: int
    batch: int = 1
    kv_heads: int = 2
    shared: int = 1
    """Query heads of each head of keys and values."""
    lag: int = 0
    """How many positions before its own the last one is that a query sees."""

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("less than a block", 5),
    Case("one query", 1, shared=4),
    Case("two whole blocks", 2 * BLOCK, kv_heads=1, shared=4),
    Case("one more than two blocks, two rows", 2 * BLOCK + 1, batch=2, shared=4, lag=1),
    Case("some blocks, two rows", 3 * BLOCK - 7, batch=2, lag=3),
    Case("the draft's third step", 2 * BLOCK + 11, shared=2, lag=2),
]


def visible(case: Case, texts: int = 20, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Limits of random texts of about so many positions, one of a single position among them."""
    random, positions = np.random.default_rng(seed), np.arange(case.length)
    first = np.zeros((case.batch, case.length), np.int32)
    for row in first:
        starts = random.integers(0, case.length, case.length // texts)
        middle = case.length // 2
        starts = np.unique([0, middle, min(middle + 1, case.length - 1), *starts])
        row[:] = starts[np.searchsorted(starts, positions, side="right") - 1]
    last = np.broadcast_to(positions - case.lag, first.shape)
    return jnp.asarray(first), jnp.asarray(last, jnp.int32)


def arrays(case: Case, size: int = 8, dtype: Any = np.float64, seed: int = 1) -> list[jax.Array]:
    """Query, key, value, and cotangents of the output and the log-sum-exp."""
    random, heads = np.random.default_rng(seed), case.kv_heads * case.shared
    tails = (heads, size), (case.kv_heads, size), (case.kv_heads, size), (heads, size), (heads,)
    shapes = [(case.batch, case.length, *tail) for tail in tails]
    made = [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]
    made[-1] = made[-1].astype(np.promote_types(dtype, np.float32))
    return made


def attend_plainly(query: Any, key: Any, value: Any, first: Any, last: Any) -> tuple[Any, Any]:
    """The plain twin, with the scores of all pairs."""
    shared = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(leaf, shared, axis=2) for leaf in (key, value))
    positions = jnp.arange(key.shape[1], dtype=jnp.int32)
    seen = (positions >= first[..., None]) & (positions <= last[..., None])
    seen, sees = seen[:, None], seen.any(axis=-1)
    scores = jnp.einsum("BTNH,BSNH->BNTS", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(seen, scores, -jnp.inf)
    # A row without scores has no derivative, so another one stands in for it.
    safe = jnp.where(sees[:, None, :, None], scores, 0)
    weights = jnp.where(seen, jax.nn.softmax(safe, axis=-1), 0)
    log_sum = jax.nn.logsumexp(safe, axis=-1).transpose(0, 2, 1)
    output = jnp.einsum("BNTS,BSNH->BTNH", weights, value)
    return output, jnp.where(sees[..., None], log_sum, -jnp.inf)


def differentiated(attend: Any) -> Any:
    """A compiled function that returns both results and the gradients of query, key and value."""

    def run(query: Any, key: Any, value: Any, *others: Any) -> list[jax.Array]:
        *cotangents, first, last = others
        results, pull = jax.vjp(lambda *inputs: attend(*inputs, first, last), query, key, value)
        return [*results, *pull(tuple(cotangents))]

    return jax.jit(run)


NAMES = "output", "log_sum", "d_query", "d_key", "d_value"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_those_of_the_plain_twin(case: Case) -> None:
    inputs = *arrays(case), *visible(case)
    blind = np.asarray(inputs[-1] < inputs[-2])
    assert blind.any() == (case.lag > 0)
    found = differentiated(attend_visible)(*inputs)
    expected = differentiated(attend_plainly)(*inputs)
    for name, ours, theirs in zip(NAMES, found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12, err_msg=name)
    output, log_sum, d_query = (np.asarray(leaf) for leaf in found[:3])
    assert not output[blind].any()
    assert not d_query[blind].any()
    assert (log_sum[blind] == -np.inf).all()


@pytest.mark.parametrize("count", [1, BLOCK, 2 * BLOCK + 5])
def test_queries_may_be_fewer_than_keys_and_in_any_order(count: int) -> None:
    """As where a draft is run for some positions alone."""
    case = Case("", 3 * BLOCK - 7, batch=2, shared=2, lag=1)
    query, key, value, *cotangents = arrays(case)
    limits = visible(case)
    chosen = np.stack([np.random.default_rng(row).permutation(case.length) for row in range(2)])

    def some(array: jax.Array) -> jax.Array:
        places = chosen[:, :count].reshape(2, count, *[1] * (array.ndim - 2))
        return jnp.take_along_axis(array, places, axis=1)

    inputs = some(query), key, value, *map(some, cotangents), *map(some, limits)
    found = differentiated(attend_visible)(*inputs)
    expected = differentiated(attend_plainly)(*inputs)
    for name, ours, theirs in zip(NAMES, found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12, err_msg=name)


def test_cotangents_of_a_query_that_sees_nothing_are_ignored() -> None:
    """The gradient of a merge by log-sum-exp may be NaN where one term is -inf."""
    case = Case("", BLOCK + 3, lag=1)
    *inputs, first, last = *arrays(case), *visible(case)
    sees = (first <= last)[..., None]
    d_output = jnp.where(sees[..., None], inputs[3], jnp.nan)
    d_log_sum = jnp.where(sees, inputs[4], jnp.nan)
    run = differentiated(attend_visible)
    spoiled = run(*inputs[:3], d_output, d_log_sum, first, last)
    for clean, found in zip(run(*inputs, first, last), spoiled, strict=True):
        np.testing.assert_array_equal(clean, found)


def test_gradients_are_those_of_finite_differences() -> None:
    case = Case("", 7, shared=2)
    *inputs, for_output, for_log_sum = arrays(case, size=4)
    first, last = visible(case, texts=3)

    @jax.jit
    def weighed(query: Any, key: Any, value: Any) -> Any:
        output, log_sum = attend_visible(query, key, value, first, last)
        return jnp.sum(output * for_output) + jnp.sum(log_sum * for_log_sum)

    check_grads(weighed, tuple(inputs), order=1, modes=["rev"])


def test_bfloat16_is_near_float64() -> None:
    """Within 2% of each array's largest entry: weights are rounded to 8 bits."""
    case = Case("", 2 * BLOCK + 5, shared=2)
    inputs, limits = arrays(case, size=32, dtype=jnp.bfloat16), visible(case)
    found = differentiated(attend_visible)(*inputs, *limits)
    for name, leaf in zip(NAMES, found, strict=True):
        assert leaf.dtype == (jnp.float32 if name == "log_sum" else jnp.bfloat16)
    exact = (leaf.astype(np.float64) for leaf in inputs)
    expected = differentiated(attend_plainly)(*exact, *limits)
    for name, ours, theirs in zip(NAMES, found, expected, strict=True):
        error = np.abs(np.asarray(ours, np.float64) - theirs).max() / np.abs(theirs).max()
        assert error < 0.02, name


def test_large_scores_do_not_overflow() -> None:
    case = Case("", BLOCK + 20)
    query, *others = arrays(case, dtype=np.float32)
    inputs = 1e4 * query, *others, *visible(case)
    found = differentiated(attend_visible)(*inputs)
    expected = differentiated(attend_plainly)(*inputs)
    assert np.abs(expected[1]).max() > 1e4
    for name, ours, theirs in zip(NAMES[:2], found, expected, strict=False):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3, err_msg=name)
    assert all(np.isfinite(leaf).all() for leaf in found)


def test_blocks_that_no_query_sees_are_skipped() -> None:
    """NaN in the keys of a second text reaches neither results nor gradients of the first."""
    case = Case("", 4 * BLOCK)
    positions = jnp.arange(case.length, dtype=jnp.int32)[None]
    boundary = 2 * BLOCK
    first = jnp.where(positions < boundary, 0, boundary).astype(jnp.int32)
    query, key, value, *cotangents = arrays(case)
    others = *cotangents, first, positions
    bad_key, bad_value = (leaf.at[:, boundary:].set(jnp.nan) for leaf in (key, value))
    run = differentiated(attend_visible)
    spoiled = run(query, bad_key, bad_value, *others)
    for clean, found in zip(run(query, key, value, *others), spoiled, strict=True):
        np.testing.assert_array_equal(clean[:, :boundary], found[:, :boundary])
        assert np.isnan(found[:, boundary:]).all()


def compiled_at(length: int) -> Any:
    """The program of results and gradients for texts of 192."""
    case = Case("", length, shared=2)
    inputs = arrays(case, dtype=np.float32)
    first = jnp.arange(length, dtype=jnp.int32)[None]
    return differentiated(attend_visible).lower(*inputs, first - first % 192, first).compile()


def test_memory_is_linear_in_the_length() -> None:
    programs = {length: compiled_at(length) for length in (2048, 4096)}
    short, long = (program.memory_analysis().temp_size_in_bytes for program in programs.values())
    assert 0 < long <= 2.2 * short
    for length, program in programs.items():
        padded = length + -length % BLOCK
        found = re.findall(r"\w\[([\d,]+)\]", program.as_text())
        shapes = [[int(size) for size in shape.split(",")] for shape in found]
        axes = [sum(size in (length, padded) for size in shape) for shape in shapes]
        assert max(axes) == 1, "no array has two axes of positions"


@pytest.mark.parametrize(("data", "tensor"), [(4, 1), (2, 2)])
def test_inside_shard_map_with_scan_and_checkpoint(data: int, tensor: int) -> None:
    """Each shard of `data` has texts of its own; heads are split over `tensor` without exchange."""
    case = Case("", BLOCK + 9, batch=data, kv_heads=2, shared=2)
    inputs, limits, scales = arrays(case), visible(case), jnp.asarray([1.0, 0.5])
    by_row, by_head = P(DATA), P(DATA, None, "tensor")
    mesh = make_mesh(data, tensor)

    def layers(attend: Any, *leaves: Any) -> Any:
        query, key, value, first, last = leaves

        @jax.checkpoint
        def layer(hidden: Any, scale: Any) -> tuple[Any, Any]:
            def run(inner: Any) -> tuple[Any, Any]:
                return attend(inner * scale, key, value, first, last)

            def skip(inner: Any) -> tuple[Any, Any]:
                return inner, jnp.zeros(inner.shape[:-1], inner.dtype)

            return lax.cond(scale > 0, run, skip, hidden)

        hidden, log_sums = lax.scan(layer, query, scales)
        return hidden, jnp.sum(log_sums, axis=0)

    def sharded(*leaves: Any) -> Any:
        run = jax.shard_map(
            functools.partial(layers, attend_visible),
            mesh=mesh,
            in_specs=(by_row,) * 5,
            out_specs=by_row,
            axis_names={DATA},
            check_vma=False,
        )
        return run(*leaves)

    expected = differentiated(lambda *leaves: layers(attend_plainly, *leaves))(*inputs, *limits)
    placed = [jax.device_put(leaf, jax.NamedSharding(mesh, by_head)) for leaf in inputs]
    placed_limits = [jax.device_put(leaf, jax.NamedSharding(mesh, by_row)) for leaf in limits]
    program = differentiated(sharded).lower(*placed, *placed_limits).compile()
    for name, ours, theirs in zip(NAMES, program(*placed, *placed_limits), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11, err_msg=name)
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", program.as_text())
