"""Evaluations between the steps of a run: what is found is written down, and the best checkpoint is
kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspec.config.as_json import to_json
from jaxspec.evaluation.evaluator import Evaluator, measured, metrics_of
from jaxspec.evaluation.program import own_settings, samples_of, with_own_program
from jaxspec.evaluation.records import Records
from jaxspec.host.batches import Batches
from jaxspec.host.job import Job
from jaxspec.host.run_state import RunState
from jaxspec.host.runner import Runner
from jaxspec.host.workdir import BEST
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import listed, read_json
from jaxspec.processes.process_0 import refused_by_all
from jaxspec.rewards.scorer import SetScorers
from jaxspec.state import Prompts, PyTree, Rollout, TrainState
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system.files import write_whole

VALUES = "best.json"
"""The settings of evaluations, and the value of their metric by number of the checkpoint."""


class Evaluations:
    """Measures the policy of a run, and keeps in its folder `best` the checkpoint that has most of
    the metric `eval.keep_best`.

    Raises:
      ConfigError: evaluations do not give that metric.
    """

    def __init__(self, job: Job, evaluator: Evaluator, folder: Path) -> None:
        self._evaluator, self._folder, self._metric = evaluator, folder, job.config.eval.keep_best
        self._records = Records(folder, jax.process_index())
        evaluator.require_metric(self._metric)
        how = to_json(job.config)["eval"]
        self._how = {name: value for name, value in how.items() if name != "every"}
        if self._metric:
            refused_by_all(self._require_alike)
        self._best = Checkpoints(folder / BEST, keep=1, say=job.say) if self._metric else None
        self._values = self._known()

    def _require_alike(self) -> None:
        """Refuses to go on beside a checkpoint that was best by another measure."""
        file = self._folder / VALUES
        before = read_json(file).get("eval") if file.exists() else self._how
        require(
            before == self._how,
            f"{self._folder / BEST} has what was best by other settings of eval, as {file} says;"
            f" set these back, or move both away",
        )

    def _known(self) -> dict[str, float]:
        """Value of the checkpoint that is there."""
        if self._best is None or self._best.latest() is None:
            return {}
        newest, file = str(self._best.latest()), self._folder / VALUES
        values = read_json(file).get("values", {}) if file.exists() else {}
        return {number: value for number, value in values.items() if number == newest}

    def cut_back(self, run: RunState) -> None:
        """Drops what was found for batches that are evaluated again."""
        has = run.pending is not None and measured(run.pending.line)
        self._records.cut_back(run.over + has)

    def __call__(
        self, state: TrainState, step: int, stop: Callable[[], bool]
    ) -> tuple[TrainState, dict[str, float]]:
        """The state, which may be consumed, and the metrics of its policy; none if it was asked to
        stop before the end."""
        state, records = self._evaluator(state, stop)
        if records is None:
            return state, {}
        self._records.write(step, records)
        return state, metrics_of(self._evaluator.estimated(records))

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Whether a checkpoint of these metrics is to be kept."""
        value = metrics.get(f"eval/{self._metric}")
        return value is not None and value > max(self._values.values(), default=float("-inf"))

    def keep(
        self,
        number: int,
        arrays: PyTree,
        host: dict[str, Any],
        own: dict[str, Any] | None,
        metrics: dict[str, float],
    ) -> None:
        """Starts to save the best checkpoint so far, as `Checkpoints.save`."""
        assert self._best is not None, "there is a metric to be best by"
        self._values[str(number)] = metrics[f"eval/{self._metric}"]
        if jax.process_index() == 0:
            values = {"eval": self._how, "values": self._values}
            write_whole(self._folder / VALUES, json.dumps(values, indent=2) + "\n")
        self._best.save(number, arrays, host, own)

    def close(self) -> None:
        """Waits until what is kept is saved."""
        if self._best is not None:
            self._best.close()


@contextlib.contextmanager
def in_run(
    job: Job, batches: Batches, scorers: SetScorers, runner: Runner, folder: Path
) -> Iterator[Evaluations]:
    """What measures the policy between a run's calls: by the program of its step, or where
    evaluations have settings of their own by another, which is compiled now and said.

    Raises:
      ConfigError: that one does not fit the devices; `eval.keep_best` is no metric of theirs.
    """

    def own(state: TrainState, prompts: Prompts) -> tuple[TrainState, Rollout]:
        result = runner(state, batches.nothing_finished(), prompts, lambda _: False)
        assert result.rollout is not None, "an evaluation call is never interrupted"
        return result.state, result.rollout

    differing = own_settings(job.config)
    if differing:
        job.say(f"compiling one more program for evaluations: {listed(differing)}")
        evaluator = with_own_program(job, batches.sets, scorers)
    else:
        evaluator = Evaluator(batches, job.config, samples_of(job.config), own)
    with contextlib.closing(Evaluations(job, evaluator, folder)) as evaluations:
        yield evaluations
