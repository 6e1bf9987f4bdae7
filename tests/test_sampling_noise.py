"""Noise with exact laws, that depends on nothing but its keys, and tokens drawn by it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from jaxspec import sampling
from jaxspec.sampling import BRANCHES, Uniforms
from tests.conftest import FOR_LONG_RUNS, chi_square

STREAMS = (sampling.TARGET_STREAM, sampling.ROUND_STREAM)

# One program each, where calling it would compile one for every operation.
row_keys = jax.jit(sampling.row_keys, static_argnums=2)
position_keys = jax.jit(sampling.position_keys, static_argnums=2)
uniforms = jax.jit(sampling.uniform_numbers, static_argnums=(2, 3))
gumbel = jax.jit(sampling.gumbel_noise, static_argnums=(1, 2), compiler_options=FOR_LONG_RUNS)
categorical = jax.jit(sampling.categorical)


def keys_of(rows: list[int], seed: int = 0, stream: int = sampling.TARGET_STREAM) -> jax.Array:
    return row_keys(jax.random.key(seed), jnp.array(rows, jnp.int32), stream)


def at(positions: list[int]) -> jax.Array:
    return jnp.array(positions, jnp.int32)


def uniforms_of_rounds(rows: int, length: int, count: int) -> np.ndarray:
    """The numbers that so many rows draw with in rounds that start at this committed length."""
    keys = keys_of(list(range(rows)), stream=sampling.ROUND_STREAM)
    return np.asarray(
        uniforms(keys, jnp.full((rows, 1), length, jnp.int32), count, jnp.dtype("float32"))[:, 0]
    )


def log(law: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(law)


def law_of(vocab: int) -> np.ndarray:
    """An uneven law with impossible tokens: the first ones, the last ones, whole stretches, and
    some between."""
    random = np.random.default_rng(vocab + 1)
    law = random.dirichlet(np.ones(vocab))
    law[random.random(vocab) < 0.2] = 0
    law[[0, -1]] = 0
    if vocab > 3 * BRANCHES:
        law[:BRANCHES], law[-BRANCHES:], law[BRANCHES + 9] = 0, 0, 0.4
    assert (law > 0).sum() > 1
    return law / law.sum()


def pair(stretch: Any, token: Any) -> Uniforms:
    """Numbers that find a stretch, and a token in it; in a vocabulary of one stretch, the second
    does all."""
    return Uniforms(jnp.stack([jnp.asarray(token), jnp.asarray(stretch)], axis=-1))


@functools.partial(jax.jit, compiler_options=FOR_LONG_RUNS)
def draw(logprobs: jax.Array, noise: Uniforms) -> jax.Array:
    """One token of the same law for each draw's numbers."""
    wide = jnp.broadcast_to(logprobs, (*noise.levels.shape[:-1], len(logprobs)))
    return sampling.categorical(wide, noise)


VOCABULARIES = [5, 100, BRANCHES, BRANCHES + 1, 300, 2 * BRANCHES, 1000]
BELOW_ONE = {
    dtype: np.nextafter(np.dtype(dtype).type(1), np.dtype(dtype).type(0))
    for dtype in ("float32", "float64")
}


@pytest.mark.parametrize("uniform", [False, True], ids=["gumbel", "uniforms"])
def test_categorical_has_the_law_it_is_given(uniform: bool) -> None:
    law = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    rows = 100_000
    keys = keys_of(list(range(rows)))
    start = jnp.zeros((rows,), jnp.int32)
    dtype = jnp.dtype("float32")
    if uniform:
        noise = Uniforms(uniforms(keys, start[:, None], 1, dtype)[:, 0])
    else:
        noise = gumbel(position_keys(keys, start, 1), 5, dtype)[:, 0]
    logprobs = jnp.broadcast_to(jnp.asarray(log(law), jnp.float32), (rows, 5))
    tokens = np.asarray(categorical(logprobs, noise))
    assert tokens.dtype == np.int32
    assert chi_square(np.bincount(tokens, minlength=5), rows * law) > 1e-3


@pytest.mark.parametrize("vocab", [*VOCABULARIES, BRANCHES**2 + 1, 3000])
def test_uniform_numbers_of_a_round_draw_the_law(vocab: int) -> None:
    """Two tokens of a round at once: each has the law, and neither says anything of the other."""
    rows, law, levels = 40_000, law_of(vocab), sampling.level_count(vocab)
    assert levels == 1 + (vocab > BRANCHES) + (vocab > BRANCHES**2)
    numbers = jnp.asarray(uniforms_of_rounds(rows, 7, 2 * levels).reshape(rows, 2, levels))
    logprobs = jnp.asarray(log(law), jnp.float32)
    tokens = np.concatenate(
        [np.asarray(draw(logprobs, Uniforms(some))) for some in jnp.split(numbers, 20)]
    )
    assert tokens.dtype == np.int32
    for column in tokens.T:
        assert chi_square(np.bincount(column, minlength=vocab), rows * law) > 1e-3
    first, second = (np.cumsum(law)[column] > 0.5 for column in tokens.T)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(rows)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_grid_of_uniform_numbers_draws_exactly_the_law(vocab: int) -> None:
    """Every token has an interval as long as it is likely: the middles of N equal parts hit it N
    times its probability, give or take 1."""
    size, law = 2000, law_of(vocab)
    middles = (np.arange(size) + 0.5) / size
    stretches = np.pad(law, (0, -vocab % BRANCHES)).reshape(-1, BRANCHES)
    masses = stretches.sum(axis=1)
    with jax.enable_x64(True):
        logprobs, half = jnp.asarray(log(law)), np.full(size, 0.5)
        found = np.asarray(draw(logprobs, pair(middles, half))) // BRANCHES
        if len(masses) > 1:
            assert np.abs(np.bincount(found, minlength=len(masses)) - size * masses).max() <= 1
        for stretch in np.flatnonzero(masses):
            middle = np.full(size, masses[:stretch].sum() + masses[stretch] / 2)
            tokens = np.asarray(draw(logprobs, pair(middle, middles)))
            assert set(tokens // BRANCHES) == {stretch}
            counts = np.bincount(tokens % BRANCHES, minlength=BRANCHES)
            assert np.abs(counts - size * stretches[stretch] / masses[stretch]).max() <= 1
            assert not counts[stretches[stretch] == 0].any()


def test_intervals_are_closed_below_and_open_above() -> None:
    """Weights whose sums are exact; the last possible token ends at 1, though impossible ones
    follow it."""
    weights = np.zeros(2 * BRANCHES + 3, np.float32)
    weights[[3, 5, BRANCHES + 1, 2 * BRANCHES + 1]] = 1, 1, 2, 4
    below = BELOW_ONE["float32"]
    for stretch, token, wanted in [
        (0, 0, 3), (0, 0.5 * below, 3), (0, 0.5, 5), (0.25 * below, below, 5),
        (0.25, 0, BRANCHES + 1), (0.5 * below, below, BRANCHES + 1),
        (0.5, 0, 2 * BRANCHES + 1), (below, below, 2 * BRANCHES + 1),
    ]:  # fmt: skip
        noise = pair(np.array([stretch], np.float32), np.array([token], np.float32))
        assert sampling.draw_by_weight(jnp.asarray(weights)[None], noise).tolist() == [wanted], (
            stretch,
            token,
        )
    for token, wanted in [(0, 3), (0.5 * below, 3), (0.5, 5), (below, 5)]:
        noise = pair(np.array([0.9], np.float32), np.array([token], np.float32))
        assert sampling.draw_by_weight(jnp.asarray(weights)[None, :9], noise).tolist() == [
            wanted
        ], token


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_extreme_uniform_numbers_draw_the_first_and_the_last_possible_token(
    vocab: int, dtype: str
) -> None:
    """Never one of probability 0, however the sums are rounded."""
    random, rows = np.random.default_rng(0), 300
    laws = random.dirichlet(np.full(vocab, 0.1), rows) * (
        random.random((rows, vocab)) < random.choice([0.02, 0.5, 0.9], (rows, 1))
    )
    laws[:, vocab // 2] += 1e-3
    laws[0] = law_of(vocab)
    with jax.enable_x64(True):
        logprobs = jnp.asarray(log(laws / laws.sum(1, keepdims=True)), dtype)
        possible = np.asarray(logprobs) > -np.inf
        for stretch in (0.0, BELOW_ONE[dtype]):
            for token in (0.0, BELOW_ONE[dtype]):
                noise = pair(np.full(rows, stretch, dtype), np.full(rows, token, dtype))
                tokens = np.asarray(categorical(logprobs, noise))
                assert possible[np.arange(rows), tokens].all()
                if stretch == token == 0:
                    likely = np.exp(np.asarray(logprobs)) > 0
                    np.testing.assert_array_equal(tokens, likely.argmax(1))
                if stretch == token > 0:
                    # What rounding may leave out at the end is as unlikely as the number's last
                    # bit.
                    beyond = [
                        np.exp(np.asarray(row, np.float64))[number + 1 :].sum()
                        for row, number in zip(logprobs, tokens, strict=True)
                    ]
                    assert max(beyond) <= vocab * np.finfo(dtype).eps
    assert (~possible).any()


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    noise = jnp.array([[1e30, 0.0, 1.0]])
    assert categorical(jnp.array([[-jnp.inf, -1.0, -3.0]]), noise).tolist() == [1]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_law_gone_nan_still_draws_some_token(vocab: int) -> None:
    """Which is never kept; but it is looked up."""
    for law in (
        np.full(vocab, np.nan),
        np.where(np.arange(vocab) == 2, np.nan, -1.0),
        np.full(vocab, -np.inf),
    ):
        for number in (0.0, 0.5, float(BELOW_ONE["float32"])):
            noise = pair(np.array([number], np.float32), np.array([number], np.float32))
            (token,) = categorical(jnp.asarray(law, jnp.float32)[None], noise).tolist()
            assert 0 <= token < vocab


def test_threefry_is_that_of_jax() -> None:
    keys = np.array([123, 4_000_000_000], np.uint32)
    counters = np.arange(10, dtype=np.uint32) * 400_000_000
    wanted = threefry_2x32(jnp.asarray(keys), jnp.asarray(counters))
    found = sampling.threefry(
        *(jnp.uint32(word) for word in keys), *jnp.split(jnp.asarray(counters), 2)
    )
    np.testing.assert_array_equal(jnp.concatenate(found), wanted)


def test_uniform_numbers_are_uniform() -> None:
    rows = 50_000
    drawn = uniforms_of_rounds(rows, 0, 2)
    assert chi_square(np.histogram(drawn, 20, (0, 1))[0], np.full(20, drawn.size / 20)) > 1e-3
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 4 / np.sqrt(rows)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_bits_give_0_or_1_nor_draw_what_is_rarer_than_a_bin(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two extremes of the bits, whose numbers are middles of bins: a token of 1e-35 that stands
    first, or last, is not theirs."""
    with jax.enable_x64(True):
        half = 0.5 * np.finfo(dtype).eps  # of a bin
        for bits, wanted in ((0, half), (2**32 - 1, 1 - half)):
            monkeypatch.setattr(
                sampling,
                "threefry",
                lambda *_, bits=bits: (jnp.full((1, 1, 4), bits, jnp.uint32),) * 2,
            )
            numbers = sampling.uniform_numbers(keys_of([0]), at([0])[:, None], 4, jnp.dtype(dtype))
            assert np.asarray(numbers, np.float64).tolist() == [[[wanted] * 4]]
            for law in (
                [1e-35, 0.5, 0.5, 1e-35],
                [1e-35] * 40 + [1.0] + [1e-35] * 40,
                [0, 1e-30, 1, 1, 1, 1e-30, 0],
            ):
                weights = jnp.asarray(law, dtype)
                token = int(
                    draw(
                        jnp.log(weights), Uniforms(numbers[0, :, : sampling.level_count(len(law))])
                    )[0]
                )
                assert weights[token] > 0.1, (bits, token)
        last = np.concatenate(
            [2.0 ** np.arange(-20, 20), np.random.default_rng(0).uniform(1, 2, 10_000)]
        ).astype(dtype)
        assert (np.dtype(dtype).type(1 - half) * last < last).all(), (
            "no product reaches the end of the cumulated sums"
        )


def test_large_gumbel_noise_is_as_fine_as_float32() -> None:
    """Of 23 bits there would be 51 numbers above 12, and none above 16; rare tokens are drawn by
    these alone."""
    keys = position_keys(keys_of([0, 1, 2, 3]), at([0, 0, 0, 0]), 16)
    noise = np.asarray(gumbel(keys, 151_936, jnp.dtype("float32")))
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    large = noise[noise > 12]
    assert len(np.unique(large)) == len(large) > 40
    for least in (2, 6, 10, 12):
        expected = noise.size * -np.expm1(-np.exp(-least))
        assert abs((noise > least).sum() - expected) < 4 * np.sqrt(expected)


@pytest.mark.sweep
def test_gumbel_noise_draws_rare_tokens_as_often_as_their_probability() -> None:
    """100,000 tokens of probability 1e-7, in the vocabulary of Qwen: 1 draw of 100 is one of
    them."""
    vocab, rare, rows, calls = 151_936, 100_000, 4, 3072
    law = np.full(vocab, 0.99 / (vocab - rare))
    law[:rare] = 1e-7
    logprobs = jnp.asarray(np.log(law), jnp.float32)

    @functools.partial(jax.jit, compiler_options=FOR_LONG_RUNS)
    def drawn(first: jax.Array) -> jax.Array:
        numbers = first + jnp.arange(rows, dtype=jnp.int32)
        keys = sampling.row_keys(jax.random.key(3), numbers, sampling.TARGET_STREAM)
        here = sampling.position_keys(keys, jnp.zeros((rows,), jnp.int32), 1)
        noise = sampling.gumbel_noise(here, vocab, jnp.dtype("float32"))[:, 0]
        tokens = sampling.categorical(jnp.broadcast_to(logprobs, (rows, vocab)), noise)
        return jnp.sum(tokens < rare)

    found = sum(int(drawn(jnp.int32(rows * call))) for call in range(calls))
    expected = rows * calls * rare * 1e-7
    assert abs(found - expected) < 4 * np.sqrt(expected), (found, expected)


def test_numbers_of_different_rounds_are_unrelated() -> None:
    """Block verification with the coins of the round before is biased, as is every round whose
    drafts have its noise: their keys must hold the round."""
    rows, count = 50_000, 3 * 3 + 2
    together = np.concatenate(
        [uniforms_of_rounds(rows, length, count) for length in range(4)], axis=1
    )
    for shown in (together, together > 0.9, np.abs(together - 0.5)):
        related = np.corrcoef(np.asarray(shown, float).T) - np.eye(4 * count)
        assert np.abs(related).max() < 4.5 / np.sqrt(rows)


def test_rows_keep_their_noise_wherever_they_stand() -> None:
    rows, positions = [5, 0, 7, 123_456], [3, 9, 3, 0]
    order, dtype = [2, 3, 0, 1], jnp.dtype("float32")
    for count in (1, 4):
        for stream, make in (
            (
                sampling.TARGET_STREAM,
                lambda k, p, n=count: gumbel(position_keys(k, p, n), 6, dtype),
            ),
            (
                sampling.TARGET_STREAM,
                lambda k, p, n=count: uniforms(
                    k, p[:, None] + jnp.arange(n, dtype=jnp.int32), 2, dtype
                ),
            ),
            (sampling.ROUND_STREAM, lambda k, p, n=count: uniforms(k, p[:, None], n, dtype)),
        ):
            straight = make(keys_of(rows, stream=stream), at(positions))
            mixed = make(
                keys_of([rows[i] for i in order], stream=stream), at([positions[i] for i in order])
            )
            np.testing.assert_array_equal(mixed, straight[jnp.array(order)])


def test_target_noise_belongs_to_the_absolute_position() -> None:
    """However a round is cut, a position gets the same noise: that is what makes the coupled rule
    plain decoding."""
    keys = keys_of([4, 8])
    long = jax.random.key_data(position_keys(keys, at([10, 20]), 6))
    for shift in range(5):
        np.testing.assert_array_equal(
            jax.random.key_data(position_keys(keys, at([10 + shift, 20 + shift]), 2)),
            long[:, shift : shift + 2],
        )


def test_no_two_draws_share_a_key() -> None:
    """Over seeds, rows, streams, starting lengths and offsets; in particular a draw beyond the cut
    does not come back in the next round."""
    rows, seen = [0, 1, 2, 3], []
    with jax.enable_x64(True):
        for seed in (0, 1):
            for length in range(6):
                keys = keys_of(rows, seed, sampling.ROUND_STREAM)
                seen.append(
                    uniforms(keys, at([length] * 4)[:, None], 3 * 5, jnp.dtype("float64")).reshape(
                        -1
                    )
                )
            positions = jnp.broadcast_to(jnp.arange(11, dtype=jnp.int32), (4, 11))
            seen.append(
                uniforms(keys_of(rows, seed), positions, 2, jnp.dtype("float64")).reshape(-1)
            )
        drawn = np.concatenate([np.asarray(part) for part in seen])
    assert len(np.unique(drawn)) == len(drawn) == 2 * (4 * 6 * 3 * 5 + 4 * 11 * 2)
    keys = [keys_of(rows, seed, stream) for seed in (0, 1) for stream in STREAMS]
    assert (
        len(
            np.unique(
                np.concatenate([np.asarray(jax.random.key_data(some)) for some in keys]), axis=0
            )
        )
        == 2 * 4 * 2
    )
    assert len(set(STREAMS)) == 2
