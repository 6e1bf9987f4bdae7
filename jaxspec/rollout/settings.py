"""Settings of a rollout, which shape its compiled program."""

from collections.abc import Callable
from typing import NamedTuple

from jaxspec import sampling
from jaxspec.rollout.decode_state import StopStrings
from jaxspec.rollout.verification.block import Verification
from jaxspec.rollout.verification.plain import PLAIN
from jaxspec.rollout.verify import Verdict


class Settings(NamedTuple):
    """What shapes a rollout; part of the compiled program."""

    group_size: int
    max_new_tokens: int
    processing: sampling.Processing
    rule: Callable[..., Verdict] | None
    """How drafts that were drawn are verified, `token_rule` or `block_rule`; None couples draft and
    target by shared noise."""
    grid: tuple[float, ...] = (1.0,)
    """Factors on the temperature at which a draft is compared; of several, `Drafter.factor_index`
    says which one it samples at. (0,): argmax."""
    slots: int = 0
    """Rows of a shard that are generated at once, while the others wait; 0: all."""
    page_size: int = 0
    """Positions of a page; 0: a page is as long as a row, and every slot has one."""
    chunk: int = 0
    """Positions of such a row whose keys lie together; 0: all."""
    pages: int = 0
    """Pages of a shard's pool; 0: as many as prompts and slots can need."""
    tail: tuple[int, ...] = ()
    """Ever fewer slots that the last rows move to, so that a round costs what they need."""
    lengths: tuple[int, ...] = ()
    """Draft lengths among which each round chooses, ascending up to the draft's own; empty: that
    one alone."""
    piece: int = 0
    """Positions of a piece of known text; 0: those of the longest prompt."""
    stop: StopStrings | None = None
    """What ends a response beside an end token."""
    verification: Verification = PLAIN
    """How drafts are drawn and compared with the target; the distribution is the same."""
