"""Feed-forward layers of experts against products with all of them, values and gradients; and what
they cost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.kernels import exchange, grouped
from jaxspec.kernels.grouped import expert_swiglu
from jaxspec.mesh import EXPERT, ROWS, TENSOR, make_mesh, shard_map_rows
from jaxspec.models import moe
from jaxspec.models.moe import Traffic, mixture_of_experts

pytestmark = pytest.mark.usefixtures("x64")

WIDTH, INNER, EXPERTS, CHOSEN = 16, 12, 8, 3


def weights_of(random: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    router = jnp.asarray(random.normal(size=(WIDTH, EXPERTS)), dtype)
    shapes = (EXPERTS, WIDTH, INNER), (EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH)
    return router, tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)


def by_all(x: Any, router: Any, experts: Any, normalize: bool) -> Any:
    """Every token through every expert."""
    gate, up, down = experts
    laws = jax.nn.softmax(jnp.einsum("BTD,DE->BTE", x, router), axis=-1)
    weights, chosen = jax.lax.top_k(laws, CHOSEN)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    inner = jax.nn.silu(jnp.einsum("BTD,EDF->BTEF", x, gate))
    inner = inner * jnp.einsum("BTD,EDF->BTEF", x, up)
    outputs = jnp.einsum("BTEF,EFD->BTED", inner, down)
    shares = jnp.sum(jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype) * weights[..., None], axis=2)
    return jnp.einsum("BTED,BTE->BTD", outputs, shares)


def with_gradients(function: Any, normalize: bool) -> Any:
    def run(x: Any, router: Any, experts: Any, cotangent: Any) -> Any:
        output, pull = jax.vjp(lambda *inputs: function(*inputs, normalize), x, router, experts)
        return output, pull(cotangent)

    return run


def by_blocks(x: Any, router: Any, experts: Any, normalize: bool) -> Any:
    return mixture_of_experts(x, router, experts, CHOSEN, normalize)[0]


def assert_near(found: Any, wanted: Any, tolerance: float) -> None:
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(
            one, other, rtol=0, atol=tolerance * float(np.abs(other).max())
        ),
        found,
        wanted,
    )


def inputs_of(rows: int, dtype: Any, seed: int = 0) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)
    x, cotangent = (jnp.asarray(random.normal(size=(rows, 5, WIDTH)), dtype) for _ in range(2))
    return (x, *weights_of(random, dtype), cotangent)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_blocks_give_what_products_with_all_experts_give(
    rows: int, normalize: bool, dtype: str, tolerance: float
) -> None:
    inputs = inputs_of(rows, dtype)
    found = jax.jit(with_gradients(by_blocks, normalize))(*inputs)
    assert_near(found, jax.jit(with_gradients(by_all, normalize))(*inputs), tolerance)


@pytest.mark.parametrize(
    ("data", "expert", "tensor"), [(1, 2, 1), (1, 4, 2), (2, 4, 1), (2, 2, 2), (1, 8, 1)]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float64", 1e-12), pytest.param("float32", 1e-5, marks=pytest.mark.sweep)],
)
def test_it_does_not_matter_who_holds_the_experts(
    data: int, expert: int, tensor: int, dtype: str, tolerance: float
) -> None:
    inputs = inputs_of(8, dtype)
    mesh = make_mesh(data, tensor, expert)
    split = P(EXPERT, None, TENSOR), P(EXPERT, None, TENSOR), P(EXPERT, TENSOR)

    def shard(*given: Any) -> Any:
        output, (of_x, of_router, of_experts) = with_gradients(by_blocks, True)(*given)
        # the router is read by all; an expert by its own data shards' tokens
        summed = jax.lax.psum(of_router, ROWS), jax.lax.psum(of_experts, "data")
        return output, (of_x, *summed)

    specs = P(ROWS), P(), (P(EXPERT),) * 3
    run = shard_map_rows(mesh, shard, (*specs, P(ROWS)), (P(ROWS), specs))
    places = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        (P(ROWS), P(), split, P(ROWS)),
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    found = jax.jit(run)(*jax.device_put(inputs, places))
    assert_near(found, jax.jit(with_gradients(by_all, True))(*inputs), tolerance)


@pytest.mark.parametrize("size", [2**9, 2**10])
def test_nor_how_many_tokens_go_there_at_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parts are of tokens of several rows, and the last is not full."""
    monkeypatch.setattr(moe, "MAX_RECEIVED_BYTES", size)
    test_it_does_not_matter_who_holds_the_experts(2, 2, 2, "float64", 1e-12)


def ragged(
    operand: Any, output: Any, starts: Any, sizes: Any, places: Any, _: Any, *, axis_name: str
) -> Any:
    """What `lax.ragged_all_to_all` gives by its description, from everything of all members."""
    me, rows = lax.axis_index(axis_name), jnp.arange(len(operand), dtype=jnp.int32)
    operands, starts, sizes, places = (
        lax.all_gather(leaf, axis_name) for leaf in (operand, starts, sizes, places)
    )
    for sender in range(len(sizes)):
        source = operands[sender][jnp.minimum(starts[sender, me] + rows, len(operand) - 1)]
        there = rows < sizes[sender, me]
        place = jnp.where(there, places[sender, me] + rows, len(output))
        output = output.at[place].set(source, mode="drop")
    return output


def test_nor_whether_only_those_rows_travel_that_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs."""
    monkeypatch.setattr(exchange, "has_gpus_in_scope", lambda: True)
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged)
    test_it_does_not_matter_who_holds_the_experts(2, 2, 2, "float64", 1e-12)
    test_a_token_that_all_send_to_one_member_gets_there()


def test_a_token_that_all_send_to_one_member_gets_there() -> None:
    """The worst case of an exchange: a router that likes the last experts only."""
    x, router, experts, _ = inputs_of(8, "float64")
    router = router.at[:, :].set(0).at[0, -CHOSEN:].set(50.0)
    x = x.at[:, :, 0].set(1.0)
    mesh = make_mesh(1, 1, 4)
    specs = P(ROWS), P(), (P(EXPERT),) * 3
    run = shard_map_rows(mesh, lambda *given: by_blocks(*given, normalize=True), specs, P(ROWS))
    found = jax.jit(run)(x, router, experts)
    assert_near(found, by_all(x, router, experts, True), 1e-12)


def test_an_expert_without_tokens_is_not_read_and_a_bad_token_stays_alone() -> None:
    random = np.random.default_rng(3)
    _, experts = weights_of(random, "float64")
    experts = jax.tree.map(lambda weight: weight.at[5].set(jnp.nan), experts)
    tokens = jnp.asarray(random.normal(size=(9, WIDTH)))
    chosen = jnp.asarray(random.integers(0, 5, (9, 2)), jnp.int32).at[4].set(EXPERTS)
    shares = jnp.ones((9, 2))
    whole = expert_swiglu(tokens, chosen, shares, experts)
    assert np.isfinite(whole).all()
    assert not whole[4].any(), "a token of no expert"
    poisoned = expert_swiglu(tokens.at[2].set(jnp.inf), chosen, shares, experts)
    others = np.arange(9) != 2
    np.testing.assert_array_equal(poisoned[others], whole[others])
    bad = tokens.at[2].set(jnp.inf)
    gradients = jax.grad(lambda given: jnp.sum(expert_swiglu(bad, chosen, shares, given)[0]))
    untouched = np.setdiff1d(np.arange(5), np.asarray(chosen[2]))
    for of_weight in gradients(experts):
        assert np.isfinite(of_weight[untouched]).all()
        assert np.any(of_weight[untouched])


def test_the_routers_scores_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, at largest scores of 32, many tokens would have tied experts."""
    random, count = np.random.default_rng(5), 200
    tokens = jnp.asarray(random.normal(size=(1, count, 64)), jnp.bfloat16)
    router = random.normal(size=(64, 40))
    router *= 32 / np.abs(np.asarray(tokens, np.float64) @ router).max()
    narrow = jnp.asarray(router, jnp.bfloat16)
    found: list[Any] = []

    def record(tokens: Any, chosen: Any, weights: Any, *_: Any, **__: Any) -> Any:
        found.extend((np.asarray(chosen), np.asarray(weights, np.float64)))
        return tokens

    monkeypatch.setattr(moe, "expert_swiglu", record)
    wide, tall = jnp.zeros((40, 64, 4), jnp.bfloat16), jnp.zeros((40, 4, 64), jnp.bfloat16)
    mixture_of_experts(tokens, narrow, (wide, wide, tall), CHOSEN, normalize=False)
    scores = (np.asarray(tokens, np.float64) @ np.asarray(narrow, np.float64))[0]
    laws = np.exp(scores - scores.max(axis=1, keepdims=True))
    laws /= laws.sum(axis=1, keepdims=True)
    order = np.argsort(-laws, axis=1)[:, :CHOSEN]
    chosen, weights = found
    np.testing.assert_array_equal(chosen, order)
    wanted = np.take_along_axis(laws, order, axis=1)
    np.testing.assert_allclose(np.log(weights), np.log(wanted), rtol=0, atol=1e-5)
    rounded = np.sort(np.asarray(scores, jnp.bfloat16).astype(np.float64), axis=1)
    assert np.mean(rounded[:, -CHOSEN] == rounded[:, -CHOSEN - 1]) > 0.02


def test_traffic_is_that_of_the_counted_tokens() -> None:
    random = np.random.default_rng(6)
    router, experts = weights_of(random, "float64")
    x, counted = random.normal(size=(2, 10, WIDTH)), random.random((2, 10)) < 0.6
    _, traffic = mixture_of_experts(
        jnp.asarray(x), router, experts, CHOSEN, True, traffic_mask=jnp.asarray(counted)
    )
    assert isinstance(traffic, Traffic)
    scores = (x @ np.asarray(router))[counted]
    laws = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    order = np.argsort(-scores, axis=1)[:, :CHOSEN]
    tokens, entropy = np.bincount(order.ravel(), minlength=EXPERTS), -(laws * np.log(laws)).sum()
    np.testing.assert_array_equal(traffic.tokens, tokens)
    np.testing.assert_allclose(traffic.entropy, entropy)


def test_loads_are_over_an_even_share_and_means_of_layers() -> None:
    """One layer sends all tokens to one of two experts, the other half of them."""
    traffic = Traffic(jnp.array([[6.0, 0.0], [3.0, 3.0]]), jnp.array([1.5, 4.5]))
    found = {name: float(value) for name, value in traffic.to_metrics(jnp.array(6.0)).items()}
    assert found == {"experts/load_min": 0.5, "experts/load_max": 1.5, "experts/entropy": 0.5}


def test_a_layer_of_a_stack_reads_the_experts_it_needs_and_no_other() -> None:
    random = np.random.default_rng(4)
    experts = weights_of(random, "float64")[1]
    stacks = tuple(jnp.full((3, *weight.shape), jnp.nan).at[1].set(weight) for weight in experts)
    tokens = jnp.asarray(random.normal(size=(9, WIDTH)))
    chosen = jnp.asarray(random.integers(0, EXPERTS, (9, 2)), jnp.int32)
    shares = jnp.asarray(random.uniform(size=(9, 2)))
    program = jax.jit(expert_swiglu).lower(tokens, chosen, shares, stacks, layer=jnp.int32(1))
    found = program.compile()(tokens, chosen, shares, stacks, layer=jnp.int32(1))
    np.testing.assert_array_equal(found, expert_swiglu(tokens, chosen, shares, experts))
    sizes = f"{EXPERTS}x{WIDTH}x{INNER}", f"{EXPERTS}x{INNER}x{WIDTH}"
    assert not any(f"tensor<{size}xf64>" in program.as_text() for size in sizes)


def test_products_are_of_the_tokens_there_are() -> None:
    """Of a program's text: every product is of one expert and one block. How many there are is
    counted where they run."""
    rows = 512
    tokens = jnp.zeros((rows, WIDTH))
    chosen = jnp.zeros((rows, 2), jnp.int32).at[:, 1].set(EXPERTS)
    experts = weights_of(np.random.default_rng(0), "float64")[1]
    text = jax.jit(expert_swiglu).lower(tokens, chosen, jnp.ones((rows, 2)), experts).as_text()
    size = 2 * rows // EXPERTS
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all(f"tensor<{size}x" in line and f"<{EXPERTS}x" not in line for line in products)
    blocks = grouped._group_pairs(chosen, EXPERTS, 1)
    assert blocks.block_counts.tolist() == [rows // size] + [0] * (EXPERTS - 1)
