"""The cache: blocks land on their own slots, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.kv import KVCache, append, empty_cache, repeat_rows

LAYERS, ROWS, SLOTS, HEADS, SIZE = 3, 4, 6, 2, 5


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("jitted", [True, False])
def test_append_writes_each_rows_block_at_its_positions(layer: int, jitted: bool) -> None:
    """Positions beyond the cache are dropped: they neither wrap round nor pile up on the last slot."""
    random = np.random.default_rng(layer)
    before = random.normal(size=(LAYERS, ROWS, SLOTS, HEADS, SIZE)).astype(np.float32)
    fresh = random.normal(size=(ROWS, 3, HEADS, SIZE)).astype(np.float32)
    positions = np.array([[0, 1, 2], [3, 4, 5], [4, 5, 6], [6, 7, 8]], np.int32)
    wanted = before.copy()
    for row in range(ROWS):
        for offset, slot in enumerate(positions[row]):
            if slot < SLOTS:
                wanted[layer, row, slot] = fresh[row, offset]
    write = jax.jit(append) if jitted else append
    np.testing.assert_array_equal(write(jnp.asarray(before), jnp.int32(layer), jnp.asarray(positions), jnp.asarray(fresh)), wanted)
    assert (wanted != before).sum() == 8 * HEADS * SIZE


def test_repeat_rows_keeps_groups_together() -> None:
    keys = jnp.arange(LAYERS * 2 * SLOTS, dtype=jnp.float32).reshape(LAYERS, 2, SLOTS, 1, 1)
    repeated = repeat_rows(KVCache(keys=keys, values=-keys), 3)
    assert repeated.keys.shape == (LAYERS, 6, SLOTS, 1, 1)
    for row in range(6):
        np.testing.assert_array_equal(repeated.keys[:, row], keys[:, row // 3])
        np.testing.assert_array_equal(repeated.values[:, row], -keys[:, row // 3])


def test_an_empty_cache_has_the_shape_and_type_asked_for() -> None:
    cache = empty_cache(LAYERS, ROWS, SLOTS, HEADS, SIZE, jnp.dtype("bfloat16"))
    for leaf in (cache.keys, cache.values):
        assert (leaf.shape, leaf.dtype) == ((LAYERS, ROWS, SLOTS, HEADS, SIZE), jnp.bfloat16)
        assert not leaf.any()
