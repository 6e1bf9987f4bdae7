"""Grouped-query attention of a block to the live part of a cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.kernels.key_chunks import scores
from jaxspec.kernels.visible import Visible
from jaxspec.models.cache import KVCache, LayerIndex

BLOCK = 512
"""Positions of a cache that are looked at together; of longer caches, only as many blocks as the
longest row needs."""


TOGETHER, FEWEST = 2048, 128
"""Queries of all rows, and of one row at least, whose scores are there at once: those of a long
prompt would take more than its cache.

Milliseconds in which a CPU's core reads prompts in one piece / in several, and MB of temporaries (4
layers, 8 heads of 16, float32): 32 of 64 the same program; 32 of 192 201 / 148, 84 / 52; 16 of 512
585 / 535, 272 / 86; 2 of 4,096 4,182 / 1,971, 275 / 88.
"""


class Part(NamedTuple):
    """Attention over some positions, not yet normalised."""

    largest: Float[Array, "B M T R"]
    total: Float[Array, "B M T R"]
    weighted: Float[Array, "B M T R H"]


def attend_cache(
    query: Float[Array, "B T N H"], cache: KVCache, layer: LayerIndex, visible: Visible
) -> Float[Array, "B T N H"]:
    """Softmax attention of a block to what its rows have in the cache; scores are normalised in at
    least float32.

    A long block, that of a prompt, is gone through in pieces, so that its memory is linear in its
    length; each piece reads the cache as far as its own queries see.
    """
    rows, length, *heads = query.shape
    pieces = -(-length // max(FEWEST, TOGETHER // rows))
    if pieces == 1:
        return _attended(query, cache, layer, visible)

    def by_tile(leaf: Array, mode: str) -> Array:
        """Pieces as a first axis; the last one is filled up with what nobody reads."""
        padded = jnp.pad(
            leaf, [(0, 0), (0, -length % pieces), *[(0, 0)] * (leaf.ndim - 2)], mode=mode
        )
        return jnp.moveaxis(padded.reshape(rows, pieces, -1, *leaf.shape[2:]), 1, 0)

    def one(piece: tuple[Array, Array, Array]) -> Array:
        return _attended(piece[0], cache, layer, visible._replace(last=piece[1], own=piece[2]))

    attended = lax.map(
        one,
        (by_tile(query, "constant"), by_tile(visible.last, "edge"), by_tile(visible.own, "edge")),
    )
    return jnp.moveaxis(attended, 0, 1).reshape(rows, -1, *heads)[:, :length]


def _attended(
    query: Float[Array, "B T N H"], cache: KVCache, layer: LayerIndex, visible: Visible
) -> Float[Array, "B T N H"]:
    """Attention of a block that is short enough to be one piece."""
    rows, length, heads, size = query.shape
    grouped = (query * size**-0.5).reshape(rows, length, cache.kv_heads, -1, size)
    done = cache.layout.attend(grouped, cache, layer, visible)
    attended = (done.weighted / done.total[..., None]).astype(query.dtype)
    return attended.transpose(0, 2, 1, 3, 4).reshape(rows, length, heads, size)


def in_blocks(
    grouped: Float[Array, "B T M R H"],
    read: Callable[..., tuple[Array, Array, Int[Array, " C"]]],
    visible: Visible,
    whole: int,
    unit: int,
) -> Part:
    """Attention at a cost that follows the longest row: longer caches are gone through in blocks,
    with an online softmax (Milakov & Gimelshein, arXiv 1805.02867).

    Args:
      grouped: scaled queries, by the head of keys that they share.
      read: (first, count) -> keys, values and their positions, as in `Layout.read`.
      visible: what each query sees.
      whole: positions of a row.
      unit: positions that only come together.
    """
    count = whole if whole <= BLOCK else unit * max(1, BLOCK // unit)
    wide = np.promote_types(grouped.dtype, np.float32)

    def part(first: Int[Array, ""] | int) -> Part:
        keys, values, positions = read(first, count)
        found = scores(grouped, keys, wide)
        seen = visible.sees(positions)
        if count < whole:
            seen &= positions >= first
        found = jnp.where(seen[:, None, :, None], found, -jnp.inf)
        largest = jnp.max(found, axis=-1)
        weights = jnp.exp(found - jnp.where(largest == -jnp.inf, 0, largest)[..., None])
        split = weights.astype(values.dtype).reshape(*weights.shape[:-1], values.shape[1], -1)
        weighted = jnp.einsum("BMTRns,BnMsH->BMTRH", split, values, preferred_element_type=wide)
        return Part(largest, jnp.sum(weights, axis=-1), weighted)

    def join(index: Int[Array, ""], before: Part) -> Part:
        after = part(index * count)
        largest = jnp.maximum(before.largest, after.largest)
        base = jnp.where(largest == -jnp.inf, 0, largest)
        old, new = jnp.exp(before.largest - base), jnp.exp(after.largest - base)
        weighted = before.weighted * old[..., None] + after.weighted * new[..., None]
        return Part(largest, before.total * old + after.total * new, weighted)

    if count == whole:
        return part(0)
    # The first block joins an empty part: its own code would be compiled once more.
    empty = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(part, jnp.int32(0))
    )
    empty = empty._replace(largest=jnp.full_like(empty.largest, -jnp.inf))
    needed = jnp.minimum(jnp.max(visible.own) // count + 1, -(-whole // count))
    return lax.fori_loop(0, needed, join, empty)
