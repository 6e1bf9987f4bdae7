"""Pieces of known text: every unread position once, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rollout.append import PassSize, Texts, select_pieces


@pytest.mark.parametrize(("pieces", "positions"), [(2, 4), (5, 1), (3, 50)])
def test_pieces_cover_what_is_unread_of_every_text_once(pieces: int, positions: int) -> None:
    """Up to the last token but one, whatever the order of rows and however long the rest."""
    random, size = np.random.default_rng(0), 23
    tokens = random.integers(0, 100, (5, size))
    row, length = np.array([3, 0, 4, 1]), np.array([23, 9, 2, 17])
    unread = np.array([22, 0, 1, 6])
    texts = Texts(
        tokens=jnp.asarray(tokens, jnp.int32),
        rows=jnp.asarray(row, jnp.int32),
        lengths=jnp.asarray(length, jnp.int32),
        unread_counts=jnp.asarray(unread, jnp.int32),
        table=jnp.zeros((4, 1), jnp.int32),
    )
    take = jax.jit(select_pieces, static_argnums=3)
    ends = jnp.cumsum(-(-texts.unread_counts // positions), dtype=jnp.int32)
    found: list[tuple[int, int, int]] = []
    for turn in range(-(-int(ends[-1]) // pieces)):
        part = take(texts, ends, jnp.int32(turn), PassSize(pieces, positions))
        for text, count, at, read in zip(
            *map(np.asarray, (part.text_indices, part.lengths, part.positions, part.tokens)),
            strict=True,
        ):
            found += [(int(text), int(at[n]), int(read[n])) for n in range(count)]
    wanted = [
        (text, place, int(tokens[row[text], place]))
        for text in range(4)
        for place in range(length[text] - 1 - unread[text], length[text] - 1)
    ]
    assert found == wanted
