"""The training-time-test unroll against inference run slot by slot: for each position, a list of keys and values and a recurrent draft."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.decoder import Decoder, Forward
from jaxspec.models.eagle3 import Eagle3
from jaxspec.rl import logprob
from jaxspec.rl.draft_loss import DraftLoss, draft_loss
from jaxspec.rl.logprob import positions_of
from tests.conftest import (
    numpy_decoder,
    numpy_eagle_read,
    numpy_eagle_slot,
    numpy_softmax,
    numpy_taps,
    numpy_weights,
    tiny_model,
    tiny_network,
    with_weights,
)

pytestmark = pytest.mark.usefixtures("x64")

ROWS, LENGTH = 3, 9
TOKENS = np.random.default_rng(0).integers(0, 11, (ROWS, LENGTH)).astype(np.int32)
MASK = np.array([[0, 0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1], [0] * 9], bool)
"""A response in the middle, one up to the last token, and a row that was not valid."""


compiled = jax.jit(draft_loss, static_argnums=(5, 6, 7))


def networks(kv_heads: int = 2, tied: bool = False) -> tuple[Eagle3, Decoder]:
    model = tiny_model(kv_heads=kv_heads, tied=tied)
    return tiny_network(Eagle3, model, 2, 1.5), tiny_network(Decoder, model, 1, 1.5)


@jax.jit
def forward_of(target: Decoder) -> Forward:
    tokens = jnp.asarray(TOKENS)
    return target(tokens, positions_of(tokens), with_taps=True)


def loss_of(network: Eagle3, target: Decoder, forward: Forward, steps: int = 3, decay: float = 0.8, temperature: float = 1.0) -> DraftLoss:
    return compiled(network, target, forward, jnp.asarray(TOKENS), jnp.asarray(MASK), steps, decay, temperature)


def run_as_inference_does(network: Eagle3, target: Decoder, steps: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean cross-entropy and mean overlap by depth, over the predicted tokens in the mask."""
    embedding = numpy_weights(target)["embedding"]
    losses: list[list[float]] = [[] for _ in range(steps)]
    overlaps: list[list[float]] = [[] for _ in range(steps)]
    for row in range(ROWS):
        logits, _, stream = numpy_decoder(target, TOKENS[row])
        laws = numpy_softmax(logits / temperature)
        taps = numpy_taps(stream)
        for t in range(LENGTH - 2):
            hidden, draft_logits, seen = numpy_eagle_read(network, embedding, taps, TOKENS[row, : t + 2])
            for depth in range(steps):  # from here on it reads its own outputs
                predicted = t + 2 + depth
                if predicted >= LENGTH:
                    break
                if MASK[row, predicted]:
                    law, drafted = laws[predicted - 1], numpy_softmax(np.asarray(draft_logits / temperature))
                    losses[depth].append(-(law * np.log(drafted)).sum())
                    overlaps[depth].append(np.minimum(law, drafted).sum())
                hidden, draft_logits = numpy_eagle_slot(network, hidden, embedding[TOKENS[row, predicted]], t + 1 + depth, seen)
    return np.array([np.mean(part) for part in losses]), np.array([np.mean(part) for part in overlaps])


@pytest.mark.parametrize(("kv_heads", "tied", "temperature", "decay"), [(2, False, 1.0, 0.8), (1, True, 0.7, 1.0), (4, False, 1.3, 0.5)])
def test_unroll_equals_inference_slot_by_slot(kv_heads: int, tied: bool, temperature: float, decay: float) -> None:
    network, target = networks(kv_heads, tied)
    losses, overlaps = run_as_inference_does(network, target, 4, temperature)
    for steps in (1, 2, 4):
        weights = decay ** np.arange(steps)
        found = loss_of(network, target, forward_of(target), steps, decay, temperature)
        assert float(found.loss) == pytest.approx((weights * losses[:steps]).sum() / weights.sum(), abs=1e-11)
        np.testing.assert_allclose(found.acceptance, overlaps[:steps], rtol=0, atol=1e-11)
    assert ((overlaps > 0.05) & (overlaps < 0.95)).all()


def test_the_target_gets_no_gradient_and_every_weight_of_the_draft_does() -> None:
    network, target = networks()
    forward = forward_of(target)
    slopes = jax.grad(lambda network, target, forward: loss_of(network, target, forward).loss, (0, 1, 2), allow_int=True)(
        network, target, forward
    )
    for name, slope in numpy_weights(slopes[0]).items():
        assert slope.any(), name
    assert not any(slope.any() for slope in numpy_weights(slopes[1]).values())
    assert not np.asarray(slopes[2].hidden).any()
    assert not np.asarray(slopes[2].taps).any()


def test_gradient_matches_finite_differences() -> None:
    """Through all depths: the recurrence is not cut."""
    network, target = networks()
    forward = forward_of(target)
    value = jax.jit(lambda network: loss_of(network, target, forward, 3).loss)
    slope = jax.grad(value)(network)
    random = np.random.default_rng(3)
    for _ in range(3):
        direction = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape)), network)
        up, down = (value(jax.tree.map(lambda leaf, move, sign=sign: leaf + sign * 1e-5 * move, network, direction)) for sign in (1, -1))
        along = sum(jax.tree.leaves(jax.tree.map(lambda s, d: jnp.sum(s * d), slope, direction)))
        assert float(up - down) / 2e-5 == pytest.approx(float(along), rel=1e-6)


@pytest.mark.parametrize("positions_per_chunk", [1, 4])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, positions_per_chunk: int) -> None:
    network, target = networks()
    forward = forward_of(target)

    def run() -> tuple[Any, Any, int]:
        def value(network: Eagle3) -> DraftLoss:
            return draft_loss(network, target, forward, jnp.asarray(TOKENS), jnp.asarray(MASK), 2, 0.8, 1.0)

        both = jax.jit(jax.value_and_grad(value, has_aux=True))
        return *both(network), str(jax.make_jaxpr(value)(network)).count("scan[")

    wanted, slope, loops = run()
    monkeypatch.setattr(logprob, "CHUNK_ELEMENTS", 2 * ROWS * 11 * positions_per_chunk)
    found, found_slope, chunk_loops = run()
    assert (loops, chunk_loops) == (0, 2)  # one for each depth
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    for name, part in numpy_weights(slope).items():
        np.testing.assert_allclose(numpy_weights(found_slope)[name], part, rtol=0, atol=1e-12, err_msg=name)


def test_a_draft_that_equals_the_target_is_accepted_for_certain() -> None:
    """Both heads zero: uniform laws, overlap 1, cross-entropy log V; an empty mask gives 0 and no NaN."""
    network, target = networks()
    network, target = (with_weights(flat, head=np.zeros((16, 11))) for flat in (network, target))
    forward = forward_of(target)
    found = loss_of(network, target, forward)
    np.testing.assert_allclose(found.acceptance, 1, atol=1e-12)
    assert float(found.loss) == pytest.approx(np.log(11))
    nothing = draft_loss(network, target, forward, jnp.asarray(TOKENS), jnp.zeros(TOKENS.shape, bool), 3, 0.8, 1.0)
    assert float(nothing.loss) == 0
    np.testing.assert_array_equal(nothing.acceptance, 0)
