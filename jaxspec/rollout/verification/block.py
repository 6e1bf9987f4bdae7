"""Interface of both forms of verification."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafts.base import DrawnProposal, PointProposal, Proposal
from jaxspec.rollout.feedback.acceptance import DraftOverlap
from jaxspec.rollout.verification.vocabulary import (
    DraftVocabulary,
    FullVocabulary,
    make_vocabulary,
)
from jaxspec.rollout.verify import Distributions
from jaxspec.sampling import Processing


class Block(NamedTuple):
    """Block of K drafts per row to verify."""

    logits: Float[Array, "B K1 V"]
    """Logits of the target at the K+1 positions."""
    proposal: Proposal
    """Draft tokens, with their distributions."""
    response_positions: Int[Array, "B K1"]
    """Number of response tokens before each position."""
    processing: Processing
    """Logit processing of the target. With `factors`, also of the draft."""
    factors: Float[Array, " K"] | float
    """Temperature factor that each draft was sampled at."""
    grid: tuple[float, ...]
    """Temperature factors to measure. They include `factors`."""
    # A pass over the vocabulary for each factor would cost as much as a step of a small model, so
    # only some slots are measured.
    measured_slots: slice | Int[Array, " m"]
    """Slots in which the grid is measured."""


class DraftLogits(NamedTuple):
    """Distributions of a block's drafts."""

    logits: Float[Array, "B K W"]
    vocabulary: DraftVocabulary
    is_certain: bool
    """Whether each distribution is a point mass on the draft's token."""


def read_draft_logits(block: Block) -> DraftLogits:
    """Returns logits of all drafts: point masses for deterministic ones."""
    vocab = block.logits.shape[-1]
    match block.proposal:
        case PointProposal(tokens):
            # Only the rules of rejection read these, and XLA removes them elsewhere.
            is_drafted = tokens[:, :, None] == jnp.arange(vocab, dtype=jnp.int32)
            point_masses = jnp.where(is_drafted, 0.0, -jnp.inf).astype(block.logits.dtype)
            return DraftLogits(point_masses, FullVocabulary(vocab), True)
        case DrawnProposal() as drawn:
            return DraftLogits(drawn.logits, make_vocabulary(drawn.ids, vocab), False)


class BlockComparison(NamedTuple):
    """Result of comparing target and draft of a block."""

    distributions: Distributions
    finite: Bool[Array, "B K1"]
    """Whether the target is finite, so that it can be verified and sampled from."""
    logprobs: Callable[[Int[Array, "B K1"]], Float[Array, "B K1"]]
    """(tokens) -> their log-probabilities under the target."""
    entropy: Float[Array, "B K1"]
    """Entropy of the target in nats."""
    draft_overlap: DraftOverlap


class Verification(NamedTuple):
    """A form of verification.

    Both functions must use the same draft distributions.
    """

    name: str
    draw_drafts: Callable[..., Int[Array, " B"]]
    """(draft logits [B W], ids, vocab, processing, response_positions, factor, may_be_zero, noise)
    -> tokens.

    `ids` are the target's ids of the logits' tokens, and `vocab` is the target's vocabulary size.
    """
    compare_block: Callable[[Block], BlockComparison]
