"""A run that goes on elsewhere chooses its draft lengths by that machine's costs."""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import mesh as meshes
from jaxspec.config.settings import Config, DraftConfig, ResolvedConfig, RolloutConfig
from jaxspec.data.problems import load_sets
from jaxspec.host import run_state
from jaxspec.host.batches import Batches
from jaxspec.host.job import Job, make_job
from jaxspec.host.run_state import RunState
from jaxspec.models.decoder import Decoder
from jaxspec.state import LengthChooser, TrainState
from jaxspec.storage.checkpoint import Checkpoints
from tests.conftest import eagle3, small_mesh, tiny_config, tiny_model, tiny_network

MODEL = tiny_model(vocab=24, dtype="float32")


@pytest.fixture(scope="module")
def job() -> Job:
    rollout = RolloutConfig(draft=DraftConfig(draft_length="auto"))
    return make_job(tiny_config(MODEL, rollout=rollout, steps=4), small_mesh(1))


def chooser_of(state: TrainState) -> LengthChooser:
    assert state.generator.chooser is not None
    return state.generator.chooser


def with_costs(state: TrainState, cost: float) -> TrainState:
    chooser = chooser_of(state)
    chooser = chooser.replace(round_cost=jnp.full_like(chooser.round_cost, cost))
    acceptance = chooser.acceptance.replace(
        accepted=chooser.acceptance.accepted + jnp.float32(cost)
    )
    chooser = chooser.replace(acceptance=acceptance)
    return state.replace(generator=state.generator.replace(chooser=chooser))


@pytest.mark.parametrize("elsewhere", [True, False])
def test_costs_of_rounds_are_those_of_the_machine(
    job: Job,
    elsewhere: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_state, "with_chooser", lambda step, state, _: with_costs(state, 7.0))
    policy, draft = tiny_network(Decoder, MODEL, 1), tiny_network(eagle3, MODEL, 2)
    state = with_costs(jax.jit(job.step.start)(policy, draft), 2.0)
    state = jax.device_put(state, job.step.state_shardings())
    seen = np.asarray(chooser_of(state).acceptance.accepted)
    here = meshes.machine(job.mesh)
    run = RunState(state, job.step.nothing_finished(16), batch=3, rollouts=3, timed_on=here)
    if elsewhere:
        run.timed_on = here | {"cores": 9999}
    batches = Batches(job, load_sets(job.config, job.tokenizer))
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(run.number, *run.to_save(batches.history))
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        resumed = run_state.resume(job, checkpoints, batches)
    assert resumed is not None
    assert resumed.timed_on == resumed.here == here
    known = chooser_of(resumed.state)
    np.testing.assert_array_equal(known.round_cost, 7.0 if elsewhere else 2.0)
    # what the run has seen of its draft counts on
    np.testing.assert_array_equal(known.acceptance.accepted, seen)
    assert ("another machine or mesh" in capsys.readouterr().out) == elsewhere


def test_a_learning_rate_that_is_chosen_is_watched() -> None:
    """Of `auto`, which is that of what is trained."""
    assert run_state.stall_watch(ResolvedConfig.of(Config()), []).summary() == []
