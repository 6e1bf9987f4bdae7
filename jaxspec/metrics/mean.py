"""Means with their counts, so that a metric without a value is absent, not NaN."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num


class Mean(NamedTuple):
    """Sum of values and their count.

    NaN in it is a value that was NaN. A count of 0 means that there was none.
    """

    total: Num[Array, ""]
    value_count: Int[Array, ""]

    @classmethod
    def from_value(cls, value: Num[Array, ""], is_present: Bool[Array, ""] | bool = True) -> "Mean":
        """Returns the mean of one value, or of none unless `is_present`."""
        # Not multiplied by the count, since 0 * NaN is NaN.
        value_count = jnp.asarray(is_present, jnp.int32)
        return cls(jnp.where(is_present, value, jnp.zeros_like(value)), value_count)

    def merge_with(self, other: "Mean") -> "Mean":
        """Merges two means."""
        return Mean(self.total + other.total, self.value_count + other.value_count)

    def keep_if(self, is_present: Bool[Array, ""]) -> "Mean":
        """Drops the values unless `is_present`."""
        return Mean(
            jnp.where(is_present, self.total, jnp.zeros_like(self.total)),
            jnp.where(is_present, self.value_count, 0),
        )

    @property
    def value(self) -> Num[Array, ""]:
        """The mean. 0 without values."""
        return self.total / jnp.maximum(self.value_count, 1).astype(self.total.dtype)


def as_means(values: Mapping[str, Num[Array, ""]], is_present: Bool[Array, ""]) -> dict[str, Mean]:
    """Returns values as means, of no value unless `is_present`."""
    return {name: Mean.from_value(value, is_present) for name, value in values.items()}


Metrics = dict[str, Num[Array, ""] | Mean]
"""Metrics by name. A plain array always has a value."""


def metrics_to_host(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Copies metrics to the host, without those that have no value."""
    host_metrics = jax.device_get(dict(metrics))
    return {
        name: float(metric.total / metric.value_count if isinstance(metric, Mean) else metric)
        for name, metric in host_metrics.items()
        if not isinstance(metric, Mean) or metric.value_count
    }
