"""A run that goes on elsewhere chooses its draft lengths by that machine's costs."""

import contextlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.settings import (
    Config,
    DraftConfig,
    DynamicSamplingConfig,
    ResolvedConfig,
    RolloutConfig,
)
from jaxspec.data.problems import load_sets
from jaxspec.host.job import Job, make_job
from jaxspec.inputs.checked import ConfigError
from jaxspec.models.decoder import Decoder
from jaxspec.processes.devices import describe_machine
from jaxspec.run import start
from jaxspec.run.dynamic_batch import PartialBatch
from jaxspec.run.stalls import make_stall_watch
from jaxspec.run.start import adapt_run
from jaxspec.run.state import BatchRecord, GenerationProgress, QueuedBatch, RunState, restore_run
from jaxspec.state import LengthChooser, TrainState
from jaxspec.storage.checkpoint import Checkpoints
from tests.conftest import eagle3, small_mesh, tiny_config, tiny_model, tiny_network
from tests.host.batches import batches_of

MODEL = tiny_model(vocab=24, dtype="float32")


@pytest.fixture(scope="module")
def job() -> Job:
    rollout = RolloutConfig(draft=DraftConfig(draft_length="auto"))
    return make_job(tiny_config(MODEL, rollout=rollout, steps=4), small_mesh(1))


def chooser_of(state: TrainState) -> LengthChooser:
    assert isinstance(state.generator.chooser, LengthChooser)
    return state.generator.chooser


def never(*_: Any) -> Any:
    raise AssertionError("nothing is generated here")


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
    monkeypatch.setattr(start, "fill_length_chooser", lambda step, state, _: with_costs(state, 7.0))
    policy, draft = tiny_network(Decoder, MODEL, 1), tiny_network(eagle3, MODEL, 2)
    state = with_costs(jax.jit(job.step.init_state)(policy, draft), 2.0)
    state = jax.device_put(state, job.step.state_shardings())
    seen = np.asarray(chooser_of(state).acceptance.accepted)
    here = describe_machine(job.mesh)
    batches = batches_of(job, load_sets(job.config, job.tokenizer))
    history = batches.source.history
    run = RunState(state, history, learned=3, generation=GenerationProgress(3), timed_on=here)
    if elsewhere:
        run.timed_on = here | {"cores": 9999}
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(run.checkpoint_number, *run.to_checkpoint())
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        resumed = restore_run(job.step, job.config.batch.prompts, checkpoints, history)
    assert resumed is not None
    timed: list[bool] = []
    adapt_run(job.step, resumed, batches.source, lambda: timed.append(True), job.say)
    assert timed == [True] * elsewhere
    assert resumed.timed_on == resumed.machine == here
    known = chooser_of(resumed.state)
    np.testing.assert_array_equal(known.round_cost, 7.0 if elsewhere else 2.0)
    # what the run has seen of its draft counts on
    np.testing.assert_array_equal(known.acceptance.accepted, seen)
    assert ("another machine or mesh" in capsys.readouterr().out) == elsewhere


def test_a_learning_rate_that_is_chosen_is_watched() -> None:
    """Of `auto`, which is that of what is trained."""
    assert make_stall_watch(ResolvedConfig.from_config(Config()), []).lasting_signs() == []


def test_checkpoints_of_another_format_are_refused(job: Job, tmp_path: Path) -> None:
    history = batches_of(job, load_sets(job.config, job.tokenizer)).source.history
    state = jax.device_put(jax.jit(job.step.init_random_state)(), job.step.state_shardings())
    arrays, host, local = RunState(state, history).to_checkpoint()
    for number in (None, 3):
        folder = tmp_path / str(number)
        other = {name: value for name, value in host.items() if name != "format"}
        other |= {} if number is None else {"format": number}
        with contextlib.closing(Checkpoints(folder)) as checkpoints:
            checkpoints.save(0, arrays, other, local)
        with (
            contextlib.closing(Checkpoints(folder)) as checkpoints,
            pytest.raises(ConfigError, match=rf"have format {number or 1}, .* reads format 2"),
        ):
            restore_run(job.step, job.config.batch.prompts, checkpoints, history)


def test_metrics_of_queued_batches_survive_a_resume(tmp_path: Path) -> None:
    """NaN too, which means that something diverged."""
    config = tiny_config(MODEL, steps=4, dynamic_sampling=DynamicSamplingConfig(max_batches=2))
    job = make_job(config, small_mesh(1))
    batches = batches_of(job, load_sets(job.config, job.tokenizer))
    source, rows = batches.source, batches.planner.empty_rollout()
    state = jax.device_put(jax.jit(job.step.init_random_state)(), job.step.state_shardings())
    metrics = {"reward/mean": float("nan"), "rollout/tokens": 12}
    run = RunState(
        state,
        source.history,
        queue=[QueuedBatch(rows, BatchRecord(0, dict(metrics), []))],
        generation=GenerationProgress(
            2, PartialBatch(rows.replace(plan=None), 1, [dict(metrics), {"reward/mean": 0.5}])
        ),
    )
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(run.checkpoint_number, *run.to_checkpoint())
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        resumed = restore_run(job.step, job.config.batch.prompts, checkpoints, source.history)
    assert resumed is not None
    assert resumed.generation.filling is not None
    np.testing.assert_equal([item.record.metrics for item in resumed.queue], [metrics])
    assert resumed.generation.filling.groups == 1
    np.testing.assert_equal(resumed.generation.filling.metrics, [metrics, {"reward/mean": 0.5}])
