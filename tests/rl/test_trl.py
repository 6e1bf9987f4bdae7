"""Losses and their slopes beside those of TRL's own trainer on the same numbers."""

import functools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rl.loss_terms import EntropyBonus, ImportanceWeights, KlPenalty, LossInputs, k3
from jaxspec.rl.losses import (
    ConstantDivisor,
    cispo_surrogate,
    gspo_surrogate,
    policy_gradient_loss,
    ppo_surrogate,
    sequence_mean,
    token_mean,
)

pytestmark = pytest.mark.usefixtures("x64")

ROWS, TOKENS, LONGEST = 6, 9, 12
LOW, HIGH = 0.1, 0.2


class Batch:
    """Rows of responses of several lengths, whose ratios leave the bounds now and then."""

    def __init__(self) -> None:
        random = np.random.default_rng(5)
        shape = ROWS, TOKENS
        self.policy = -random.gamma(2.0, 0.5, shape)
        self.old, self.reference, self.sampled = (
            self.policy + scale * random.normal(size=shape) for scale in (0.2, 0.3, 0.4)
        )
        self.entropy = random.random(shape)
        self.advantages = random.normal(size=ROWS)
        self.chosen = np.arange(TOKENS) < random.integers(2, TOKENS + 1, ROWS)[:, None]


BATCH = Batch()


@pytest.fixture(scope="module")
def loss_of_trl() -> Any:
    """The method of TRL's trainer; its import takes long."""
    pytest.importorskip("torch")
    return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer._compute_loss


def of_trl(compute: Any, cap: float = 0.0, **settings: Any) -> tuple[float, np.ndarray]:
    """The loss of TRL's trainer, and its slope in the policy's logprobs."""
    import torch

    policy = torch.tensor(BATCH.policy, requires_grad=True)
    mask = torch.tensor(BATCH.chosen, dtype=torch.float64)
    arguments = SimpleNamespace(
        use_bias_correction_kl=False, delta=settings.pop("delta", None), steps_per_generation=1
    )
    found = {
        "beta": 0.0,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "importance_sampling_level": "token",
        "entropy_coef": 0.0,
        **settings,
    }
    trainer = SimpleNamespace(
        **found,
        args=arguments,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=cap > 0,
        vllm_importance_sampling_correction=cap > 0,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            reduce=lambda value, reduction: value,
            gather=lambda value: value,
        ),
        _entropy_bonus_enabled=found["entropy_coef"] > 0,
        use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            policy,
            torch.tensor(BATCH.entropy),
            None,
        ),
    )
    weights = np.minimum(np.exp(BATCH.old - BATCH.sampled), cap or 1)
    ids = torch.zeros((ROWS, TOKENS), dtype=torch.long)
    loss = compute(
        trainer,
        None,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": torch.tensor(BATCH.advantages),
            "old_per_token_logps": torch.tensor(BATCH.old),
            "ref_per_token_logps": torch.tensor(BATCH.reference),
            "importance_sampling_ratio": torch.tensor(weights),
            "num_items_in_batch": mask.sum(),
        },
    )
    loss.backward()
    slope = policy.grad
    assert slope is not None
    return loss.item(), slope.numpy()


def ours(aggregation: Any, surrogate: Any, **parts: Any) -> tuple[float, np.ndarray]:
    chosen = jnp.asarray(BATCH.chosen)

    def loss_of(policy: jax.Array) -> jax.Array:
        advantages = jnp.broadcast_to(jnp.asarray(BATCH.advantages)[:, None], policy.shape)
        inputs = LossInputs(
            policy_logprobs=policy,
            old_logprobs=jnp.asarray(BATCH.old),
            sampled_logprobs=jnp.asarray(BATCH.sampled),
            reference_logprobs=jnp.asarray(BATCH.reference),
            entropy=jnp.asarray(BATCH.entropy),
            advantages=advantages,
            loss_mask=chosen,
            text_start=jnp.zeros(policy.shape, jnp.int32),
        )
        by_label = policy_gradient_loss(inputs, surrogate, **parts).by_label
        labels = jnp.broadcast_to(jnp.sum(chosen, 1, keepdims=True, dtype=float), policy.shape)
        weights = aggregation(labels, jnp.sum(chosen, dtype=float), jnp.asarray(float(ROWS)))
        return jnp.sum(jnp.where(chosen, weights * by_label, 0))

    value, slope = jax.value_and_grad(loss_of)(jnp.asarray(BATCH.policy))
    return float(value), np.asarray(slope)


PPO = functools.partial(ppo_surrogate, clip_low=LOW, clip_high=HIGH)
GSPO = functools.partial(gspo_surrogate, clip_low=LOW, clip_high=HIGH)


@pytest.mark.parametrize(
    ("theirs", "aggregation", "surrogate", "parts"),
    [
        ({"loss_type": "grpo"}, sequence_mean, PPO, {}),
        ({"loss_type": "bnpo"}, token_mean, PPO, {}),
        ({"loss_type": "dapo"}, token_mean, PPO, {}),
        ({"loss_type": "dr_grpo"}, ConstantDivisor(LONGEST, ROWS), PPO, {}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            sequence_mean,
            GSPO,
            {},
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 1 + HIGH},
            token_mean,
            functools.partial(cispo_surrogate, clip_low=1.0, clip_high=HIGH),
            {},
        ),
        (
            {"loss_type": "dapo", "delta": 1.3},
            token_mean,
            functools.partial(PPO, dual_clip=1.3),
            {},
        ),
        (
            {"loss_type": "grpo", "beta": 0.04},
            sequence_mean,
            PPO,
            {"terms": (KlPenalty(0.04, k3),)},
        ),
        (
            {"loss_type": "dapo", "cap": 1.2},
            token_mean,
            PPO,
            {"correction": ImportanceWeights(max_weight=1.2)},
        ),
        (
            {"loss_type": "dapo", "entropy_coef": 0.2},
            token_mean,
            PPO,
            {"terms": (EntropyBonus(0.2),)},
        ),
    ],
)
def test_values_and_slopes_are_those_of_trl(
    loss_of_trl: Any, theirs: dict[str, Any], aggregation: Any, surrogate: Any, parts: Any
) -> None:
    wanted, slopes = of_trl(loss_of_trl, **theirs)
    value, found = ours(aggregation, surrogate, **parts)
    assert value == pytest.approx(wanted, abs=1e-5)
    np.testing.assert_allclose(found, slopes, rtol=0, atol=1e-5)
    assert np.abs(slopes).max() > 1e-2
