"""Pieces of known text for prefill."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num


class Pieces(NamedTuple):
    """Pieces of known texts for one pass.

    Target and draft read them in one pass. Pieces of a text follow each other. H texts are read,
    each in its own row of the cache.
    """

    tokens: Int[Array, "N T"]
    positions: Int[Array, "N T"]
    text_indices: Int[Array, " N"]
    """Index of each piece's text, ascending. H for a piece without a text."""
    lengths: Int[Array, " N"]
    """Number of positions to read. The rest of the piece is padding."""

    def shift_values(
        self, values: Float[Array, "N T C"], prior_values: Float[Array, "H C"]
    ) -> Array:
        """Returns each position's preceding value.

        The first piece of a text takes it from `prior_values`. Position 0 has none and gets zeros.
        """
        first_values = jnp.where(
            self._continues_text()[:, None],
            jnp.roll(self.gather_last(values), 1, axis=0),
            jnp.take(prior_values, self.text_indices, axis=0, mode="clip"),
        )
        shifted = jnp.concatenate([first_values[:, None], values[:, :-1]], axis=1)
        return jnp.where((self.positions > 0)[:, :, None], shifted, 0)

    def scatter_last(
        self, leaf: Num[Array, "H ..."], values: Num[Array, "N T ..."]
    ) -> Num[Array, "H ..."]:
        """Sets each text's entry to its last value in this pass."""
        is_continued = jnp.roll(self._continues_text(), -1)
        # Only a text's last piece may write. All others get an index past the end.
        text_indices = jnp.where((self.lengths > 0) & ~is_continued, self.text_indices, len(leaf))
        return leaf.at[text_indices].set(self.gather_last(values), mode="drop")

    def gather_last(self, values: Num[Array, "N T ..."]) -> Num[Array, "N ..."]:
        """Returns the value of each piece's last position."""
        last_positions = jnp.maximum(self.lengths - 1, 0)
        return values[jnp.arange(len(last_positions), dtype=jnp.int32), last_positions]

    def _continues_text(self) -> Bool[Array, " N"]:
        """Returns whether each piece continues the one before."""
        # The roll compares the first piece with the last one, so the first is excluded.
        same_text = (self.text_indices == jnp.roll(self.text_indices, 1)) & (self.lengths > 0)
        return same_text & (jnp.arange(len(self.text_indices), dtype=jnp.int32) > 0)
