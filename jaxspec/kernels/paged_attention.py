"""Attention to a paged cache on Hopper GPUs.

The kernel is written in Pallas (Mosaic GPU), and `attend_cache` is the equivalent in plain JAX.
Each thread block reads every n-th page of one row and one KV head, for all queries of that head. It
copies the next pages while it multiplies the current one. The partial results of a row are merged
at the end (flash decoding; Dao et al., 2023).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxspec.kernels.visible import AttentionMask
from jaxspec.mesh import TENSOR, device_kind_in_scope, shard_map_tensor

# A product of a warp group has 64 rows.
TILE_QUERIES = 64
"""Largest number of queries that share a KV head."""
# A tile of swizzled shared memory has 8 rows. Their maximum scores are 32 bytes, as are their sums,
# and a copy needs at least 16.
COPY_ROWS = 8
"""Divisor of the number of rows in copies of queries and results."""
SWIZZLE_LANES = 64
"""Number of bfloat16 elements in a swizzle of 128 bytes of shared memory."""
# Shared memory holds two pages of keys of this size, and their values.
MAX_PAGE_ELEMENTS = 128 * 128
"""Largest number of elements of the keys of one head in a page."""
# Two thread blocks for each of the 132 multiprocessors of an H100.
THREAD_BLOCKS = 264
"""Intended number of thread blocks."""
HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")


def has_hopper_gpus() -> bool:
    """Returns whether the mesh in scope has Hopper GPUs."""
    # The kernel uses WGMMA instructions, which other generations do not have.
    device_words = device_kind_in_scope().replace("-", " ").split()
    return any(name in device_words for name in HOPPER_NAMES)


def supports_shapes(query: Float[Array, "B T M R H"], keys: Float[Array, "... P M H s"]) -> bool:
    """Returns whether the kernel supports these shapes and types.

    It needs bfloat16, and page and head sizes that are multiples of a swizzle. The size of a page
    and the number of queries are limited.
    """
    _, length, _, shared, size = query.shape
    page_size = keys.shape[-1]
    aligned = (
        size % SWIZZLE_LANES == 0
        and page_size % SWIZZLE_LANES == 0
        and size * page_size <= MAX_PAGE_ELEMENTS
    )
    return query.dtype == keys.dtype == jnp.bfloat16 and aligned and length * shared <= TILE_QUERIES


def attend_pages(
    query: Float[Array, "B T M R H"],
    keys: Float[Array, "L P M H s"],
    values: Float[Array, "L P M s H"],
    layer: Int[Array, ""],
    table: Int[Array, "B N"],
    mask: AttentionMask,
) -> tuple[Float[Array, "B M T R"], Float[Array, "B M T R"], Float[Array, "B M T R H"]]:
    """Computes unnormalized attention to each row's pages.

    Args:
      query: Queries, already scaled.
      keys: Keys of all layers.
      values: Values of all layers.
      layer: Index of the layer.
      table: Page numbers of each row.
      mask: Positions that each query sees.

    Returns:
      Maximum scores, sums of weights, and weighted sums of values, all in float32.
    """
    rows, length, heads, shared, size = query.shape
    page_size, query_count = keys.shape[-1], length * shared
    query_tile = jnp.pad(
        query.transpose(0, 2, 1, 3, 4).reshape(rows, heads, query_count, size),
        ((0, 0), (0, 0), (0, -query_count % COPY_ROWS), (0, 0)),
    )
    # Padding queries have limits of -1, so that they see no position.
    limits = jnp.repeat(jnp.stack([mask.last, mask.query_positions], axis=1), shared, axis=2)
    limits = jnp.pad(limits, ((0, 0), (0, 0), (0, TILE_QUERIES - query_count)), constant_values=-1)
    page_counts = jnp.max(limits, axis=(1, 2)) // page_size + 1
    # Entries that a row does not need may be beyond the pool, where the kernel must not read.
    pages = jnp.clip(table, 0, keys.shape[1] - 1)

    def run_kernel(*arrays: Array) -> list[Array]:
        return _run_kernel(*arrays, mask=mask)

    # The compiler cannot split a kernel over `tensor`.
    by_head = P(None, TENSOR), P(None, None, TENSOR), P(None, None, TENSOR), P(), P(), P(), P()
    partials = shard_map_tensor(run_kernel, by_head, P(None, TENSOR))(
        query_tile, keys, values, layer[None], pages, limits, page_counts
    )
    max_score, weight_sum, weighted_values = (
        leaf[:, :, :query_count].reshape(rows, heads, length, shared, *leaf.shape[3:])
        for leaf in _merge_partitions(*partials)
    )
    return max_score, weight_sum, weighted_values


def _merge_partitions(
    max_scores: Float[Array, "B M parts Q"],
    weight_sums: Float[Array, "B M parts Q"],
    weighted_values: Float[Array, "B M parts Q H"],
) -> tuple[Float[Array, "B M Q"], Float[Array, "B M Q"], Float[Array, "B M Q H"]]:
    """Merges the partial results of each row."""
    if max_scores.shape[2] == 1:
        return max_scores[:, :, 0], weight_sums[:, :, 0], weighted_values[:, :, 0]
    max_score = jnp.max(max_scores, axis=2, keepdims=True)
    # A query that sees nothing has -inf everywhere, and -inf - -inf would be NaN.
    scale = jnp.exp(max_scores - jnp.where(max_score == -jnp.inf, 0, max_score))
    return (
        max_score[:, :, 0],
        jnp.sum(weight_sums * scale, axis=2),
        jnp.sum(weighted_values * scale[..., None], axis=2),
    )


def _run_kernel(  # noqa: C901, PLR0915 - a kernel is one piece
    query: Float[Array, "B M Q H"],
    keys: Float[Array, "L P M H s"],
    values: Float[Array, "L P M s H"],
    layer: Int[Array, " 1"],
    pages: Int[Array, "B N"],
    limits: Int[Array, "B two all"],
    page_counts: Int[Array, " B"],
    mask: AttentionMask,
) -> list[Array]:
    """Computes partial results for partitions of pages.

    Returns maximum scores, sums of weights, and weighted sums of values.
    """
    # Imported here, because the import takes half a second that runs on a CPU need not pay.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, heads, query_count, size = query.shape
    page_size, accum_dtype = keys.shape[-1], jnp.float32
    # Splits the pages of a row until there is work for all multiprocessors.
    partitions = max(1, min(pages.shape[1], -(-THREAD_BLOCKS // (rows * heads))))
    prefetch_depth = 2 if size * page_size * 2 > MAX_PAGE_ELEMENTS else 4

    def body(*refs) -> None:
        (
            (query_ref, keys_ref, values_ref, layer_ref, pages_ref, limits_ref, page_counts_ref),
            refs,
        ) = (
            refs[:7],
            refs[7:],
        )
        results, (queries, weights, key_pages, value_pages), refs = refs[:3], refs[3:7], refs[7:]
        limit_tiles, result_tiles, (inputs_ready, keys_ready, values_ready) = (
            refs[:2],
            refs[2:5],
            refs[5:],
        )
        row, head, partition = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("part")
        iterations = (
            jnp.maximum(page_counts_ref[row] - partition, 0) + partitions - 1
        ) // partitions
        # Copies real queries only. The other rows of the tile are never copied out, and each row of
        # a product depends on its own query only.
        query_rows = pl.ds(0, query_count)
        plgpu.copy_gmem_to_smem(query_ref.at[row, head], queries.at[query_rows], inputs_ready)
        for number, limit in enumerate(limit_tiles):
            plgpu.copy_gmem_to_smem(limits_ref.at[row, number], limit, inputs_ready)

        def fetch_page(iteration: Array) -> None:
            page_id, buffer = (
                pages_ref[row, partition + iteration * partitions],
                lax.rem(iteration, jnp.int32(prefetch_depth)),
            )
            plgpu.copy_gmem_to_smem(
                keys_ref.at[layer_ref[0], page_id, head],
                key_pages.at[buffer],
                keys_ready.at[buffer],
            )
            plgpu.copy_gmem_to_smem(
                values_ref.at[layer_ref[0], page_id, head],
                value_pages.at[buffer],
                values_ready.at[buffer],
            )

        for iteration in range(prefetch_depth):
            pl.when(iteration < iterations)(
                lambda iteration=iteration: fetch_page(jnp.int32(iteration))
            )
        plgpu.barrier_wait(inputs_ready)

        def multiply_tiles(lhs, rhs, shape: tuple[int, int]) -> Array:
            def multiply(accumulator) -> Array:
                plgpu.wgmma(accumulator, lhs, rhs)
                return accumulator[...]

            return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, accum_dtype))

        def attend_page(
            iteration: Array, state: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            max_score, weight_sum, weighted_values = state
            buffer = lax.rem(iteration, jnp.int32(prefetch_depth))
            plgpu.barrier_wait(keys_ready.at[buffer])
            scores = multiply_tiles(queries, key_pages.at[buffer], (TILE_QUERIES, page_size))
            positions = (partition + iteration * partitions) * page_size + lax.broadcasted_iota(
                jnp.int32, (TILE_QUERIES, page_size), 1
            )
            last, query_positions = (
                lax.broadcast_in_dim(limit[...], (TILE_QUERIES, page_size), (0,))
                for limit in limit_tiles
            )
            is_draft = (positions > last) & (positions <= query_positions)
            if mask.period > 1:
                is_draft &= lax.rem(query_positions - positions, jnp.int32(mask.period)) == 0
            scores = jnp.where(
                ((positions >= mask.first) & (positions <= last)) | is_draft, scores, -jnp.inf
            )
            new_max = jnp.maximum(max_score, scores.max(axis=1))
            # A query may see none of the page. -inf as base would turn its weights into NaN.
            base = jnp.where(new_max == -jnp.inf, 0.0, new_max)
            rescale = jnp.exp(max_score - base)
            exp_scores = jnp.exp(scores - lax.broadcast_in_dim(base, scores.shape, (0,)))
            weights[...] = exp_scores.astype(weights.dtype)
            # Makes the weights visible to the next product, which reads shared memory.
            plgpu.commit_smem()
            plgpu.barrier_wait(values_ready.at[buffer])
            products = multiply_tiles(weights, value_pages.at[buffer], (TILE_QUERIES, size))
            # Only now is the buffer of this page free for another page.
            pl.when(iteration + prefetch_depth < iterations)(
                lambda: fetch_page(iteration + prefetch_depth)
            )
            return (
                new_max,
                weight_sum * rescale + exp_scores.sum(axis=1),
                weighted_values * lax.broadcast_in_dim(rescale, weighted_values.shape, (0,))
                + products,
            )

        initial = (
            jnp.full((TILE_QUERIES,), -jnp.inf, accum_dtype),
            jnp.zeros((TILE_QUERIES,), accum_dtype),
            jnp.zeros((TILE_QUERIES, size), accum_dtype),
        )
        for tile, value in zip(
            result_tiles, lax.fori_loop(0, iterations, attend_page, initial), strict=True
        ):
            tile[...] = value
        plgpu.commit_smem()
        for tile, result in zip(result_tiles, results, strict=True):
            plgpu.copy_smem_to_gmem(tile.at[query_rows], result.at[row, head, partition])
        plgpu.wait_smem_to_gmem(0)

    def allocate_swizzled(*shape: int) -> Any:
        transforms = plgpu.TilingTransform((8, SWIZZLE_LANES)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, query.dtype, transforms=transforms)

    run = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((rows, heads, partitions, *shape), accum_dtype)
            for shape in ((query_count,), (query_count,), (query_count, size))
        ],
        scratch_types=[
            allocate_swizzled(TILE_QUERIES, size),
            allocate_swizzled(TILE_QUERIES, page_size),
            allocate_swizzled(prefetch_depth, size, page_size),
            allocate_swizzled(prefetch_depth, page_size, size),
            *(plgpu.SMEM((TILE_QUERIES,), jnp.int32) for _ in range(2)),
            *(
                plgpu.SMEM(shape, accum_dtype)
                for shape in ((TILE_QUERIES,), (TILE_QUERIES,), (TILE_QUERIES, size))
            ),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_barriers=prefetch_depth),
            plgpu.Barrier(num_barriers=prefetch_depth),
        ],
        grid=(rows, heads, partitions),
        grid_names=("row", "head", "part"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return list(run(query, keys, values, layer, pages, limits, page_counts))
