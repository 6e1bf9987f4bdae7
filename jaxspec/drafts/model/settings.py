"""Settings and specification of draft models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxspec.inputs.checked import CheckedConfig
from jaxspec.inputs.spec import LayerCount, LearnedSpec, Natural, RunFacts


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(CheckedConfig, prefix="rollout.draft.model."):
    """A small decoder that drafts."""

    layers: LayerCount = 1
    """Decoder layers of the draft."""
    ffn: Natural = 0
    """Width of its SwiGLU layers. 0 = the policy's."""


@dataclass(frozen=True, kw_only=True)
class DraftModelSpec(LearnedSpec):
    """Specification of a draft model."""

    kind: ClassVar[str] = "model"
    settings: DraftModelConfig

    @classmethod
    def from_run(cls, settings: DraftModelConfig, run: RunFacts) -> DraftModelSpec:
        """Makes the spec of a run's draft."""
        return cls(
            max_length=run.max_length,
            policy=run.policy,
            path=run.path,
            decoder=run.decoder,
            settings=settings,
        )
