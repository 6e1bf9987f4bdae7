"""What the two sides of a pipelined run sample, against enumeration of the version that sampled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.config.settings import BatchConfig, OptimizerConfig
from jaxspec.mesh import make_mesh, replicated_sharding, row_sharding
from jaxspec.models.decoder import Decoder
from jaxspec.rl.train_batch import plan_shardings
from jaxspec.run.pipelined.programs import PipelinedSchedule, compile_pipelined_schedule
from jaxspec.run.pipelined.queue import BatchPlan
from jaxspec.state import Prompts, Rollout, ScoredRollout
from jaxspec.step import Step
from tests.conftest import no_history, tiny_model
from tests.rollout.harness import numpy_processed
from tests.rollout.laws import law_p_value, sequence_law
from tests.twins import numpy_decoder
from tests.whole_step import GROUP, STOP, WIDTH, config_of, host, start

pytestmark = pytest.mark.usefixtures("x64")

VOCAB, NEW, PROMPTS, BATCHES, LAG = 6, 4, 2048, 4, 1
TEXTS = (2, 0, 4), (3, 3)


def split_step(learners: int, generators: int) -> Step:
    """A step whose generator has devices of its own, and which learns fast."""
    config = config_of("token", max_new_tokens=NEW, model=tiny_model(vocab=VOCAB, kv_heads=4))
    config = dataclasses.replace(
        config,
        batch=BatchConfig(micro_tokens=8192, prompts=PROMPTS, group_size=GROUP),
        optimizer=OptimizerConfig(learning_rate=0.05, warmup_steps=0),
    )
    devices = jax.devices()
    step, other = (
        build_step(config, make_mesh(count, devices=devices[first:]), STOP, VOCAB)
        for first, count in ((0, learners), (learners, generators))
    )
    return dataclasses.replace(step, generator=other.generator)


def prompts_of(step: Step, batch: int) -> Prompts:
    texts = [[*text, 0, 0, 0][:WIDTH] for text in TEXTS] * (PROMPTS // 2)
    lengths = [len(text) for text in TEXTS] * (PROMPTS // 2)
    prompts = Prompts(
        tokens=jnp.asarray(texts, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        live=jnp.ones(PROMPTS, bool),
        stream=jnp.int32(0),
        batch=jnp.int32(batch),
        **no_history(PROMPTS, WIDTH + NEW),
    )
    mesh = step.generator.mesh
    by_row, everywhere = row_sharding(mesh), replicated_sharding(mesh)
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, by_row if np.ndim(leaf) else everywhere), prompts
    )


def score(step: Step, schedule: PipelinedSchedule, rollout: Rollout) -> ScoredRollout:
    """Rewards the first token 2, and moves the batch to the learner."""
    mesh = step.generator.mesh
    first = np.take_along_axis(
        np.asarray(rollout.tokens), np.asarray(rollout.prompt_lengths)[:, None], 1
    )[:, 0]
    scored: Any = step.empty_scored_rollout(len(first)).replace(
        rollout=rollout,
        rewards=jax.device_put((first == 2).astype(np.float32), row_sharding(mesh)),
        valid=jax.device_put(np.ones(len(first), bool), row_sharding(mesh)),
        learn=jax.device_put(np.asarray(True), replicated_sharding(mesh)),
        plan=None,
    )
    received = schedule.send_batch(schedule.pack_batch(scored))
    plan: Any = step.plan_batch((np.asarray(rollout.lengths) - 1).astype(np.int32))
    return received.replace(plan=jax.device_put(plan, plan_shardings(step.learner.mesh)))


def p_value(rollout: Rollout, policy: Decoder, processing: Any, number: int) -> float:
    """Of the answers to a text, under the law of a policy."""
    rows = np.flatnonzero(np.arange(len(rollout.status)) // GROUP % 2 == number)
    return law_p_value(rollout, rows, sequence_law(policy, [*TEXTS[number]], processing, NEW))


@pytest.mark.parametrize(
    ("learners", "generators"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow),
        *(pytest.param(*sizes, marks=pytest.mark.sweep) for sizes in ((2, 2), (1, 2), (4, 1))),
    ],
)
def test_rows_have_the_law_of_the_version_that_their_lag_names(
    learners: int, generators: int
) -> None:
    step = split_step(learners, generators)
    schedule = compile_pipelined_schedule(step, PROMPTS, LAG, slice_rounds=1)
    processing = step.generator.settings.processing
    state, policies, waiting = start(step), [], []
    plan = BatchPlan(LAG, 0, 0, BATCHES)
    for version in range(BATCHES):
        policies.append(host(state.learner.policy.network))
        published = schedule.weight_link.move(schedule.pack_weights(state))
        # The generator is ahead of the learner by the lag.
        for batch in range(BATCHES):
            if plan.find_version(batch) == version:
                weights = schedule.load(published)
                rollout = schedule.generate(weights, prompts_of(step, batch), lambda _: False)
                assert rollout is not None
                waiting.append((version, host(rollout), score(step, schedule, rollout)))
        made_by, rollout, scored = waiting.pop(0)
        assert made_by == max(version - LAG, 0)
        total = jax.tree.map(lambda leaf: leaf.sum(0), rollout.statistics)
        assert 0.02 < total.accepted[0] / total.draft_rounds[0] < 0.98
        for number in range(len(TEXTS)):
            assert p_value(rollout, policies[made_by], processing, number) > 1e-3
            # The test would notice another version.
            if version > made_by:
                assert p_value(rollout, policies[version], processing, number) < 1e-6
        for row in range(0, len(rollout.status), 97):
            first, end = rollout.prompt_lengths[row], rollout.lengths[row]
            logits = numpy_decoder(policies[made_by], rollout.tokens[row, :end])[0]
            wanted = [
                np.log(numpy_processed(logits[at - 1], processing, at - first))[
                    rollout.tokens[row, at]
                ]
                for at in range(first, end)
            ]
            np.testing.assert_allclose(rollout.logprobs[row, first:end], wanted, rtol=0, atol=1e-9)
        state, metrics = schedule.learn(state, scored)
        assert int(metrics["learner/lag"].total) == version - made_by
