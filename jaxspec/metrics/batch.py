"""Numbers of a batch: merged over its rollouts, rates, and those that the terminal shows."""

import math
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from statistics import fmean
from typing import Any

import numpy as np

from jaxspec.metrics.table import find_metric


def merge_rollout_metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the metrics of the rollouts that fill a batch.

    Each is merged as the table says, over the rollouts that have it.
    """
    merged = {}
    # A dict instead of a set keeps the order of the names.
    for name in {name: None for record in records for name in record}:
        values = [record[name] for record in records if name in record]
        metric = find_metric(name)
        merged[name] = (metric.merge if metric else fmean)(values)
    return merged


def read_depths(record: Mapping[str, Any], family: str) -> list[float]:
    """Reads a family of metrics by draft depth.

    Ends before the first depth without a value, which no draft reached.
    """
    names = (f"{family}_{depth}" for depth in count(1))
    return [record[name] for name in takewhile(record.__contains__, names)]


def standard_deviation(values: np.ndarray) -> float:
    """Returns the population standard deviation, NaN without values.

    It is exactly 0 if all values are equal.
    """
    if not values.size:
        return math.nan
    # The mean of equal values is rounded and may differ from them.
    return float(values.std(dtype=np.float64)) if np.ptp(values) else 0.0


def headline_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Selects the numbers of a batch that the terminal shows.

    These are its results, and the number of failed rows and skipped updates if there are any. A
    pipelined batch also has the seconds that its sides waited for each other.
    """
    result_metrics = {
        "reward": "reward/mean",
        "acceptance_length": "rollout/acceptance_length",
        "tokens_per_s": "rollout/tokens_per_s",
    }
    fault_metrics = {
        "failed": "status/failed",
        "skipped_policy": "skipped/policy",
        "skipped_draft": "skipped/draft",
    }
    # A batch without rewards shows NaN, so that it is noticed.
    numbers = {name: record.get(key, math.nan) for name, key in result_metrics.items()}
    wait_metrics = {"exposed_s": "time/exposed_generation", "idle_s": "time/idle_generate"}
    numbers |= {name: record[key] for name, key in wait_metrics.items() if key in record}
    return numbers | {name: record[key] for name, key in fault_metrics.items() if record.get(key)}


def effective_shares(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the effective sample size of ratios and importance weights, as shares of the labels.

    Source: Kish, Survey Sampling (1965): the square of the sum over the sum of squares.
    """
    return {
        f"{family}/effective_share": record[f"{family}/mean"] ** 2 / mean_square
        for family in ("ratio", "importance")
        if (mean_square := record.get(f"{family}/mean_square"))
    }


def token_rates(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the tokens per second of a batch.

    There is a rate over the full step, and one over generation if that was timed separately.
    """
    duration_metrics = {
        "rollout/tokens_per_s": "time/step",
        "rollout/generation_tokens_per_s": "time/generate",
    }
    return {
        name: record["rollout/tokens"] / record[duration]
        for name, duration in duration_metrics.items()
        if duration in record
    }
