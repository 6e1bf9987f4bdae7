"""Attention of packed sequences to the keys that each query sees, in blocks (flash attention; Dao et al., arXiv 2205.14135)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

QUERY_BLOCK = 64
KEY_BLOCK = 64


class _Tiles(NamedTuple):
    """What blocks of queries need, block by block; queries stand in the last axis, where the processor's vectors run over them."""

    query: Float[Array, "C M H Q"]
    first: Int[Array, "C Q"]
    last: Int[Array, "C Q"]
    row: Int[Array, " C"]
    start: Int[Array, " C"]
    """The first block of keys that a query of the block sees."""
    stop: Int[Array, " C"]
    """One past the last such block; not above `start` where no query of the block sees anything."""


def attend_visible(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T M H"],
    value: Float[Array, "B T M H"],
    first: Int[Array, "B T"],
    last: Int[Array, "B T"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Computes softmax attention of each query to the keys from `first` to `last`, and the log-sum-exp of its scaled scores.

    Memory is linear in T, and blocks of keys that no query of a block sees cost nothing. Both results may be differentiated, so that
    callers can merge other terms into the same softmax.

    Args:
      query: of N = M * R heads; head n uses head n // R of keys and values.
      key: one for each position.
      value: the same.
      first: the first position that each query sees; it never falls along T.
      last: the last one, which is included; it never falls along T. A query whose last is before its first sees nothing.

    Returns:
      The attended values and the log-sum-exp, the latter in at least float32; 0 and -inf for a query that sees nothing.
    """
    return _attend(query, key, value, first, last)


@jax.custom_vjp
def _attend(query: Array, key: Array, value: Array, first: Array, last: Array) -> tuple[Array, Array]:
    return _forward(query, key, value, first, last)[0]


def _forward(query: Array, key: Array, value: Array, first: Array, last: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """The results and what the backward pass needs."""
    batch, length, heads, size = query.shape
    kv_heads, wide = key.shape[2], np.promote_types(query.dtype, np.float32)
    keys, values = _key_blocks(key), _key_blocks(value)
    scale = np.asarray(size**-0.5, wide)

    def one_block(_: None, tiles: _Tiles) -> tuple[None, tuple[Array, Array]]:
        columns = tiles.query.shape[-1]

        def add(index: Array, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, weighted = before
            scores = _dot("MsH,MHq->Msq", keys[tiles.row, index], tiles.query) * scale
            scores = jnp.where(_seen(tiles, index), scores, -jnp.inf)
            raised = jnp.maximum(largest, jnp.max(scores, axis=1))
            base = jnp.where(raised == -jnp.inf, 0, raised)  # -inf - -inf is NaN
            weights, old = jnp.exp(scores - base[:, None]), jnp.exp(largest - base)
            added = _dot("MsH,Msq->MHq", values[tiles.row, index], weights.astype(query.dtype))
            return raised, total * old + jnp.sum(weights, axis=1), weighted * old[:, None] + added

        nothing = jnp.full((kv_heads, columns), -jnp.inf, wide), jnp.zeros((kv_heads, columns), wide)
        start = *nothing, jnp.zeros((kv_heads, size, columns), wide)
        largest, total, weighted = lax.fori_loop(tiles.start, tiles.stop, add, start)
        divisor = jnp.where(total == 0, 1, total)
        return None, ((weighted / divisor[:, None]).astype(query.dtype), largest + jnp.log(divisor))

    _, (attended, log_sum) = lax.scan(one_block, None, _tiles(query, kv_heads, first, last))
    output = _from_tiles(attended, batch, length, heads)
    log_sum = _from_tiles(log_sum[:, :, None], batch, length, heads)[..., 0]
    return (output, log_sum), (query, key, value, output, log_sum, first, last)


def _backward(residuals: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple[Array | None, ...]:
    """Gradients of query, key and value; scores are computed again from the log-sum-exp, block by block."""
    query, key, value, output, log_sum, first, last = residuals
    batch, length, heads, size = query.shape
    kv_heads, wide = key.shape[2], np.promote_types(query.dtype, np.float32)
    keys, values = _key_blocks(key), _key_blocks(value)
    scale = np.asarray(size**-0.5, wide)
    # A query that sees nothing gives nothing back: what a caller's merge makes of its -inf may be NaN, and 0 x NaN is NaN.
    sees = (first <= last)[..., None]
    d_output = jnp.where(sees[..., None], cotangents[0], 0)
    d_log_sum = jnp.where(sees, cotangents[1], 0)
    offset = d_log_sum - jnp.sum(d_output.astype(wide) * output.astype(wide), axis=-1)
    tiled = functools.partial(_to_tiles, kv_heads=kv_heads)
    scalars = (tiled(leaf[..., None])[:, :, 0] for leaf in (jnp.where(sees, log_sum, 0), offset))

    def one_block(carried: tuple[Array, Array], here: tuple[_Tiles, Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        tiles, d_attended, base, shift = here

        def add(index: Array, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_query, d_keys, d_values = before
            key_block, value_block = keys[tiles.row, index], values[tiles.row, index]
            scores = _dot("MsH,MHq->Msq", key_block, tiles.query) * scale
            weights = jnp.exp(jnp.where(_seen(tiles, index), scores - base[:, None], -jnp.inf))
            d_weights = _dot("MsH,MHq->Msq", value_block, d_attended)
            d_scores = (weights * (d_weights + shift[:, None]) * scale).astype(query.dtype)
            d_query += _dot("MsH,Msq->MHq", key_block, d_scores)
            d_keys = d_keys.at[tiles.row, index].add(_dot("Msq,MHq->MsH", d_scores, tiles.query))
            d_values = d_values.at[tiles.row, index].add(_dot("Msq,MHq->MsH", weights.astype(query.dtype), d_attended))
            return d_query, d_keys, d_values

        d_query, *carried_on = lax.fori_loop(tiles.start, tiles.stop, add, (jnp.zeros(tiles.query.shape, wide), *carried))
        return (carried_on[0], carried_on[1]), d_query.astype(query.dtype)

    nothing = jnp.zeros(keys.shape, wide)
    tiles = _tiles(query, kv_heads, first, last)
    (d_keys, d_values), d_query = lax.scan(one_block, (nothing, nothing), (tiles, tiled(d_output), *scalars))
    d_key, d_value = (_from_key_blocks(leaf, length).astype(query.dtype) for leaf in (d_keys, d_values))
    return _from_tiles(d_query, batch, length, heads), d_key, d_value, None, None


_attend.defvjp(_forward, _backward)


def _dot(subscripts: str, left: Array, right: Array) -> Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=np.promote_types(left.dtype, np.float32))


def _seen(tiles: _Tiles, index: Array) -> Array:
    """Which keys of a block of keys each query of a block of queries sees, [s q]."""
    positions = index * KEY_BLOCK + jnp.arange(KEY_BLOCK, dtype=jnp.int32)[:, None]
    return (positions >= tiles.first) & (positions <= tiles.last)


def _tiles(query: Float[Array, "B T N H"], kv_heads: int, first: Int[Array, "B T"], last: Int[Array, "B T"]) -> _Tiles:
    batch, length = first.shape
    beyond = (0, 0), (0, -length % QUERY_BLOCK)
    # Queries beyond those that there are see nothing.
    first = jnp.pad(first.astype(jnp.int32), beyond, constant_values=length).reshape(-1, QUERY_BLOCK)
    last = jnp.pad(last.astype(jnp.int32), beyond, constant_values=-1).reshape(-1, QUERY_BLOCK)
    sees = first <= last
    start = jnp.min(jnp.where(sees, first, length), axis=1) // KEY_BLOCK
    stop = jnp.max(jnp.where(sees, last, -1), axis=1) // KEY_BLOCK + 1
    row = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), len(first) // batch)
    first, last = (jnp.tile(leaf, (1, query.shape[2] // kv_heads)) for leaf in (first, last))
    return _Tiles(_to_tiles(query, kv_heads), first, last, row, start, stop)


def _to_tiles(array: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "C M H Q"]:
    """Blocks of queries, padded with 0; a block's columns are the R heads that share keys, and in each its positions."""
    batch, length, _, size = array.shape
    padded = jnp.pad(array, ((0, 0), (0, -length % QUERY_BLOCK), (0, 0), (0, 0)))
    apart = padded.reshape(batch, -1, QUERY_BLOCK, kv_heads, array.shape[2] // kv_heads, size)
    tiles = apart.transpose(0, 1, 3, 5, 4, 2)
    return tiles.reshape(-1, kv_heads, size, tiles.shape[4] * QUERY_BLOCK)


def _from_tiles(tiles: Float[Array, "C M H Q"], batch: int, length: int, heads: int) -> Float[Array, "B T N H"]:
    _, kv_heads, size, _ = tiles.shape
    apart = tiles.reshape(batch, -1, kv_heads, size, heads // kv_heads, QUERY_BLOCK)
    return apart.transpose(0, 1, 5, 2, 4, 3).reshape(batch, -1, heads, size)[:, :length]


def _key_blocks(array: Float[Array, "B T M H"]) -> Float[Array, "B c M s H"]:
    """Blocks of keys or values, padded with 0."""
    batch, length, kv_heads, size = array.shape
    padded = jnp.pad(array, ((0, 0), (0, -length % KEY_BLOCK), (0, 0), (0, 0)))
    return padded.reshape(batch, -1, KEY_BLOCK, kv_heads, size).swapaxes(2, 3)


def _from_key_blocks(blocks: Float[Array, "B c M s H"], length: int) -> Float[Array, "B T M H"]:
    batch, _, kv_heads, _, size = blocks.shape
    return blocks.swapaxes(2, 3).reshape(batch, -1, kv_heads, size)[:, :length]
