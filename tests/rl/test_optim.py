"""AdamW written out in numpy; schedules at their corners; and updates that must not happen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.rl import optim

pytestmark = pytest.mark.usefixtures("x64")

WEIGHTS = {"a": np.array([[1.0, -2.0], [0.5, 3.0]]), "b": np.array([0.1, -0.1])}


def gradients(scale: float, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: scale * random.normal(size=value.shape) for name, value in WEIGHTS.items()}


def as_jax(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_clip_then_adamw(decay: float) -> None:
    """Three updates, of which the global-norm clip changes the first and the last; betas 0.9 and 0.95."""
    clip, rate = 1.0, 0.01
    optimizer = optim.adamw(rate, clip, decay)
    learner = optim.start(as_jax(WEIGHTS), optimizer)
    weights = {name: value.copy() for name, value in WEIGHTS.items()}
    first, second = ({name: np.zeros_like(value) for name, value in WEIGHTS.items()} for _ in range(2))
    for number, scale in enumerate((5.0, 0.1, 30.0), start=1):
        raw = gradients(scale, number)
        norm = np.sqrt(sum((part**2).sum() for part in raw.values()))
        assert (norm > clip) == (number != 2)
        learner, found = optim.update(learner, as_jax(raw), jnp.asarray(1.0), optimizer)
        assert float(found) == pytest.approx(norm)  # the norm before the clip
        for name in WEIGHTS:
            slope = raw[name] * min(1.0, clip / norm)
            first[name] = 0.9 * first[name] + 0.1 * slope
            second[name] = 0.95 * second[name] + 0.05 * slope**2
            step = first[name] / (1 - 0.9**number) / (np.sqrt(second[name] / (1 - 0.95**number)) + 1e-8)
            weights[name] = weights[name] - rate * (step + decay * weights[name])
            np.testing.assert_allclose(learner.network[name], weights[name], rtol=1e-9)


@pytest.mark.parametrize("jitted", [True, False])
def test_non_finite_losses_and_gradients_change_only_the_counts(jitted: bool) -> None:
    optimizer = optim.adamw(optim.warmup(0.1, 3), 1.0)
    update = (jax.jit if jitted else lambda function: function)(lambda learner, slope, loss: optim.update(learner, slope, loss, optimizer))
    learner, _ = update(optim.start(as_jax(WEIGHTS), optimizer), as_jax(gradients(1.0)), jnp.asarray(1.0))
    before = jax.tree.map(np.asarray, learner)
    assert (int(learner.skipped), int(learner.skipped_in_row)) == (0, 0)
    one_bad = {**gradients(1.0), "b": np.array([0.1, np.nan])}
    infinite = {**gradients(1.0), "a": np.full((2, 2), np.inf)}
    cases = [(gradients(1.0), np.nan), (gradients(1.0), np.inf), (one_bad, 1.0), (infinite, 1.0), (gradients(1e200), 1.0)]
    for times, (slope, loss) in enumerate(cases, start=1):
        learner, _ = update(learner, as_jax(slope), jnp.asarray(loss))
        assert (int(learner.skipped), int(learner.skipped_in_row)) == (times, times)
        jax.tree.map(np.testing.assert_array_equal, learner.network, before.network)
        jax.tree.map(np.testing.assert_array_equal, learner.optimizer, before.optimizer)
    learner, _ = update(learner, as_jax(gradients(1.0)), jnp.asarray(1.0))
    assert (int(learner.skipped), int(learner.skipped_in_row)) == (len(cases), 0)
    assert (np.asarray(learner.network["a"]) != before.network["a"]).all()


def test_schedules() -> None:
    def at(schedule: optax.Schedule, *counts: int) -> np.ndarray:
        with jax.numpy_dtype_promotion("standard"):  # optax promotes inside
            return np.array([np.asarray(schedule(jnp.int32(count))) for count in counts])

    np.testing.assert_allclose(at(optim.warmup(0.4, 4), 0, 1, 3, 4, 100), [0.1, 0.2, 0.4, 0.4, 0.4], rtol=1e-6)
    np.testing.assert_allclose(at(optim.warmup(0.4, 0), 0), 0.4, rtol=1e-6)
    np.testing.assert_allclose(at(optim.cosine(1.0, 200), 0, 10, 105, 200, 500), [0.05, 1.0, 0.55, 0.1, 0.1], atol=1e-6)
    assert np.isfinite(at(optim.cosine(1.0, 1), 0, 1, 2)).all()
