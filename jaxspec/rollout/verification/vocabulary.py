"""Vocabulary of a draft, within that of the target."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class FullVocabulary(NamedTuple):
    """The target's vocabulary."""

    size: int

    @property
    def ids(self) -> None:
        """No ids, since the draft's indices are the target's ids."""

    @property
    def indices(self) -> Int[Array, " V"]:
        """Draft index of each token."""
        return jnp.arange(self.size, dtype=jnp.int32)

    @property
    def outside_mask(self) -> Bool[Array, " 1"]:
        """Tokens that the draft does not have: none."""
        return jnp.zeros((1,), bool)

    def find_ids(self, indices: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Returns the target's ids of draft indices."""
        return indices

    def find_indices(self, tokens: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Returns the draft indices of tokens, -1 if outside."""
        return tokens

    def select(self, values: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        """Selects the draft's tokens."""
        return values

    def expand(self, values: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        """Expands values to the target's vocabulary, arbitrary outside."""
        return values

    def clear_outside(self, values: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        """Sets values outside to 0."""
        return values


class PartialVocabulary(NamedTuple):
    """Some tokens of the target's vocabulary."""

    ids: Int[Array, " W"]
    """The target's ids of the draft's tokens, ascending."""
    indices: Int[Array, " V"]
    """Draft index of each token, -1 if outside."""

    @property
    def outside_mask(self) -> Bool[Array, " V"]:
        """Tokens that the draft does not have."""
        return self.indices < 0

    def find_ids(self, indices: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Returns the target's ids of draft indices."""
        return self.ids[indices]

    def find_indices(self, tokens: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """Returns the draft indices of tokens, -1 if outside."""
        return self.indices[tokens]

    def select(self, values: Float[Array, "*B V"]) -> Float[Array, "*B W"]:
        """Selects the draft's tokens."""
        return jnp.take(values, self.ids, axis=-1)

    def expand(self, values: Float[Array, "*B W"]) -> Float[Array, "*B V"]:
        """Expands values to the target's vocabulary, arbitrary outside."""
        # A token outside the draft's vocabulary has index -1, for which any entry serves.
        return jnp.take(values, jnp.maximum(self.indices, 0), axis=-1)

    def clear_outside(self, values: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        """Sets values outside to 0."""
        return jnp.where(self.indices < 0, 0, values)


DraftVocabulary = FullVocabulary | PartialVocabulary


def make_vocabulary(ids: Int[Array, " W"] | None, vocab: int) -> DraftVocabulary:
    """Makes the vocabulary of a draft from the ids of its tokens."""
    if ids is None:
        return FullVocabulary(vocab)
    indices = jnp.arange(len(ids), dtype=jnp.int32)
    # `ids` are ascending.
    no_indices = jnp.full((vocab,), -1, jnp.int32)
    return PartialVocabulary(
        ids, no_indices.at[ids].set(indices, indices_are_sorted=True, unique_indices=True)
    )
