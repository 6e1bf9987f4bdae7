"""Reports on the batches of a run: metrics, samples, progress line and alarms."""

from typing import Any

import jax

from jaxspec.config.settings import ResolvedConfig
from jaxspec.metrics.batch import effective_shares, headline_numbers, token_rates
from jaxspec.metrics.files import MetricsWriter, read_metrics
from jaxspec.rl.optimizers import require_progress
from jaxspec.run.stalls import make_stall_watch
from jaxspec.run.state import BatchRecord
from jaxspec.step import Step
from jaxspec.system import alarms
from jaxspec.system.progress import Progress


class BatchReporter:
    """Writes and shows the records of batches."""

    def __init__(
        self, config: ResolvedConfig, step: Step, writer: MetricsWriter, progress: Progress
    ) -> None:
        self._config, self._writer, self._progress = config, writer, progress
        self._acceptance = 0.0
        """Acceptance length of the batch reported last. 0 before the first since this start."""
        records = read_metrics(writer.folder) if jax.process_index() == 0 else []
        self._stalls = make_stall_watch(config, records)
        self._max_probability_factor = step.learner.max_probability_factor

    def print_line(self, text: str) -> None:
        """Prints a line above the progress line."""
        self._progress.print_line(text)

    def write_samples(self, batch: int, samples: list[dict[str, Any]]) -> None:
        """Writes samples of a batch that has no record."""
        self._writer.write_samples(batch, samples)

    def report_batch(self, record: BatchRecord) -> None:
        """Writes and shows the complete record of a batch.

        Raises:
          Diverged: too many updates in a row were skipped.
        """
        config, metrics = self._config, record.metrics_line
        metrics |= token_rates(metrics) | effective_shares(metrics)
        self._writer.write_record(metrics)
        self._writer.write_samples(record.batch, record.samples)
        self._progress.update(record.batch + 1, **headline_numbers(metrics))
        previous_length, self._acceptance = (
            self._acceptance,
            metrics.get("rollout/acceptance_length", 0.0),
        )
        for alarm in (
            alarms.logprob_gap_warning(metrics, self._max_probability_factor),
            alarms.acceptance_warning(metrics, previous_length, config.draft_training.alarm),
            alarms.short_batch_warning(metrics, config.batch.prompts),
            *self._stalls.add_record(metrics),
        ):
            if alarm:
                self._progress.print_line(alarm)
        unrewarded = "" if "reward/mean" in metrics else "None of its rows has a reward. "
        for name in ("policy", "draft"):
            remedy = (
                f"{unrewarded}Look at loss/{name}, grad_norm/{name}, status/failed and"
                f" rollout/logprob_gap_max in {config.workdir}/metrics.jsonl, and at samples.jsonl"
                " beside it. A lower learning rate often helps. Earlier checkpoints are intact."
            )
            skipped = metrics.get(f"skipped_in_row/{name}", 0.0)
            require_progress(skipped, name, f"batch {record.batch}", remedy)
