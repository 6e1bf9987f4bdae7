"""The cache against plain numpy: blocks land on their own slots, rows and pages move as wholes, and
nothing lands anywhere else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kernels import key_chunks
from jaxspec.models import contiguous, paged
from jaxspec.models.cache import KVCache, PromptCopy, locate_block, write_block
from jaxspec.models.contiguous import CONTIGUOUS, empty_cache
from jaxspec.models.paged import PAGED

LAYERS, ROWS, SLOTS, HEADS, SIZE = 3, 4, 6, 2, 5
PAGE, PAGES = 2, 14
TABLE = np.array([[3, 9, 0], [12, 1, 7], [5, PAGES, PAGES], [13, 4, 8]], np.int32)
"""Three pages of two slots for each row; the third row has but one."""
STACKED = pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])


class Twin:
    """Keys [L P s M H] and values of the same order in numpy: however a cache lies, an entry has
    one place here."""

    def __init__(self, cache: KVCache):
        keys, values = (
            np.stack(pools) if isinstance(pools, tuple) else np.asarray(pools)
            for pools in (cache.keys, cache.values)
        )
        chunks = keys.reshape(*keys.shape[:2], HEADS, -1, *keys.shape[3:]).transpose(
            0, 1, 3, 5, 2, 4
        )
        self.keys, self.values = (
            chunks.reshape(*chunks.shape[:2], -1, HEADS, SIZE).copy(),
            values.transpose(0, 1, 3, 2, 4).copy(),
        )

    def both(self) -> tuple[np.ndarray, np.ndarray]:
        return self.keys, self.values

    def change(self, function: Callable[..., None], *others: "Twin") -> "Twin":
        """Changes keys and values alike."""
        for ours, *theirs in zip(self.both(), *(other.both() for other in others), strict=True):
            function(ours, *theirs)
        return self


def random_cache(
    stacked: bool,
    pages: int = ROWS,
    page_size: int = SLOTS,
    table: np.ndarray | None = None,
    seed: int = 0,
) -> KVCache:
    """A cache that is full of different numbers."""
    empty = empty_cache(LAYERS, pages, page_size, HEADS, SIZE, jnp.dtype("float32"), stacked)
    if table is not None:
        empty = paged.empty_pages(empty, pages, page_size)
    return full(empty, table, seed)


def in_chunks(stacked: bool, rows: int = ROWS, slots: int = SLOTS, seed: int = 0) -> KVCache:
    """The same in chunks of two slots."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(key_chunks, "MIN_CHUNKED_BYTES", 0)
        made = full(
            contiguous.empty_rows(
                empty_cache(LAYERS, 1, 1, HEADS, SIZE, jnp.dtype("float32"), stacked),
                rows,
                slots,
                2,
            ),
            seed=seed,
        )
    assert contiguous.block_alignment(made) == 2
    return made


def full(empty: KVCache, table: np.ndarray | None = None, seed: int = 0) -> KVCache:
    random = np.random.default_rng(seed)
    filled = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype), empty
    )
    return filled if table is None else filled.replace(table=jnp.asarray(table))


def paged_cache(stacked: bool) -> KVCache:
    """The same in pages that are not in use."""
    return random_cache(stacked, PAGES, PAGE, np.zeros((0, 0), np.int32))


def seat_of(row: int, prompt: int, *pages: np.ndarray) -> PromptCopy:
    to, source = pages or (np.zeros(0, np.int32), np.zeros(0, np.int32))
    return PromptCopy(jnp.int32(row), jnp.int32(prompt), jnp.asarray(to), jnp.asarray(source))


def assert_is(cache: KVCache, wanted: Twin, like: KVCache) -> None:
    """The entries wanted, laid out like those of `like`."""
    assert (
        isinstance(cache.keys, tuple)
        == isinstance(cache.values, tuple)
        == isinstance(like.keys, tuple)
    )
    for found, entries in zip(Twin(cache).both(), wanted.both(), strict=True):
        np.testing.assert_array_equal(found, entries)


def cache_with(stacked: bool, table: np.ndarray | str | None, seed: int = 0) -> KVCache:
    if isinstance(table, str):
        return in_chunks(stacked, seed=seed)
    return (
        random_cache(stacked, seed=seed)
        if table is None
        else random_cache(stacked, PAGES, PAGE, table, seed)
    )


def place(table: np.ndarray | str | None, row: int, slot: int) -> tuple[int, int] | None:
    """Page of a row's slot and the place in it; None: there is none."""
    if table is None or isinstance(table, str):
        return (row, slot) if slot < SLOTS else None
    page_index = slot // PAGE
    page = table[row, page_index] if page_index < table.shape[1] else PAGES
    return (int(page), slot % PAGE) if page < PAGES else None


TABLES = pytest.mark.parametrize(
    "table", [None, "chunks", TABLE], ids=["whole rows", "chunks", "pages"]
)
POSITIONS = np.array([[0, 1, 2], [3, 4, 5], [4, 5, 6], [6, 7, 8]], np.int32)


@TABLES
@STACKED
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("jitted", [True, False])
def test_extend_writes_each_rows_block_at_its_slots(
    layer: int, jitted: bool, stacked: bool, table: np.ndarray | str | None
) -> None:
    """Positions beyond the cache are dropped: they neither wrap round nor pile up on the last
    slot."""
    random = np.random.default_rng(layer)
    before = cache_with(stacked, table, layer)
    fresh = random.normal(size=(2, ROWS, 3, HEADS, SIZE)).astype(np.float32)
    wanted, written = Twin(before), 0
    for row in range(ROWS):
        for offset, slot in enumerate(POSITIONS[row]):
            where = place(table, row, int(slot))
            if where is not None:
                written += 1
                for pool, entries in zip(wanted.both(), fresh, strict=True):
                    pool[layer, *where] = entries[row, offset]
    assert written == (6 if isinstance(table, np.ndarray) else 8)

    def write(cache: KVCache, layer: Any, slots: Any, keys: Any, values: Any) -> KVCache:
        return write_block(cache, layer, locate_block(cache, slots), keys, values)

    if jitted:
        write = jax.jit(write, static_argnums=() if stacked else 1)
    found = write(
        before,
        jnp.int32(layer) if stacked else layer,
        jnp.asarray(POSITIONS),
        *(jnp.asarray(part) for part in fresh),
    )
    assert_is(found, wanted, before)
    assert found.layout is (PAGED if isinstance(table, np.ndarray) else CONTIGUOUS)
    np.testing.assert_array_equal(found.table, before.table)


@TABLES
@STACKED
def test_what_is_not_finite_is_a_nan_to_who_sees_it_and_nothing_to_others(
    stacked: bool, table: np.ndarray | str | None
) -> None:
    """A key says so for its value, which is 0: in a sum over slots that are not seen it would be 0
    x NaN."""
    random = np.random.default_rng(7)
    before, layer = cache_with(stacked, table), 1
    keys, values = random.normal(size=(2, ROWS, 2, HEADS, SIZE)).astype(np.float32)
    keys[0, 0, 0, 1], keys[1, 0, 1, 2], keys[1, 1] = np.nan, np.inf, -np.inf
    values[0, 1, 1, 3], values[1, 1, 0, 0], values[3, 0] = np.nan, -np.inf, np.inf
    slots = np.array([[0, 1], [2, 3], [0, 1], [4, 5]], np.int32)
    wanted = Twin(before)
    for row in range(ROWS):
        for offset, slot in enumerate(slots[row]):
            for index in np.ndindex(HEADS, SIZE):
                key, value = (float(part[row, offset][index]) for part in (keys, values))
                where = place(table, row, int(slot))
                assert where is not None
                wanted.keys[(layer, *where, *index)] = (
                    key if np.isfinite(key) and np.isfinite(value) else np.nan
                )
                wanted.values[(layer, *where, *index)] = value if np.isfinite(value) else 0
    assert np.isnan(wanted.keys).sum() == 2 + HEADS * SIZE + 1 + HEADS * SIZE
    places = locate_block(before, jnp.asarray(slots))
    found = write_block(before, layer, places, jnp.asarray(keys), jnp.asarray(values))
    assert_is(found, wanted, before)
    assert np.isfinite(Twin(found).values).all()


@STACKED
@pytest.mark.parametrize(
    "table",
    [
        None,
        "chunks",
        np.array([[3, 9, 0, 2], [12, 1, 7, 6], [5, 11, PAGES, PAGES], [13, 4, 8, 10]], np.int32),
    ],
)
@pytest.mark.parametrize("count", [2, 4, 6, 8])
def test_blocks_hold_the_slots_that_they_say(
    stacked: bool, table: np.ndarray | str | None, count: int
) -> None:
    """At the end of a row slots come along that were seen already; every slot is in one of the
    blocks, in the order of their numbers."""
    if isinstance(table, str):
        cache = in_chunks(stacked, slots=8)
    else:
        cache = (
            random_cache(stacked, page_size=8)
            if table is None
            else random_cache(stacked, PAGES, PAGE, table)
        )
    twin, whole, seen = Twin(cache), 8, set()
    for first in range(0, whole, count):
        for layer in range(LAYERS):
            where = jnp.int32(layer) if stacked else layer
            keys, values, slots = cache.layout.read_positions(
                cache, where, first if count == whole else jnp.int32(first), count
            )
            assert slots.tolist() == list(
                range(min(first, whole - count), min(first, whole - count) + count)
            )
            seen |= set(slots.tolist())
            assert keys.shape == (
                ROWS,
                HEADS,
                *((1, SIZE, count) if table is None else (count // PAGE, SIZE, PAGE)),
            )
            parts = (np.asarray(keys).swapaxes(1, 2), 4), (np.asarray(values), 3)
            flat = [
                np.moveaxis(part, axis, 2).reshape(ROWS, count, HEADS, SIZE) for part, axis in parts
            ]
            for row in range(ROWS):
                for index, slot in enumerate(slots.tolist()):
                    page, at = (
                        (int(table[row, slot // PAGE]), slot % PAGE)
                        if isinstance(table, np.ndarray)
                        else (row, slot)
                    )
                    for entries, pool in zip(flat, twin.both(), strict=True):
                        if page < PAGES:  # else nobody looks
                            np.testing.assert_array_equal(
                                entries[row, index], pool[layer, page, at]
                            )
    assert seen == set(range(whole))


@STACKED
@pytest.mark.parametrize(
    "chunk", [0, 4, 8], ids=["one chunk", "prompts of two chunks", "of less than one"]
)
def test_rows_of_keeps_groups_together(
    stacked: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of at least the length that is asked for."""
    monkeypatch.setattr(key_chunks, "MIN_CHUNKED_BYTES", 0)
    prompts, slots = random_cache(stacked, 2), 16
    rows, twin = contiguous.expand_prompts(prompts, 3, SLOTS + 8, chunk), Twin(prompts)
    found = Twin(rows)
    assert rows.keys[0].shape[-1] == (chunk or slots)
    assert found.keys.shape == found.values.shape == (LAYERS, 6, slots, HEADS, SIZE)
    for row in range(6):
        for ours, theirs in zip(found.both(), twin.both(), strict=True):
            np.testing.assert_array_equal(ours[:, row, :SLOTS], theirs[:, row // 3])
            assert not ours[:, row, SLOTS:].any()
    assert (
        isinstance(rows.keys, tuple)
        == isinstance(rows.values, tuple)
        == isinstance(prompts.keys, tuple)
    )


@STACKED
def test_an_empty_cache_has_the_shape_and_type_asked_for(stacked: bool) -> None:
    cache = empty_cache(LAYERS, ROWS, SLOTS, HEADS, SIZE, jnp.dtype("bfloat16"), stacked)
    pool = paged.empty_pages(random_cache(stacked), 9, 7)
    rows = contiguous.empty_rows(random_cache(stacked), 9, 13, 4)
    for made, pages, size, dtype in (
        (cache, ROWS, SLOTS, jnp.bfloat16),
        (pool, 9, 7, jnp.float32),
        (rows, 9, 16, jnp.float32),
    ):
        assert made.layout is (PAGED if made is pool else CONTIGUOUS)
        assert made.table.shape == (0, 0)
        assert isinstance(made.keys, tuple) != stacked
        for pools, page in ((made.keys, (SIZE, size)), (made.values, (size, SIZE))):
            layers = [pools] if stacked else pools
            assert len(layers) == (1 if stacked else LAYERS)
            for leaf in layers:
                assert leaf.shape == (*((LAYERS,) if stacked else ()), pages, HEADS, *page)
                assert leaf.dtype == dtype
                assert not leaf.any()


@STACKED
@pytest.mark.parametrize(
    ("chunks", "slots"), [(False, SLOTS - 2), (True, SLOTS - 2), (True, 1), (True, 3)]
)
def test_a_seat_in_contiguous_rows_copies_a_prompt_to_the_beginning_of_a_row(
    stacked: bool, chunks: bool, slots: int
) -> None:
    """What stands behind it in the row is left, but for keys in its last chunk, and so are the
    other rows."""
    cache = (in_chunks if chunks else random_cache)(stacked)
    prompts = random_cache(stacked, 3, slots, seed=1)

    def put(row: int, prompt: int, ours: np.ndarray, theirs: np.ndarray) -> None:
        ours[:, row, :slots] = theirs[:, prompt]

    for row, prompt in ((0, 2), (3, 0), (2, 1)):
        wanted = Twin(cache).change(partial(put, row, prompt), Twin(prompts))
        if chunks and slots % 2 and slots > 2:
            wanted.keys[:, row, slots] = 0
        found = jax.jit(contiguous.copy_prompt)(cache, seat_of(row, prompt), prompts)
        assert_is(found, wanted, cache)


@STACKED
@pytest.mark.parametrize("make", [random_cache, in_chunks])
def test_rows_that_are_taken_and_put_back_leave_the_others(
    make: Callable[..., KVCache], stacked: bool
) -> None:
    cache, rows = make(stacked), np.array([2, 0, 3], np.int32)
    some = contiguous.take_rows(cache, jnp.asarray(rows))
    for found, whole in zip(Twin(some).both(), Twin(cache).both(), strict=True):
        np.testing.assert_array_equal(found, whole[:, rows])

    def put(ours: np.ndarray, theirs: np.ndarray) -> None:
        ours[:, rows] = theirs

    fresh = make(stacked, 3, seed=1)
    assert_is(
        contiguous.write_rows(cache, jnp.asarray(rows), fresh),
        Twin(cache).change(put, Twin(fresh)),
        some,
    )
    assert_is(contiguous.write_rows(cache, jnp.asarray(rows), some), Twin(cache), cache)


@STACKED
def test_a_seat_in_pages_copies_whole_pages_and_nothing_to_no_page(stacked: bool) -> None:
    cache = paged_cache(stacked)
    to, source = np.array([5, PAGES, 1], np.int32), np.array([3, 2, 5], np.int32)

    def copy(ours: np.ndarray) -> None:
        ours[:, 5], ours[:, 1] = ours[:, 3].copy(), ours[:, 5].copy()

    assert_is(
        paged.copy_prompt(cache, seat_of(0, 0, to, source), cache), Twin(cache).change(copy), cache
    )
