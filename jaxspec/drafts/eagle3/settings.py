"""Settings and specification of EAGLE-3 drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxspec.inputs.checked import CheckedConfig
from jaxspec.inputs.spec import HeadSpec, LearnedSpec, Natural, RunFacts

# Each drafted token reads the whole head. Published heads have 32,000 tokens (SpecForge).
LARGE_VOCAB, PUBLISHED_VOCAB = 32_768, 32_000
"""Threshold and maximum of `vocab auto`.

The threshold is the policy's vocabulary above which its draft gets a smaller one.
"""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(CheckedConfig, prefix="rollout.draft.eagle3."):
    """EAGLE-3 drafts. `head.` has further variants of the head."""

    vocab: Natural | Literal["auto"] = "auto"
    """Size of the draft's own vocabulary, which offline training selects from the policy's samples.
    0 = the policy's vocabulary. `auto` = 0, or with offline training and more than 32,768 tokens a
    quarter of them, at most 32,000. A smaller head is read faster in each draft."""
    ffn: Natural = 0
    """Width of the draft's SwiGLU layer. 0 = the policy's."""
    tap_convention: Literal["auto", "boundary", "output_of"] = "auto"
    """Meaning of layer numbers in the folder of `rollout.draft.path`. `boundary` counts the layers
    applied (vLLM, speculators). `output_of` names the layer whose output is read (SpecForge).
    `auto` decides by the folder's format."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(LearnedSpec):
    """Specification of an EAGLE-3 draft."""

    kind: ClassVar[str] = "eagle3"
    settings: Eagle3Config
    head: HeadSpec
    row_length: int
    """Maximum tokens of a row, with prompt and response."""
    trains_offline: bool
    banned_count: int
    """Number of token ids that are never sampled."""

    @classmethod
    def from_run(cls, settings: Eagle3Config, run: RunFacts) -> Eagle3Spec:
        """Makes the spec of a run's draft."""
        return cls(
            max_length=run.max_length,
            policy=run.policy,
            path=run.path,
            decoder=run.decoder,
            settings=settings,
            head=run.head,
            row_length=run.row_length,
            trains_offline=run.trains_offline,
            banned_count=len(run.banned),
        )

    @property
    def vocab(self) -> int:
        """Tokens of the draft's own vocabulary. 0 = the policy's vocabulary."""
        # An unresolved `auto` counts as 0.
        return 0 if isinstance(self.settings.vocab, str) else self.settings.vocab
