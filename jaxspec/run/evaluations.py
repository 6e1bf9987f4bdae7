"""Evaluations during a run, and its best checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from jaxspec.config.as_json import to_json
from jaxspec.config.settings import ResolvedConfig
from jaxspec.evaluation.evaluator import (
    Evaluator,
    PolicyAnswerer,
    estimates_to_metrics,
    has_evaluation,
)
from jaxspec.evaluation.program import (
    WeightSource,
    compile_evaluator,
    list_differing_settings,
    samples_per_problem,
)
from jaxspec.evaluation.records import RecordFile
from jaxspec.host.job import Job
from jaxspec.host.starts import BEST
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import join_names, read_json
from jaxspec.processes.process_0 import check_in_process_0
from jaxspec.rewards.scorer import SetScorers
from jaxspec.run.batches import BatchPlanner, BatchSource
from jaxspec.run.schedules import StepSchedule
from jaxspec.run.state import RunState
from jaxspec.state import Prompts, PyTree, Rollout, TrainState
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system.files import write_text_atomic
from jaxspec.system.terminal import LinePrinter


@runtime_checkable
class StateAnswerer(Protocol):
    """Answers prompts by the policy of `state`. A call may donate the state and replace it."""

    state: Any
    """State of training, or exported weights if the learner has other devices."""

    def __call__(self, prompts: Prompts) -> Rollout:
        """Answers every prompt."""
        ...


@dataclasses.dataclass
class StepAnswerer:
    """Answers prompts with the run's own step program."""

    schedule: StepSchedule
    planner: BatchPlanner
    state: TrainState

    def __call__(self, prompts: Prompts) -> Rollout:
        """Answers every prompt."""
        # An empty rollout has nothing to learn, so the call only generates. Each call gets a new
        # one, which it may donate.
        result = self.schedule(self.state, self.planner.empty_rollout(), prompts, lambda _: False)
        assert result.rollout is not None, "an evaluation call is never interrupted"
        self.state = result.state
        return result.rollout


@dataclasses.dataclass
class WeightsAnswerer:
    """Answers prompts by a program of evaluations, and leaves the state as it is."""

    answer_prompts: PolicyAnswerer
    state: Any

    def __call__(self, prompts: Prompts) -> Rollout:
        """Answers every prompt."""
        return self.answer_prompts(prompts)


BEST_FILE = "best.json"
"""File with the settings of evaluations, and the value of the best checkpoint by its number."""


class Evaluations:
    """Evaluates the policy of a run.

    Keeps the checkpoint with the highest metric `eval.keep_best`, if that names one.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        evaluator: Evaluator,
        bind: Callable[[Any], StateAnswerer],
        folder: Path,
        say: LinePrinter,
    ) -> None:
        """Opens the evaluations of the run in `folder`. `bind` gives a state's answerer.

        Raises:
          ConfigError: `eval.keep_best` is no metric of evaluations, or the best checkpoint was
            chosen by other settings.
        """
        self._evaluator, self._bind = evaluator, bind
        self._folder, self._metric = folder, config.eval.keep_best
        self._records = RecordFile(folder, jax.process_index())
        evaluator.require_metric(self._metric)
        settings = to_json(config)["eval"]
        # How often a policy is evaluated does not change the value.
        self._settings = {name: value for name, value in settings.items() if name != "every"}
        if self._metric:
            check_in_process_0(self._require_same_settings)
        self._best = Checkpoints(folder / BEST, keep=1, log=say) if self._metric else None
        self._values = self._read_best_value()

    def _require_same_settings(self) -> None:
        """Refuses a checkpoint that was best by other settings.

        Raises:
          ConfigError: the settings of evaluations have changed.
        """
        file = self._folder / BEST_FILE
        saved_settings = read_json(file).get("eval") if file.exists() else self._settings
        require(
            saved_settings == self._settings,
            f"the checkpoint in {self._folder / BEST} was the best by other settings of eval, which"
            f" are in {file}; set these back, or move both away",
        )

    def _read_best_value(self) -> dict[str, float]:
        """Reads the best checkpoint's value, by its number. Returns no value without one."""
        # The file is written before a checkpoint, which may then fail to be saved. So it also has
        # the values of earlier ones.
        if self._best is None or self._best.latest_step() is None:
            return {}
        newest, file = str(self._best.latest_step()), self._folder / BEST_FILE
        values = read_json(file).get("values", {}) if file.exists() else {}
        return {number: value for number, value in values.items() if number == newest}

    def truncate_records(self, run: RunState) -> None:
        """Drops records of batches that will be evaluated again."""
        self.truncate_records_from(count_evaluated(run))

    def truncate_records_from(self, batch: int) -> None:
        """Drops records of a batch and later ones."""
        self._records.truncate_from(batch)

    def __call__(
        self, state: Any, step: int, stop: Callable[[], bool]
    ) -> tuple[Any, dict[str, float]]:
        """Evaluates the policy.

        Answers are written down under the number `step`. Donates `state` or returns it as it is.
        Also returns the metrics, which are empty if `stop` returned true.
        """
        answerer = self._bind(state)
        records = self._evaluator(answerer, stop)
        if records is None:
            return answerer.state, {}
        self._records.append_records(step, records)
        return answerer.state, estimates_to_metrics(self._evaluator.estimate_sets(records))

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Returns whether metrics beat the best checkpoint. Without `eval.keep_best`, none do."""
        value = metrics.get(f"eval/{self._metric}")
        return value is not None and value > max(self._values.values(), default=float("-inf"))

    def save_best(
        self,
        checkpoint_number: int,
        arrays: PyTree,
        host_state: dict[str, Any],
        process_state: dict[str, Any] | None,
        metrics: dict[str, float],
    ) -> None:
        """Starts to save the best checkpoint, like `Checkpoints.save`."""
        assert self._best is not None, "only a metric makes a checkpoint the best"
        self._values[str(checkpoint_number)] = metrics[f"eval/{self._metric}"]
        if jax.process_index() == 0:
            values = {"eval": self._settings, "values": self._values}
            write_text_atomic(self._folder / BEST_FILE, json.dumps(values, indent=2) + "\n")
        self._best.save(checkpoint_number, arrays, host_state, process_state)

    def close(self) -> None:
        """Waits until the best checkpoint is saved."""
        if self._best is not None:
            self._best.close()


class AnswerMethods(NamedTuple):
    """Two ways to answer the prompts of evaluations."""

    bind: Callable[[Any], StateAnswerer]
    """Returns an answerer that uses the program of the run's step."""
    source: WeightSource
    """Source of the weights for a program of evaluations."""
    is_local: bool = True
    """Whether this process answers. If not, others evaluate."""


@contextlib.contextmanager
def open_evaluations(
    job: Job,
    batches: BatchSource,
    scorers: SetScorers,
    methods: AnswerMethods,
    folder: Path,
) -> Iterator[Evaluations]:
    """Opens the evaluations of a run until the context ends.

    They use the program of the run's step, unless their settings need another one.

    Raises:
      ConfigError: that program does not fit the devices, `eval.keep_best` is no metric, or the best
        checkpoint was chosen by other settings.
    """
    source, scorer = batches.prompts, batches.scorer
    other_settings = list_differing_settings(job.config)
    if other_settings and methods.is_local:
        job.say(f"compiling one more program for evaluations: {join_names(other_settings)}")
        evaluator, program = compile_evaluator(
            job.config,
            job.step,
            job.tokenizer,
            source.sets,
            scorers,
            job.say,
            source=methods.source,
        )

        methods = methods._replace(bind=lambda state: WeightsAnswerer(program.bind(state), state))
    else:
        evaluator = Evaluator(source, scorer, job.config, samples_per_problem(job.config))
    evaluations = Evaluations(job.config, evaluator, methods.bind, folder, job.say)
    with contextlib.closing(evaluations):
        yield evaluations


def count_evaluated(run: RunState) -> int:
    """Counts the batches of a restored run up to the last whose evaluation is not made again."""
    # Queued batches carry the metrics of their evaluation in the checkpoint.
    queued = [item.record for item in run.queue if has_evaluation(item.record.metrics)]
    return max([run.learned, *(record.batch + 1 for record in queued)])
