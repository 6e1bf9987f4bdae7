"""Functions in chunks of positions: the same results and slopes as all at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kernels import chunks
from jaxspec.kernels.chunks import map_in_chunks
from jaxspec.rl.loss_terms import label_logprobs
from jaxspec.sampling import Processing

pytestmark = pytest.mark.usefixtures("x64")


def test_in_chunks_pads_and_joins_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    values = jnp.arange(10.0).reshape(2, 5)
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 4)
    doubled, deep = map_in_chunks(
        lambda _, left, right: (left * 2, right + 1), None, 2, values, jnp.stack([values] * 3, -1)
    )
    np.testing.assert_array_equal(doubled, values * 2)
    np.testing.assert_array_equal(deep, np.stack([values + 1] * 3, -1))
    huge = map_in_chunks(
        lambda _, part: part + 1, None, 10**9, values
    )  # at least one position at a time
    np.testing.assert_array_equal(huge, values + 1)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_wanted_positions_have_the_results_and_slopes_of_all_of_them(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Only chunks of wanted positions are computed: two thirds of these are never read."""
    rng = np.random.default_rng(0)
    hidden, head = jnp.asarray(rng.normal(size=(2, 57, 4))), jnp.asarray(rng.normal(size=(4, 9)))
    labels = jnp.asarray(rng.integers(0, 9, (2, 57)))
    weights = jnp.asarray(rng.normal(size=(2, 57)))
    wanted = jnp.asarray(rng.random((2, 57)) < share)

    def total(inputs: tuple[jax.Array, ...], some: bool) -> tuple[jax.Array, jax.Array]:
        hidden, head = inputs

        def chunk(
            networks: tuple[jax.Array, jax.Array], hidden: jax.Array, labels: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            head, order = networks
            return label_logprobs((hidden @ head)[..., order], labels, labels, Processing())

        networks, arrays = (head, jnp.arange(9)[::-1]), (hidden, labels)
        logprobs, entropy = map_in_chunks(
            chunk, networks, 9, *arrays, mask=wanted if some else None
        )
        return jnp.sum(jnp.where(wanted, logprobs * weights + entropy**2, 0)), logprobs

    monkeypatch.setattr(chunks, "WIDE_ELEMENTS", 9)
    monkeypatch.setattr(chunks, "CHUNK_POSITIONS_CPU", 8)
    slopes = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=1)
    (expected, _), expected_slopes = slopes((hidden, head), False)
    (found, logprobs), found_slopes = slopes((hidden, head), True)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for ours, theirs in zip(found_slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    most = int(np.max(np.sum(np.asarray(wanted), axis=1)))
    assert np.count_nonzero(np.asarray(logprobs)) <= 2 * -(-most // 8) * 8
