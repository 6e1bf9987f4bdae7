"""Logprobs and entropies against plain numpy, in one chunk or many, with the same gradients."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kernels import chunks
from jaxspec.kernels.chunks import map_in_chunks
from jaxspec.models.decoder import Decoder
from jaxspec.rl.loss_terms import label_logprobs
from jaxspec.rl.train_batch import response_mask, rows_to_pack
from jaxspec.rollout.feedback.acceptance import init_statistics
from jaxspec.sampling import Processing
from jaxspec.state import Rollout
from tests.conftest import tiny_model, tiny_network
from tests.twins import numpy_decoder, numpy_softmax, numpy_weights

pytestmark = pytest.mark.usefixtures("x64")

TOKENS = np.random.default_rng(0).integers(0, 11, (2, 8)).astype(np.int32)
STARTS = jnp.array([2, 3], jnp.int32)


def token_logprobs(policy: Decoder, processing: Processing) -> tuple[jax.Array, jax.Array]:
    """Of each token and the entropy it was drawn with, in chunks; zeros at position 0, which
    nothing precedes."""
    texts = rows_to_pack(jnp.asarray(TOKENS), jnp.ones(TOKENS.shape, bool))
    produced = texts.positions + 1 - STARTS[:, None]

    def chunk(
        policy: Decoder, hidden: jax.Array, labels: jax.Array, produced: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return label_logprobs(policy.logits(hidden), labels, produced, processing)

    inputs = (
        part[:, :-1]
        for part in (policy(texts.tokens, texts.positions).hidden, texts.labels, produced)
    )
    picked, entropies = map_in_chunks(chunk, policy, len(TOKENS) * policy.config.vocab, *inputs)
    shift = ((0, 0), (1, 0))
    return jnp.pad(picked, shift), jnp.pad(entropies, shift)


def policy_of(tied: bool) -> Decoder:
    return tiny_network(Decoder, tiny_model(tied=tied), 1, 1.5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_match_plain_numpy(tied: bool, temperature: float) -> None:
    policy = policy_of(tied)
    found, entropy = token_logprobs(policy, Processing(temperature=temperature))
    assert found.shape == entropy.shape == TOKENS.shape
    np.testing.assert_array_equal(found[:, 0], 0)
    np.testing.assert_array_equal(entropy[:, 0], 0)
    for row in range(2):
        laws = numpy_softmax(numpy_decoder(policy, TOKENS[row])[0] / temperature)
        for t in range(1, 8):
            assert float(found[row, t]) == pytest.approx(
                np.log(laws[t - 1, TOKENS[row, t]]), abs=1e-11
            )
            assert float(entropy[row, t]) == pytest.approx(
                -(laws[t - 1] * np.log(laws[t - 1])).sum(), abs=1e-11
            )


def test_minimum_length_counts_from_the_prompts_end_and_top_p_keeps_what_was_sampled() -> None:
    """End tokens are excluded from the first two response tokens; whatever the text holds has a
    log-probability."""
    policy = policy_of(tied=True)
    processing = Processing(min_new_tokens=2, stop_ids=(4,), temperature=0.7, top_p=0.6)
    found, _ = token_logprobs(policy, processing)
    assert np.isfinite(np.asarray(found)[TOKENS != 4]).all()
    for row, start in enumerate(STARTS.tolist()):
        logits = numpy_decoder(policy, TOKENS[row])[0] / 0.7
        for t in range(start, 8):
            law = logits[t - 1].copy()
            law[4] = -np.inf if t < start + 2 else law[4]
            likely = np.argsort(-law)
            before = np.cumsum(numpy_softmax(law[likely])) - numpy_softmax(law[likely])
            kept = set(likely[before < 0.6].tolist()) | {int(TOKENS[row, t])}
            law = numpy_softmax(np.where([token in kept for token in range(11)], law, -np.inf))
            assert np.exp(found[row, t]) == pytest.approx(law[TOKENS[row, t]], abs=1e-12)


@pytest.mark.parametrize("positions_per_chunk", [1, pytest.param(2, marks=pytest.mark.sweep), 3, 7])
def test_chunks_change_neither_values_nor_gradients(
    monkeypatch: pytest.MonkeyPatch, positions_per_chunk: int
) -> None:
    policy = policy_of(tied=False)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, *TOKENS.shape)))

    def total(policy: Decoder) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        both = token_logprobs(policy, Processing(temperature=0.8))
        return jnp.sum(weights[0] * both[0] + weights[1] * both[1]), both

    def loops_of(function: Callable) -> int:
        return str(jax.make_jaxpr(function)(policy)).count("scan[")

    (_, wanted), wanted_slope = jax.jit(jax.value_and_grad(total, has_aux=True))(policy)
    before = loops_of(lambda policy: total(policy))  # those of layers and attention
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 2 * 11 * positions_per_chunk)
    loops = loops_of(total)
    (_, found), found_slope = jax.jit(jax.value_and_grad(total, has_aux=True))(policy)
    assert loops - before == (0 if positions_per_chunk == 7 else 1)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    for name, slope in numpy_weights(wanted_slope).items():
        np.testing.assert_allclose(
            numpy_weights(found_slope)[name], slope, rtol=0, atol=1e-12, err_msg=name
        )
        assert slope.any(), name


def test_response_mask_covers_what_the_policy_sampled() -> None:
    rollout = Rollout(
        tokens=jnp.zeros((3, 6), jnp.int32),
        prompt_lengths=jnp.array([2, 1, 4], jnp.int32),
        lengths=jnp.array([5, 1, 6], jnp.int32),
        logprobs=jnp.zeros((3, 6)),
        status=jnp.zeros(3, jnp.int32),
        origin=jnp.array([[0, 0, 2, 5, 3, 0], [0] * 6, [0, 0, 0, 1, 4, 6]], jnp.int8),
        version=jnp.zeros(3, jnp.int32),
        statistics=init_statistics(3, 1, 1, 1, jnp.float64),
    )
    assert np.asarray(response_mask(rollout)).astype(int).tolist() == [
        [0, 0, 1, 1, 1, 0],
        [0] * 6,
        [0, 0, 0, 0, 1, 1],
    ]
