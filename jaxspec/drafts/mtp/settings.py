"""Settings and specification of MTP drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxspec.inputs.checked import CheckedConfig
from jaxspec.inputs.spec import LayerCount, LearnedSpec, Natural, RunFacts


@dataclass(frozen=True, kw_only=True)
class MtpConfig(CheckedConfig, prefix="rollout.draft.mtp."):
    """Layers for multi-token prediction (MTP)."""

    layers: LayerCount = 1
    """Number of layers. Depth i uses layer i mod layers."""
    ffn: Natural = 0
    """Width of their SwiGLU layer. 0 = the policy's."""
    embedding_first: bool = True
    """Order of concatenation. True = [embedding, hidden] as in DeepSeek, False = [hidden,
    embedding] as in MiMo."""


@dataclass(frozen=True, kw_only=True)
class MtpSpec(LearnedSpec):
    """Specification of an MTP draft."""

    kind: ClassVar[str] = "mtp"
    settings: MtpConfig
    depths: int
    """Number of depths at which the draft is trained. 0 = not trained."""

    @classmethod
    def from_run(cls, settings: MtpConfig, run: RunFacts) -> MtpSpec:
        """Makes the spec of a run's draft."""
        return cls(
            max_length=run.max_length,
            policy=run.policy,
            path=run.path,
            decoder=run.decoder,
            settings=settings,
            depths=run.depths,
        )
