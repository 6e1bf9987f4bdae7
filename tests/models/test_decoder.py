"""The decoder against loops in plain numpy; in blocks with a cache as in one pass; and what its
taps are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.cache import KVCache
from jaxspec.models.decoder import Decoder, tap_boundaries
from tests.conftest import tiny_model, tiny_network
from tests.twins import numpy_decoder, numpy_weights

pytestmark = pytest.mark.usefixtures("x64")

SEQUENCE = [3, 7, 7, 1, 0, 9, 4, 2]


def tokens_of(*rows: list[int]) -> jax.Array:
    return jnp.array(rows, jnp.int32)


def from_zero(tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_matches_plain_numpy(tied: bool, kv_heads: int) -> None:
    policy = tiny_network(Decoder, tiny_model(kv_heads=kv_heads, tied=tied), kv_heads, 1.5)
    assert ("head" in numpy_weights(policy)) != tied
    tokens = tokens_of(SEQUENCE, SEQUENCE[::-1])
    forward = policy(tokens, from_zero(tokens))
    for row in range(2):
        logits, hidden, _ = numpy_decoder(policy, tokens[row])
        np.testing.assert_allclose(forward.hidden[row], hidden, rtol=0, atol=1e-12)
        np.testing.assert_allclose(policy.logits(forward.hidden)[row], logits, rtol=0, atol=1e-12)
    assert forward.taps is None
    assert forward.cache is None


@pytest.mark.parametrize(
    ("layers", "boundaries"),
    [
        (36, (2, 18, 33)),
        (28, (2, 14, 25)),
        (64, (2, 32, 61)),
        (8, (2, 4, 5)),
        (12, (2, 6, 9)),
        (4, (1, 2, 3)),
    ],
)
def test_tap_boundaries_are_those_of_published_heads(
    layers: int, boundaries: tuple[int, int, int]
) -> None:
    assert tap_boundaries(layers) == boundaries


@pytest.mark.parametrize(
    ("layers", "boundaries"), [(8, (2, 4, 5)), (11, (2, 5, 8)), (4, (0, 1, 2, 3, 4)), (4, (4,))]
)
def test_taps_are_the_residual_stream_at_the_boundaries(
    layers: int, boundaries: tuple[int, ...]
) -> None:
    policy = tiny_network(Decoder, tiny_model(layers=layers), 5)
    tokens = tokens_of(SEQUENCE)
    forward = policy(tokens, from_zero(tokens), taps=boundaries)
    stream = numpy_decoder(policy, SEQUENCE)[2]
    assert forward.taps is not None
    np.testing.assert_allclose(
        forward.taps[0], np.concatenate([stream[b] for b in boundaries], -1), rtol=0, atol=1e-12
    )
    np.testing.assert_array_equal(forward.hidden, policy(tokens, from_zero(tokens)).hidden)


def cache_for(policy: Decoder, rows: int, slots: int) -> KVCache:
    """A cache full of junk: slots above a row's position must not matter."""
    empty = policy.empty_cache(rows, slots)
    assert not any(leaf.any() for leaf in jax.tree.leaves(empty))
    return jax.tree.map(lambda leaf: leaf + 99, empty)


@pytest.mark.parametrize("widths", [[8], [1] * 8, [3, 1, 4], [5, 3], [1, 6, 1]])
def test_blocks_with_a_cache_equal_one_pass(widths: list[int]) -> None:
    policy = tiny_network(Decoder, tiny_model(), 2, 1.5)
    tokens = tokens_of(SEQUENCE, SEQUENCE[::-1])
    whole = policy(tokens, from_zero(tokens), taps=(1, 2, 3))
    call = jax.jit(
        lambda tokens, positions, cache: policy(tokens, positions, cache, taps=(1, 2, 3))
    )
    cache, start, parts = cache_for(policy, 2, 10), 0, []
    for width in widths:
        block = slice(start, start + width)
        forward = call(tokens[:, block], from_zero(tokens)[:, block], cache)
        parts.append(forward)
        cache, start = forward.cache, start + width
    for name in ("hidden", "taps"):
        np.testing.assert_allclose(
            np.concatenate([getattr(part, name) for part in parts], 1),
            getattr(whole, name),
            rtol=0,
            atol=1e-12,
        )


def test_rows_at_different_positions_with_rejected_blocks_equal_one_pass() -> None:
    """Each row has committed its own number of tokens; blocks of 4 hold junk after the first few,
    and the next block starts over them."""
    policy = tiny_network(Decoder, tiny_model(), 3, 1.5)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 11, (3, 12)).astype(np.int32)
    whole = [numpy_decoder(policy, row)[1] for row in tokens]
    call = jax.jit(policy)
    cache, done = cache_for(policy, 3, 16), np.array([0, 0, 0])
    while (done < 12).any():
        keep = np.minimum(random.integers(1, 5, 3), np.maximum(12 - done, 0))
        block = random.integers(0, 11, (3, 4)).astype(np.int32)
        for row in range(3):
            block[row, : keep[row]] = tokens[row, done[row] : done[row] + keep[row]]
        positions = (np.minimum(done, 12)[:, None] + np.arange(4)).astype(np.int32)
        forward = call(block, positions, cache)
        cache = forward.cache
        for row in range(3):
            np.testing.assert_allclose(
                forward.hidden[row, : keep[row]],
                whole[row][done[row] : done[row] + keep[row]],
                rtol=0,
                atol=1e-12,
            )
        done = done + keep


def test_padding_on_the_right_does_not_matter() -> None:
    policy = tiny_network(Decoder, tiny_model(), 4, 1.5)
    padded = [tokens_of([*SEQUENCE[:5], *junk]) for junk in ([0, 0, 0], [9, 1, 6])]
    for cached in (False, True):
        outputs = [
            policy(tokens, from_zero(tokens), cache_for(policy, 1, 8) if cached else None).hidden[
                0, :5
            ]
            for tokens in padded
        ]
        np.testing.assert_array_equal(*outputs)
        np.testing.assert_allclose(
            outputs[0], numpy_decoder(policy, SEQUENCE[:5])[1], rtol=0, atol=1e-12
        )


def test_recomputing_layers_changes_nothing() -> None:
    policies = [tiny_network(Decoder, tiny_model(remat=remat), 6) for remat in (True, False)]
    tokens = tokens_of(SEQUENCE)

    def total(policy: Decoder) -> Any:
        return jnp.sum(policy.logits(policy(tokens, from_zero(tokens)).hidden) ** 2)

    values, slopes = zip(
        *(jax.jit(jax.value_and_grad(total))(policy) for policy in policies), strict=True
    )
    np.testing.assert_allclose(values[0], values[1], rtol=1e-13)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max()),
        numpy_weights(slopes[0]),
        numpy_weights(slopes[1]),
    )
    # every weight takes part
    assert all(slope.any() for slope in numpy_weights(slopes[0]).values())


@pytest.mark.parametrize(
    ("dtype", "master", "tolerance"), [("float32", "float32", 1e-4), ("bfloat16", "float32", 0.2)]
)
def test_narrow_types(dtype: Any, master: str, tolerance: float) -> None:
    """Master weights stay wide; a pass in a narrow type gives logits in float32 that are close."""
    policy = tiny_network(Decoder, tiny_model(dtype=dtype), 7)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(policy)} == {master}
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), policy)
    tokens = tokens_of(SEQUENCE)
    forward = narrow(tokens, from_zero(tokens), taps=(1, 2, 3))
    assert forward.taps is not None
    assert str(forward.hidden.dtype) == str(forward.taps.dtype) == dtype
    logits = narrow.logits(forward.hidden)
    assert str(logits.dtype) == "float32"
    np.testing.assert_allclose(logits[0], numpy_decoder(policy, SEQUENCE)[0], atol=tolerance)
