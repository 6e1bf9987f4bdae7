"""Compares kernels with their plain twins.

The kernels are attention to pages of a cache, and attention of packed texts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxspec.bench.gpu.cells import replicate_shapes
from jaxspec.bench.gpu.programs import Recipe
from jaxspec.bench.gpu.run import NOT_APPLICABLE, GpuPlan, GpuRun
from jaxspec.compiled.counts import ATTENTION_TARGETS
from jaxspec.kernels.segment_attention import attend_segments
from jaxspec.kernels.visible import causal_mask
from jaxspec.mesh import replicated_sharding, shard_map_rows, use_plain_kernels
from jaxspec.models.attention import attend_cache
from jaxspec.models.contiguous import empty_cache
from jaxspec.models.paged import empty_pages

ROWS, BLOCK, PAGES = 8, 4, 24
"""Rows of the paged cache, queries at the end of each row, and pages per row."""
POSITIONS = 2048
"""Positions of a pack of two texts."""
# In bfloat16, attention weights are rounded to 8 bits.
MAX_ERROR = 0.02
"""Maximum error relative to the largest entry."""


def _run_on_shards(plan: GpuPlan, function: Callable) -> Callable:
    """Wraps a function to run on the shards of the mesh."""

    def call_on_shards(*arrays: Any) -> Any:
        # Kernels choose their code by the devices of the mesh in scope.
        return shard_map_rows(plan.mesh, function, P(), P())(*arrays)

    return call_on_shards


def _plain_twin(function: Callable) -> Callable:
    """Returns a function's plain twin. It computes in float32 if arrays are bfloat16."""

    def call_plain_twin(*arrays: Any) -> Any:
        # In bfloat16 the twin would have rounding errors of its own.
        float32_arrays = jax.tree.map(
            lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, arrays
        )
        with use_plain_kernels():
            return function(*float32_arrays)

    return call_plain_twin


def _attend_pages(query: Any, keys: Any, values: Any, table: Any, lengths: Any) -> Any:
    """Computes attention of a block of queries at the end of each row."""
    # The cache has one layer, and its keys end in the axes (head size, positions).
    heads, size, page = keys.shape[-3], keys.shape[-2], keys.shape[-1]
    page_count = keys.shape[1]
    contiguous_cache = empty_cache(1, page_count, page, heads, size, keys.dtype, stacked=True)
    cache = empty_pages(contiguous_cache, page_count, page).replace(
        keys=keys, values=values, table=table
    )
    positions = lengths[:, None] + jnp.arange(BLOCK, dtype=jnp.int32)
    return attend_cache(query, cache, jnp.int32(0), causal_mask(positions))


def _attend_texts(query: Any, key: Any, value: Any, text_starts: Any, cotangent: Any) -> Any:
    """Computes attention of packed texts, and its gradients."""
    output, pull_back = jax.vjp(
        lambda query, key, value: attend_segments(query, key, value, text_starts), query, key, value
    )
    return output, *pull_back(cotangent)


def _page_inputs(plan: GpuPlan) -> tuple[Any, ...]:
    options, rng = plan.options, np.random.default_rng(0)
    # With --page_size 0 the kernel still needs pages to be checked on.
    heads, size, page = options.kv_heads, options.head_size, options.page_size or 64
    page_count = ROWS * PAGES

    def draw_normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(options.dtype)

    query = draw_normal(ROWS, BLOCK, options.heads, size)
    keys, values = (
        draw_normal(1, page_count, heads, size, page),
        draw_normal(1, page_count, heads, page, size),
    )
    # Shuffled pages, so that a kernel that ignores the table is found out.
    table = rng.permutation(page_count).reshape(ROWS, PAGES).astype(np.int32)
    # Different lengths, so that rows end within pages.
    lengths = rng.integers(1, PAGES * page - BLOCK, ROWS).astype(np.int32)
    return query, keys, values, table, lengths


def _text_inputs(plan: GpuPlan) -> tuple[Any, ...]:
    options, rng = plan.options, np.random.default_rng(1)
    head_counts = options.heads, options.kv_heads, options.kv_heads, options.heads
    arrays = [
        rng.normal(size=(1, POSITIONS, count, options.head_size)).astype(options.dtype)
        for count in head_counts
    ]
    text_starts = np.where(np.arange(POSITIONS) < POSITIONS // 3, 0, POSITIONS // 3).astype(
        np.int32
    )
    return *arrays[:3], text_starts[None], arrays[3]


_CHECKS: dict[str, tuple[Callable, Callable[[GpuPlan], tuple[Any, ...]]]] = {
    "pages": (_attend_pages, _page_inputs),
    "texts": (_attend_texts, _text_inputs),
}


def kernel_recipes(plan: GpuPlan) -> list[Recipe]:
    """Lists the programs of each kernel and its twin. The list is empty on CPUs."""
    recipes = []
    for name, (function, inputs) in _CHECKS.items() if plan.targets_gpu else ():

        def input_shapes(inputs: Callable = inputs) -> Any:
            return replicate_shapes(plan.mesh, inputs(plan))

        recipes += [
            Recipe(f"attention to {name}", _run_on_shards(plan, function), input_shapes),
            Recipe(
                f"attention to {name}, plain twin",
                _run_on_shards(plan, _plain_twin(function)),
                input_shapes,
            ),
        ]
    return recipes


def check_kernels(run: GpuRun) -> dict[str, Any]:
    """Compares each kernel with its twin and prints the results."""
    if not run.plan.targets_gpu:
        run.print_line(f"kernels beside their plain twins: {NOT_APPLICABLE}")
        return {name: {"not_applicable": NOT_APPLICABLE} for name in _CHECKS}
    comparisons = {}
    for name in _CHECKS:
        comparisons[name] = run.attempt_part(
            f"attention to {name}", lambda name=name: _compare_kernel(run, name)
        )
        run.print_line(f"attention to {name}: {_describe_comparison(comparisons[name])}")
    return comparisons


def _compare_kernel(run: GpuRun, name: str) -> dict[str, Any]:
    kernel_program, twin_program = (
        run.get_program(f"attention to {name}"),
        run.get_program(f"attention to {name}, plain twin"),
    )
    inputs = jax.device_put(_CHECKS[name][1](run.plan), replicated_sharding(run.plan.mesh))
    kernel_leaves, twin_leaves = (
        jax.tree.leaves(compiled.program(*inputs)) for compiled in (kernel_program, twin_program)
    )
    errors = []
    for kernel_leaf, twin_leaf in zip(kernel_leaves, twin_leaves, strict=True):
        kernel_leaf, twin_leaf = (np.asarray(leaf, np.float32) for leaf in (kernel_leaf, twin_leaf))
        errors.append(float(np.abs(kernel_leaf - twin_leaf).max() / np.abs(twin_leaf).max()))
    # For some cards and shapes the same function has no kernel, and would agree trivially.
    text = kernel_program.program.as_text()
    has_kernel = any(f'custom_call_target="{target}' in text for target in ATTENTION_TARGETS)
    return {
        "kernel": has_kernel,
        "errors": errors,
        # A NaN at any place but the first may be lost in `max`.
        "right": max(errors) <= MAX_ERROR and bool(np.isfinite(errors).all()),
    }


def _describe_comparison(comparison: dict[str, Any]) -> str:
    if "errors" not in comparison:
        return "not compared"
    kernel_text = "its kernel" if comparison["kernel"] else "NO KERNEL for this card; plain code"
    verdict = "agrees with" if comparison["right"] else "DIFFERS from"
    return f"{kernel_text} {verdict} the plain twin (largest error {max(comparison['errors']):.2%})"
