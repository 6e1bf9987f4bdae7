"""Kernels beside their plain twins: attention to pages of a cache, and to packed texts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxspec.bench.gpu.cells import whole_on
from jaxspec.bench.gpu.programs import Recipe
from jaxspec.bench.gpu.run import NOT_HERE, GpuRun, Plan
from jaxspec.compiled.counts import ATTENTION
from jaxspec.kernels.segment_attention import attend_segments
from jaxspec.kernels.visible import causal
from jaxspec.mesh import on_each_shard, plain_twins, replicated
from jaxspec.models.attention import attend_cache
from jaxspec.models.contiguous import empty_cache
from jaxspec.models.paged import empty_pages

ROWS, BLOCK, PAGES = 8, 4, 24
"""Of the paged cache: each row has so many pages, and a block of queries at its end."""
POSITIONS = 2048
"""Of a pack of two texts."""
BOUND = 0.02
"""Largest error as a share of the largest entry: weights are rounded to 8 bits."""


def _on_the_device(plan: Plan, function: Callable) -> Callable:
    """Runs a function where it sees the mesh's devices, as kernels ask for them."""

    def run(*arrays: Any) -> Any:
        return on_each_shard(plan.mesh, function, P(), P())(*arrays)

    return run


def _without_kernels(function: Callable) -> Callable:
    """The plain twin, in float32."""

    def run(*arrays: Any) -> Any:
        wide = jax.tree.map(
            lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, arrays
        )
        with plain_twins():
            return function(*wide)

    return run


def _attend_pages(query: Any, keys: Any, values: Any, table: Any, lengths: Any) -> Any:
    """Attention of a block at the end of each row."""
    heads, size, page = keys.shape[-3], keys.shape[-2], keys.shape[-1]
    count = keys.shape[1]
    empty = empty_cache(1, count, page, heads, size, keys.dtype, stacked=True)
    cache = empty_pages(empty, count, page).replace(keys=keys, values=values, table=table)
    positions = lengths[:, None] + jnp.arange(BLOCK, dtype=jnp.int32)
    return attend_cache(query, cache, jnp.int32(0), causal(positions))


def _attend_texts(query: Any, key: Any, value: Any, first: Any, cotangent: Any) -> Any:
    """Attention of packed texts, and its gradients."""
    output, pull = jax.vjp(
        lambda query, key, value: attend_segments(query, key, value, first), query, key, value
    )
    return output, *pull(cotangent)


def _page_inputs(plan: Plan) -> tuple[Any, ...]:
    options, random = plan.options, np.random.default_rng(0)
    heads, size, page = options.kv_heads, options.head_size, options.page_size or 64
    count = ROWS * PAGES

    def normal(*shape: int) -> Any:
        return random.normal(size=shape).astype(options.dtype)

    query = normal(ROWS, BLOCK, options.heads, size)
    keys, values = normal(1, count, heads, size, page), normal(1, count, heads, page, size)
    table = random.permutation(count).reshape(ROWS, PAGES).astype(np.int32)
    lengths = random.integers(1, PAGES * page - BLOCK, ROWS).astype(np.int32)
    return query, keys, values, table, lengths


def _text_inputs(plan: Plan) -> tuple[Any, ...]:
    options, random = plan.options, np.random.default_rng(1)
    heads = options.heads, options.kv_heads, options.kv_heads, options.heads
    arrays = [
        random.normal(size=(1, POSITIONS, count, options.head_size)).astype(options.dtype)
        for count in heads
    ]
    first = np.where(np.arange(POSITIONS) < POSITIONS // 3, 0, POSITIONS // 3).astype(np.int32)
    return *arrays[:3], first[None], arrays[3]


_CHECKS: dict[str, tuple[Callable, Callable[[Plan], tuple[Any, ...]]]] = {
    "pages": (_attend_pages, _page_inputs),
    "texts": (_attend_texts, _text_inputs),
}


def kernel_recipes(plan: Plan) -> list[Recipe]:
    """Programs of each kernel and of its twin; none where there are no kernels."""
    found = []
    for name, (function, inputs) in _CHECKS.items() if plan.on_gpu else ():

        def shapes(inputs: Callable = inputs) -> Any:
            return whole_on(plan.mesh, inputs(plan))

        found += [
            Recipe(f"attention to {name}", _on_the_device(plan, function), shapes),
            Recipe(
                f"attention to {name}, plain twin",
                _on_the_device(plan, _without_kernels(function)),
                shapes,
            ),
        ]
    return found


def check_kernels(run: GpuRun) -> dict[str, Any]:
    """Compares each kernel with its twin."""
    if not run.plan.on_gpu:
        run.say(f"kernels beside their plain twins: {NOT_HERE}")
        return {name: {"not_applicable": NOT_HERE} for name in _CHECKS}
    found = {}
    for name in _CHECKS:
        found[name] = run.attempt(f"attention to {name}", lambda name=name: _compared(run, name))
        run.say(f"attention to {name}: {_told(found[name])}")
    return found


def _compared(run: GpuRun, name: str) -> dict[str, Any]:
    made, twin = run.get(f"attention to {name}"), run.get(f"attention to {name}, plain twin")
    inputs = jax.device_put(_CHECKS[name][1](run.plan), replicated(run.plan.mesh))
    ours, theirs = (jax.tree.leaves(each.program(*inputs)) for each in (made, twin))
    errors = []
    for one, other in zip(ours, theirs, strict=True):
        one, other = (np.asarray(leaf, np.float32) for leaf in (one, other))
        errors.append(float(np.abs(one - other).max() / np.abs(other).max()))
    text = made.program.as_text()
    kernel = any(f'custom_call_target="{target}' in text for target in ATTENTION)
    return {
        "kernel": kernel,
        "errors": errors,
        # also false for what is not a number
        "right": max(errors) <= BOUND and bool(np.isfinite(errors).all()),
    }


def _told(found: dict[str, Any]) -> str:
    if "errors" not in found:
        return "not compared"
    which = "its kernel" if found["kernel"] else "NO KERNEL for this card; plain code"
    verdict = "agrees with" if found["right"] else "DIFFERS from"
    return f"{which} {verdict} the plain twin (largest error {max(found['errors']):.2%})"
