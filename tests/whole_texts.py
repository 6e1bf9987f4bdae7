"""Texts that a draft reads whole, as the oracle of texts that are read in pieces."""

from typing import Any

import jax.numpy as jnp

from jaxspec.drafts.base import Draft
from jaxspec.drafts.pieces import Pieces
from jaxspec.state import Prompts


def read_whole(draft: Draft, network: Any, target: Any, prompts: Prompts, features: Any) -> Any:
    """A draft's state and contiguous cache once it has read whole prompts, each in one piece."""
    rows, width = prompts.tokens.shape
    pieces = Pieces(
        tokens=prompts.tokens,
        positions=jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width)),
        text_indices=jnp.arange(rows, dtype=jnp.int32),
        lengths=jnp.maximum(prompts.lengths - 1, 0),
    )
    state, empty = (
        draft.init_state(network, target, prompts),
        draft.empty_cache(network, rows, width),
    )
    return draft.prefill(network, target, state, empty, pieces, features)
