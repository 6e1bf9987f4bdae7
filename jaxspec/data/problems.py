"""Prompts with checkable answers, by number: generated exercises or JSON lines, their shuffled
stream, and padded batches."""

from __future__ import annotations

import difflib
import math
import os
import re
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Int32, Int64

from jaxspec.config.checked import read_from
from jaxspec.config.json_keys import is_whole_text, json_line, listed, named, shown
from jaxspec.config.settings import ConfigError, DataConfig, require
from jaxspec.data import arithmetic
from jaxspec.data.tokenizer import Tokenizer
from jaxspec.rewards.extract import extract, normalise

_EMPTY_BOX = re.compile(r"\\boxed\s{0,8}\{\s*\}")
_ANSWERS = (
    "answer",
    "answers",
    "solution",
    "solutions",
    "response",
    "completion",
    "output",
    "target",
)
"""Columns that are never proposed for problems."""


@dataclass(frozen=True)
class Problem:
    """A prompt as it is tokenised, its ids, the normalised reference answer, and the number of its
    row in the source."""

    prompt: str
    ids: tuple[int, ...]
    answer: str
    index: int


class LeftOut(NamedTuple):
    """Lines of a file that give no problem, by the reason."""

    too_long: int = 0
    repeated: int = 0
    """Their prompt is that of an earlier line."""
    unanswered: int = 0
    """They state no answer."""
    empty: int = 0
    """Their problem is empty, or white space."""
    blank: int = 0
    """They hold nothing at all."""

    @property
    def problems(self) -> int:
        """All but blank lines."""
        return sum(self) - self.blank

    def __str__(self) -> str:
        reasons = "too long", "repeated", "without an answer", "with an empty problem"
        counted = ", ".join(
            f"{count} {reason}" for count, reason in zip(self, reasons, strict=False) if count
        )
        problems = f"{self.problems} problems left out ({counted})" if counted else ""
        return " and ".join(
            filter(None, (problems, f"{self.blank} blank lines passed over" if self.blank else ""))
        )


class Problems(ABC):
    """Problems by position, readable from several threads at once."""

    left_out = LeftOut()
    """What the source has beside them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Problem: ...

    def __iter__(self) -> Iterator[Problem]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True)
class Generated(Problems):
    """The first `rows` exercises of one side of a generated task."""

    tokenizer: Tokenizer
    task: arithmetic.Task
    digits: int
    held_out: bool
    rows: int

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < self.rows:
            raise IndexError(f"problem {index} of {self.rows}")
        exercise = arithmetic.make_exercise(self.task, self.digits, index, held_out=self.held_out)
        prompt = self.tokenizer.render(exercise.question)
        return Problem(
            prompt, tuple(self.tokenizer.encode(prompt)), normalise(exercise.answer), index
        )


@dataclass(frozen=True)
class RowParser:
    """How a line of a JSON-lines file becomes a problem; `key` and `path` name the file in
    messages."""

    config: DataConfig
    tokenizer: Tokenizer
    key: str
    path: str

    def parse(self, line: bytes, index: int) -> Problem:
        """Return the problem in `line`, the file's row `index` from 0, with an empty prompt where
        the problem is empty.

        Raises `ConfigError` naming file, line and column.
        """
        row = json_line(line, self.where(index))
        problem = self._column(row, "prompt_column", index)
        answer = reference_answer(self._column(row, "answer_column", index))
        if not problem.strip():
            return Problem("", (), answer, index)
        text = f"{problem}\n{self.config.instruction}" if self.config.instruction else problem
        if not self.config.tokenizer and (unknown := self.tokenizer.unknown(text)):
            raise ConfigError(
                f"{self.where(index)}: the built-in tokenizer lacks {unknown[:20]!r}; set"
                " data.tokenizer to a tokenizer's folder"
            )
        with read_from(self.where(index)):
            prompt = self.tokenizer.render(text)
            return Problem(prompt, tuple(self.tokenizer.encode(prompt)), answer, index)

    def where(self, index: int) -> str:
        """Return the place of row `index` for a message."""
        return f"{self.key} {self.path}, line {index + 1}"

    def _column(self, row: dict[str, Any], setting: str, index: int) -> str:
        name: str = getattr(self.config, setting)
        if name not in row:
            columns = listed(map(shown, row)) or "none"
            raise ConfigError(
                f"{self.where(index)}: no column {shown(name)} among {columns};"
                f" {self._remedy(row, setting)}"
            )
        value = row[name]
        if isinstance(value, str) and not is_whole_text(value):
            raise ConfigError(
                f"{self.where(index)}: column {name!r} holds half of a character, {shown(value)};"
                " correct the text"
            )
        if (
            isinstance(value, bool)
            or not isinstance(value, str | int | float)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            kind = (
                f"{type(value).__name__}{' that is not finite' if isinstance(value, float) else ''}"
            )
            raise ConfigError(
                f"{self.where(index)}: column {name!r} holds a {kind} instead of text; set"
                f" --data.{setting} to a column of text"
            )
        return str(value)

    def _remedy(self, row: dict[str, Any], setting: str) -> str:
        """What to do about a column that is absent: never advice that would train on the answers,
        or break the other file."""
        if self.key != "data.path":
            return f"give the file the columns of data.path, which --data.{setting} names for both"
        other = (
            self.config.answer_column if setting == "prompt_column" else self.config.prompt_column
        )
        taken = {other, *(_ANSWERS if setting == "prompt_column" else ())}
        near = difflib.get_close_matches(
            getattr(self.config, setting),
            [column for column in row if column.lower() not in taken],
            1,
        )
        return (
            f"did you mean --data.{setting} {named(near[0])}?" if near else f"set --data.{setting}"
        )


class JsonLines(Problems):
    """Rows of a JSON-lines file, of which only the places are kept in memory: offset, size, row
    number and the prompt's hash."""

    def __init__(
        self, parser: RowParser, places: Int64[np.ndarray, "rows 4"], left_out: LeftOut
    ) -> None:
        self.left_out = left_out
        self._parser, self._places = parser, places
        self._file = os.open(parser.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        offset, size, row, _ = self._places[index].tolist()
        return self._parser.parse(os.pread(self._file, size, offset), row)

    def shared(self, other: JsonLines) -> int:
        """Return how many of these problems are among those of `other`."""
        return int(np.isin(self._places[:, 3], other._places[:, 3]).sum())


class PromptStream:
    """Problems without end, shuffled anew each epoch; `stream[i]` depends on the seed and the
    global position i alone."""

    def __init__(self, problems: Problems, seed: int) -> None:
        self._problems = grain.MapDataset.source(problems).seed(seed).shuffle().repeat()

    def __getitem__(self, position: int) -> Problem:
        problem = self._problems[position]
        assert problem is not None  # only a filtered MapDataset has holes
        return problem


def all_problems(config: DataConfig, tokenizer: Tokenizer) -> Problems:
    """Return every problem of the file `data.path`; none is held out. Raises `ConfigError` as
    `load_problems` does."""
    parser = RowParser(config, tokenizer, "data.path", config.path)
    return JsonLines(parser, *_scan(parser))


def load_problems(config: DataConfig, tokenizer: Tokenizer) -> tuple[Problems, Problems]:
    """Return the training and the held-out problems; the latter are at most `data.eval_prompts`.

    Generated tasks hold out a fixed share of the operands. Of a file, the last rows are held out
    unless `data.eval_path` is set.
    Raises `ConfigError` where a file or column is missing, a line is damaged, or too few prompts
    fit `data.max_prompt_length`.
    """
    if not config.path:
        return _generated(config, tokenizer, held_out=False), _generated(
            config, tokenizer, held_out=True
        )
    same = f"data.prompt_column and data.answer_column are both {shown(config.prompt_column)}"
    require(
        config.prompt_column != config.answer_column,
        f"{same}, so that problems would state their answers; name two columns",
    )
    halved = (
        f"data.instruction is {shown(config.instruction)}, which is no text in UTF-8; write it in"
        " UTF-8"
    )
    require(is_whole_text(config.instruction), halved)
    parser, held_out = RowParser(config, tokenizer, "data.path", config.path), config.eval_prompts
    places, left_out = _scan(parser)
    if config.eval_path:
        other = RowParser(config, tokenizer, "data.eval_path", config.eval_path)
        eval_places, eval_left_out = _scan(other)
        return JsonLines(parser, places, left_out), JsonLines(
            other, eval_places[:held_out], eval_left_out
        )
    if len(places) <= held_out:
        raise ConfigError(
            f"data.path {config.path}: {len(places)} usable problems, of which data.eval_prompts ="
            f" {held_out} would be held out; lower data.eval_prompts or set data.eval_path"
        )
    return JsonLines(parser, places[:-held_out], left_out), JsonLines(
        parser, places[-held_out:], LeftOut()
    )


def remarks(
    config: DataConfig, problems: Problems, held_out: Problems, batch: int = 1
) -> list[str]:
    """Return what a user should know of the problems: what was left out, held-out ones that are
    trained on, and numbers below those asked.

    A batch of training takes `batch` problems.
    """
    lines = []
    if str(problems.left_out):
        lines.append(f"data.path {config.path}: {problems.left_out}; {len(problems)} to train on")
    if str(held_out.left_out):
        lines.append(
            f"data.eval_path {config.eval_path}: {held_out.left_out}; {len(held_out)} held out"
        )
    if (
        isinstance(problems, JsonLines)
        and isinstance(held_out, JsonLines)
        and (shared := held_out.shared(problems))
    ):
        lines.append(
            f"warning: {shared} of the {len(held_out)} held-out problems are among those to train"
            " on, too"
        )
    if len(problems) < batch:
        lines.append(
            f"warning: a batch takes {batch} problems, and there are {len(problems)} to train on,"
            " so that some are in it repeatedly"
        )
    if len(held_out) < config.eval_prompts:
        lines.append(
            f"{len(held_out)} problems are held out: there are no more, though data.eval_prompts is"
            f" {config.eval_prompts}"
        )
    return lines


def reference_answer(text: str) -> str:
    """Return the normalised answer of a reference: what follows its last `####`, else its last
    \\boxed{}, else all of it.

    An empty box, without another, is no answer.
    """
    _, mark, rest = text.rpartition("####")
    return normalise(
        rest.strip().partition("\n")[0]
        if mark
        else extract(text, "boxed") or text * (not _EMPTY_BOX.search(text))
    )


def pad_prompts(
    problems: Sequence[Problem], length: int, pad_id: int
) -> tuple[Int32[np.ndarray, "n length"], Int32[np.ndarray, " n"]]:
    """Return the prompts' ids padded on the right to `length`, and their lengths; raises ValueError
    for a longer prompt."""
    tokens = np.full((len(problems), length), pad_id, np.int32)
    lengths = np.array([len(problem.ids) for problem in problems], np.int32)
    if len(problems) and lengths.max() > length:
        raise ValueError(f"a prompt of {lengths.max()} tokens does not fit rows of {length}")
    for row, problem in enumerate(problems):
        tokens[row, : len(problem.ids)] = problem.ids
    return tokens, lengths


def _generated(config: DataConfig, tokenizer: Tokenizer, *, held_out: bool) -> Generated:
    rows = arithmetic.count(config.task, config.digits, held_out=held_out)
    problems = Generated(
        tokenizer,
        config.task,
        config.digits,
        held_out,
        min(rows, config.eval_prompts) if held_out else rows,
    )
    longest = max(len(problems[position].ids) for position in range(min(len(problems), 64)))
    if longest > config.max_prompt_length:
        raise ConfigError(
            f"data.max_prompt_length is {config.max_prompt_length}, but prompts of data.digits"
            f" {config.digits} take {longest} tokens; set --data.max_prompt_length {longest} or"
            " more"
        )
    return problems


def _scan(parser: RowParser) -> tuple[Int64[np.ndarray, "rows 4"], LeftOut]:
    """Return the places of the usable rows and what was left out, after a look at every line of the
    file."""
    limit = parser.config.max_prompt_length
    places: list[tuple[int, int, int, int]] = []
    seen: set[int] = set()
    offset, counts, shortest = 0, Counter[str](), 0
    try:
        with Path(parser.path).open("rb") as file:
            for index, line in enumerate(file):
                problem = parser.parse(line, index) if line.strip() else None
                reason = _unusable(problem, limit, seen)
                counts[reason] += 1
                if problem and reason == "too_long":
                    shortest = min(shortest or len(problem.ids), len(problem.ids))
                elif problem and not reason:
                    places.append((offset, len(line), index, hash(problem.prompt)))
                    seen.add(hash(problem.prompt))
                offset += len(line)
    except OSError as error:
        raise ConfigError(
            f"{parser.key} {parser.path}: {error.strerror}; give a readable JSON-lines file"
        ) from error
    left_out = LeftOut(**{reason: count for reason, count in counts.items() if reason})
    if not places and left_out.too_long:
        raise ConfigError(
            f"{parser.key} {parser.path}: none of {left_out.too_long} prompts fits"
            f" data.max_prompt_length = {limit}; the shortest takes {shortest} tokens, so raise"
            " data.max_prompt_length"
        )
    if not places and left_out.problems:
        column = (
            f"column {parser.config.answer_column!r} states no answer in any of"
            f" {left_out.unanswered} lines; set data.answer_column"
        )
        empty = (
            f"column {parser.config.prompt_column!r} is empty in all of {left_out.empty} lines; set"
            " data.prompt_column"
        )
        raise ConfigError(f"{parser.key} {parser.path}: {column if left_out.unanswered else empty}")
    if not places:
        raise ConfigError(
            f"{parser.key} {parser.path}: the file is empty; give one JSON object a line"
        )
    return np.array(places, np.int64), left_out


def _unusable(problem: Problem | None, limit: int, seen: set[int]) -> str:
    """Return why a line is left out, by the name of the count in `LeftOut`; empty for a usable
    one."""
    if problem is None:
        return "blank"
    if not problem.prompt:
        return "empty"
    if not problem.answer:
        return "unanswered"
    if len(problem.ids) > limit:
        return "too_long"
    return "repeated" if hash(problem.prompt) in seen else ""
