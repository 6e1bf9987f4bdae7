"""Watches a run for signs that it cannot learn."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.config.settings import ResolvedConfig
from jaxspec.system.alarms import StallWatch


def stall_watch(config: ResolvedConfig, lines: Iterable[Mapping[str, Any]]) -> StallWatch:
    """Returns a watch that has seen the `lines` of earlier batches."""
    optimizer, batch = config.optimizer, config.batch
    updates = config.steps * batch.mini_batches * batch.epochs
    rate = config.learning_rates.policy * min(1.0, updates / max(optimizer.warmup_steps, 1))
    watch = StallWatch(config.advantage.baseline != "none", rate)
    for line in lines:
        watch.add_record(line)
    return watch
