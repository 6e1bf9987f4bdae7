"""Losses by worked numbers, by their slopes, and by what TRL makes of the same numbers."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rl.loss_terms import (
    ESTIMATORS,
    EntropyBonus,
    ImportanceWeights,
    KlPenalty,
    LossInputs,
    SequenceMask,
    k1,
    k2,
    k3,
    keep_weights,
)
from jaxspec.rl.losses import (
    ConstantDivisor,
    cispo_surrogate,
    gspo_surrogate,
    negative_log_likelihood,
    policy_gradient_loss,
    ppo_surrogate,
    reinforce_surrogate,
    sequence_mean,
    token_mean,
)

pytestmark = pytest.mark.usefixtures("x64")

LOW, HIGH = 0.2, 0.28
PPO = functools.partial(ppo_surrogate, clip_low=0.2, clip_high=0.2)
FREE = ImportanceWeights()
"""Importance weights without bounds."""


def inputs_of(policy: Any, advantages: Any, mask: Any = None, **others: Any) -> LossInputs:
    """Rows of one text each; what is not given is as the policy's."""
    policy = jnp.asarray(policy, float)
    chosen = jnp.ones(policy.shape, bool) if mask is None else jnp.asarray(mask)
    given = {name: jnp.asarray(value, float) for name, value in others.items()}
    same = jax.lax.stop_gradient(policy)
    advantages = jnp.asarray(advantages, float)
    wide = advantages if advantages.ndim == 2 else advantages[:, None]
    parts: dict[str, Any] = {
        "policy_logprobs": policy,
        "old_logprobs": same,
        "sampled_logprobs": same,
        "reference_logprobs": same,
        "entropy": jnp.zeros_like(policy),
        "advantages": jnp.broadcast_to(wide, policy.shape),
        "loss_mask": chosen,
        "text_start": jnp.zeros(policy.shape, jnp.int32),
    }
    return LossInputs(**{**parts, **given})


def mean(inputs: LossInputs, loss: Any, aggregation: Any = token_mean) -> jax.Array:
    """The loss of the batch, as the learner takes it."""
    chosen = inputs.loss_mask
    labels = jnp.broadcast_to(jnp.sum(chosen, 1, keepdims=True, dtype=float), chosen.shape)
    tokens = jnp.sum(chosen, dtype=float)
    texts = jnp.sum(jnp.any(chosen, axis=1), dtype=float)
    weights = aggregation(labels, jnp.maximum(tokens, 1), jnp.maximum(texts, 1))
    return jnp.sum(jnp.where(chosen, weights * loss(inputs).by_label, 0))


# ---- worked numbers


CLIP: dict[str, Any] = {
    "policy": [[-1.69315, -1.0, -0.59453]],
    "advantages": [[1.0, -1.0, 2.0]],
    "old_logprobs": [[-1.0, -1.0, -1.0]],
}
"""Ratios .5, 1, 1.5."""
SAMPLED = {"sampled_logprobs": [[-0.5, -1.5, -0.8]]}


def corrected(correction: Any, surrogate: Any = PPO, **more: Any) -> float:
    loss = functools.partial(
        policy_gradient_loss, surrogate=surrogate, correction=correction, **more
    )
    return float(mean(inputs_of(**CLIP, **SAMPLED), loss))


def test_clipped_loss() -> None:
    inputs = inputs_of(**CLIP)
    assert float(mean(inputs, PPO)) == pytest.approx(-0.6333, abs=5e-5)
    np.testing.assert_allclose(PPO(inputs).metrics["ratio/mean"], [[0.5, 1, 1.5]], atol=1e-5)
    assert np.asarray(PPO(inputs).metrics["ratio/clipped_low"]).tolist() == [[0, 0, 0]]
    assert np.asarray(PPO(inputs).metrics["ratio/clipped_high"]).tolist() == [[0, 0, 1]]


def test_plain_reinforce_and_a_ratio_of_1() -> None:
    cur = [[-0.5, -1.0, -1.5]]
    loss = mean(inputs_of(cur, CLIP["advantages"]), reinforce_surrogate)
    assert float(loss) == pytest.approx(0.8333, abs=5e-5)
    on_policy = inputs_of(CLIP["policy"], CLIP["advantages"])  # old is the policy's own
    assert float(mean(on_policy, PPO)) == pytest.approx(-0.6667, abs=5e-5)


def test_dual_clip() -> None:
    policy = np.log([[0.5, 1.0, 10.0]]) - 1
    inputs = inputs_of(policy, [[1.0, -1.0, -4.0]], old_logprobs=[[-1.0, -1, -1]])
    dual = functools.partial(PPO, dual_clip=3.0)
    assert float(mean(inputs, dual)) == pytest.approx(4.1667, abs=5e-5)
    # a token whose gradient the bound takes counts like one that the clip takes
    assert np.asarray(dual(inputs).metrics["ratio/clipped_high"]).tolist() == [[0, 0, 1]]
    assert np.asarray(PPO(inputs).metrics["ratio/clipped_high"]).tolist() == [[0, 0, 0]]
    # the bound on weights does not ask for the sign of the advantage
    weights = cispo_surrogate(inputs, clip_low=0.2, clip_high=4.0).metrics
    assert np.asarray(weights["ratio/clipped_high"]).tolist() == [[0, 0, 1]]
    assert np.asarray(weights["ratio/clipped_low"]).tolist() == [[1, 0, 0]]
    assert float(mean(inputs, PPO)) == pytest.approx((-0.5 + 1 + 40) / 3)


@pytest.mark.parametrize(
    ("reference", "one", "two", "three"),
    [(0, -1, 0.5, 0.7183), (-15, 14, 98, 13.0), (-30, 29, 420.5, 28.0)],
)
def test_kl_estimators(reference: float, one: float, two: float, three: float) -> None:
    """The log ratio is clamped at 20, and not what is made of it."""
    log_ratio = jnp.array([[reference - -1.0]])
    for estimator, wanted in ((k1, one), (k2, two), (k3, three)):
        assert float(estimator(log_ratio)[0, 0]) == pytest.approx(wanted, abs=5e-5)
    inputs = inputs_of([[-1.0]], [0.0], reference_logprobs=[[float(reference)]])
    bounded = float(KlPenalty(1.0, k3)(inputs).by_label[0, 0])
    assert bounded == pytest.approx(min(three, 19), abs=5e-5)


def test_kl_penalty_in_the_loss() -> None:
    cur = [[0.0, -1.0, -2.0]]
    inputs = inputs_of(cur, [0.0], reference_logprobs=[[-1.0, -1, -1]])
    loss = functools.partial(policy_gradient_loss, surrogate=PPO, terms=(KlPenalty(0.1, k3),))
    assert float(mean(inputs, loss)) == pytest.approx(0.0362, abs=5e-5)


def test_importance_weights() -> None:
    weights = FREE(inputs_of(**CLIP, **SAMPLED)).by_label
    np.testing.assert_allclose(weights, [[0.6065, 1.6487, 0.8187]], atol=5e-5)
    assert corrected(FREE) == pytest.approx(-0.2065, abs=5e-5)
    assert corrected(ImportanceWeights(max_weight=0.8)) == pytest.approx(-0.4744, abs=5e-5)
    whole = ImportanceWeights(max_weight=0.8, by_sequence=True)
    gspo = functools.partial(gspo_surrogate, clip_low=0.2, clip_high=0.2)
    assert corrected(whole, gspo) == pytest.approx(-0.4846, abs=5e-5)


def test_importance_weights_and_kl_together() -> None:
    inputs = inputs_of(**CLIP, **SAMPLED, reference_logprobs=[[-1.0, -1, -1]])
    kl = KlPenalty(0.1, k3, importance=True)
    penalty = float(mean(inputs, lambda each: negative(kl(each).by_label)))
    assert penalty == pytest.approx(0.00605, abs=5e-6)
    loss = functools.partial(policy_gradient_loss, surrogate=PPO, correction=FREE, terms=(kl,))
    assert float(mean(inputs, loss)) == pytest.approx(-0.2004, abs=5e-5)


def negative(by_label: jax.Array) -> Any:
    return negative_log_likelihood(inputs_of(-by_label, [0.0]))


def test_masked_importance_weights() -> None:
    gen = [[-0.5, -3.5, -0.8]]
    inputs = inputs_of(
        CLIP["policy"], CLIP["advantages"], old_logprobs=[[-1.0] * 3], sampled_logprobs=gen
    )
    np.testing.assert_allclose(FREE(inputs).by_label, [[0.6065, 12.1825, 0.8187]], atol=5e-5)
    icepop = ImportanceWeights(0.5, 5.0, truncate=False)(inputs)
    np.testing.assert_allclose(icepop.by_label, [[0.6065, 0, 0.8187]], atol=5e-5)
    assert np.asarray(icepop.metrics["importance/outside"]).tolist() == [[0, 1, 0]]


def test_a_sequence_is_masked_by_its_geometric_mean() -> None:
    """Means exp(0) and exp(.01): the second is outside .999 to 1.002, whatever its tokens are."""
    old, gen = np.zeros((2, 2)), np.array([[0.3, -0.3], [-0.01, -0.01]])
    inputs = inputs_of(old, [1.0, 1.0], old_logprobs=old, sampled_logprobs=gen)
    weights = SequenceMask(0.999, 1.002)(inputs)
    np.testing.assert_allclose(weights.by_label, [[np.exp(-0.3), np.exp(0.3)], [0, 0]])
    assert np.asarray(weights.metrics["importance/outside"]).tolist() == [[0, 0], [1, 1]]


def test_sequence_ratios() -> None:
    """One ratio .9086 for the first row, 2.4697 for the second."""
    gspo = functools.partial(gspo_surrogate, clip_low=0.2, clip_high=0.2)
    inputs = inputs_of(**CLIP)
    np.testing.assert_allclose(gspo(inputs).metrics["ratio/mean"], [[0.9086] * 3], atol=5e-5)
    assert float(mean(inputs, gspo)) == pytest.approx(-0.6057, abs=5e-5)
    assert corrected(ImportanceWeights(by_sequence=True), gspo) == pytest.approx(-0.4959, abs=5e-5)


@pytest.mark.parametrize("junk", [0.0, 900.0, np.nan, np.inf, -np.inf])
def test_what_is_masked_has_neither_value_nor_slope(junk: float) -> None:
    mask = [[True, False, False]]
    others = {"old_logprobs": [[-1.0, -np.inf, 2.0]], "sampled_logprobs": [[-1.0, junk, junk]]}
    others |= {"reference_logprobs": [[-1.0, junk, 0.0]]}
    kl = KlPenalty(0.5, k3)
    for surrogate in (ppo_surrogate, gspo_surrogate, cispo_surrogate, reinforce_surrogate):
        loss = functools.partial(
            policy_gradient_loss, surrogate=surrogate, correction=FREE, terms=(kl,)
        )

        def value_of(policy: jax.Array, loss: Any = loss) -> jax.Array:
            return mean(inputs_of(policy, [3.0], mask, **others), loss)

        value, slope = jax.value_and_grad(value_of)(jnp.array([[-1.0, junk, 1e3]]))
        ratio = surrogate in (ppo_surrogate, gspo_surrogate)
        assert float(value) == pytest.approx(-3 if ratio else 3)
        np.testing.assert_allclose(slope, [[-3.0, 0, 0]])


FAR = np.array([89.0, 1e4, -1e4, np.inf, -np.inf])


@pytest.mark.parametrize(
    "correction",
    [keep_weights, ImportanceWeights(max_weight=2.0), ImportanceWeights(by_sequence=True)],
)
@pytest.mark.parametrize(
    "surrogate",
    [ppo_surrogate, gspo_surrogate, cispo_surrogate, functools.partial(PPO, dual_clip=3.0)],
)
def test_no_log_ratio_loses_the_update(surrogate: Any, correction: Any) -> None:
    """In float32, where exp(89) is infinite: whatever the advantage, loss, slope and measures are
    finite, and the other token of each text keeps its slope."""
    advantages = np.repeat([0.0, 1.0, -1.0], len(FAR))
    old = np.stack([-1.0 - np.tile(FAR, 3), np.full(3 * len(FAR), -1.0)], axis=1)
    reference = np.where(np.isfinite(old), np.clip(-2 - old, -1e4, 0), -1.0)
    kl = KlPenalty(0.1, k3, importance=True)
    loss = functools.partial(
        policy_gradient_loss, surrogate=surrogate, correction=correction, terms=(kl,)
    )

    def value_of(policy: jax.Array) -> tuple[jax.Array, Any]:
        inputs = inputs_of(
            policy, advantages, None, old_logprobs=old, sampled_logprobs=old,
            reference_logprobs=reference,
        )  # fmt: skip
        narrow = {
            name: leaf.astype("float32")
            for name, leaf in inputs._asdict().items()
            if leaf.dtype == "float64"
        }
        found = loss(inputs._replace(**narrow))
        return jnp.sum(found.by_label), found.metrics

    at = jnp.full(old.shape, -1.0)
    (value, measured), slope = jax.value_and_grad(value_of, has_aux=True)(at)
    assert np.isfinite(value)
    assert np.isfinite(slope).all()
    assert all(np.isfinite(each).all() for each in measured.values())
    if surrogate is not gspo_surrogate and correction is keep_weights:
        np.testing.assert_allclose(slope[:, 1], -advantages, atol=1e-6)


# ---- aggregation


def test_a_token_counts_alike_or_by_its_response_or_by_a_constant() -> None:
    """Row 0 has one token of loss 4, row 1 three of loss 8, row 2 none."""
    policy = -np.array([[4.0, 0, 0], [8, 8, 8], [0, 0, 0]])
    mask = [[True, False, False], [True] * 3, [False] * 3]
    inputs = inputs_of(policy, [0.0] * 3, mask)
    for aggregation, wanted in (
        (token_mean, (4 + 3 * 8) / 4),
        (sequence_mean, (4 + 8) / 2),
        (ConstantDivisor(10, 3), (4 + 24) / (10 * 3)),
    ):
        found = mean(inputs, negative_log_likelihood, aggregation)
        assert float(found) == pytest.approx(wanted), aggregation


# ---- slopes


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain"),
    [
        (1.0, 2.0, 2.0),
        (1.2, 1.0, 1.2),
        (1.5, 1.0, 1.28),  # clipped above, further than below
        (0.5, 1.0, 0.5),  # a bad move away from a good token is not hidden
        (0.9, -1.0, -0.9),
        (0.5, -1.0, -0.8),
        (1.5, -1.0, -1.5),
        (3.0, 0.0, 0.0),
    ],
)
def test_worked_gains(ratio: float, advantage: float, gain: float) -> None:
    loss = functools.partial(ppo_surrogate, clip_low=LOW, clip_high=HIGH)
    inputs = inputs_of([[-1.3 + math.log(ratio)]], [advantage], old_logprobs=[[-1.3]])
    assert float(mean(inputs, loss)) == pytest.approx(-gain)


def test_slopes_are_the_policy_gradient_inside_the_clip_and_zero_outside() -> None:
    ratios = np.array([[1.0, 1.1, 1.5], [1.0, 0.7, 0.85]])
    old = np.full((2, 3), -0.7)

    def slope_of(loss: Any) -> jax.Array:
        return jax.grad(
            lambda policy: mean(inputs_of(policy, [2.0, -1.0], old_logprobs=old), loss)
        )(jnp.asarray(old + np.log(ratios)))

    clipped = functools.partial(ppo_surrogate, clip_low=LOW, clip_high=HIGH)
    np.testing.assert_allclose(
        slope_of(clipped), -np.array([[2.0, 2.2, 0], [-1.0, 0, -0.85]]) / 6, rtol=1e-12
    )
    # what CISPO clips still has a slope, of the weight that is left
    cispo = functools.partial(cispo_surrogate, clip_low=0.25, clip_high=HIGH)
    np.testing.assert_allclose(
        slope_of(cispo), -np.array([[2.0, 2.2, 2.56], [-1.0, -0.75, -0.85]]) / 6, rtol=1e-12
    )


RANDOM = np.random.default_rng(7)
LOSSES: dict[str, Any] = {
    "clip": functools.partial(ppo_surrogate, dual_clip=1.4),
    "gspo": functools.partial(gspo_surrogate, clip_low=0.1, clip_high=0.1),
    "reinforce": reinforce_surrogate,
    **{
        name: functools.partial(
            policy_gradient_loss, surrogate=ppo_surrogate, terms=(KlPenalty(0.3, estimator),)
        )
        for name, estimator in ESTIMATORS.items()
    },
    "entropy": functools.partial(
        policy_gradient_loss, surrogate=ppo_surrogate, terms=(EntropyBonus(0.2),)
    ),
}
"""Losses whose slope is that of their value: CISPO and weights are detached on purpose."""


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        *((name, token_mean) for name in LOSSES),
        ("clip", sequence_mean),
        ("gspo", ConstantDivisor(6, 2)),
    ],
)
def test_slopes_agree_with_finite_differences(name: str, aggregation: Any) -> None:
    """In the logits of a small vocabulary, of which labels have log-probabilities."""
    shape = 2, 4, 3
    logits = jnp.asarray(RANDOM.normal(size=shape))
    labels, mask = RANDOM.integers(0, 3, shape[:2]), RANDOM.random(shape[:2]) < 0.8
    near = np.log(RANDOM.uniform(0.8, 1.25, (2, *shape[:2])))

    def picked_of(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(logprobs, jnp.asarray(labels)[..., None], axis=2)[..., 0]
        return picked, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)

    old, reference = (picked_of(logits)[0] + shift for shift in near)

    @jax.jit
    def value_of(logits: jax.Array) -> jax.Array:
        picked, entropy = picked_of(logits)
        others = {"old_logprobs": old, "reference_logprobs": reference}
        inputs = inputs_of(picked, [1.0, -2.0], mask, **others)
        return mean(inputs._replace(entropy=entropy), LOSSES[name], aggregation)

    size = 1e-6
    steps = size * jnp.eye(logits.size).reshape(-1, *shape)
    above, below = (jax.vmap(value_of)(logits + sign * steps) for sign in (1, -1))
    slope = (above - below).reshape(shape) / (2 * size)
    np.testing.assert_allclose(jax.grad(value_of)(logits), slope, rtol=0, atol=1e-8)


def test_the_negative_log_likelihood_is_that_of_the_policy_alone() -> None:
    found = negative_log_likelihood(inputs_of([[-0.5, -2.0]], [9.0]))
    np.testing.assert_array_equal(found.by_label, [[0.5, 2.0]])


def test_texts_of_a_pack_have_ratios_of_their_own() -> None:
    """Two texts side by side, as rows of their own."""
    policy, old = np.array([[-1.0, -2.0, -0.5, -3.0]]), np.array([[-1.2, -2.5, -0.4, -3.0]])
    packed = inputs_of(policy, [[1.0, 1, -1, -1]], [[True, True, True, False]], old_logprobs=old)
    packed = packed._replace(text_start=jnp.array([[0, 0, 2, 2]], jnp.int32))
    rows = inputs_of(
        policy.reshape(2, 2),
        [1.0, -1.0],
        [[True, True], [True, False]],
        old_logprobs=old.reshape(2, 2),
    )
    np.testing.assert_allclose(
        gspo_surrogate(packed).by_label.reshape(2, 2), gspo_surrogate(rows).by_label
    )
