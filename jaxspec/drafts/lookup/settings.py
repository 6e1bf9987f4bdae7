"""Settings and specifications of drafts by look-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxspec.inputs.checked import CheckedConfig, require
from jaxspec.inputs.spec import Count, DraftSpec, Natural, RunFacts

Rule = Literal["vllm", "hf", "latest"]
"""Tie-break among the longest matches.

`vllm` and `hf` take the earliest. `latest` takes the latest of those with the most tokens after it.
"""


@dataclass(frozen=True, kw_only=True)
class SearchConfig(CheckedConfig, prefix="rollout.lookup."):
    """Search of existing text."""

    rule: Rule = "vllm"
    """Choice among n-gram matches: the longest and earliest (`vllm`), the same cut at an end token
    (`hf`), or the longest and latest (`latest`)."""
    min_match: Count = 2
    """Shortest n-gram at the end of the text that is searched for, in tokens."""
    max_match: Count = 5
    """Longest n-gram that is compared, in tokens."""
    past: Natural = 2
    """History: answers of the last epoch kept per prompt. 0 = only the other rows of the group are
    searched."""

    def check(self) -> None:
        message = (
            f"rollout.lookup.min_match {self.min_match} is above rollout.lookup.max_match"
            f" {self.max_match}"
        )
        # No n-gram would be compared otherwise.
        require(self.min_match <= self.max_match, f"{message}; lower the first or raise the second")


@dataclass(frozen=True, kw_only=True)
class NgramSpec(DraftSpec):
    """Specification of look-up in a row's own text."""

    kind: ClassVar[str] = "ngram"
    max_length: int
    settings: SearchConfig

    @classmethod
    def from_run(cls, settings: SearchConfig, run: RunFacts) -> NgramSpec:
        """Makes the spec of a run's look-up."""
        return cls(max_length=run.max_length, settings=settings)


@dataclass(frozen=True, kw_only=True)
class HistorySpec(DraftSpec):
    """Specification of look-up in other answers too."""

    kind: ClassVar[str] = "history"
    max_length: int
    settings: SearchConfig
    group_size: int

    @classmethod
    def from_run(cls, settings: SearchConfig, run: RunFacts) -> HistorySpec:
        """Makes the spec of a run's look-up."""
        return cls(max_length=run.max_length, settings=settings, group_size=run.group_size)
