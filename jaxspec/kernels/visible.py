"""Which positions of a cache the queries of a block see."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Int


class Visible(NamedTuple):
    """The positions of its row that each query sees: `first` to `last`, and of those after `last`
    its own and every `period`-th before it."""

    first: int
    last: Int[Array, "B T"]
    own: Int[Array, "B T"]
    period: int = 1

    def sees(self, positions: Int[Array, " C"]) -> Bool[Array, "B T C"]:
        """Whether each query sees each of the numbered positions."""
        own, last = self.own[:, :, None], self.last[:, :, None]
        beyond = (positions > last) & (positions <= own)
        if self.period > 1:
            beyond &= (own - positions) % self.period == 0
        true = positions <= last
        return (true & (positions >= self.first) if self.first else true) | beyond


def causal(positions: Int[Array, "B T"]) -> Visible:
    """All positions up to a query's own."""
    return Visible(0, positions, positions)
