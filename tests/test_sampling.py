"""Noise with exact laws, that depends on nothing but its keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import sampling
from tests.conftest import chi_square

STREAMS = (sampling.TARGET, sampling.DRAFT, sampling.COIN, sampling.NEXT)


def keys_of(rows: list[int], seed: int = 0) -> jax.Array:
    return sampling.row_keys(jax.random.key(seed), jnp.array(rows, jnp.int32))


def at(positions: list[int]) -> jax.Array:
    return jnp.array(positions, jnp.int32)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_processed_logprobs_are_the_tempered_softmax(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(size=(3, 2, 7)) * 4
    powers = np.exp(logits / temperature)
    found = sampling.processed_logprobs(jnp.asarray(logits, jnp.float32), temperature)
    np.testing.assert_allclose(np.exp(found), powers / powers.sum(-1, keepdims=True), atol=1e-6)


def test_categorical_has_the_law_it_is_given() -> None:
    law = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    rows = 100_000
    keys = sampling.offset_keys(keys_of(list(range(rows))), jnp.zeros((rows,), jnp.int32), sampling.DRAFT, 1)
    noise = sampling.gumbel(keys, 5, jnp.dtype("float32"))[:, 0]
    with np.errstate(divide="ignore"):
        logprobs = jnp.broadcast_to(jnp.asarray(np.log(law), jnp.float32), (rows, 5))
    tokens = np.asarray(sampling.categorical(logprobs, noise))
    assert tokens.dtype == np.int32
    assert chi_square(np.bincount(tokens, minlength=5), rows * law) > 1e-3


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    noise = jnp.array([[1e30, 0.0, 1.0]])
    assert sampling.categorical(jnp.array([[-jnp.inf, -1.0, -3.0]]), noise).tolist() == [1]


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    rows = 50_000
    drawn = np.asarray(
        sampling.uniform(
            sampling.offset_keys(keys_of(list(range(rows))), jnp.zeros((rows,), jnp.int32), sampling.COIN, 2), jnp.dtype("float32")
        )
    )
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert chi_square(np.histogram(drawn, 20, (0, 1))[0], np.full(20, drawn.size / 20)) > 1e-3
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 4 / np.sqrt(rows)


def test_rows_keep_their_noise_wherever_they_stand() -> None:
    rows, positions = [5, 0, 7, 123_456], [3, 9, 3, 0]
    order = [2, 3, 0, 1]
    keys, shuffled = keys_of(rows), keys_of([rows[i] for i in order])
    for count in (1, 4):
        for make in (
            lambda k, p, n=count: sampling.position_keys(k, p, n),
            lambda k, p, n=count: sampling.offset_keys(k, p, sampling.DRAFT, n),
        ):
            straight = sampling.gumbel(make(keys, at(positions)), 6, jnp.dtype("float32"))
            mixed = sampling.gumbel(make(shuffled, at([positions[i] for i in order])), 6, jnp.dtype("float32"))
            np.testing.assert_array_equal(mixed, straight[jnp.array(order)])


def test_target_noise_belongs_to_the_absolute_position() -> None:
    """However a round is cut, a position gets the same noise: that is what makes the coupled rule plain decoding."""
    keys = keys_of([4, 8])
    long = jax.random.key_data(sampling.position_keys(keys, at([10, 20]), 6))
    for shift in range(5):
        np.testing.assert_array_equal(
            jax.random.key_data(sampling.position_keys(keys, at([10 + shift, 20 + shift]), 2)), long[:, shift : shift + 2]
        )


def test_no_two_draws_share_a_key() -> None:
    """Over seeds, rows, streams, starting lengths and offsets; in particular a draw beyond the cut does not come back in the next round."""
    seen = []
    for seed in (0, 1):
        keys = keys_of([0, 1, 2, 3], seed)
        for length in range(6):
            for stream in (sampling.DRAFT, sampling.COIN, sampling.NEXT):
                seen.append(jax.random.key_data(sampling.offset_keys(keys, at([length] * 4), stream, 5)).reshape(-1, 2))
        seen.append(jax.random.key_data(sampling.position_keys(keys, at([0] * 4), 11)).reshape(-1, 2))
    drawn = np.concatenate([np.asarray(part) for part in seen])
    assert len(np.unique(drawn, axis=0)) == len(drawn) == 2 * (4 * 6 * 3 * 5 + 4 * 11)
    assert len(set(STREAMS)) == 4
