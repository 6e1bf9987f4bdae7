"""Attention of a block to pages of a cache on NVIDIA Hopper GPUs (Pallas, Mosaic GPU): what
`attend_cache` does elsewhere in plain JAX.

A thread block goes through every n-th page of one row and one head of keys and values, for all
queries that share that head; a page is copied while the one before it is multiplied. What the
blocks of a row found is joined afterwards (flash decoding; Dao et al., 2023).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxspec.kernels.visible import Visible
from jaxspec.mesh import TENSOR, kind_in_scope, on_each_member

QUERIES = 64
"""Rows of a product of a warp group: so many queries may share a head of keys and values."""
ROWS = 8
"""Rows of queries and of results are copied in so many: a tile of swizzled shared memory has as
many, and their largest scores and sums are 32 bytes, where a copy takes 16 at least."""
LANES = 64
"""Two-byte numbers of 128 bytes, in which shared memory is swizzled."""
LARGEST = 128 * 128
"""Numbers of a page's keys of one head that fit shared memory twice, with their values."""
BLOCKS = 264
"""Thread blocks wanted: two for each multiprocessor of an H100."""
HOPPER = ("H100", "H200", "H800", "H20", "GH200")


def runs_here() -> bool:
    """Whether the devices of the mesh in scope are Hopper GPUs; those of other generations multiply
    by other instructions."""
    words = kind_in_scope().replace("-", " ").split()
    return any(name in words for name in HOPPER)


def fits(query: Float[Array, "B T M R H"], keys: Float[Array, "... P M H s"]) -> bool:
    """Whether shapes and types are such that tiles of them can be multiplied: bfloat16, and pages
    and heads of whole swizzles."""
    _, length, _, shared, size = query.shape
    page = keys.shape[-1]
    whole = size % LANES == 0 and page % LANES == 0 and size * page <= LARGEST
    return query.dtype == keys.dtype == jnp.bfloat16 and whole and length * shared <= QUERIES


def paged_parts(
    query: Float[Array, "B T M R H"],
    keys: Float[Array, "L P M H s"],
    values: Float[Array, "L P M s H"],
    layer: Int[Array, ""],
    table: Int[Array, "B N"],
    visible: Visible,
) -> tuple[Float[Array, "B M T R"], Float[Array, "B M T R"], Float[Array, "B M T R H"]]:
    """Attention that is not yet normalised: largest scores, sums of weights, and weighted values,
    all float32.

    Args:
      query: scaled.
      keys: of all layers.
      values: the same.
      layer: which one.
      table: the pages of each row.
      visible: what each query sees.
    """
    rows, length, heads, shared, size = query.shape
    page, count = keys.shape[-1], length * shared
    tile = jnp.pad(
        query.transpose(0, 2, 1, 3, 4).reshape(rows, heads, count, size),
        ((0, 0), (0, 0), (0, -count % ROWS), (0, 0)),
    )
    # Queries beyond those that there are see nothing.
    limits = jnp.repeat(jnp.stack([visible.last, visible.own], axis=1), shared, axis=2)
    limits = jnp.pad(limits, ((0, 0), (0, 0), (0, QUERIES - count)), constant_values=-1)
    needed = jnp.max(limits, axis=(1, 2)) // page + 1
    pages = jnp.clip(table, 0, keys.shape[1] - 1)  # what a row does not need may be no page

    def run(*arrays: Array) -> list[Array]:
        return _kernel(*arrays, visible=visible)

    # the compiler does not split a kernel by itself
    by_head = P(None, TENSOR), P(None, None, TENSOR), P(None, None, TENSOR), P(), P(), P(), P()
    found = on_each_member(run, by_head, P(None, TENSOR))(
        tile, keys, values, layer[None], pages, limits, needed
    )
    largest, total, weighted = (
        leaf[:, :, :count].reshape(rows, heads, length, shared, *leaf.shape[3:])
        for leaf in _joined(*found)
    )
    return largest, total, weighted


def _joined(
    largest: Float[Array, "B M parts Q"],
    total: Float[Array, "B M parts Q"],
    weighted: Float[Array, "B M parts Q H"],
) -> tuple[Float[Array, "B M Q"], Float[Array, "B M Q"], Float[Array, "B M Q H"]]:
    """The parts of each row together."""
    if largest.shape[2] == 1:
        return largest[:, :, 0], total[:, :, 0], weighted[:, :, 0]
    over = jnp.max(largest, axis=2, keepdims=True)
    scale = jnp.exp(largest - jnp.where(over == -jnp.inf, 0, over))
    return (
        over[:, :, 0],
        jnp.sum(total * scale, axis=2),
        jnp.sum(weighted * scale[..., None], axis=2),
    )


def _kernel(  # noqa: C901, PLR0915 - a kernel is one piece
    query: Float[Array, "B M Q H"],
    keys: Float[Array, "L P M H s"],
    values: Float[Array, "L P M s H"],
    layer: Int[Array, " 1"],
    pages: Int[Array, "B N"],
    limits: Int[Array, "B two all"],
    needed: Int[Array, " B"],
    visible: Visible,
) -> list[Array]:
    """Largest scores, sums of weights and weighted values of each of the parts that a row's pages
    are dealt into."""
    # here, since they take half a second to import, which a start on a CPU can do without
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, heads, count, size = query.shape
    page, wide = keys.shape[-1], jnp.float32
    parts = max(1, min(pages.shape[1], -(-BLOCKS // (rows * heads))))
    ahead = 2 if size * page * 2 > LARGEST else 4

    def body(*refs) -> None:
        (query_ref, keys_ref, values_ref, layer_ref, pages_ref, limits_ref, needed_ref), refs = (
            refs[:7],
            refs[7:],
        )
        results, (queries, weights, key_pages, value_pages), refs = refs[:3], refs[3:7], refs[7:]
        limits_here, outs, (ready, keys_ready, values_ready) = refs[:2], refs[2:5], refs[5:]
        row, head, part = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("part")
        turns = (jnp.maximum(needed_ref[row] - part, 0) + parts - 1) // parts
        # Only real queries are copied in and out: what else the tile holds is masked, and every
        # row of a product depends on its own query alone.
        real = pl.ds(0, count)
        plgpu.copy_gmem_to_smem(query_ref.at[row, head], queries.at[real], ready)
        for number, limit in enumerate(limits_here):
            plgpu.copy_gmem_to_smem(limits_ref.at[row, number], limit, ready)

        def fetch(turn: Array) -> None:
            number, place = pages_ref[row, part + turn * parts], lax.rem(turn, jnp.int32(ahead))
            plgpu.copy_gmem_to_smem(
                keys_ref.at[layer_ref[0], number, head], key_pages.at[place], keys_ready.at[place]
            )
            plgpu.copy_gmem_to_smem(
                values_ref.at[layer_ref[0], number, head],
                value_pages.at[place],
                values_ready.at[place],
            )

        for turn in range(ahead):
            pl.when(turn < turns)(lambda turn=turn: fetch(jnp.int32(turn)))
        plgpu.barrier_wait(ready)

        def product(left, right, shape: tuple[int, int]) -> Array:
            def multiply(accumulator) -> Array:
                plgpu.wgmma(accumulator, left, right)
                return accumulator[...]

            return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, wide))

        def one(turn: Array, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, weighted = before
            place = lax.rem(turn, jnp.int32(ahead))
            plgpu.barrier_wait(keys_ready.at[place])
            scores = product(queries, key_pages.at[place], (QUERIES, page))
            positions = (part + turn * parts) * page + lax.broadcasted_iota(
                jnp.int32, (QUERIES, page), 1
            )
            last, own = (
                lax.broadcast_in_dim(limit[...], (QUERIES, page), (0,)) for limit in limits_here
            )
            beyond = (positions > last) & (positions <= own)
            if visible.period > 1:
                beyond &= lax.rem(own - positions, jnp.int32(visible.period)) == 0
            scores = jnp.where(
                ((positions >= visible.first) & (positions <= last)) | beyond, scores, -jnp.inf
            )
            new = jnp.maximum(largest, scores.max(axis=1))
            base = jnp.where(new == -jnp.inf, 0.0, new)
            old = jnp.exp(largest - base)
            fresh = jnp.exp(scores - lax.broadcast_in_dim(base, scores.shape, (0,)))
            weights[...] = fresh.astype(weights.dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(values_ready.at[place])
            added = product(weights, value_pages.at[place], (QUERIES, size))
            pl.when(turn + ahead < turns)(lambda: fetch(turn + ahead))
            return (
                new,
                total * old + fresh.sum(axis=1),
                weighted * lax.broadcast_in_dim(old, weighted.shape, (0,)) + added,
            )

        nothing = (
            jnp.full((QUERIES,), -jnp.inf, wide),
            jnp.zeros((QUERIES,), wide),
            jnp.zeros((QUERIES, size), wide),
        )
        for out, found in zip(outs, lax.fori_loop(0, turns, one, nothing), strict=True):
            out[...] = found
        plgpu.commit_smem()
        for out, result in zip(outs, results, strict=True):
            plgpu.copy_smem_to_gmem(out.at[real], result.at[row, head, part])
        plgpu.wait_smem_to_gmem(0)

    def swizzled(*shape: int) -> Any:
        transforms = plgpu.TilingTransform((8, LANES)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, query.dtype, transforms=transforms)

    run = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((rows, heads, parts, *shape), wide)
            for shape in ((count,), (count,), (count, size))
        ],
        scratch_types=[
            swizzled(QUERIES, size),
            swizzled(QUERIES, page),
            swizzled(ahead, size, page),
            swizzled(ahead, page, size),
            *(plgpu.SMEM((QUERIES,), jnp.int32) for _ in range(2)),
            *(plgpu.SMEM(shape, wide) for shape in ((QUERIES,), (QUERIES,), (QUERIES, size))),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_barriers=ahead),
            plgpu.Barrier(num_barriers=ahead),
        ],
        grid=(rows, heads, parts),
        grid_names=("row", "head", "part"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return list(run(query, keys, values, layer, pages, limits, needed))
