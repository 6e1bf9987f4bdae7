"""A loss of the user's own, named in the config."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.settings import LossConfig
from jaxspec.host.job import Job, make_job
from jaxspec.inputs.checked import ConfigError
from jaxspec.rl.loss_terms import LossInputs
from jaxspec.rl.losses import ppo_surrogate
from jaxspec.rl.objective import PolicyObjective
from tests.conftest import small_mesh, tiny_config, tiny_model

CODE = """
import jax.numpy as jnp


def unclipped(inputs):
    return -inputs.advantages * jnp.exp(inputs.policy_logprobs - inputs.old_logprobs)


def mean(inputs):
    return jnp.mean(unclipped(inputs))


def broken(inputs):
    return inputs.advantages @ inputs.advantages


number = 3
"""


def job_with(function: str) -> Job:
    loss = LossConfig(function=function, entropy=0.5)
    return make_job(tiny_config(tiny_model(vocab=24, dtype="float32"), loss=loss), small_mesh())


def test_it_takes_the_place_of_the_surrogate(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(CODE)
    rng = np.random.default_rng(0)
    policy, old, sampled, reference, entropy, advantages = (
        jnp.asarray(rng.normal(size=(2, 5)), jnp.float32) for _ in range(6)
    )
    inputs = LossInputs(
        policy_logprobs=policy,
        old_logprobs=old,
        sampled_logprobs=sampled,
        reference_logprobs=reference,
        entropy=entropy,
        advantages=advantages,
        loss_mask=jnp.ones((2, 5), bool),
        text_start=jnp.zeros((2, 5), jnp.int32),
    )
    objective = job_with(f"{tmp_path}/losses.py:unclipped").step.learner.policy_objective
    assert isinstance(objective, PolicyObjective)
    found = objective.loss(inputs)
    wide = ppo_surrogate(inputs, clip_low=1e6, clip_high=1e6)
    np.testing.assert_allclose(found.by_label, wide.by_label - 0.5 * entropy, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mean", r"gives an array of shape \(\) for tokens of shape \(2, 3\)"),
        ("broken", r"losses\.py:broken: TypeError: .*\(losses\.py, line 14\)"),
        ("number", r"number is a int, which cannot be called"),
        ("missing", r"has no attribute 'missing'"),
    ],
)
def test_what_is_no_loss_is_refused_before_anything_is_compiled(
    tmp_path: Path, name: str, told: str
) -> None:
    (tmp_path / "losses.py").write_text(CODE)
    with pytest.raises(ConfigError, match=told):
        job_with(f"{tmp_path}/losses.py:{name}")
