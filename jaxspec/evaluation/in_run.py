"""Evaluations between the steps of a run: what is found is written down, and the best checkpoint is
kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxspec.evaluation.evaluator import Evaluator, metrics_of
from jaxspec.evaluation.program import own_settings, samples_of, with_own_program
from jaxspec.evaluation.records import Records
from jaxspec.host.batches import Batches
from jaxspec.host.job import Job
from jaxspec.host.runner import Runner
from jaxspec.host.workdir import BEST
from jaxspec.inputs.json_keys import listed, read_json
from jaxspec.rewards.scorer import SetScorers
from jaxspec.state import Prompts, PyTree, Rollout, TrainState
from jaxspec.storage.checkpoint import Checkpoints
from jaxspec.system.files import write_whole

VALUES = "best.json"
"""The metric by which checkpoints were kept, and its value by their number."""


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
        self._best = Checkpoints(folder / BEST, keep=1, say=job.say) if self._metric else None
        self._values = self._known()

    def _known(self) -> dict[str, float]:
        """Values of checkpoints that are there: what was kept by another metric says nothing."""
        file = self._folder / VALUES
        found = read_json(file) if self._best and file.exists() else {}
        newest = str(self._best.latest()) if self._best else ""
        values = found.get("values", {}) if found.get("metric") == self._metric else {}
        return {number: value for number, value in values.items() if number == newest}

    def cut_back(self, step: int) -> None:
        """Drops what was found for a batch that is made again."""
        self._records.cut_back(step)

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
        self, number: int, arrays: PyTree, host: dict[str, Any], metrics: dict[str, float]
    ) -> None:
        """Starts to save the best checkpoint so far, as `Checkpoints.save`."""
        assert self._best is not None, "there is a metric to be best by"
        self._values[str(number)] = metrics[f"eval/{self._metric}"]
        if jax.process_index() == 0:
            values = {"metric": self._metric, "values": self._values}
            write_whole(self._folder / VALUES, json.dumps(values, indent=2) + "\n")
        self._best.save(number, arrays, host)

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
