"""Settings of a rollout."""

from typing import NamedTuple

from jaxspec import sampling
from jaxspec.rollout.verification.block import Verification
from jaxspec.rollout.verification.modes import RoundMode
from jaxspec.rollout.verification.plain import PLAIN
from jaxspec.tokens.stop_strings import NO_STOP_STRINGS, StopStrings


class Settings(NamedTuple):
    """Static settings of a rollout, part of the compiled program."""

    group_size: int
    """Responses per prompt."""
    max_new_tokens: int
    """Maximum tokens of a response."""
    processing: sampling.Processing
    """Logit processing of the target."""
    mode: RoundMode
    """Whether drafts are matched with target samples, or accepted by coins.

    It fits one draft and `grid`. `VerificationMode.for_draft` gives it.
    """
    grid: tuple[float, ...] = (1.0,)
    """Draft temperature factors to measure. (0,) drafts the argmax.

    `Drafter.factor_index` selects the factor that each depth samples at.
    """
    slots: int = 0
    """Rows of a shard that are generated at once. 0 = all."""
    page_size: int = 0
    """Positions per page. 0 = contiguous caches, one page per slot."""
    chunk: int = 0
    """Positions per chunk of a contiguous cache's keys. 0 = all."""
    pages: int = 0
    """Pages of a shard's pool. 0 = as many as prompts and slots can need."""
    # With fewer slots, a round of the last rows costs less.
    tail: tuple[int, ...] = ()
    """Slots of the tail loops that the last rows move to, descending."""
    lengths: tuple[int, ...] = ()
    """Draft lengths that each round chooses from, ascending up to the draft's maximum.

    If empty, all rounds have the maximum.
    """
    piece: int = 0
    """Positions per piece of known text. 0 = the maximum prompt length."""
    stop: StopStrings = NO_STOP_STRINGS
    """Stop strings that end a response, in addition to end tokens."""
    verification: Verification = PLAIN
    """Form of verification. All forms sample the same distribution."""
