"""KL penalties by exact enumeration: all texts of three tokens over a small vocabulary, each with
its probability."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rl.advantages import AdvantageEstimator, keep_rewards, keep_scale, whiten_over_tokens
from jaxspec.rl.loss_terms import ESTIMATORS, KlPenalty, LossInputs, k3
from jaxspec.rl.losses import policy_gradient_loss, reinforce_surrogate

pytestmark = pytest.mark.usefixtures("x64")

VOCAB, LENGTH = 4, 3
TEXTS = np.array(list(itertools.product(range(VOCAB), repeat=LENGTH)))
PREFIXES = [text for size in range(LENGTH) for text in itertools.product(range(VOCAB), repeat=size)]
ROW = np.array([[PREFIXES.index(tuple(text[:at])) for at in range(LENGTH)] for text in TEXTS])
"""Row of the logits that predict each token of each text."""
RANDOM = np.random.default_rng(11)
POLICY, REFERENCE, SAMPLER = (RANDOM.normal(size=(len(PREFIXES), VOCAB)) for _ in range(3))


def picked(logits: Any) -> jax.Array:
    """Log-probability of each token of each text."""
    return jax.nn.log_softmax(jnp.asarray(logits))[ROW, TEXTS]


def probability(logits: Any) -> jax.Array:
    return jnp.exp(jnp.sum(picked(logits), axis=1))


def divergence(logits: Any) -> jax.Array:
    """KL(policy, reference) of whole texts."""
    log_ratio = jnp.sum(picked(logits) - picked(REFERENCE), axis=1)
    return jnp.sum(probability(logits) * log_ratio)


def by_prefix(logits: Any, sampler: Any, forward: bool = False) -> jax.Array:
    """KL of the next token, summed over the prefixes that a sampler reaches: policy from
    reference, or `forward`, reference from policy."""
    ours, theirs = (jax.nn.log_softmax(jnp.asarray(each)) for each in (logits, REFERENCE))
    first, second = (theirs, ours) if forward else (ours, theirs)
    of_row = jnp.sum(jnp.exp(first) * (first - second), axis=1)
    return jnp.sum(probability(sampler)[:, None] * of_row[ROW])


def inputs_of(logits: Any, sampler: Any, gains: Any = 0.0) -> LossInputs:
    policy = picked(logits)
    return LossInputs(
        policy_logprobs=policy,
        old_logprobs=jax.lax.stop_gradient(policy),
        sampled_logprobs=picked(sampler),
        reference_logprobs=picked(REFERENCE),
        entropy=jnp.zeros_like(policy),
        advantages=jnp.broadcast_to(jnp.asarray(gains, float), policy.shape),
        loss_mask=jnp.ones(policy.shape, bool),
        text_start=jnp.zeros(policy.shape, jnp.int32),
    )


def slope_in_loss(penalty: KlPenalty, sampler: Any) -> jax.Array:
    """Expected slope of the loss with a penalty and no advantages."""

    def loss(logits: Any) -> jax.Array:
        found = policy_gradient_loss(
            inputs_of(logits, sampler), reinforce_surrogate, terms=(penalty,)
        )
        return jnp.sum(probability(sampler)[:, None] * found.by_label)

    return jax.grad(loss)(jnp.asarray(POLICY))


def slope_in_reward(penalty: KlPenalty) -> jax.Array:
    """Expected slope of the loss of rewards that are nothing but the penalty."""
    here = picked(POLICY)
    kl = penalty.estimate_kl(here, picked(REFERENCE), jnp.ones(here.shape, bool))
    rows, valid = len(TEXTS), jnp.ones(len(TEXTS), bool)
    rewards, lengths = jnp.zeros(rows), jnp.full((rows,), LENGTH, jnp.int32)
    plain = AdvantageEstimator(1, keep_rewards, keep_scale)
    if penalty.reward_to_go:
        to_go = jnp.cumsum(kl[:, ::-1], axis=1)[:, ::-1]
        sampled = jnp.ones(here.shape, bool)
        gains = plain.compute_token_advantages(rewards, valid, sampled, penalty.beta * to_go)
    else:
        rewards = rewards - penalty.beta * jnp.sum(kl, axis=1)
        gains = plain.compute_row_advantages(rewards, valid, lengths)[:, None]

    def loss(logits: Any) -> jax.Array:
        found = policy_gradient_loss(inputs_of(logits, POLICY, gains), reinforce_surrogate)
        return jnp.sum(probability(POLICY)[:, None] * found.by_label)

    return jax.grad(loss)(jnp.asarray(POLICY))


BETA = 0.3


@pytest.mark.parametrize("to_go", [False, True])
def test_a_reward_less_k1_has_the_gradient_of_the_divergence(to_go: bool) -> None:
    found = slope_in_reward(KlPenalty(BETA, ESTIMATORS["k1"], reward_to_go=to_go))
    np.testing.assert_allclose(
        found, BETA * jax.grad(divergence)(jnp.asarray(POLICY)), rtol=0, atol=1e-12
    )
    assert float(jnp.abs(found).max()) > 1e-2


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_a_reward_less_another_estimate_has_not(name: str) -> None:
    found = slope_in_reward(KlPenalty(BETA, ESTIMATORS[name])).ravel()
    wanted = jax.grad(divergence)(jnp.asarray(POLICY)).ravel()
    cosine = found @ wanted / jnp.linalg.norm(found) / jnp.linalg.norm(wanted)
    assert float(cosine) < 0.9


@pytest.mark.parametrize("importance", [False, True])
def test_slopes_of_estimates_in_the_loss(importance: bool) -> None:
    """k2 has the gradient of the divergence at each token, k3 that of its reverse, k1 none; with
    weights also on texts of another sampler."""
    sampler = SAMPLER if importance else POLICY
    found = {
        name: slope_in_loss(KlPenalty(BETA, estimator, importance), sampler)
        for name, estimator in ESTIMATORS.items()
    }
    wanted = {
        "k1": np.zeros_like(POLICY),
        "k2": BETA * jax.grad(by_prefix)(jnp.asarray(POLICY), sampler),
        "k3": BETA * jax.grad(by_prefix)(jnp.asarray(POLICY), sampler, True),
    }
    for name, slope in wanted.items():
        np.testing.assert_allclose(found[name], slope, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("log_ratio", [11.0, 15.0, 19.0])
def test_k3_still_pulls_where_the_policy_is_far_from_the_reference(log_ratio: float) -> None:
    def penalty(logprob: jax.Array) -> jax.Array:
        chosen = jnp.ones((1, 1), bool)
        return KlPenalty(1.0, k3).estimate_kl(logprob, logprob * 0 - 1.0, chosen).sum()

    slope = jax.grad(penalty)(jnp.full((1, 1), -1.0 - log_ratio))
    np.testing.assert_allclose(slope, [[1 - np.exp(log_ratio)]], rtol=1e-12)
    assert np.isfinite(penalty(jnp.full((1, 1), -1e30)))


def test_rewards_to_go_are_whitened_over_tokens() -> None:
    """REINFORCE++ written out: reward less beta times the divergence from each token on, with mean
    0 and variance 1 over all tokens."""
    rewards, lengths = np.array([1.0, 0.0, 2.0]), np.array([3, 1, 4])
    valid, kl = np.array([True, True, False]), RANDOM.normal(size=(3, 5))
    mask = (np.arange(5) < lengths[:, None]) & valid[:, None]
    to_go = np.stack([[(BETA * kl * mask)[row, at:].sum() for at in range(5)] for row in range(3)])
    gains = (rewards[:, None] - to_go)[mask]
    wanted = (gains - gains.mean()) / gains.std()
    found = AdvantageEstimator(1, keep_rewards, whiten_over_tokens).compute_token_advantages(
        jnp.asarray([1.0, 0.0, np.nan]),
        jnp.asarray(valid),
        jnp.asarray(mask),
        jnp.asarray(to_go),
    )
    np.testing.assert_allclose(np.asarray(found)[mask], wanted, rtol=1e-12)
    np.testing.assert_array_equal(np.asarray(found)[~mask], 0)
