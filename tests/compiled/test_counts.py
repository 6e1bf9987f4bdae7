"""Products, bytes and kernels of compiled programs, against what their loops and shapes say."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxspec.compiled.counts import Cost, CostCounter
from jaxspec.compiled.text import Program
from jaxspec.kernels.grouped import expert_swiglu

MESH = {"data": 1}
T, D, F, L = 24, 64, 128, 7


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def program_of(function: Callable, *arguments: Any) -> Program:
    return Program(jax.jit(function).lower(*arguments).compile().as_text() or "")


def cost(function: Callable, *arguments: Any, **options: Any) -> Cost:
    program = program_of(function, *arguments)
    return CostCounter(program, MESH).count_computation(program.entry, **options)


def layers(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ weights[0]) @ weights[1], None

    return lax.scan(layer, x, (up, down))[0]


WEIGHTS = array(L, D, F), array(L, F, D)


def test_a_loop_counts_as_often_as_it_runs() -> None:
    found = cost(layers, array(T, D), *WEIGHTS)
    assert found.flops == L * 2 * (2 * T * D * F)
    assert found.loops == 1


def test_a_backward_pass_makes_twice_the_products_and_remat_those_that_it_needs() -> None:
    forward = L * 2 * T * D * F

    def loss(layer: Callable, x: jax.Array, *weights: jax.Array) -> jax.Array:
        return jnp.sum(layer(x, *weights) ** 2)

    def plain(*given: jax.Array) -> Any:
        return jax.grad(lambda *given: loss(layers, *given), (0, 1, 2))(*given)

    assert cost(plain, array(T, D), *WEIGHTS).flops == 3 * 2 * forward

    def recomputed(x: jax.Array, *weights: jax.Array) -> jax.Array:
        def layer(x: jax.Array, each: Any) -> tuple[jax.Array, None]:
            return jax.checkpoint(lambda x, up, down: jnp.tanh(x @ up) @ down)(x, *each), None

        return lax.scan(layer, x, weights)[0]

    def remat(*given: jax.Array) -> Any:
        return jax.grad(lambda *given: loss(recomputed, *given), (0, 1, 2))(*given)

    # the last product of a layer is not needed again
    assert cost(remat, array(T, D), *WEIGHTS).flops == (3 * 2 + 1) * forward


def test_batched_and_attention_like_products() -> None:
    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.einsum("bnts,bsnh->btnh", jnp.einsum("btnh,bsnh->bnts", query, key), value)

    shape = array(2, 16, 4, 32)
    assert cost(run, shape, shape, shape).flops == 2 * (2 * 2 * 4 * 16 * 16 * 32)


def test_bytes_follow_what_is_sliced_not_what_it_is_sliced_from() -> None:
    """Each turn reads a layer's weights once, and writes rows in place."""
    found = cost(layers, array(T, D), *WEIGHTS)
    weights = L * 2 * D * F * 4
    # sliced off, and read by the product
    assert weights <= found.bytes <= 5 * weights

    def put(pool: jax.Array, row: jax.Array, place: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(pool, row, (place, 0))

    pool, row = array(4096, 64), array(1, 64)
    program = jax.jit(put, donate_argnums=0).lower(pool, row, array(dtype=jnp.int32)).compile()
    counted = CostCounter(text := Program(program.as_text() or ""), MESH)
    assert counted.count_computation(text.entry).bytes <= 8 * 64 * 4


def test_of_branches_the_dear_one_or_the_cheap_one() -> None:
    def run(which: jax.Array, x: jax.Array, weights: jax.Array) -> jax.Array:
        return lax.cond(which > 0, lambda x: jnp.tanh(x @ weights) @ weights, lambda x: x + 1, x)

    given = array(dtype=jnp.int32), array(T, D), array(D, D)
    assert cost(run, *given).flops == 2 * 2 * T * D * D
    assert cost(run, *given, cheapest=True).flops == 0


def test_a_loop_that_decides_by_itself_is_told_apart_or_taken_for_causal_attention() -> None:
    def until(x: jax.Array, weights: jax.Array, most: jax.Array) -> jax.Array:
        return lax.while_loop(lambda y: jnp.sum(y) < most, lambda y: jnp.tanh(y @ weights), x)

    with_scope = jax.named_scope("generate")(until)
    program = program_of(with_scope, array(T, D), array(D, D), array())
    parts = CostCounter(program, MESH).split_by_phase({}, ())
    turn = parts.largest_loop("generate")
    assert turn is not None
    assert turn.cost.flops == 2 * T * D * D
    assert (
        CostCounter(program, MESH).count_computation(program.entry, outer_trips=9.0).flops
        == 5 * 2 * T * D * D
    )


def test_a_loop_of_loops_counts_as_these_and_a_scope_tells_them_apart() -> None:
    def both(x: jax.Array, weights: jax.Array, most: jax.Array) -> jax.Array:
        def more(y: jax.Array) -> jax.Array:
            return jnp.sum(y) < most

        def each(y: jax.Array) -> jax.Array:
            with jax.named_scope("prefill"):
                y = lax.while_loop(more, lambda y: jnp.tanh(y @ weights @ weights), y)
            with jax.named_scope("rounds"):
                return lax.while_loop(more, lambda y: jnp.sin(y @ weights), y)

        with jax.named_scope("of_loops"):
            return lax.while_loop(more, each, x)

    program = program_of(jax.named_scope("generate")(both), array(T, D), array(D, D), array())
    parts = CostCounter(program, MESH).split_by_phase({}, ())
    found = [parts.largest_loop("generate", part) for part in ("", "prefill", "rounds", "refill")]
    assert [turn and turn.cost.flops / (2 * T * D * D) for turn in found] == [2, 2, 1, None]


@pytest.mark.parametrize(
    ("name", "products"), [("flash", 2), ("sm100_dkv_kernel", 4), ("dq_kernel", 3)]
)
def test_kernels_of_attention_by_their_shapes(name: str, products: int) -> None:
    text = f"""
ENTRY %main (q: bf16[64,8,32]) -> bf16[64,8,32] {{
  %q = bf16[64,8,32]{{2,1,0}} parameter(0)
  %k = bf16[64,2,32]{{2,1,0}} parameter(1)
  ROOT %out = bf16[64,8,32]{{2,1,0}} custom-call(%q, %k, %k), custom_call_target="mosaic_gpu_v2", \
metadata={{op_name="jit(run)/train/{name}/mpmd_map"}}
}}
"""
    program = Program(text)
    assert CostCounter(program, MESH).count_computation("main").flops == products * 8 * 64 * 64 * 32


def test_products_of_cublas() -> None:
    text = """
ENTRY %main (a: bf16[64,32]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %out = (bf16[64,16]{1,0}, s8[1024]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]},"beta":0}}
}
"""
    assert CostCounter(Program(text), MESH).count_computation("main").flops == 2 * 64 * 32 * 16


def test_experts_cost_what_their_tokens_cost() -> None:
    """Counted by the number of blocks that their loops usually have."""
    tokens, experts, chosen = 256, 8, 2

    weights = array(experts, D, F), array(experts, D, F), array(experts, F, D)
    inputs = array(tokens, D), array(tokens, chosen, dtype=jnp.int32), array(tokens, chosen)
    found = cost(expert_swiglu, *inputs, weights)
    assert found.flops == 3 * 2 * tokens * chosen * D * F
