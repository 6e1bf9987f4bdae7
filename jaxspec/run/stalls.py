"""Watches a run for signs that it cannot learn."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.config.settings import ResolvedConfig
from jaxspec.system.alarms import StallWatch


def make_stall_watch(config: ResolvedConfig, records: Iterable[Mapping[str, Any]]) -> StallWatch:
    """Returns a watch that has seen earlier `records`."""
    optimizer, batch = config.optimizer, config.batch
    updates = config.steps * batch.mini_batches * batch.epochs
    rate = config.learning_rates.policy * min(1.0, updates / max(optimizer.warmup_steps, 1))
    watch = StallWatch(config.advantage.baseline != "none", rate)
    for record in records:
        watch.add_record(record)
    return watch
