"""The interface of verification: a block to verify, and the answers of either form."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafts.base import Proposal
from jaxspec.rollout.feedback.acceptance import DraftOverlap
from jaxspec.rollout.verify import Distributions
from jaxspec.sampling import Processing


class Block(NamedTuple):
    """K drafts of each row, and the target's logits at the K+1 positions."""

    logits: Float[Array, "B K1 V"]
    proposal: Proposal
    """Without logits, the drafted tokens count as certain."""
    response_positions: Int[Array, "B K1"]
    """Response tokens before each position."""
    processing: Processing
    """The target's, and with `factors` the draft's."""
    factors: Float[Array, " K"] | float
    """On the temperature, at which the drafts were drawn."""
    grid: tuple[float, ...]
    """Factors to measure, in some slots only: a pass over the vocabulary for each would cost as
    much as a step of a small model. `factors` are among them."""
    measured_slots: slice | Int[Array, " m"]
    """These slots."""


class BlockComparison(NamedTuple):
    """Target and draft of a block, compared."""

    distributions: Distributions
    finite: Bool[Array, "B K1"]
    """Whether the target can be verified and sampled from."""
    logprobs: Callable[[Int[Array, "B K1"]], Float[Array, "B K1"]]
    """The target's log-probabilities of tokens."""
    entropy: Float[Array, "B K1"]
    """The target's."""
    draft_overlap: DraftOverlap


class Verification(NamedTuple):
    """How drafts are drawn and compared; both functions take the same distributions of them."""

    name: str
    draw_drafts: Callable[..., Int[Array, " B"]]
    """(draft logits [B W], their ids, the target's vocabulary, processing, response_positions,
    factor, may_be_zero, noise) -> tokens."""
    compare_block: Callable[[Block], BlockComparison]
