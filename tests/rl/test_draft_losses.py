"""Losses of a draft at worked numbers, their gradients by hand, and where they stay finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rl.draft_objective import KL_DECAY, LOSSES
from tests.twins import numpy_softmax

pytestmark = pytest.mark.usefixtures("x64")

LAW = np.array([0.5, 0.25, 0.125])
"""The target on a draft vocabulary that covers 7/8 of it."""
DRAFTED = np.array([0.25, 0.25, 0.5])
KL_VALUE = 4 / 7 * np.log(16 / 7) + 2 / 7 * np.log(8 / 7) + 1 / 7 * np.log(2 / 7)
WORKED = {
    "ce": 4 / 7 * np.log(4) + 2 / 7 * np.log(4) + 1 / 7 * np.log(2),
    "kl": KL_VALUE,
    "lk": -np.log(0.625),
    "lambda": np.exp(-0.625 * KL_DECAY) * KL_VALUE + (1 - np.exp(-0.625 * KL_DECAY)) * 0.375,
    "tv": 0.375,
}


@pytest.mark.parametrize("name", LOSSES)
def test_worked_numbers(name: str) -> None:
    """sum min = 1/4 + 1/4 + 1/8 = 0.625."""
    found = LOSSES[name](jnp.log(jnp.asarray(LAW)[None]), jnp.log(jnp.asarray(DRAFTED)[None]))
    assert found.shape == (1,)
    assert float(found[0]) == pytest.approx(WORKED[name], abs=1e-12)


def of_logits(name: str, law: np.ndarray) -> Any:
    return lambda logits: LOSSES[name](jnp.log(jnp.asarray(law)), jax.nn.log_softmax(logits))


@pytest.mark.parametrize("name", LOSSES)
def test_least_where_the_laws_are_equal(name: str) -> None:
    """No slope there, and every step away costs; away from it, the slope moves the loss down."""
    random = np.random.default_rng(0)
    law = numpy_softmax(random.normal(size=6))
    logits = jnp.asarray(
        np.log(law) + np.concatenate([np.zeros((1, 6)), random.normal(size=(20, 6))])
    )
    both = jax.jit(jax.vmap(jax.value_and_grad(of_logits(name, law))))
    values, slopes = both(logits)
    np.testing.assert_allclose(slopes[0], 0, atol=1e-12)
    assert (values[1:] > values[0] + 1e-4).all()
    assert (both(logits - 1e-4 * slopes)[0][1:] < values[1:]).all()


def test_gradients_by_hand() -> None:
    """tv: minus the acceptance's, which counts what the draft underrates; lk: that over the
    acceptance; lambda: its weight is fixed."""
    logits = jnp.log(jnp.asarray(DRAFTED))
    law = np.array([0.6, 0.3, 0.1])
    underrated = law > DRAFTED
    kept = np.minimum(law, DRAFTED).sum()
    of_acceptance = DRAFTED * (underrated - (DRAFTED * underrated).sum())  # through the softmax
    slopes = {name: np.asarray(jax.grad(of_logits(name, law))(logits)) for name in LOSSES}
    np.testing.assert_allclose(slopes["tv"], -of_acceptance, atol=1e-12)
    np.testing.assert_allclose(slopes["lk"], -of_acceptance / kept, atol=1e-12)
    np.testing.assert_allclose(slopes["kl"], DRAFTED - law, atol=1e-12)
    np.testing.assert_allclose(slopes["ce"], DRAFTED - law, atol=1e-12)
    weight = np.exp(-KL_DECAY * kept)
    np.testing.assert_allclose(
        slopes["lambda"], weight * (DRAFTED - law) - (1 - weight) * of_acceptance, atol=1e-12
    )


def test_lk_stays_finite_where_the_target_is_far_outside_the_draft_vocabulary() -> None:
    """Log-probabilities of -2000 underflow as probabilities; the loss and its slope must not."""
    found, slope = jax.value_and_grad(
        lambda logits: LOSSES["lk"](jnp.array([-2000.0, -2001.0]), jax.nn.log_softmax(logits))
    )(jnp.zeros(2))
    assert float(found) == pytest.approx(2000 - np.log1p(np.exp(-1)))
    assert np.isfinite(slope).all()
