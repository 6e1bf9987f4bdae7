"""Which positions of a cache the queries of a block see."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Int


class AttentionMask(NamedTuple):
    """The positions of its row that each query sees: `first` to `last`, and of those after `last`
    its own and every `period`-th before it."""

    first: int
    last: Int[Array, "B T"]
    query_positions: Int[Array, "B T"]
    period: int = 1

    def is_visible(self, positions: Int[Array, " C"]) -> Bool[Array, "B T C"]:
        """Whether each query sees each of the numbered positions."""
        query_positions, last = self.query_positions[:, :, None], self.last[:, :, None]
        is_draft = (positions > last) & (positions <= query_positions)
        if self.period > 1:
            is_draft &= (query_positions - positions) % self.period == 0
        is_committed = positions <= last
        return (is_committed & (positions >= self.first) if self.first else is_committed) | is_draft


def causal_mask(positions: Int[Array, "B T"]) -> AttentionMask:
    """All positions up to a query's own."""
    return AttentionMask(0, positions, positions)
