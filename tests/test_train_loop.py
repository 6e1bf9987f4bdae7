"""What the training loop does between two calls, on states made by hand: what is saved, what is
told, and with what status a run ends."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.settings import EvalConfig
from jaxspec.data.problems import load_sets
from jaxspec.evaluation.evaluator import Evaluator
from jaxspec.host.comparison import SpeedComparison
from jaxspec.host.job import Job, make_job, run_and_report_errors
from jaxspec.metrics.files import MetricsWriter
from jaxspec.models.decoder import Decoder
from jaxspec.rl.optimizers import Diverged
from jaxspec.run import closing
from jaxspec.run.batches import BatchMaker
from jaxspec.run.closing import close_run
from jaxspec.run.evaluations import Evaluations
from jaxspec.run.loop import BatchSource, Host, Loop
from jaxspec.run.reporting import BatchReporter
from jaxspec.run.schedules import StepSchedule
from jaxspec.run.start import empty_history
from jaxspec.run.state import (
    BatchRecord,
    CheckpointSaver,
    GenerationProgress,
    QueuedBatch,
    RunState,
)
from jaxspec.state import TrainState
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress
from jaxspec.system.trace import Profiler
from tests.conftest import eagle3, small_mesh, tiny_config, tiny_model, tiny_network, with_weights
from tests.host.batches import batches_of

NAN = float("nan")
MODEL = tiny_model(vocab=24, dtype="float32")


@pytest.fixture(scope="module")
def job() -> Job:
    return make_job(
        tiny_config(MODEL, steps=4, save_every=1, eval=EvalConfig(every=1)), small_mesh(4, 2)
    )


@pytest.fixture(scope="module")
def state(job: Job) -> TrainState:
    """A sound one."""
    state = jax.jit(job.step.init_state)(
        tiny_network(Decoder, MODEL, 1), tiny_network(eagle3, MODEL, 2)
    )
    return jax.device_put(state, job.step.state_shardings())


def spoiled(job: Job, state: TrainState, name: str, how: str) -> TrainState:
    """A state whose policy or draft has skipped its last update, or has one weight or one moment
    that is not finite, on some device."""
    trained = getattr(state.learner, name)
    if how == "skipped":
        trained = trained.replace(skipped_in_row=jnp.int32(1))
    elif how == "weight":
        query = (trained.network.layers if name == "policy" else trained.network.first).query[...]
        trained = trained.replace(
            network=with_weights(trained.network, query=query.at[0, -1, -1, -1].set(jnp.inf))
        )
    else:
        trained = trained.replace(
            optimizer=jax.tree.map(
                lambda leaf: leaf.at[(-1,) * leaf.ndim].set(NAN) if leaf.ndim > 2 else leaf,
                trained.optimizer,
            )
        )
    return jax.device_put(
        state.replace(learner=state.learner.replace(**{name: trained})), job.step.state_shardings()
    )


class Asked(Interrupt):
    """An interrupt that came or did not; it watches for no signal."""

    def __init__(self, came: bool) -> None:
        super().__init__()
        self._stop_requested = came


def never(*_: Any) -> Any:
    raise AssertionError("nothing is generated here")


def loop_of(job: Job, folder: Path, asked: bool = False) -> Loop:
    progress = Progress("rl", job.config.steps)
    profiler = Profiler(range(0), folder / "trace", (), print)
    source, scorer, planner = batches_of(job, load_sets(job.config, job.tokenizer))
    evaluator = Evaluator(source, scorer, job.config, job.config.batch.group_size)
    evaluations, checkpoints = (
        Evaluations(job.config, evaluator, never, folder, job.say),
        Checkpoints(folder / "checkpoints"),
    )
    saver = CheckpointSaver(job.step, checkpoints, progress.print_line)
    reporter = BatchReporter(job.config, job.step, MetricsWriter(folder, 0), progress)
    batches = BatchSource(source, scorer, BatchMaker(job.config, scorer, None), planner)
    host = Host(batches, evaluations, saver, reporter, profiler)
    return Loop(job.config, StepSchedule(never, {}), Asked(asked), host)


def position_of(job: Job, state: TrainState, batch: int) -> RunState:
    """A run in which so many batches are generated, and the last one waits for its update."""
    record = BatchRecord(batch - 1, {"loss/policy": NAN, "eval/held_out/avg@8": 0.5}, [])
    queue = [QueuedBatch(job.step.empty_scored_rollout(16), record)]
    history = empty_history(job.config)
    return RunState(state, history, queue, batch - 1, GenerationProgress(batch))


def record_of(line: dict[str, Any]) -> BatchRecord:
    metrics = {name: value for name, value in line.items() if name != "step"}
    return BatchRecord(line["step"], metrics, [])


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("policy", "skipped", "the policy's last update was skipped"),
        ("draft", "skipped", "the draft's last update was skipped"),
        ("policy", "weight", "the policy's weights or moments are not finite"),
        pytest.param(
            *("draft", "weight", "the draft's weights or moments are not finite"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("policy", "moment", "the policy's weights or moments are not finite"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_nothing_to_go_on_from_is_not_saved(
    job: Job,
    state: TrainState,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    how: str,
    words: str,
) -> None:
    """A stop in that state leaves the checkpoint before it the newest, and says so; a sound state
    is saved again."""
    loop = loop_of(job, tmp_path, asked=True)
    assert not loop.run_to_end(position_of(job, state, 1))
    assert (loop.host.saver.checkpoints.latest_step(), loop.host.saver.unsaved) == (1, "")
    assert not loop.run_to_end(position_of(job, spoiled(job, state, name, how), 2))
    told = capsys.readouterr().out
    assert words in told
    assert words in loop.host.saver.unsaved
    assert "checkpoint 3 is not saved" in told
    assert "checkpoint 1 stays the newest" in told
    loop.host.saver.checkpoints.wait_until_saved()
    assert [
        entry.name for entry in (tmp_path / "checkpoints").iterdir() if entry.name.isdigit()
    ] == ["1"]
    if how == "skipped":
        loop.host.saver.save(position_of(job, state, 3))
        assert (loop.host.saver.checkpoints.latest_step(), loop.host.saver.unsaved) == (5, "")
    loop.host.saver.checkpoints.close()


def test_a_batch_without_a_number_is_saved_and_comes_back_as_one(
    job: Job, state: TrainState, tmp_path: Path
) -> None:
    loop = loop_of(job, tmp_path)
    loop.host.saver.save(position_of(job, state, 1))
    saved = state, (job.step.empty_scored_rollout(16).replace(plan=None),)
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), saved
    )
    host = loop.host.saver.checkpoints.restore(1, like).host_state
    assert np.isnan(host["queue"][0]["metrics"]["loss/policy"])
    loop.host.saver.checkpoints.close()


def a_line(step: int, **changes: float) -> dict[str, Any]:
    ended = {"status/eos": 12.0, "status/length": 4.0, "status/failed": 0.0}
    ended |= {"skipped_in_row/policy": 0.0, "skipped_in_row/draft": 0.0}
    rates = {"rollout/acceptance_length": 2.0, "rollout/tokens": 100.0}
    return {"step": step, "time/step": 1.0, "reward/mean": 0.5, **ended, **rates, **changes}


def all_failed(step: int, **changes: float) -> dict[str, Any]:
    ended = {"status/eos": 0.0, "status/length": 0.0, "status/failed": 16.0}
    line = a_line(step, **ended, **changes)
    del line["reward/mean"]
    return line


def test_failed_rows_are_told_as_they_come(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = loop_of(job, tmp_path)
    loop.host.reporter.report_batch(record_of(a_line(0)))
    loop.host.reporter.report_batch(
        record_of(a_line(1, **{"status/eos": 11.0, "status/failed": 1.0}))
    )
    loop.host.reporter.report_batch(
        record_of(all_failed(2, **{"skipped/policy": 2.0, "skipped_in_row/policy": 2.0}))
    )
    first, second, third = capsys.readouterr().out.splitlines()
    assert "failed" not in first
    assert "reward 0.5" in second
    assert "failed 1" in second
    assert "reward none" in third
    assert "failed 16" in third
    with pytest.raises(
        Diverged,
        match=(
            r"policy's .* 3 updates in a row, the last after batch 3\. None of its rows has a"
            r" reward\."
        ),
    ):
        loop.host.reporter.report_batch(
            record_of(all_failed(3, **{"skipped/policy": 3.0, "skipped_in_row/policy": 3.0}))
        )


def test_a_draft_that_is_suddenly_accepted_less_is_told_with_what_to_look_at(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = loop_of(job, tmp_path)
    for step, length in enumerate((3.0, 2.2, 1.5, 1.4)):
        loop.host.reporter.report_batch(
            record_of(a_line(step, **{"rollout/acceptance_length": length}))
        )
    told = [
        line for line in capsys.readouterr().out.splitlines() if "acceptance_length fell" in line
    ]
    assert len(told) == 1
    for words in ("batch 2", "2.20 to 1.50", "draft_training.alarm 0.3", "loss/draft"):
        assert words in told[0]


def test_recorded_logprobs_that_are_far_off_are_told_once_where_they_are_reused(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = dataclasses.replace(job.config.batch, epochs=2)
    twice = make_job(dataclasses.replace(job.config, batch=batch), job.mesh)
    name = "rollout/probability_factor"

    def told(made: Job, folder: str) -> list[str]:
        (tmp_path / folder).mkdir()
        loop = loop_of(made, tmp_path / folder)
        for step, (factor, recompute) in enumerate(((1.01, 0), (1.2, 0), (1.2, 1))):
            loop.host.reporter.report_batch(
                record_of(a_line(step, **{name: factor, "learner/recompute": recompute}))
            )
        printed = capsys.readouterr().out.splitlines()
        return [line for line in printed if "by a factor of" in line]

    assert told(job, "once") == []
    loop = loop_of(twice, tmp_path)
    loop.host.reporter.report_batch(record_of(a_line(0, **{name: NAN, "learner/recompute": 0})))
    assert "by a factor of" not in capsys.readouterr().out
    (line,) = told(twice, "twice")
    assert "batch 1" in line
    assert "1.2 on average, which is above loss.reuse_below 1.05" in line


def test_rewards_that_stay_equal_are_told_also_across_a_resume(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = {"reward/mean": 0.0, "reward/std": 0.0, "reward/frac_zero_std": 1.0}
    loop = loop_of(job, tmp_path)
    for step in range(7):
        loop.host.reporter.report_batch(record_of(a_line(step, **equal)))
    assert "all rewards are 0" not in capsys.readouterr().out
    resumed = loop_of(job, tmp_path)
    for step in range(7, 11):
        resumed.host.reporter.report_batch(record_of(a_line(step, **equal)))
    told = [line for line in capsys.readouterr().out.splitlines() if "all rewards are 0" in line]
    assert len(told) == 1
    assert told[0].startswith("warning: batches 0 to 9: all rewards are 0")


def test_the_closing_table_says_that_the_run_could_not_learn(
    job: Job, state: TrainState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = dataclasses.replace(job.config.optimizer, learning_rate=1e-12)
    config = dataclasses.replace(job.config, optimizer=tiny, compare_plain=False)
    batches = batches_of(job, load_sets(job.config, job.tokenizer))
    equal = {"reward/mean": 0.0, "reward/std": 0.0}
    with MetricsWriter(tmp_path, 0) as writer:
        for step in range(4):
            writer.write_record(a_line(step, **equal))
    run = position_of(job, state, 4)
    close_run(config, job.step, batches.source, run, tmp_path, job.say)
    table = " ".join(capsys.readouterr().out.split())
    assert "cannot learn batches 0 to 3: the learning rate is at most" in table
    assert "cannot learn batches 0 to 3: all rewards are 0" in table


@pytest.mark.parametrize(
    ("last", "unsaved", "words"),
    [
        (a_line(3, **{"eval/held_out/avg@8": 0.5}), "", []),
        (
            all_failed(3, **{"eval/held_out/avg@8": 0.5}),
            "",
            ["last batch, 3, has no reward: 16 of its 16 rows failed"],
        ),
        (
            a_line(3, **{"eval/held_out/avg@8": NAN}),
            "",
            ["the last evaluation has no held_out/avg@8"],
        ),
        (all_failed(3, **{"eval/held_out/avg@8": NAN}), "", ["last batch, 3,", "last evaluation"]),
        (
            a_line(3, **{"eval/held_out/avg@8": 0.5}),
            "the draft's weights or moments are not finite",
            ["end of the run is not saved", "the draft's weights"],
        ),
    ],
)
def test_a_run_without_a_result_ends_as_one(
    job: Job,
    state: TrainState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    last: dict[str, Any],
    unsaved: str,
    words: list[str],
) -> None:
    """The table comes first, then why, in one line; and so it is when the same command is run
    again."""
    monkeypatch.setattr(
        closing, "compare_decoding", lambda *_: SpeedComparison(16, 2.0, 1.0, 1.0, 1.0, 1.0)
    )
    with MetricsWriter(tmp_path, 0) as writer:
        for line in (a_line(0, **{"eval/held_out/avg@8": 0.25}), a_line(1), a_line(2), last):
            writer.write_record(line)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
    batches = batches_of(job, load_sets(job.config, job.tokenizer))
    for _ in range(2):
        run = position_of(job, state, 4)
        close = functools.partial(
            close_run, job.config, job.step, batches.source, run, tmp_path, job.say, unsaved
        )
        status = run_and_report_errors(close)
        told = capsys.readouterr()
        assert "4 batches" in told.out
        assert status == (1 if words else 0)
        assert len(told.err.splitlines()) == bool(words)
        assert all(word in told.err for word in words)
