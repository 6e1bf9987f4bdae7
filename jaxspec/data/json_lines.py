"""Rows of a data file: how one becomes a problem with its reference answer."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxspec.config.settings import DataConfig
from jaxspec.data.messages import Message, Tools, messages_of, tools_of
from jaxspec.data.problem_source import Problem, normal_form
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


class Question(NamedTuple):
    """A row's question as it stands in the file, before instruction and template."""

    chat: Sequence[Message]
    """Its messages, up to the last that is not the assistant's."""
    tools: Tools | None
    answer: str
    """The reference answer; empty where the row states none."""
    turn: int
    """Place of the user's last message, which is the problem."""
    cut: int
    """Messages of the assistant after those."""
    is_chat: bool
    """Whether the row has messages, not one text."""
    absent: tuple[str, ...]
    """Settings that name a column which the row does not have."""

    @property
    def problem(self) -> str:
        """The text of the problem; empty where there is none."""
        return self.chat[self.turn]["content"] if self.chat else ""

    @property
    def text(self) -> str:
        """All that is asked in its normal form, the same for the same question."""
        if [message.keys() for message in self.chat] == [{"role", "content"}] and not self.tools:
            return normal_form(self.problem)
        parts = [normal_form(f"{each['role']}: {each.get('content')}") for each in self.chat]
        others = [
            {name: part for name, part in each.items() if name not in ("role", "content")}
            for each in self.chat
        ]
        return "\n".join(parts) + json.dumps([others, self.tools], sort_keys=True, default=str)

    @property
    def key(self) -> int:
        """A number that is the same for the same question, in every process."""
        digest = hashlib.blake2b(self.text.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


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

    def read(self, row: Mapping[str, Any], index: int) -> Question:
        """Return the question of `row`, the file's row `index` from 0. Its chat is empty where the
        problem is null, absent or blank.

        Raises `ConfigError` naming file, line and column.
        """
        absent = []
        value = self._value(row, "prompt_column", absent)
        answer = self._answer(row, index, absent)
        chat = self._messages(value, index) if isinstance(value, list) else []
        users = [place for place, each in enumerate(chat) if each["role"] == "user"]
        turn, tools = users[-1] if users else 0, None
        asked = [place for place, each in enumerate(chat) if each["role"] != "assistant"]
        if value is not None and not isinstance(value, list):
            problem = self._column(value, "prompt_column", index)
            chat, asked = [{"role": "user", "content": problem}], [0]
        if "tools" in row:
            with read_from(self.where(index)):
                tools = tools_of(row["tools"])
        end = asked[-1] + 1 if asked else 0
        is_chat, cut = isinstance(value, list), len(chat) - end
        if not chat or not (chat[turn].get("content") or "").strip():
            chat, turn, end, cut = [], 0, 0, 0
        return Question(chat[:end], tools, answer, turn, cut, is_chat, tuple(absent))

    def asked(self, question: Question, index: int) -> str | list[Message]:
        """Return the messages to ask, or the text where that is all: with `data.instruction`.

        Raises `ConfigError` where the built-in tokenizer lacks a character.
        """
        instruction, problem = self.config.instruction, question.problem
        if self.config.answer_style == "code":
            instruction = instruction.replace("{test}", first_test(question.answer))
        text = f"{problem}\n{instruction}" if instruction else problem
        if not self.config.tokenizer and (unknown := self.tokenizer.unknown(text)):
            raise ConfigError(
                f"{self.where(index)}: the built-in tokenizer lacks {unknown[:20]!r}; set"
                " data.tokenizer to a tokenizer's folder"
            )
        if not question.is_chat and not question.tools:
            return text
        chat = list(question.chat)
        chat[question.turn] = {**chat[question.turn], "content": text}
        return chat

    def render(self, question: Question, index: int) -> str:
        """Return the prompt of a question, which is not empty; raises `ConfigError` naming file and
        line where the chat template refuses it."""
        with read_from(self.where(index)):
            return self.tokenizer.render(self.asked(question, index), question.tools)

    def parse(self, line: bytes, index: int) -> Problem:
        """Return the problem in `line`, with an empty prompt where there is none.

        Raises `ConfigError` as `read` and `render` do.
        """
        row = json_line(line, self.where(index))
        question = self.read(row, index)
        if not question.chat:
            return Problem("", (), question.answer, index)
        prompt = self.render(question, index)
        with read_from(self.where(index)):
            ids = tuple(self.tokenizer.encode(prompt))
        return Problem(prompt, ids, question.answer, index, row, question.text)

    def answer(self, line: bytes, index: int) -> str:
        """Return the reference answer in `line`, as `parse` does; nothing is tokenised."""
        return self._answer(json_line(line, self.where(index)), index, [])

    def _answer(self, row: Mapping[str, Any], index: int, absent: list[str]) -> str:
        value = self._value(row, "answer_column", absent)
        if value is None or value == []:
            return ""
        try:
            if self.config.answer_style == "code":
                return assertions_of(row, value) or self._column(value, "answer_column", index)
            return reference_answer(self._column(value, "answer_column", index))
        except ConfigError:
            if self.answers:
                raise
            return ""

    def where(self, index: int) -> str:
        """Return the place of row `index` for a message."""
        return f"{self.key} {self.path}, line {index + 1}"

    def no_column(self, row: Mapping[str, Any], setting: str, index: int) -> ConfigError:
        """Return the refusal of a file whose rows lack the column that a setting names."""
        name: str = getattr(self.config, setting)
        columns = listed(map(shown, row)) or "none"
        return ConfigError(
            f"{self.where(index)}: no column {shown(name)} among {columns};"
            f" {self._remedy(row, setting)}"
        )

    def _messages(self, value: list[Any], index: int) -> list[Message]:
        """The messages of a problem that is a chat."""
        chat = messages_of(value)
        texts = [each.get("content") or "" for each in chat or []]
        users = [each for each in chat or [] if each["role"] == "user"]
        whole = all(isinstance(text, str) and is_whole_text(text) for text in texts)
        if chat is None or not whole or (chat and not users):
            raise ConfigError(
                f"{self.where(index)}: column {self.config.prompt_column!r} holds a list that is no"
                " chat; its messages must be objects with a text (or parts of type 'text') for"
                " `role` and `content` (or `from` and `value`), and the user must ask something"
            )
        return chat

    def _value(self, row: Mapping[str, Any], setting: str, absent: list[str]) -> Any:
        """The value in the column that a setting names, by its whole name or along its dots; None
        for a null, and for a column that is not there, which is added to `absent`."""
        name: str = getattr(self.config, setting)
        value: Any = row
        for part in [name] if name in row else name.split("."):
            if value is None:
                return None
            if not isinstance(value, Mapping) or part not in value:
                absent.append(setting)
                return None
            value = value[part]
        return value

    def _column(self, value: Any, setting: str, index: int) -> str:
        """The text of a value that is not null."""
        name: str = getattr(self.config, setting)
        holds = f"{self.where(index)}: column {name!r} holds"
        if isinstance(value, str) and not is_whole_text(value):
            raise ConfigError(f"{holds} half of a character, {shown(value)}; correct the text")
        kind, remedy = type(value).__name__, f"set {self._option(setting)} to a column of text"
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{holds} a {kind} instead of text; {remedy}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{holds} a {kind} that is not finite instead of text; {remedy}")
        return str(value)

    def _remedy(self, row: Mapping[str, Any], setting: str) -> str:
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


def assertions_of(row: Mapping[str, Any], tests: Any) -> str:
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


@functools.lru_cache(maxsize=32768)
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
