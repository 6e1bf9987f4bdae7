"""A config opened: constants, schedules and terms of the loss that it asks for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import build
from jaxspec.build import build_step
from jaxspec.config.settings import BatchConfig, KlConfig, LossConfig, OptimizerConfig
from jaxspec.inputs.spec import FamilySpec
from jaxspec.models.decoder import Decoder
from jaxspec.rl import optimizers
from jaxspec.rl.loss_terms import LossInputs
from jaxspec.rl.objective import PolicyObjective
from jaxspec.step import Step
from tests.conftest import small_mesh, tiny_config, tiny_model, tiny_network


def step_of(**parts: Any) -> Step:
    return build_step(tiny_config(tiny_model(dtype="float32"), **parts), small_mesh(), (1,), 11)


def objective_of(**changes: Any) -> PolicyObjective:
    objective = step_of(**changes).learner.policy_objective
    assert isinstance(objective, PolicyObjective)
    return objective


def inputs() -> LossInputs:
    random = np.random.default_rng(0)
    parts: dict[str, Any] = {
        name: jnp.asarray(0.5 * random.normal(size=(2, 5)), jnp.float32)
        for name in LossInputs._fields
    }
    parts |= {"loss_mask": jnp.ones((2, 5), bool), "text_start": jnp.zeros((2, 5), jnp.int32)}
    return LossInputs(**parts)


def test_the_constant_is_the_longest_response() -> None:
    """Not the longest row."""
    aggregation: Any = objective_of(loss=LossConfig(aggregation="constant")).aggregation
    assert aggregation.max_length == 6


def test_a_constant_counts_the_rows_of_a_mini_batch() -> None:
    batch = BatchConfig(prompts=8, group_size=2, mini_batches=4)
    loss = LossConfig(aggregation="constant")
    aggregation: Any = objective_of(loss=loss, batch=batch).aggregation
    assert aggregation.row_count == 4


def test_a_schedule_ends_with_the_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 batches with 2 x 2 updates each, the twelfth is the last that moves anything."""
    made, schedule = [], build.optimizers.warmup_schedule

    def record(*given: Any) -> Any:
        made.append(schedule(*given))
        return made[-1]

    monkeypatch.setattr(build.optimizers, "warmup_schedule", record)
    optimizer = OptimizerConfig(schedule="linear", learning_rate=0.1)
    step_of(optimizer=optimizer, batch=BatchConfig(prompts=8, mini_batches=2, epochs=2), steps=3)
    (rate,) = made
    assert [float(rate(update)) > 0 for update in (0, 11, 12)] == [True, True, False]


@pytest.mark.parametrize("importance", [True, False])
def test_kl_importance_weighs_the_estimate(importance: bool) -> None:
    kl = KlConfig(beta=0.1, estimator="k3", where="loss", importance=importance)
    loss, given = objective_of(kl=kl).loss, inputs()
    policy, sampled, reference = (
        np.asarray(part, np.float64)
        for part in (given.policy_logprobs, given.sampled_logprobs, given.reference_logprobs)
    )
    x = reference - policy
    wanted = (np.exp(x) - 1 - x) * (np.exp(policy - sampled) if importance else 1)
    np.testing.assert_allclose(loss(given).metrics["kl"], wanted, rtol=1e-5, atol=1e-6)


def test_an_entropy_bonus_lowers_the_loss() -> None:
    plain, bonus = (objective_of(loss=LossConfig(entropy=weight)).loss for weight in (0.0, 0.5))
    given = inputs()
    change = bonus(given).by_label - plain(given).by_label
    np.testing.assert_allclose(change, -0.5 * given.entropy, atol=1e-6)


def test_a_frozen_router_and_the_learning_rate_reach_the_learner() -> None:
    """Of a warm-up over four updates, by the updates that were made."""
    family = FamilySpec(model_type="qwen3_moe", experts=4, experts_per_token=2)
    model = tiny_model(layers=1, family=family, dtype="float32")
    optimizer = OptimizerConfig(freeze_router=True, learning_rate=0.1, warmup_steps=4)
    learner = build_step(tiny_config(model, optimizer=optimizer), small_mesh(), (1,), 11).learner
    assert learner.learning_rate is not None
    rates = [np.asarray(learner.learning_rate(count)) for count in (0, 1, 9)]
    np.testing.assert_allclose(rates, [0.025, 0.05, 0.1], rtol=1e-6)
    weights = optimizers.trainable_parameters(tiny_network(Decoder, model, 1))
    state = learner.policy_optimizer.init(weights)
    assert optimizers.count_updates(state) == 0
    router = weights.layers.router.shape
    assert router not in {leaf.shape for leaf in jax.tree.leaves(state)}
