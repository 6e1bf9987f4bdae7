"""Several updates on a batch, old and reference logprobs: what the learner makes of packed texts on
any mesh, beside the same written out on padded rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    EngineConfig,
    KlConfig,
    LoraConfig,
    LossConfig,
    MeshConfig,
    RolloutConfig,
)
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.models.decoder import Decoder
from jaxspec.models.lora import AdaptedDecoder, merge_lora
from jaxspec.rl import optimizers
from jaxspec.rl.learner import Learner
from jaxspec.rl.train_batch import TrainBatch, count_tokens_to_read, plan_shardings, rows_to_pack
from jaxspec.state import PROMPT, UNDRAFTED, LearnerState, TrainState
from jaxspec.step import Step
from tests.conftest import small_mesh, tiny_config, tiny_model, tiny_network

pytestmark = pytest.mark.usefixtures("x64")

PROMPTS, GROUP, WIDTH, NEW = 8, 2, 5, 6
ROWS, SIZE = PROMPTS * GROUP, WIDTH + NEW
MODEL = tiny_model(vocab=16, heads=4, kv_heads=4)
RATE, BETA, LOW, HIGH = 0.1, 0.3, 0.1, 0.15
LOSS: dict[str, Any] = {"clip_low": LOW, "clip_high": HIGH}


def step_of(
    mesh: tuple[int, int] = (1, 1),
    loss: LossConfig | None = None,
    kl: KlConfig | None = None,
    minis: int = 2,
    epochs: int = 2,
    rank: int = 0,
) -> Step:
    """Plain gradient descent; micro-batches of some texts."""
    config = tiny_config(
        MODEL,
        rollout=RolloutConfig(
            max_new_tokens=NEW, draft=DraftConfig(kind="none"), engine=EngineConfig(tail=False)
        ),
        batch=BatchConfig(
            prompts=PROMPTS,
            group_size=GROUP,
            micro_tokens=30,
            mini_batches=minis,
            epochs=epochs,
        ),
        data=DataConfig(max_prompt_length=WIDTH),
        mesh=MeshConfig(shard_above=0),
        loss=loss or LossConfig(**LOSS),
        kl=kl or KlConfig(beta=BETA),
        lora=LoraConfig(rank=rank),
    )
    step = build_step(config, small_mesh(*mesh), (1,), MODEL.vocab)
    optimizer = optax.sgd(optax.constant_schedule(RATE))
    learner = dataclasses.replace(step.learner, policy_optimizer=optimizer)
    return dataclasses.replace(step, learner=learner)


class Rows:
    """Texts with advantages, and logprobs near those of the policy that learns."""

    def __init__(self, far: float = 0.1, lag: int = 0) -> None:
        random = np.random.default_rng(3)
        self.tokens = random.integers(2, MODEL.vocab, (ROWS, SIZE)).astype(np.int32)
        ends = random.integers(WIDTH, SIZE + 1, ROWS)[:, None]
        place = np.arange(SIZE)
        self.chosen = (place >= 3) & (place < ends) & (random.random((ROWS, SIZE)) < 0.8)
        self.chosen[5] = False
        self.advantages = random.normal(size=ROWS)
        noise = far * random.normal(size=(ROWS, SIZE))
        self.sampled = np.asarray(logprobs_of(policy(), self)) + noise
        self.version = np.full(ROWS, -lag, np.int32)

    def on(self, step: Step) -> TrainBatch:
        """As the learner reads them."""
        plan = step.plan_batch(np.asarray(count_tokens_to_read(self.chosen)).astype(np.int32))
        parts: dict[str, Any] = {
            "tokens": self.tokens,
            "sampled_logprobs": self.sampled,
            "loss_mask": self.chosen,
            "advantages": self.advantages,
            "version": self.version,
        }
        rows = jax.tree.map(jnp.asarray, parts)
        return TrainBatch(**rows, plan=jax.device_put(plan, plan_shardings(step.learner.mesh)))


def policy() -> Decoder:
    return tiny_network(Decoder, MODEL, 1)


def logprobs_of(network: Any, rows: Rows) -> jax.Array:
    """Of each token given those before it, [rows, size]; 0 for the first."""
    network = merge_lora(network)
    texts = rows_to_pack(jnp.asarray(rows.tokens), jnp.asarray(rows.chosen))
    logits = network.logits(network(texts.tokens, texts.positions).hidden)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), texts.labels[..., None], axis=2)
    return jnp.pad(picked[:, :-1, 0], ((0, 0), (1, 0)))


def by_hand(network: Any, rows: Rows, minis: int, epochs: int, recompute: bool) -> Any:
    """Descent on the clipped loss and the bounded k3 divergence, written out; with the losses."""
    reference = logprobs_of(network.base if isinstance(network, AdaptedDecoder) else network, rows)
    old = logprobs_of(network, rows) if recompute else jnp.asarray(rows.sampled)

    def loss_of(weights: Any, here: jax.Array) -> jax.Array:
        logprobs = logprobs_of(optimizers.replace_parameters(network, weights), rows)
        ratio = jnp.exp(jnp.where(here, logprobs - old, 0))
        gains = jnp.asarray(rows.advantages)[:, None] * jnp.stack(
            [ratio, jnp.clip(ratio, 1 - LOW, 1 + HIGH)]
        )
        x = jnp.clip(jnp.where(here, reference - logprobs, 0), -20, 20)
        losses = -gains.min(0) + BETA * (jnp.exp(x) - 1 - x)
        return jnp.sum(jnp.where(here, losses, 0)) / jnp.sum(here, dtype=losses.dtype)

    slope, weights, losses = (
        jax.jit(jax.value_and_grad(loss_of)),
        optimizers.trainable_parameters(network),
        [],
    )
    for _ in range(epochs):
        for mini in range(minis):
            mask = (np.arange(ROWS) * minis // ROWS == mini)[:, None] & rows.chosen
            loss, gradient = slope(weights, jnp.asarray(mask))
            weights = jax.tree.map(lambda old, new: old - RATE * new, weights, gradient)
            losses.append(float(loss))
    return weights, np.mean(losses)


def learnt(step: Step, network: Any, rows: Rows) -> tuple[LearnerState, dict[str, float]]:
    state = step.learner.init_state(network, None, online=False)
    state = jax.device_put(state, step.learner.train_layout(state))
    after, metrics = jax.jit(step.learner.learn)(state, rows.on(step))
    return after, metrics_to_host(metrics)


def assert_close(found: Any, wanted: Any) -> None:
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11),
        found,
        wanted,
    )


@pytest.mark.parametrize(
    ("mesh", "minis", "epochs", "recompute", "rank"),
    [
        ((2, 1), 2, 2, False, 0),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                ((1, 1), 4, 1, True, 0),
                ((4, 2), 2, 2, True, 0),
                ((2, 2), 1, 3, False, 2),
            )
        ),
    ],
)
def test_several_updates_are_those_written_out(
    mesh: tuple[int, int], minis: int, epochs: int, recompute: bool, rank: int
) -> None:
    how: Any = "recompute" if recompute else "reuse"
    step = step_of(mesh, LossConfig(**LOSS, logprobs=how), None, minis, epochs, rank)
    rows, network = Rows(), step.add_adapters(policy())
    if isinstance(network, AdaptedDecoder):  # whose change is not nothing
        network.adapters = jax.tree.map(lambda leaf: leaf + 0.05, network.adapters)
    after, metrics = learnt(step, network, rows)
    weights, loss = by_hand(network, rows, minis, epochs, recompute)
    assert_close(optimizers.trainable_parameters(after.policy.network), weights)
    assert metrics["loss/policy"] == pytest.approx(loss, abs=1e-11)
    assert metrics["ratio/clipped_low"] + metrics["ratio/clipped_high"] > 0.02
    assert metrics["learner/recompute"] == recompute
    assert metrics["kl"] > 0


def test_an_update_is_traced_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing one takes a large part of the time that a program takes to start."""
    traced: list[Any] = []
    update = Learner._update
    monkeypatch.setattr(Learner, "_update", lambda *given: traced.append(0) or update(*given))
    step = step_of(minis=2, epochs=2)
    state = step.learner.init_state(policy(), None, online=False)
    jax.eval_shape(step.learner.learn, state, Rows().on(step))
    assert len(traced) == 1


def test_one_update_has_the_old_logprobs_of_its_own_rows_for_nothing() -> None:
    """Rows of this version have ratio 1 whatever was recorded; older ones that of the record, or of
    the policy itself where that is not to be trusted."""
    loss, off = LossConfig(**LOSS), KlConfig()
    fresh, older = Rows(), Rows(lag=1)
    _, metrics = learnt(step_of(loss=loss, kl=off, minis=1, epochs=1), policy(), fresh)
    assert (metrics["ratio/mean"], metrics["learner/lag"]) == (1, 0)
    gap = np.abs(np.asarray(logprobs_of(policy(), fresh)) - fresh.sampled)[fresh.chosen]
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(gap.mean(), abs=1e-12)
    assert metrics["rollout/logprob_gap_max"] == pytest.approx(gap.max(), abs=1e-12)
    assert metrics["rollout/probability_factor"] == pytest.approx(np.exp(gap).mean(), abs=1e-12)
    _, metrics = learnt(step_of(loss=loss, kl=off, minis=1, epochs=1), policy(), older)
    ratio = np.exp(np.asarray(logprobs_of(policy(), older)) - older.sampled)[older.chosen]
    assert metrics["ratio/mean"] == pytest.approx(ratio.mean(), abs=1e-12)
    assert metrics["learner/lag"] == 1
    # what was learnt since they were sampled is no fault of the record
    assert "rollout/probability_factor" not in metrics
    mixed = Rows()
    mixed.version[::2] = -1
    _, metrics = learnt(step_of(loss=loss, kl=off, minis=1, epochs=1), policy(), mixed)
    gap = np.abs(np.asarray(logprobs_of(policy(), mixed)) - mixed.sampled)
    newer = mixed.chosen & (mixed.version == 0)[:, None]
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(gap[newer].mean(), abs=1e-12)
    again = LossConfig(**LOSS, logprobs="recompute", importance="tis")
    _, metrics = learnt(step_of(loss=again, kl=off, minis=1, epochs=1), policy(), older)
    assert metrics["ratio/mean"] == 1
    assert metrics["importance/mean"] == pytest.approx(np.minimum(ratio, 2).mean(), abs=1e-12)


def test_a_mini_batch_of_nothing_is_passed_over() -> None:
    """As where dynamic sampling found few groups: neither an update nor a skipped one."""
    rows = Rows()
    rows.chosen[ROWS // 2 :] = False
    after, metrics = learnt(step_of(minis=2, epochs=1), policy(), rows)
    weights, loss = by_hand(policy(), rows, 1, 1, recompute=False)
    assert_close(optimizers.trainable_parameters(after.policy.network), weights)
    assert metrics["loss/policy"] == pytest.approx(loss, abs=1e-11)
    assert (metrics["skipped/policy"], metrics["skipped_in_row/policy"]) == (0, 0)
    assert metrics["ratio/mean"] == pytest.approx(1, abs=0.1)
    rows.chosen[:] = False
    _, metrics = learnt(step_of(minis=2, epochs=1), policy(), rows)
    assert (metrics["skipped/policy"], metrics["skipped_in_row/policy"]) == (2, 2)


def test_recorded_logprobs_that_are_far_off_are_recomputed_from_then_on() -> None:
    step = step_of(loss=LossConfig(**LOSS, reuse_below=1.05), kl=KlConfig(), minis=2, epochs=1)
    near, far = Rows(0.01), Rows(0.2)
    still = dataclasses.replace(
        step.learner,
        policy_optimizer=optax.sgd(optax.constant_schedule(1e-9)),
        learning_rate=optax.linear_schedule(0.0, 1.0, 10),
    )
    state, told = still.init_state(policy(), None, online=False), []
    learn = jax.jit(still.learn)
    for version, rows in enumerate((near, far, near)):
        rows.version[:] = version
        state, means = learn(state, rows.on(step))
        metrics = metrics_to_host(means)
        told.append((metrics["rollout/probability_factor"] > 1.05, metrics["learner/recompute"]))
        # of the first of its two updates
        assert metrics["optimizer/learning_rate"] == pytest.approx(0.2 * version)
    assert told == [(False, 0), (True, 0), (False, 1)]
    assert bool(state.recompute)


@pytest.mark.parametrize("how", ["reuse", pytest.param("recompute", marks=pytest.mark.sweep)])
def test_the_gap_is_that_of_the_whole_batch_before_its_first_update(how: Any) -> None:
    """Though the record is right in the first of four mini-batches, and every update goes far."""
    loss = LossConfig(**LOSS, logprobs=how)
    step = step_of((2, 1), loss, KlConfig(), minis=4, epochs=2)
    rows = Rows(0.01)
    rows.sampled[ROWS // 4 :] -= np.log(20)
    rows.version[-1] = -1  # sampled by an older policy, which is no fault of the record
    after, metrics = learnt(step, policy(), rows)
    current = rows.chosen & (rows.version == 0)[:, None]
    gap = np.abs(np.asarray(logprobs_of(policy(), rows)) - rows.sampled)[current]
    assert metrics["rollout/probability_factor"] == pytest.approx(np.exp(gap).mean(), rel=1e-11)
    assert metrics["rollout/logprob_gap_mean"] == pytest.approx(gap.mean(), abs=1e-11)
    assert metrics["rollout/logprob_gap_max"] == pytest.approx(gap.max(), abs=1e-11)
    assert 10 < metrics["rollout/probability_factor"] < 20
    assert bool(after.recompute)


@pytest.mark.parametrize("where", ["reward", "reward_to_go"])
def test_the_divergence_of_answers_comes_back_in_the_order_of_the_rows(where: Any) -> None:
    kl = KlConfig(beta=BETA, where=where)
    step, rows = step_of((4, 2), kl=kl, minis=1, epochs=1), Rows()
    other = tiny_network(Decoder, MODEL, 2)
    state = step.learner.init_state(policy(), None, online=False).replace(reference=other)
    penalty = step.kl_in_reward
    assert penalty is not None
    found = jax.jit(
        lambda batch: step.learner.sum_reference_kl(state, batch, penalty, jnp.asarray(True))
    )(rows.on(step))
    log_ratio = rows.sampled - np.asarray(logprobs_of(other, rows))
    by_token = np.where(rows.chosen, log_ratio, 0)
    to_go = by_token[:, ::-1].cumsum(1)[:, ::-1]
    wanted = to_go if where == "reward_to_go" else to_go[:, :1]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-11)
    assert step.learner.keeps_reference
    assert not step.learner.reads_reference


@pytest.mark.parametrize("where", ["reward", pytest.param("reward_to_go", marks=pytest.mark.slow)])
def test_what_leaving_the_reference_costs_is_taken_from_rewards(where: Any) -> None:
    """Of whole answers before their baseline, or of tokens after it; the rows of one group have
    another reference."""
    step, rows = step_of((2, 1), kl=KlConfig(beta=BETA, where=where), minis=1, epochs=1), Rows()
    starts, ends = np.full(ROWS, 3), np.array([SIZE, SIZE - 2] * PROMPTS)
    place = np.arange(SIZE)
    rows.chosen = (place >= 3) & (place < ends[:, None])
    valid, rewards = np.arange(ROWS) != 7, np.random.default_rng(1).random(ROWS)
    other = tiny_network(Decoder, MODEL, 2)
    finished = step.empty_scored_rollout(ROWS)
    rollout = {"tokens": rows.tokens, "logprobs": rows.sampled, "lengths": ends.astype(np.int32)}
    places = np.arange(rows.tokens.shape[1])
    sampled = (places >= starts[:, None]) & (places < ends[:, None])
    rollout |= {"origin": np.where(sampled, UNDRAFTED, PROMPT).astype(np.int8)}
    rollout = jax.tree.map(jnp.asarray, rollout | {"prompt_lengths": starts.astype(np.int32)})
    finished = finished.replace(
        rollout=finished.rollout.replace(**rollout),
        rewards=jnp.asarray(rewards),
        valid=jnp.asarray(valid),
        plan=rows.on(step).plan,
        learn=jnp.ones((), bool),
    )
    learner = step.learner.init_state(policy(), None, online=False).replace(reference=other)
    state = TrainState(learner=learner, generator=step.generator.init_state())
    batch, metrics = jax.jit(step._build_rewarded_batch)(state, finished)
    mask = rows.chosen & valid[:, None]
    kl = np.where(mask, rows.sampled - np.asarray(logprobs_of(other, rows)), 0)
    mean_kl = kl.sum() / valid.sum()
    assert metrics_to_host(metrics)["reward/kl"] == pytest.approx(mean_kl, abs=1e-11)
    if where == "reward":
        rewards = rewards - BETA * kl.sum(1)
    pairs, there = rewards.reshape(-1, GROUP), valid.reshape(-1, GROUP)
    mean = (pairs * there).sum(1, keepdims=True) / there.sum(1, keepdims=True)
    centred = pairs - mean
    variance = (there * centred**2).sum(1, keepdims=True)  # over 2 - 1
    scale = np.where(variance > 0, np.sqrt(variance) + 1e-6, 1)
    if where == "reward":
        wanted = np.where(there, centred / scale, 0).ravel()
    else:
        to_go = BETA * kl[:, ::-1].cumsum(1)[:, ::-1]
        by_token = (centred.ravel()[:, None] - to_go) / np.repeat(scale, GROUP)[:, None]
        wanted = np.where(mask, by_token, 0)
    np.testing.assert_allclose(batch.advantages, wanted, rtol=0, atol=1e-11)
    assert np.abs(wanted).max() > 0.1
    # each token is learned from by its own
    _, learned = jax.jit(step.learner.learn)(learner, batch)
    gains = wanted if where == "reward_to_go" else wanted[:, None] * mask
    assert metrics_to_host(learned)["loss/policy"] == pytest.approx(
        -gains.sum() / mask.sum(), abs=1e-11
    )


def test_a_constant_counts_all_rows_that_were_asked() -> None:
    """Also the one that has nothing to learn from."""
    loss = LossConfig(**LOSS, aggregation="constant")
    rows = Rows()
    assert not rows.chosen[5].any()
    _, metrics = learnt(step_of((2, 1), loss, KlConfig(), minis=1, epochs=1), policy(), rows)
    gains = rows.advantages[:, None] * rows.chosen
    assert metrics["loss/policy"] == pytest.approx(-gains.sum() / (NEW * ROWS), abs=1e-12)


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.sweep)])
def test_the_reference_is_the_policy_that_training_began_with(rank: int) -> None:
    """Its divergence is 0 before the first update; then the policy leaves it, and it stays."""
    step = step_of(minis=1, epochs=1, rank=rank)
    state, rows = step.learner.init_state(step.add_adapters(policy()), None, online=False), Rows()
    assert (state.reference is None) == (rank > 0)
    learn, found = jax.jit(step.learner.learn), []
    for _ in range(3):
        before = state.reference
        state, metrics = learn(state, rows.on(step))
        found.append(metrics_to_host(metrics)["kl"])
        jax.tree.map(np.testing.assert_array_equal, state.reference, before)
    assert found[0] == pytest.approx(0, abs=1e-20)
    assert min(found[1:]) > 1e-3
