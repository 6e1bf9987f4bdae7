"""Attention to a cache is attention to the slots that a query may see: in blocks or at once, in
whole rows or in pages."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kernels import key_chunks
from jaxspec.kernels.visible import AttentionMask, causal_mask
from jaxspec.models import attention, contiguous, paged
from jaxspec.models.attention import attend_cache
from jaxspec.models.cache import KVCache, locate_block, write_block
from jaxspec.models.contiguous import empty_cache
from tests.dense import attend, up_to_position

pytestmark = pytest.mark.usefixtures("x64")

ROWS, BLOCK, SLOTS, HEADS, KV_HEADS, SIZE = 4, 3, 24, 4, 2, 5
FIRST = np.array([0, 3, 11, 20], np.int32)
"""Of each row's block."""
POSITIONS = FIRST[:, None] + np.arange(BLOCK, dtype=np.int32)


class Seen(NamedTuple):
    """What the first query of each row sees, and the others accordingly, as in `AttentionMask`."""

    name: str
    first: int
    last: np.ndarray
    own: np.ndarray
    period: int = 1

    def __str__(self) -> str:
        return self.name

    @property
    def visible(self) -> AttentionMask:
        return AttentionMask(self.first, jnp.asarray(self.last), jnp.asarray(self.own), self.period)

    def mask(self) -> np.ndarray:
        """Slot by slot."""
        seen = np.zeros((*self.own.shape, SLOTS), bool)
        for (row, query), own in np.ndenumerate(self.own):
            last = self.last[row, query]
            for slot in range(SLOTS):
                true = self.first <= slot <= last
                seen[row, query, slot] = true or (
                    last < slot <= own and (own - slot) % self.period == 0
                )
        return seen


SIGHTS = [
    Seen("causal", 0, POSITIONS, POSITIONS),
    Seen("second turn of four reads", 1, POSITIONS - 1, POSITIONS, 4),
    Seen("last turn of four reads", 3, POSITIONS - 3, POSITIONS, 4),
    Seen("one turn drafts", 0, np.broadcast_to(FIRST[:, None], POSITIONS.shape), POSITIONS),
    Seen(
        "second turn of two drafts",
        1,
        np.broadcast_to(FIRST[:, None], POSITIONS.shape),
        POSITIONS + 1,
        2,
    ),
]
"""The draft's slots are past the true ones by 1 to 3 steps, of which its turn has drafted some."""


def cache_of(
    keys: np.ndarray,
    values: np.ndarray,
    page: int,
    stacked: bool,
    written: int = SLOTS,
    junk: float = 99.0,
) -> KVCache:
    """The first slots of each row in the middle one of three layers; elsewhere keys are NaN.

    Pages of `page` slots; 0: whole rows, which are `-page` chunks where it is less.
    """
    pages = ROWS * -(-SLOTS // page) + 2 if page > 0 else ROWS
    cache = empty_cache(
        3, pages, page if page > 0 else SLOTS, KV_HEADS, SIZE, jnp.dtype(keys.dtype), stacked
    )
    if page > 0:
        cache = paged.empty_pages(cache, pages, page)
    if page < 0:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(key_chunks, "MIN_CHUNKED_BYTES", 0)
            cache = contiguous.empty_rows(cache, ROWS, SLOTS, SLOTS // -page)
        assert contiguous.block_alignment(cache) == SLOTS // -page
    if page > 0:
        order = np.random.default_rng(1).permutation(pages)[: ROWS * -(-SLOTS // page)]
        cache = cache.replace(table=jnp.asarray(order.reshape(ROWS, -1), jnp.int32))
    return filled(cache, keys[:, :written], values[:, :written], junk)


@jax.jit
def filled(cache: KVCache, keys: jax.Array, values: jax.Array, junk: float) -> KVCache:
    """Keys and values in layer 1 from the first slot on, after NaN and junk everywhere."""
    cache = cache.replace(
        keys=jax.tree.map(lambda leaf: leaf + jnp.nan, cache.keys),
        values=jax.tree.map(lambda leaf: leaf + jnp.asarray(junk, leaf.dtype), cache.values),
    )
    slots = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape[:2])
    return write_block(cache, 1, locate_block(cache, slots), keys, values)


class Attention:
    """Attention to caches of one shape, compiled once: what a query sees at each of some sights."""

    def __init__(self, *sights: AttentionMask) -> None:
        def run(query: jax.Array, cache: KVCache, layer: jax.Array) -> list[jax.Array]:
            # only stacked layers have a number that is known late
            at = 1 if isinstance(cache.keys, tuple) else layer
            return [attend_cache(query, cache, at, visible) for visible in sights]

        self.run = jax.jit(run)

    def __call__(self, query: np.ndarray, cache: KVCache) -> list[jax.Array]:
        return self.run(query, cache, jnp.int32(1))


@jax.jit
def dense(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """What attention is, all scores at once."""
    return attend(query, keys, values, mask)


def made(dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values."""
    random = np.random.default_rng(0)
    query = random.normal(size=(ROWS, BLOCK, HEADS, SIZE)) * 2
    keys, values = random.normal(size=(2, ROWS, SLOTS, KV_HEADS, SIZE))
    return query.astype(dtype), keys.astype(dtype), values.astype(dtype)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])
@pytest.mark.parametrize(
    "page",
    [-3, 0, 1, 3, 5],
    ids=lambda page: (
        f"pages of {page}" if page > 0 else f"{-page} chunks" if page else "whole rows"
    ),
)
@pytest.mark.parametrize("together", [1, 5, 23, 512])
def test_a_cache_is_attended_to_like_a_text(
    together: int, page: int, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 1 to 23 positions, through blocks that do and do not divide the cache or the
    page."""
    monkeypatch.setattr(attention, "BLOCK", together)
    query, keys, values = made()
    cache = cache_of(keys, values, page, stacked)

    attention_by_sight = Attention(*(seen.visible for seen in SIGHTS))
    for seen, found in zip(SIGHTS, attention_by_sight(query, cache), strict=True):
        mask = seen.mask()
        assert mask.any(axis=-1).all()
        wanted = dense(query, keys, values, mask)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13, err_msg=str(seen))


def test_causal_sight_is_that_of_a_text() -> None:
    visible = causal_mask(jnp.asarray(POSITIONS))
    np.testing.assert_array_equal(
        visible.is_visible(jnp.arange(SLOTS, dtype=jnp.int32)),
        up_to_position(jnp.asarray(POSITIONS), SLOTS),
    )
    np.testing.assert_array_equal(SIGHTS[0].mask(), up_to_position(jnp.asarray(POSITIONS), SLOTS))


@pytest.mark.parametrize("page", [-2, 0, 3], ids=["chunks", "whole rows", "pages"])
@pytest.mark.parametrize("together", [4, 512])
def test_a_slot_that_is_not_finite_harms_who_sees_it_alone(
    together: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK", together)
    query, keys, values = made()
    spoilt, spoilt_values = keys.copy(), values.copy()
    spoilt[1, 4], spoilt_values[3, 22] = np.nan, np.inf
    spoilt[2, 14:], spoilt_values[2, 14:] = np.nan, np.nan  # beyond the block
    attend_causally = Attention(causal_mask(jnp.asarray(POSITIONS)))
    clean, found = (
        np.asarray(attend_causally(query, cache_of(*pair, page, False))[0])
        for pair in ((keys, values), (spoilt, spoilt_values))
    )
    harmed = np.zeros((ROWS, BLOCK), bool)
    harmed[1, 1:] = harmed[3, 2] = True
    assert np.isnan(found[harmed]).all()
    np.testing.assert_array_equal(found[~harmed], clean[~harmed])


@pytest.mark.parametrize("page", [-6, 0, 2], ids=["chunks", "whole rows", "pages"])
def test_stretches_beyond_the_longest_row_are_not_read(
    page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold NaNs, also in their values, which even a weight of 0 would let through."""
    monkeypatch.setattr(attention, "BLOCK", 4)
    query, keys, values = made()
    # the last query's block ends with slot 11
    positions = jnp.minimum(jnp.asarray(POSITIONS), 11)
    cache = cache_of(keys, values, page, True, 12, np.nan)
    assert all(jnp.isnan(leaf[1]).any() for leaf in (cache.keys, cache.values))
    (found,) = Attention(causal_mask(positions))(query, cache)
    wanted = dense(query, keys, values, up_to_position(positions, SLOTS))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.02)])
@pytest.mark.parametrize("together", [4, 512])
def test_narrow_types_are_summed_in_float32(
    dtype: Any, tolerance: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK", together)
    query, keys, values = (np.asarray(jnp.asarray(part, dtype)) for part in made())
    (found,) = Attention(causal_mask(jnp.asarray(POSITIONS)))(
        query, cache_of(keys, values, 0, False)
    )
    assert found.dtype == dtype
    query, keys, values = (part.astype(np.float64) for part in (query, keys, values))
    wanted = dense(query, keys, values, SIGHTS[0].mask())
    np.testing.assert_allclose(
        np.asarray(found.astype(jnp.float32)), wanted, rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("page", [-3, 0, 5], ids=["chunks", "whole rows", "pages"])
@pytest.mark.parametrize("together", [5, 512])
@pytest.mark.parametrize("queries", [1, 2])
def test_a_long_block_is_attended_to_in_pieces(
    queries: int, together: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees as if it were whole, and a slot that is not finite harms the queries that see it
    alone."""
    for name, size in (("BLOCK", together), ("TILE_QUERIES", 1), ("MIN_ROW_QUERIES", queries)):
        monkeypatch.setattr(attention, name, size)
    query, keys, values = made()
    attention_by_sight = Attention(*(seen.visible for seen in SIGHTS))
    results = attention_by_sight(query, cache_of(keys, values, page, False))
    for seen, found in zip(SIGHTS, results, strict=True):
        wanted = dense(query, keys, values, seen.mask())
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13, err_msg=str(seen))
    assert SIGHTS[0].name == "causal"
    keys[1, 4] = np.nan
    found, *_ = attention_by_sight(query, cache_of(keys, values, page, False))
    harmed = np.zeros((ROWS, BLOCK), bool)
    harmed[1, 1:] = True
    np.testing.assert_array_equal(np.isnan(found).any(axis=(2, 3)), harmed)
