"""What a source of problems is: problems by position, and the count of what it has beside them."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


def normalize_text(text: str) -> str:
    """Returns a text that is the same for two that differ in white space or Unicode form only."""
    return " ".join(unicodedata.normalize("NFC", text).split())


@dataclass(frozen=True)
class Problem:
    """A prompt as it is tokenised, its ids, the reference answer, and the number of its row in the
    source."""

    prompt: str
    ids: tuple[int, ...]
    answer: str
    index: int
    columns: dict[str, Any] = field(default_factory=dict)
    """Everything that the row says."""
    question: str = ""
    """The problem before instruction and template, in its normal form."""
    set_number: int = 0
    """Number of the set of problems that says what its responses are paid for."""


class SkippedLines(NamedTuple):
    """Lines of a file that give no problem, by the reason."""

    too_long: int = 0
    repeated: int = 0
    """They ask the problem of an earlier line."""
    unanswered: int = 0
    """They state no answer."""
    empty: int = 0
    """Their problem is empty, or white space."""
    blank: int = 0
    """They hold nothing at all."""

    @property
    def problem_count(self) -> int:
        """All but blank lines."""
        return sum(self) - self.blank

    def __str__(self) -> str:
        reasons = "too long", "repeated", "without an answer", "with an empty problem"
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
    """Problems by position, readable from several threads at once."""

    skipped_lines = SkippedLines()
    """What the source has beside them."""
    unrendered: Mapping[str, int] = {}
    """Parts of rows that no prompt holds, with the number of problems that have them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Problem: ...

    def iter_references(self) -> Iterator[tuple[str, str]]:
        """The place of each problem, for a message, and its reference answer."""
        return ((f"problem {problem.index + 1}", problem.answer) for problem in self)

    def __iter__(self) -> Iterator[Problem]:
        return (self[index] for index in range(len(self)))
