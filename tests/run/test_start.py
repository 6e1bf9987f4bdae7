"""What a restored run has between two calls, by the schedule that goes on with it."""

import dataclasses
from typing import Any

import pytest

from jaxspec.config.settings import EvalConfig, ResolvedConfig, ScheduleConfig
from jaxspec.data.history import AnswerHistory
from jaxspec.inputs.checked import ConfigError
from jaxspec.run.batches import BatchSource
from jaxspec.run.dynamic_batch import PartialBatch
from jaxspec.run.start import adapt_filling, require_complete_batches
from jaxspec.run.state import BatchRecord, GenerationProgress, QueuedBatch, RunState
from jaxspec.state import ScoredRollout, TrainState
from tests.conftest import tiny_config, tiny_model

EVALUATED = {"eval/held_out/avg@4": 0.5}


ROWS, EMPTY_ROWS = object.__new__(ScoredRollout), object.__new__(ScoredRollout)
"""Nothing reads what they hold."""


class Source(BatchSource):
    """A source with an empty batch to fill."""

    def make_progress(self, generated: int = 0) -> GenerationProgress:
        return GenerationProgress(generated, PartialBatch(EMPTY_ROWS))


def config_of(kind: Any, lag: int = 0, **changes: Any) -> ResolvedConfig:
    config = tiny_config(tiny_model(), eval=EvalConfig(every=4), steps=10)
    return dataclasses.replace(config, schedule=ScheduleConfig(kind=kind, lag=lag), **changes)


def run_of(groups: int = 0, batch: int = 4, metrics: dict[str, float] | None = None) -> RunState:
    """A run that has one batch to learn from, and some groups of the next."""
    item = QueuedBatch(ROWS, BatchRecord(batch, dict(metrics or {}), []))
    progress = GenerationProgress(5, PartialBatch(ROWS, groups) if groups else None)
    state, history = object.__new__(TrainState), object.__new__(AnswerHistory)
    return RunState(state, history, [item], batch, progress)


def adapt(config: ResolvedConfig, run: RunState) -> None:
    require_complete_batches(config, run)
    adapt_filling(config, run, object.__new__(Source))


def test_other_schedules_go_on_with_what_was_begun() -> None:
    run = run_of(groups=3)
    adapt(config_of("fused"), run)
    assert run.generation.filling is not None
    assert run.generation.filling.groups == 3
    run = run_of()
    adapt(config_of("staged"), run)
    assert run.generation.filling is not None
    assert run.generation.filling.rows is EMPTY_ROWS


@pytest.mark.parametrize(
    "run",
    [
        run_of(metrics=EVALUATED),
        run_of(batch=5),  # not evaluated
        run_of(batch=9),  # the last, whose weights are evaluated after the update
    ],
)
def test_a_pipelined_run_starts_with_complete_batches(run: RunState) -> None:
    adapt(config_of("pipelined"), run)
    assert run.generation.filling is None


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_of(groups=3, metrics=EVALUATED), "3 groups of a batch that dynamic sampling"),
        (run_of(), "before the evaluation at batch 4 was done"),
    ],
)
def test_a_pipelined_run_refuses_what_is_half_done(run: RunState, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{words}.*resume it with schedule.kind fused"):
        adapt(config_of("pipelined"), run)


@pytest.mark.parametrize("changes", [{"eval": EvalConfig(every=1)}, {"steps": 20}])
def test_what_is_evaluated_from_now_on_refuses_no_pipelined_run(changes: dict[str, Any]) -> None:
    """Its last batch was not to be evaluated when it was made."""
    adapt(config_of("pipelined", lag=1, **changes), run_of(batch=9))
