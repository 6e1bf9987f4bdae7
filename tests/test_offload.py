"""Moments in host memory: the same training in every bit, saved and resumed alike, and no bytes of
a device."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec import build
from jaxspec.build import build_step
from jaxspec.host import memory
from jaxspec.host.programs import abstract_arguments
from jaxspec.inputs.checked import ConfigError
from jaxspec.mesh import row_sharding
from jaxspec.metrics.mean import metrics_to_host
from jaxspec.rl import optimizers
from jaxspec.step import HOST_MEMORY, Step
from jaxspec.storage.checkpoint import Checkpoints
from tests.conftest import small_mesh
from tests.whole_step import (
    MODEL,
    PROMPTS,
    STOP,
    TOKENS,
    Program,
    config_of,
    finish,
    host,
    nothing_finished,
    prompts_of,
    score,
    start,
)

pytestmark = pytest.mark.usefixtures("x64")


def made(offload: bool, data: int = 2) -> Program:
    config = config_of(shard_above=0)
    config = dataclasses.replace(
        config,
        batch=dataclasses.replace(config.batch, micro_tokens=TOKENS),
        optimizer=dataclasses.replace(config.optimizer, offload=offload),
    )
    built = build_step(config, small_mesh(data, 1), STOP, MODEL.vocab)
    layout = built.state_shardings(), row_sharding(built.learner.mesh), None, None
    return Program(built, jax.jit(built.train_step, out_shardings=layout, donate_argnums=0), [])


def kinds(state: Any) -> set[str]:
    return {
        leaf.sharding.memory_kind
        for leaf in jax.tree.leaves(state.learner.policy.optimizer)
        if leaf.ndim
    }


def spoilt(given: Step, rollout: Any) -> Any:
    """A batch whose loss is no number."""
    rows = len(rollout.lengths)
    return finish(given, rollout, np.full(rows, np.nan), np.ones(rows, bool))


def trained(made: Program, folder: Path) -> list[Any]:
    """The states after calls that learn nothing, learn, are skipped, and learn again from a
    checkpoint; and their metrics."""
    given, seen = made.step, []
    state, finished = start(given), nothing_finished(given)
    for batch in range(5):
        state, rollout, learnt, _ = made.call(state, finished, prompts_of(given, batch))
        assert kinds(state) == {HOST_MEMORY if given.offloads_moments else "device"}
        seen.append((host(state), metrics_to_host(learnt)))
        finished = spoilt(given, host(rollout)) if batch == 1 else score(given, rollout, batch)
        if batch == 3:
            shapes = abstract_arguments(given, PROMPTS)[0]
            with contextlib.closing(Checkpoints(folder)) as checkpoints:
                checkpoints.save(1, state, {})
                checkpoints.wait_until_saved()
                state = checkpoints.restore(1, shapes)[0]
            assert kinds(state) == {HOST_MEMORY if given.offloads_moments else "device"}
    return seen


@pytest.mark.slow
def test_training_is_the_same_in_every_bit(tmp_path: Path) -> None:
    plain, offloaded = (
        trained(made(offload, 1), tmp_path / str(offload)) for offload in (False, True)
    )
    jax.tree.map(np.testing.assert_array_equal, offloaded, plain)
    assert plain[0][1] == {}, "the first call has no batch"
    skipped = [metrics["skipped/policy"] for _, metrics in plain[1:]]
    assert skipped == [0, 1, 1, 1], "the third call's batch has no loss"
    moments = [jax.tree.leaves(state.learner.policy.optimizer) for state, _ in plain]
    assert any(np.any(last != first) for last, first in zip(moments[-1], moments[1], strict=True))


def test_no_device_has_them_and_they_are_looked_at_there() -> None:
    parts = [
        {
            part.name: part.size
            for part in memory.list_memory_uses(made(offload, 1).step, PROMPTS, {})
        }["the policy's optimizer"]
        for offload in (False, True)
    ]
    assert parts[0] > 1000 * parts[1]
    state = start(made(True).step)
    assert int(jax.jit(optimizers.assess_condition)(state.learner.policy)) == optimizers.SOUND


def test_a_backend_without_such_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "HOST_MEMORY", "moon")
    with pytest.raises(
        ConfigError, match=r"optimizer.offload .* of kind moon, .* only device.*; leave it out"
    ):
        made(True)
