"""Problems in a file of JSON lines: how a line becomes one, and which lines give none."""

from __future__ import annotations

import difflib
import math
import os
import re
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from jaxspec.config.settings import DataConfig
from jaxspec.data.files import json_lines_of
from jaxspec.data.problem_source import LeftOut, Problem, Problems
from jaxspec.inputs.checked import ConfigError, read_from
from jaxspec.inputs.json_keys import is_whole_text, json_line, listed, named, shown
from jaxspec.rewards.extract import extract, normalise
from jaxspec.tokens.tokenizer import Tokenizer

_EMPTY_BOX = re.compile(r"\\boxed\s{0,8}\{\s*\}")
_ANSWERS = (
    *("answer", "answers", "solution", "solutions"),
    *("response", "completion", "output", "target"),
)
"""Columns that are never proposed for problems."""


@dataclass(frozen=True)
class RowParser:
    """How a row of what `files.data_files` finds becomes a problem; `key` and `path` name that in
    messages."""

    config: DataConfig
    tokenizer: Tokenizer
    key: str
    path: str
    answers: bool = True
    """Whether a row must state its answer; else one that does not, or not rightly, is a prompt
    without one."""

    @cached_property
    def lines(self) -> str:
        """The path of the lines, which are written out first where no single file has them."""
        return json_lines_of(self.path, self.key)

    def parse(self, line: bytes, index: int) -> Problem:
        """Return the problem in `line`, the file's row `index` from 0, with an empty prompt where
        the problem is empty.

        Raises `ConfigError` naming file, line and column.
        """
        row = json_line(line, self.where(index))
        chat = self._messages(row, index)
        problem = chat[-1]["content"] if chat else self._column(row, "prompt_column", index)
        answer = self._answer(row, index)
        if not problem.strip():
            return Problem("", (), answer, index)
        instruction = self.config.instruction
        if self.config.answer_style == "code":
            instruction = instruction.replace("{test}", first_test(answer))
        text = f"{problem}\n{instruction}" if instruction else problem
        if not self.config.tokenizer and (unknown := self.tokenizer.unknown(text)):
            raise ConfigError(
                f"{self.where(index)}: the built-in tokenizer lacks {unknown[:20]!r}; set"
                " data.tokenizer to a tokenizer's folder"
            )
        with read_from(self.where(index)):
            asked = [*chat[:-1], {**chat[-1], "content": text}] if chat else text
            prompt = self.tokenizer.render(asked)
            return Problem(prompt, tuple(self.tokenizer.encode(prompt)), answer, index, row)

    def answer(self, line: bytes, index: int) -> str:
        """Return the reference answer in `line`, as `parse` does; nothing is tokenised."""
        return self._answer(json_line(line, self.where(index)), index)

    def _answer(self, row: dict[str, Any], index: int) -> str:
        try:
            if self.config.answer_style == "code":
                tests = self._value(row, "answer_column", index)
                return assertions_of(row, tests) or self._column(row, "answer_column", index)
            return reference_answer(self._column(row, "answer_column", index))
        except ConfigError:
            if self.answers:
                raise
            return ""

    def where(self, index: int) -> str:
        """Return the place of row `index` for a message."""
        return f"{self.key} {self.path}, line {index + 1}"

    def _messages(self, row: dict[str, Any], index: int) -> list[dict[str, Any]]:
        """The messages of a problem that is a chat, up to the last of the user; empty where it is a
        text."""
        value = self._value(row, "prompt_column", index)
        if not isinstance(value, list):
            return []
        chat = messages_of(value) or []
        asked = [place for place, each in enumerate(chat) if each["role"] == "user"]
        texts = [each.get("content") for each in chat]
        if not asked or not all(isinstance(text, str) and is_whole_text(text) for text in texts):
            raise ConfigError(
                f"{self.where(index)}: column {self.config.prompt_column!r} holds a list that is no"
                " chat; its messages must be objects with a text for `role` and `content` (or"
                " `from` and `value`), and the user must ask something"
            )
        return chat[: asked[-1] + 1]

    def _value(self, row: dict[str, Any], setting: str, index: int) -> Any:
        """What a row has in the column that a setting names: by its whole name, or along its
        dots."""
        name: str = getattr(self.config, setting)
        value: Any = row
        for part in [name] if name in row else name.split("."):
            if not isinstance(value, dict) or part not in value:
                columns = listed(map(shown, row)) or "none"
                raise ConfigError(
                    f"{self.where(index)}: no column {shown(name)} among {columns};"
                    f" {self._remedy(row, setting)}"
                )
            value = value[part]
        return value

    def _column(self, row: dict[str, Any], setting: str, index: int) -> str:
        name: str = getattr(self.config, setting)
        value, holds = (
            self._value(row, setting, index),
            f"{self.where(index)}: column {name!r} holds",
        )
        if isinstance(value, str) and not is_whole_text(value):
            raise ConfigError(f"{holds} half of a character, {shown(value)}; correct the text")
        kind, remedy = type(value).__name__, f"set {self._option(setting)} to a column of text"
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{holds} a {kind} instead of text; {remedy}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{holds} a {kind} that is not finite instead of text; {remedy}")
        return str(value)

    def _remedy(self, row: dict[str, Any], setting: str) -> str:
        """What to do about a column that is absent: never advice that would train on the answers,
        or break the other file."""
        option = self._option(setting)
        if self.key.endswith("eval_path"):
            return f"give the file the columns of data.path, which {option} names for both"
        taken = {self.config.prompt_column}
        if setting == "prompt_column":
            taken = {self.config.answer_column, *_ANSWERS}
        free = [column for column in row if column.lower() not in taken]
        near = difflib.get_close_matches(getattr(self.config, setting), free, 1)
        if near:
            return f"did you mean {option} {named(near[0])}?"
        return f"set {option}"

    def _option(self, setting: str) -> str:
        """What a setting beside the file's is called on the command line."""
        return f"--{self.key.rpartition('.')[0]}.{setting}"


class JsonLines(Problems):
    """Rows of a JSON-lines file, of which only the places are kept in memory: offset, size, row
    number, the prompt's hash, and whether the row states an answer."""

    def __init__(
        self, parser: RowParser, places: Int64[np.ndarray, "rows 5"], left_out: LeftOut
    ) -> None:
        self.left_out = left_out
        self._parser, self._places = parser, places
        self._file = os.open(parser.lines, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        return self._parser.parse(*self._line(index))

    def _line(self, index: int) -> tuple[bytes, int]:
        offset, size, row, *_ = self._places[index].tolist()
        return os.pread(self._file, size, offset), row

    def references(self) -> Iterator[tuple[str, str]]:
        """The line of each problem, for a message, and its reference answer."""
        for line, row in map(self._line, range(len(self))):
            yield self._parser.where(row), self._parser.answer(line, row)

    @property
    def unanswered(self) -> int:
        """How many of these problems have no reference answer."""
        return int(np.sum(self._places[:, 4] == 0))

    def shared(self, other: JsonLines) -> int:
        """Return how many of these problems are among those of `other`."""
        return int(np.isin(self._places[:, 3], other._places[:, 3]).sum())


_SPEAKERS = {"human": "user", "gpt": "assistant"}
_KEYS = {"from": "role", "value": "content"}
"""What the layout of ShareGPT and Magpie calls who speaks, and the keys of a message."""


def messages_of(chat: Any) -> list[dict[str, Any]] | None:
    """Return the messages of a chat with `role` and `content`, whichever of the two layouts it is
    written in; None where it is written in neither.

    What else a message holds (tool_calls, reasoning_content) is left to the chat template; where it
    is null it counts as absent, since parquet knows no other way.
    """
    found = []
    for message in chat if isinstance(chat, list) else [None]:
        if not isinstance(message, dict):
            return None
        held = {name: part for name, part in message.items() if part is not None}
        held = {_KEYS[name]: part for name, part in held.items() if name in _KEYS} | held
        role = held.get("role")
        if not isinstance(role, str):
            return None
        if "content" in message:  # null beside calls of tools, which templates look for
            held.setdefault("content", None)
        found.append({**held, "role": _SPEAKERS.get(role, role)})
    return found


def assertions_of(row: dict[str, Any], tests: Any) -> str:
    """Return a program of tests, as MBPP has it (a list of asserts, and what they need) or
    HumanEval (a function `check`, and what it is called with); empty where `tests` is neither a
    text nor a list of texts."""
    parts = [tests] if isinstance(tests, str) else tests
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return ""
    before = [row.get(name) for name in ("test_imports", "test_setup_code")]
    lines = [part for each in before for part in (each if isinstance(each, list) else [each])]
    entry, program = row.get("entry_point"), "\n".join(parts)
    if isinstance(entry, str) and "def check(" in program:
        program += f"\ncheck({entry})"
    return "\n".join([*(line for line in lines if isinstance(line, str)), program]).strip()


def first_test(tests: str) -> str:
    """Return the first line of a program of tests that asserts, which says what a solution must be
    called; empty where none does."""
    return next((line for line in tests.splitlines() if line.startswith("assert ")), "")


def reference_answer(text: str) -> str:
    """Return the answer of a reference: what follows its last `####`, else its last \\boxed{}, else
    all of it.

    An empty box, without another, is no answer, and neither is what has an empty normal form.
    """
    _, mark, rest = text.rpartition("####")
    if mark:
        answer = rest.strip().partition("\n")[0]
    else:
        whole = "" if _EMPTY_BOX.search(text) else text
        answer = extract(text, "boxed") or whole
    return answer.strip() if normalise(answer) else ""


def scan(parser: RowParser) -> tuple[Int64[np.ndarray, "rows 5"], LeftOut]:
    """Return the places of the usable rows, as `JsonLines` keeps them, and what was left out, after
    a look at every line of the file."""
    limit = parser.config.max_prompt_length
    places: list[tuple[int, int, int, int, bool]] = []
    seen: set[int] = set()
    offset, counts, shortest = 0, Counter[str](), 0
    try:
        with Path(parser.lines).open("rb") as file:
            for index, line in enumerate(file):
                problem = parser.parse(line, index) if line.strip() else None
                reason = _unusable(problem, limit, seen, parser.answers)
                counts[reason] += 1
                if problem and reason == "too_long":
                    shortest = min(shortest or len(problem.ids), len(problem.ids))
                elif problem and not reason:
                    row = hash(problem.prompt), bool(problem.answer)
                    places.append((offset, len(line), index, *row))
                    seen.add(hash(problem.prompt))
                offset += len(line)
    except OSError as error:
        where = f"{parser.key} {parser.path}: {error.strerror}"
        raise ConfigError(f"{where}; give a readable JSON-lines file") from error
    left_out = LeftOut(**{reason: count for reason, count in counts.items() if reason})
    if not places:
        why = _why_none(parser.config, left_out, shortest)
        raise ConfigError(f"{parser.key} {parser.path}: {why}")
    return np.array(places, np.int64), left_out


def _why_none(config: DataConfig, left_out: LeftOut, shortest: int) -> str:
    """Return why no line of a file gives a problem, and the remedy; `shortest` is the length of the
    shortest prompt that does not fit."""
    if left_out.too_long:
        return (
            f"none of {left_out.too_long} prompts fits data.max_prompt_length ="
            f" {config.max_prompt_length}; the shortest takes {shortest} tokens, so raise"
            " data.max_prompt_length"
        )
    if left_out.unanswered:
        column = f"column {config.answer_column!r} states no answer in any of"
        return f"{column} {left_out.unanswered} lines; set data.answer_column"
    if left_out.problems:
        column = f"column {config.prompt_column!r} is empty in all of"
        return f"{column} {left_out.empty} lines; set data.prompt_column"
    return "the file is empty; give one JSON object a line"


def _unusable(problem: Problem | None, limit: int, seen: set[int], answers: bool) -> str:
    """Return why a line is left out, by the name of the count in `LeftOut`; empty for a usable
    one."""
    if problem is None:
        return "blank"
    if not problem.prompt:
        return "empty"
    if answers and not problem.answer:
        return "unanswered"
    if len(problem.ids) > limit:
        return "too_long"
    return "repeated" if hash(problem.prompt) in seen else ""
