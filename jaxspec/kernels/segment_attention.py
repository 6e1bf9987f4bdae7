"""Flash attention of packed sequences.

This is the algorithm of Dao et al. (arXiv 2205.14135) in plain JAX. An online softmax runs over
blocks of keys. The backward pass recomputes the scores.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.kernels import tokamax_attention

# Larger blocks multiply faster, and smaller ones compute fewer scores that no query sees.
# Milliseconds of one CPU thread (AVX-512), forward / forward and backward, in float32, with 8 query
# heads of size 32 and 4 KV heads. malloc keeps the memory of earlier calls.
#
#   block                           32           48           64           96          128
#   16 texts of 192        11.6 / 34.8  10.5 / 30.4  10.5 / 30.2  10.3 / 31.1  14.1 / 40.7
#   28 texts of 24 to 192  11.8 / 36.7  11.6 / 35.6  12.5 / 38.0  14.9 / 44.4  18.1 / 53.1
#   one text of 3072        116 / 349   95.0 / 299   95.4 / 290   90.7 / 272   85.7 / 256
BLOCK = 48
"""Number of queries and of keys of a block."""


class _QueryTiles(NamedTuple):
    """Blocks of queries.

    A scan reads one block at a time. Inside the scan, fields have no axis C.
    """

    # Queries are the last axis, so that reductions over keys work on whole vectors.
    query: Float[Array, "C M H q"]
    """Columns q of a block: BLOCK positions for each of the R heads that share keys."""
    first: Int[Array, "C q"]
    last: Int[Array, "C q"]
    start_block: Int[Array, " C"]
    """Index of the first block of keys that a query of this block sees."""
    stop_block: Int[Array, " C"]
    """Index after the last such block, at most `start_block` if the queries see nothing."""


def attend_segments(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T M H"],
    value: Float[Array, "B T M H"],
    first: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Computes causal attention within texts.

    Uses GPU kernels if they support the devices and shapes, else `attend_visible`. Memory is linear
    in T. Some cards also need a mask of all pairs, whose size is bounded (`tokamax_attention`).

    Args:
      query: Queries of N = M * R heads.
      key: Keys, finite everywhere.
      value: Values, finite everywhere.
      first: First position that each query sees, where its text starts. It never decreases along
        T, and is at most the query's own position.
    """
    implementation = tokamax_attention.choose_implementation(query, key)
    if implementation is not None:
        return tokamax_attention.attend_causal(query, key, value, first, implementation)
    positions = jnp.broadcast_to(jnp.arange(first.shape[1], dtype=first.dtype), first.shape)
    return attend_visible(query, key, value, first, positions)[0]


def attend_visible(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S M H"],
    value: Float[Array, "B S M H"],
    first: Int[Array, "B T"],
    last: Int[Array, "B T"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Computes attention to keys `first` to `last`.

    Memory is linear in T and S. Time depends on the lengths of the texts, as blocks of keys that no
    query sees are skipped. Both results are differentiable. A caller may merge other terms into the
    same softmax by their log-sum-exp.

    Args:
      query: Queries of N = M * R heads. Head n uses KV head n // R. Scores are scaled by H**-0.5
        here.
      key: Keys. They must be finite, even if no query sees them, because 0 x NaN is NaN.
      value: Values, finite as the keys.
      first: First position that each query sees.
      last: Last position that each query sees. If it is before `first`, the query sees nothing.

    Returns:
      The attended values, and the log-sum-exp of the scaled scores in at least float32. A query
      that sees nothing gets 0 and -inf, and its cotangents are ignored.
    """
    return _attend_visible(query, key, value, first, last)


@jax.custom_vjp
def _attend_visible(
    query: Array,
    key: Array,
    value: Array,
    first: Array,
    last: Array,
) -> tuple[Array, Array]:
    return _forward(query, key, value, first, last)[0]


def _forward(
    query: Array,
    key: Array,
    value: Array,
    first: Array,
    last: Array,
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """Computes the results and their residuals."""
    batch, length, heads, _ = query.shape
    kv_heads, accum_dtype = key.shape[2], _accum_dtype(query)
    keys, values = _split_key_blocks(key), _split_key_blocks(value)

    def attend_block(_: None, tiles: _QueryTiles) -> tuple[None, tuple[Array, Array]]:
        def add_block(
            index: Array, state: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            max_score, weight_sum, weighted_values = state
            scores = _masked_scores(tiles, _take_block(keys, index), index)
            new_max = jnp.maximum(max_score, jnp.max(scores, axis=1))
            base = jnp.where(new_max == -jnp.inf, 0, new_max)  # -inf - -inf is NaN
            weights, rescale = jnp.exp(scores - base[:, None]), jnp.exp(max_score - base)
            products = _accum_einsum(
                "MsH,Msq->MHq", _take_block(values, index), weights.astype(query.dtype)
            )
            weight_sum = weight_sum * rescale + jnp.sum(weights, axis=1)
            return new_max, weight_sum, weighted_values * rescale[:, None] + products

        columns = tiles.query.shape[-1]
        initial_max = jnp.full((kv_heads, columns), -jnp.inf, accum_dtype)
        initial = (
            initial_max,
            jnp.zeros_like(initial_max),
            jnp.zeros(tiles.query.shape, accum_dtype),
        )
        max_score, weight_sum, weighted_values = lax.fori_loop(
            tiles.start_block, tiles.stop_block, add_block, initial
        )
        # A query that sees nothing gets 0 instead of 0 / 0.
        divisor = jnp.where(weight_sum == 0, 1, weight_sum)
        attended = (weighted_values / divisor[:, None]).astype(query.dtype)
        return None, (attended, max_score + jnp.log(divisor))

    _, (attended, log_sum) = lax.scan(attend_block, None, _make_tiles(query, key, first, last))
    output = _from_tiles(attended, batch, length, heads)
    log_sum = _from_tiles(log_sum[:, :, None], batch, length, heads)[..., 0]
    return (output, log_sum), (query, key, value, output, log_sum, first, last)


def _backward(
    residuals: tuple[Array, ...],
    cotangents: tuple[Array, Array],
) -> tuple[Array | None, ...]:
    """Computes the gradients (`d_x` is the gradient of `x`).

    d_score = weight * (d_weight - delta + d_log_sum). Here delta is the dot product of the output
    and its gradient. It equals the sum of weight * d_weight over all keys.
    """
    query, key, value, output, log_sum, first, last = residuals
    batch, length, heads, size = query.shape
    kv_heads, accum_dtype = key.shape[2], _accum_dtype(query)
    keys, values = _split_key_blocks(key), _split_key_blocks(value)
    scale = np.asarray(size**-0.5, accum_dtype)
    # If a caller merges a log-sum-exp of -inf, its gradient may be NaN. 0 x NaN would then spread
    # to all keys.
    has_visible = (first <= last)[..., None]
    d_output = jnp.where(has_visible[..., None], cotangents[0], 0)
    delta = jnp.sum(d_output.astype(accum_dtype) * output.astype(accum_dtype), axis=-1)
    shift = jnp.where(has_visible, cotangents[1], 0) - delta
    base = jnp.where(has_visible, log_sum, 0)
    to_tiles = functools.partial(_to_tiles, kv_heads=kv_heads)

    def differentiate_block(
        sums: tuple[Array, Array],
        inputs: tuple[_QueryTiles, Array, Array, Array],
    ) -> tuple[tuple[Array, Array], Array]:
        tiles, d_attended, base, shift = inputs

        def add_gradients(
            index: Array, gradients: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            d_query, d_keys, d_values = gradients
            key_block = _take_block(keys, index)
            weights = jnp.exp(_masked_scores(tiles, key_block, index) - base)
            d_weights = _accum_einsum("MsH,MHq->Msq", _take_block(values, index), d_attended)
            d_scores = (weights * (d_weights + shift) * scale).astype(query.dtype)
            d_key_block = _accum_einsum("Msq,MHq->MsH", d_scores, tiles.query)
            d_value_block = _accum_einsum("Msq,MHq->MsH", weights.astype(query.dtype), d_attended)
            d_query = d_query + _accum_einsum("MsH,Msq->MHq", key_block, d_scores)
            return (
                d_query,
                _add_to_block(d_keys, index, d_key_block),
                _add_to_block(d_values, index, d_value_block),
            )

        zeros = jnp.zeros(tiles.query.shape, accum_dtype)
        d_query, *new_sums = lax.fori_loop(
            tiles.start_block, tiles.stop_block, add_gradients, (zeros, *sums)
        )
        return (new_sums[0], new_sums[1]), d_query.astype(query.dtype)

    tiles = _make_tiles(query, key, first, last)
    inputs = tiles, to_tiles(d_output), to_tiles(base[..., None]), to_tiles(shift[..., None])
    zeros = jnp.zeros(keys.shape, accum_dtype)
    sums, d_query = lax.scan(differentiate_block, (zeros, zeros), inputs)
    d_key, d_value = (_merge_key_blocks(leaf, *key.shape[:2]).astype(key.dtype) for leaf in sums)
    return _from_tiles(d_query, batch, length, heads), d_key, d_value, None, None


_attend_visible.defvjp(_forward, _backward)


def _accum_dtype(array: Array) -> np.dtype:
    """Returns the type of scores and sums."""
    return np.promote_types(array.dtype, np.float32)


def _accum_einsum(subscripts: str, lhs: Array, rhs: Array) -> Array:
    return jnp.einsum(subscripts, lhs, rhs, preferred_element_type=_accum_dtype(lhs))


def _masked_scores(
    tiles: _QueryTiles,
    key_block: Float[Array, "M s H"],
    index: Array,
) -> Float[Array, "M s q"]:
    """Computes scaled scores, -inf for keys not seen."""
    scores = _accum_einsum("MsH,MHq->Msq", key_block, tiles.query)
    scores = scores * np.asarray(key_block.shape[-1] ** -0.5, scores.dtype)
    positions = index * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[:, None]
    return jnp.where((positions >= tiles.first) & (positions <= tiles.last), scores, -jnp.inf)


def _take_block(blocks: Float[Array, "c M s H"], index: Array) -> Float[Array, "M s H"]:
    return lax.dynamic_index_in_dim(blocks, index, keepdims=False)


def _add_to_block(
    blocks: Float[Array, "c M s H"],
    index: Array,
    update: Float[Array, "M s H"],
) -> Float[Array, "c M s H"]:
    """Adds `update` to one block."""
    # Inside a loop, XLA updates `blocks` in place.
    return lax.dynamic_update_index_in_dim(blocks, _take_block(blocks, index) + update, index, 0)


def _make_tiles(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S M H"],
    first: Int[Array, "B T"],
    last: Int[Array, "B T"],
) -> _QueryTiles:
    """Splits queries and their limits into blocks."""
    _, length, heads, _ = query.shape
    batch, key_length, kv_heads, _ = key.shape
    padding = -length % BLOCK
    # Key blocks of all rows form one sequence, and positions are counted through it. Each row is
    # padded to whole blocks, so that no block has keys of two rows.
    row_length = key_length + -key_length % BLOCK
    row_offsets = jnp.arange(batch, dtype=jnp.int32)[:, None] * row_length
    end_position = batch * row_length

    def to_blocks(positions: Array, fill: int) -> Array:
        shifted = positions.astype(jnp.int32) + row_offsets
        return jnp.pad(shifted, ((0, 0), (0, padding)), constant_values=fill).reshape(-1, BLOCK)

    # Padding queries see nothing, as their `first` is after their `last`.
    first, last = to_blocks(first, end_position), to_blocks(last, -1)
    has_visible = first <= last
    start_block = jnp.min(jnp.where(has_visible, first, end_position), axis=1) // BLOCK
    stop_block = jnp.max(jnp.where(has_visible, last, -1), axis=1) // BLOCK + 1
    # Repeats the limits for the heads here. Inside the loops, the repeat prevented XLA from
    # vectorizing the mask, and took half of the total time.
    first, last = (jnp.tile(leaf, (1, heads // kv_heads)) for leaf in (first, last))
    return _QueryTiles(_to_tiles(query, kv_heads), first, last, start_block, stop_block)


def _to_tiles(array: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "C M H q"]:
    """Splits padded rows of queries into blocks."""
    _, length, heads, size = array.shape
    padded = jnp.pad(array, ((0, 0), (0, -length % BLOCK), (0, 0), (0, 0)))
    by_head = padded.reshape(-1, BLOCK, kv_heads, heads // kv_heads, size)
    return by_head.transpose(0, 2, 4, 3, 1).reshape(len(by_head), kv_heads, size, -1)


def _from_tiles(
    tiles: Float[Array, "C M H q"],
    batch: int,
    length: int,
    heads: int,
) -> Float[Array, "B T N H"]:
    count, kv_heads, size, _ = tiles.shape
    by_head = tiles.reshape(count, kv_heads, size, heads // kv_heads, BLOCK)
    return by_head.transpose(0, 4, 1, 3, 2).reshape(batch, -1, heads, size)[:, :length]


def _split_key_blocks(array: Float[Array, "B T M H"]) -> Float[Array, "c M s H"]:
    """Splits padded rows of keys or values into blocks."""
    _, length, kv_heads, size = array.shape
    padded = jnp.pad(array, ((0, 0), (0, -length % BLOCK), (0, 0), (0, 0)))
    return padded.reshape(-1, BLOCK, kv_heads, size).swapaxes(1, 2)


def _merge_key_blocks(
    blocks: Float[Array, "c M s H"],
    batch: int,
    length: int,
) -> Float[Array, "B T M H"]:
    _, kv_heads, _, size = blocks.shape
    return blocks.swapaxes(1, 2).reshape(batch, -1, kv_heads, size)[:, :length]
