"""Pieces of known text, which target and draft read in one pass."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num


class Pieces(NamedTuple):
    """Pieces of known texts, which one pass of the target reads.

    Pieces of a text follow each other. H texts are read, each of which lies in a row of the cache.
    """

    tokens: Int[Array, "N T"]
    positions: Int[Array, "N T"]
    text: Int[Array, " N"]
    """Text of each piece, ascending; H: none."""
    length: Int[Array, " N"]
    """Positions to read; the others of the piece are padding."""

    def shift(self, values: Float[Array, "N T C"], before: Float[Array, "H C"]) -> Array:
        """Returns the value of the preceding position, for each position.

        The first piece of a text takes it from `before`. Position 0 has none and gets zeros.
        """
        first = jnp.where(
            self._follows()[:, None],
            jnp.roll(self.at_last(values), 1, axis=0),
            jnp.take(before, self.text, axis=0, mode="clip"),
        )
        shifted = jnp.concatenate([first[:, None], values[:, :-1]], axis=1)
        return jnp.where((self.positions > 0)[:, :, None], shifted, 0)

    def put_last(
        self, leaf: Num[Array, "H ..."], values: Num[Array, "N T ..."]
    ) -> Num[Array, "H ..."]:
        """Sets each text's entry to the value of its last position in this pass."""
        followed = jnp.roll(self._follows(), -1)
        text = jnp.where((self.length > 0) & ~followed, self.text, len(leaf))
        return leaf.at[text].set(self.at_last(values), mode="drop")

    def at_last(self, values: Num[Array, "N T ..."]) -> Num[Array, "N ..."]:
        """Returns the value of each piece's last position."""
        last = jnp.maximum(self.length - 1, 0)
        return values[jnp.arange(len(last), dtype=jnp.int32), last]

    def _follows(self) -> Bool[Array, " N"]:
        """Whether the piece before is of the same text; never for the first one."""
        same = (self.text == jnp.roll(self.text, 1)) & (self.length > 0)
        return same & (jnp.arange(len(self.text), dtype=jnp.int32) > 0)
