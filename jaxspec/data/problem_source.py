"""Problems and the interface of their sources."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


def normalize_text(text: str) -> str:
    """Normalizes white space and Unicode form of a text."""
    return " ".join(unicodedata.normalize("NFC", text).split())


@dataclass(frozen=True)
class Problem:
    """A prompt with its reference answer."""

    prompt: str
    """Text of the prompt, by the chat template and with the instruction."""
    ids: tuple[int, ...]
    """Token ids of the prompt."""
    answer: str
    """Reference answer, or empty if there is none."""
    index: int
    """Number of its row in the source."""
    columns: dict[str, Any] = field(default_factory=dict)
    """All columns of its row."""
    question: str = ""
    """Normalized question, before instruction and chat template."""
    set_number: int = 0
    """Number of the set of problems whose rewards its responses get."""


class SkippedLines(NamedTuple):
    """Counts of lines that give no problem."""

    too_long: int = 0
    """Lines whose prompt exceeds `data.max_prompt_length`."""
    repeated: int = 0
    """Lines with the problem of an earlier line."""
    unanswered: int = 0
    """Lines without an answer."""
    empty: int = 0
    """Lines whose problem is empty or white space."""
    blank: int = 0
    """Lines of white space only."""

    @property
    def problem_count(self) -> int:
        """Number of skipped lines that are not blank."""
        return sum(self) - self.blank

    def __str__(self) -> str:
        reasons = "too long", "repeated", "without an answer", "with an empty problem"
        # `reasons` lacks the last count, since blank lines are listed apart.
        breakdown = ", ".join(
            f"{count} {reason}" for count, reason in zip(self, reasons, strict=False) if count
        )
        description = f"{self.problem_count} problems left out ({breakdown})" if breakdown else ""
        return " and ".join(
            filter(
                None, (description, f"{self.blank} blank lines passed over" if self.blank else "")
            )
        )


class Problems(ABC):
    """Source of problems, safe for several threads."""

    skipped_lines = SkippedLines()
    """Counts of the lines that give no problem."""
    unrendered: Mapping[str, int] = {}
    """Number of problems by the part of their row that prompts leave out."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Problem: ...

    def iter_references(self) -> Iterator[tuple[str, str]]:
        """Yields location and reference answer of each problem."""
        return ((f"problem {problem.index + 1}", problem.answer) for problem in self)

    def __iter__(self) -> Iterator[Problem]:
        return (self[index] for index in range(len(self)))
