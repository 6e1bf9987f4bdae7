"""Which slots of a cache the queries of a block see."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Int


class Sight(NamedTuple):
    """The slots of its row that each query sees: `first` to `last`, and of those after `last` its
    own and every `period`-th before it."""

    first: int
    last: Int[Array, "B T"]
    own: Int[Array, "B T"]
    period: int = 1

    def sees(self, slots: Int[Array, " C"]) -> Bool[Array, "B T C"]:
        """Which of the numbered slots."""
        own, last = self.own[:, :, None], self.last[:, :, None]
        beyond = (slots > last) & (slots <= own)
        if self.period > 1:
            beyond &= (own - slots) % self.period == 0
        true = slots <= last
        return (true & (slots >= self.first) if self.first else true) | beyond


def causal(positions: Int[Array, "B T"]) -> Sight:
    """All slots up to a query's own."""
    return Sight(0, positions, positions)
