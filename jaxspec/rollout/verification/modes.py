"""Modes of verification: matching with target samples, or rejection.

A mode draws the noise of a round. The noise decides which drafts of its block are kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Array, Float, Int, Key

from jaxspec import sampling
from jaxspec.drafts.base import Draft, PointProposal, Proposal, block_positions
from jaxspec.rollout.verify import Distributions, Verdict, match_rule
from jaxspec.sampling import Noise


class MatchingNoise(NamedTuple):
    """Noise of a round that matches drafts with target samples."""

    target: Noise
    """Noise of the target's samples at the K+1 positions."""
    draft: Noise
    """Noise of each draft."""

    def verify(
        self,
        distributions: Distributions,
        draft_tokens: Int[Array, "B K"],
        draft_counts: Int[Array, " B"],
    ) -> Verdict:
        """Keeps drafts up to the first mismatch."""
        return match_rule(distributions, draft_tokens, draft_counts, self.target)


class RejectionNoise(NamedTuple):
    """Noise of a round that accepts drafts by coins."""

    rule: Callable[..., Verdict]
    draft: Noise
    """Noise of each draft."""
    coins: Float[Array, "B K"]
    """Acceptance coins."""
    next: Noise
    """Noise of the token after the cut."""

    def verify(
        self,
        distributions: Distributions,
        draft_tokens: Int[Array, "B K"],
        draft_counts: Int[Array, " B"],
    ) -> Verdict:
        """Keeps drafts by the rule."""
        return self.rule(distributions, draft_tokens, draft_counts, self.coins, self.next)


@dataclass(frozen=True)
class Matching:
    """Coupled mode, in which draft and target share noise."""

    name: ClassVar[str] = "matching"
    stream: ClassVar[int] = sampling.TARGET_STREAM
    """Noise stream of the rows."""

    def for_draft(self, draft: Draft, grid: tuple[float, ...]) -> "Matching":
        """Returns this mode, which fits every draft."""
        return self

    def select_distributions(self, proposal: Proposal) -> Proposal:
        """Returns the proposal, whose own distributions are compared."""
        return proposal

    def draw_noise(
        self, keys: Key[Array, " B"], lengths: Int[Array, " B"], length: int, vocab: int, dtype: Any
    ) -> MatchingNoise:
        """Draws noise, keyed by absolute position."""
        # A token beyond the cut gets the same noise in the next round, so tokens do not depend on
        # where rounds cut.
        gumbel = sampling.gumbel_noise(
            sampling.position_keys(keys, lengths, length + 1), vocab, dtype
        )
        return MatchingNoise(gumbel, gumbel)


@dataclass(frozen=True)
class PointMatching:
    """Rejection of drafts that are not drawn at random.

    For point masses it is the same as matching with target samples.
    """

    name: ClassVar[str] = "point_matching"
    stream: ClassVar[int] = sampling.TARGET_STREAM

    def select_distributions(self, proposal: Proposal) -> PointProposal:
        """Returns the proposal without logits."""
        return PointProposal(proposal.tokens, proposal.lengths)

    def draw_noise(
        self, keys: Key[Array, " B"], lengths: Int[Array, " B"], length: int, vocab: int, dtype: Any
    ) -> MatchingNoise:
        """Draws noise, keyed by absolute position."""
        levels = sampling.level_count(vocab)
        uniforms = sampling.Uniforms(
            sampling.uniform_numbers(keys, block_positions(lengths, length + 1), levels, dtype)
        )
        return MatchingNoise(uniforms, uniforms)


@dataclass(frozen=True)
class Rejection:
    """Mode of drafts that are drawn at random and accepted by coins."""

    rule: Callable[..., Verdict]
    """Verification rule, such as `token_rule` or `block_rule`."""
    stream: ClassVar[int] = sampling.ROUND_STREAM

    @property
    def name(self) -> str:
        """Name of the rule."""
        return self.rule.__name__

    def for_draft(self, draft: Draft, grid: tuple[float, ...]) -> "Rejection | PointMatching":
        """Returns the mode of a draft with these temperature factors."""
        # With a grid of (0,), drafts are the argmax.
        return self if draft.is_stochastic and grid != (0.0,) else PointMatching()

    def select_distributions(self, proposal: Proposal) -> Proposal:
        """Returns the proposal, whose own distributions are compared."""
        return proposal

    def draw_noise(
        self, keys: Key[Array, " B"], lengths: Int[Array, " B"], length: int, vocab: int, dtype: Any
    ) -> MatchingNoise | RejectionNoise:
        """Draws noise, keyed by the committed length at the start of the round."""
        levels = sampling.level_count(vocab)
        # A plain round among rounds with drafts has keys of the same kind as theirs.
        if not length:
            uniforms = sampling.Uniforms(
                sampling.uniform_numbers(keys, lengths[:, None], levels, dtype)
            )
            return MatchingNoise(uniforms, uniforms)
        # Rules look at drafts and coins beyond the cut. With keys by position, these would come
        # again in the next round, which would bias the distribution.
        numbers = sampling.uniform_numbers(
            keys, lengths[:, None], length + (length + 1) * levels, dtype
        )[:, 0]
        coins, draws = numbers[:, :length], numbers[:, length:].reshape(-1, length + 1, levels)
        return RejectionNoise(
            self.rule,
            draft=sampling.Uniforms(draws[:, :length]),
            coins=coins,
            next=sampling.Uniforms(draws[:, length]),
        )


RoundNoise = MatchingNoise | RejectionNoise
VerificationMode = Matching | Rejection
"""Mode of a config. `for_draft` gives the mode of the rounds of a draft."""
RoundMode = Matching | PointMatching | Rejection
"""Mode of the rounds of a draft."""
