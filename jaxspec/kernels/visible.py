"""Attention masks over the positions of a cache."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Int


class AttentionMask(NamedTuple):
    """Positions that each query sees in its row.

    A query sees `first` to `last`. After `last` it sees its own position and every `period`-th one
    before it.
    """

    first: int
    last: Int[Array, "B T"]
    query_positions: Int[Array, "B T"]
    period: int = 1
    """Distance between the draft positions that a query sees."""

    def is_visible(self, positions: Int[Array, " C"]) -> Bool[Array, "B T C"]:
        """Returns whether each query sees each position."""
        query_positions, last = self.query_positions[:, :, None], self.last[:, :, None]
        is_draft = (positions > last) & (positions <= query_positions)
        # `period` and `first` are static, so common masks skip these comparisons.
        if self.period > 1:
            is_draft &= (query_positions - positions) % self.period == 0
        is_committed = positions <= last
        return (is_committed & (positions >= self.first) if self.first else is_committed) | is_draft


def causal_mask(positions: Int[Array, "B T"]) -> AttentionMask:
    """Makes a causal mask."""
    return AttentionMask(0, positions, positions)
