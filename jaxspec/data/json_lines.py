"""Rows of data files as questions and answers."""

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
from jaxspec.data.messages import Message, Tools, parse_messages, parse_tools
from jaxspec.data.problem_source import Problem, normalize_text
from jaxspec.inputs.checked import ConfigError, prefix_errors
from jaxspec.inputs.json_keys import (
    format_name,
    format_value,
    is_valid_utf8,
    join_names,
    parse_json_line,
)
from jaxspec.rewards.extract import extract_answer, normalize_answer
from jaxspec.tokens.tokenizer import Tokenizer

_EMPTY_BOX = re.compile(r"\\boxed\s{0,8}\{\s*\}")
_ANSWER_COLUMNS = (
    *("answer", "answers", "solution", "solutions"),
    *("response", "completion", "output", "target"),
)
"""Columns never proposed as the column of the problem."""


class Question(NamedTuple):
    """Question of a row, without instruction and template."""

    chat: Sequence[Message]
    """Messages up to the last one that is not the assistant's."""
    tools: Tools | None
    answer: str
    """Reference answer, or empty if the row has none."""
    problem_turn: int
    """Index of the user's last message, which is the problem."""
    dropped_turns: int
    """Number of messages after those in `chat`, all of the assistant."""
    is_chat: bool
    """Whether the row has messages instead of one text."""
    absent_columns: tuple[str, ...]
    """Settings whose column the row lacks."""

    @property
    def problem(self) -> str:
        """Text of the problem, or empty."""
        return self.chat[self.problem_turn]["content"] if self.chat else ""

    @property
    def normal_text(self) -> str:
        """Normalized text, equal for equal questions."""
        # A chat of one message without other keys equals the same problem as plain text.
        if [message.keys() for message in self.chat] == [{"role", "content"}] and not self.tools:
            return normalize_text(self.problem)
        texts = [
            normalize_text(f"{message['role']}: {message.get('content')}") for message in self.chat
        ]
        extra_keys = [
            {name: value for name, value in message.items() if name not in ("role", "content")}
            for message in self.chat
        ]
        return "\n".join(texts) + json.dumps([extra_keys, self.tools], sort_keys=True, default=str)

    @property
    def key(self) -> int:
        """64-bit hash of `normal_text`, equal in all processes."""
        # Python's `hash` of a text differs from process to process. JSON may have unpaired
        # surrogates, which UTF-8 refuses without `surrogatepass`.
        digest = hashlib.blake2b(
            self.normal_text.encode(errors="surrogatepass"), digest_size=8
        ).digest()
        # Signed, to fit a table of int64.
        return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True)
class RowParser:
    """Parser of the rows of data files."""

    config: DataConfig
    tokenizer: Tokenizer
    key: str
    """Setting that names the files, such as `data.path`."""
    path: str
    """Value of that setting."""
    needs_answers: bool = True
    """Whether a row must have an answer. If not, a missing or invalid answer is taken as empty."""

    def parse_question(self, row: Mapping[str, Any], index: int) -> Question:
        """Parses the question of a row.

        Its chat is empty if the problem is null, missing or blank.

        Args:
          row: content of the row.
          index: number of the row in the files, from 0.

        Raises:
          ConfigError: a column has an invalid value. The message names file, line and column.
        """
        absent_columns = []
        value = self._find_value(row, "prompt_column", absent_columns)
        answer = self._find_answer(row, index, absent_columns)
        chat = self._parse_chat(value, index) if isinstance(value, list) else []
        user_turns = [
            position for position, message in enumerate(chat) if message["role"] == "user"
        ]
        problem_turn, tools = user_turns[-1] if user_turns else 0, None
        # Messages of the assistant after the last question would give the answer away.
        asked_turns = [
            position for position, message in enumerate(chat) if message["role"] != "assistant"
        ]
        if value is not None and not isinstance(value, list):
            problem = self._require_text(value, "prompt_column", index)
            chat, asked_turns = [{"role": "user", "content": problem}], [0]
        if "tools" in row:
            with prefix_errors(self.describe_row(index)):
                tools = parse_tools(row["tools"])
        chat_length = asked_turns[-1] + 1 if asked_turns else 0
        is_chat, dropped_turns = isinstance(value, list), len(chat) - chat_length
        if not chat or not (chat[problem_turn].get("content") or "").strip():
            chat, problem_turn, chat_length, dropped_turns = [], 0, 0, 0
        return Question(
            chat[:chat_length],
            tools,
            answer,
            problem_turn,
            dropped_turns,
            is_chat,
            tuple(absent_columns),
        )

    def add_instruction(self, question: Question, index: int) -> str | list[Message]:
        """Adds `data.instruction` to the problem.

        Returns the messages of the question, or only its text if the row has no chat and no tools.

        Raises:
          ConfigError: the built-in tokenizer lacks a character.
        """
        instruction, problem = self.config.instruction, question.problem
        if self.config.answer_style == "code":
            # The policy cannot guess the name of the function that the tests call.
            instruction = instruction.replace("{test}", first_assertion(question.answer))
        text = f"{problem}\n{instruction}" if instruction else problem
        if not self.config.tokenizer and (
            unknown_characters := self.tokenizer.unknown_characters(text)
        ):
            raise ConfigError(
                f"{self.describe_row(index)}: the built-in tokenizer lacks"
                f" {unknown_characters[:20]!r}; set data.tokenizer to a tokenizer's folder"
            )
        if not question.is_chat and not question.tools:
            return text
        # A copy, since the question keeps its text without the instruction.
        chat = list(question.chat)
        chat[question.problem_turn] = {**chat[question.problem_turn], "content": text}
        return chat

    def render_prompt(self, question: Question, index: int) -> str:
        """Renders the prompt of a nonempty question.

        Raises:
          ConfigError: the chat template refuses the question, or the built-in tokenizer lacks a
            character. The message names file and line.
        """
        with prefix_errors(self.describe_row(index)):
            return self.tokenizer.render_prompt(
                self.add_instruction(question, index), question.tools
            )

    def parse_problem(self, line: bytes, index: int) -> Problem:
        """Parses a line into a problem.

        The prompt is empty if the line has no question.

        Raises:
          ConfigError: the line is not a JSON object, or as `parse_question` and `render_prompt`.
        """
        row = parse_json_line(line, self.describe_row(index))
        question = self.parse_question(row, index)
        if not question.chat:
            return Problem("", (), question.answer, index)
        prompt = self.render_prompt(question, index)
        with prefix_errors(self.describe_row(index)):
            ids = tuple(self.tokenizer.encode(prompt))
        return Problem(prompt, ids, question.answer, index, row, question.normal_text)

    def parse_answer(self, line: bytes, index: int) -> str:
        """Returns the reference answer of a line, without parsing the question.

        Raises:
          ConfigError: the line is not a JSON object, or its answer is invalid.
        """
        return self._find_answer(parse_json_line(line, self.describe_row(index)), index, [])

    def _find_answer(self, row: Mapping[str, Any], index: int, absent_columns: list[str]) -> str:
        value = self._find_value(row, "answer_column", absent_columns)
        if value is None or value == []:
            return ""
        try:
            if self.config.answer_style == "code":
                # Tests are often a list. Any other value must be text.
                return join_tests(row, value) or self._require_text(value, "answer_column", index)
            return extract_reference(self._require_text(value, "answer_column", index))
        except ConfigError:
            if self.needs_answers:
                raise
            return ""

    def describe_row(self, index: int) -> str:
        """Names file and line of a row."""
        return f"{self.key} {self.path}, line {index + 1}"

    def missing_column_error(self, row: Mapping[str, Any], setting: str, index: int) -> ConfigError:
        """Returns the error for a missing column."""
        name: str = getattr(self.config, setting)
        columns = join_names(map(format_value, row)) or "none"
        return ConfigError(
            f"{self.describe_row(index)}: no column {format_value(name)} among {columns};"
            f" {self._suggest_remedy(row, setting)}"
        )

    def _parse_chat(self, value: list[Any], index: int) -> list[Message]:
        """Parses the messages of a chat.

        Raises:
          ConfigError: the value is not a chat of texts, or has no message of the user.
        """
        chat = parse_messages(value)
        texts = [message.get("content") or "" for message in chat or []]
        user_messages = [message for message in chat or [] if message["role"] == "user"]
        has_valid_texts = all(isinstance(text, str) and is_valid_utf8(text) for text in texts)
        if chat is None or not has_valid_texts or (chat and not user_messages):
            raise ConfigError(
                f"{self.describe_row(index)}: column {self.config.prompt_column!r} holds a list"
                " that is not a chat; its messages must be objects with a text (or parts of type"
                " 'text') for `role` and `content` (or `from` and `value`), and one of them must be"
                " the user's"
            )
        return chat

    def _find_value(self, row: Mapping[str, Any], setting: str, absent_columns: list[str]) -> Any:
        """Looks up the column of a setting.

        The setting holds the name of a column, or a path into nested objects with dots. Returns
        None for a null. If the column is missing, adds the setting to `absent_columns` and returns
        None.
        """
        name: str = getattr(self.config, setting)
        value: Any = row
        # A column whose name has a dot takes precedence over a path.
        for key in [name] if name in row else name.split("."):
            if value is None:
                return None
            if not isinstance(value, Mapping) or key not in value:
                absent_columns.append(setting)
                return None
            value = value[key]
        return value

    def _require_text(self, value: Any, setting: str, index: int) -> str:
        """Converts a value to text.

        Raises:
          ConfigError: the value is no text and no finite number, or its text is not valid UTF-8.
        """
        name: str = getattr(self.config, setting)
        description = f"{self.describe_row(index)}: column {name!r} holds"
        if isinstance(value, str) and not is_valid_utf8(value):
            raise ConfigError(
                f"{description} an unpaired surrogate, {format_value(value)}; correct the text"
            )
        type_name, remedy = (
            type(value).__name__,
            f"set {self._option_name(setting)} to a column of text",
        )
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{description} a {type_name} instead of text; {remedy}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"{description} a {type_name} that is not finite instead of text; {remedy}"
            )
        return str(value)

    def _suggest_remedy(self, row: Mapping[str, Any], setting: str) -> str:
        """Suggests a remedy for a missing column."""
        option = self._option_name(setting)
        # The setting also names the column of the training file, which another name would break.
        if self.key.endswith("eval_path"):
            return f"give the file the columns of data.path, which {option} names for both"
        # The problem must never be suggested as the answer, nor an answer as the problem: the run
        # would then train on prompts that hold their answers.
        excluded = {self.config.prompt_column}
        if setting == "prompt_column":
            excluded = {self.config.answer_column, *_ANSWER_COLUMNS}
        candidates = [column for column in row if column.lower() not in excluded]
        matches = difflib.get_close_matches(getattr(self.config, setting), candidates, 1)
        if matches:
            return f"did you mean {option} {format_name(matches[0])}?"
        return f"set {option}"

    def _option_name(self, setting: str) -> str:
        """Returns the command-line option of a setting.

        The setting is in the same section as `key`.
        """
        return f"--{self.key.rpartition('.')[0]}.{setting}"


def join_tests(row: Mapping[str, Any], tests: Any) -> str:
    """Joins tests into one program.

    Rows may be in the layout of MBPP or of HumanEval. MBPP has a list of asserts, with imports and
    setup code in other columns. HumanEval has a function `check` that takes the function to test.
    Returns an empty text if `tests` is neither a text nor a list of texts.
    """
    test_blocks = [tests] if isinstance(tests, str) else tests
    if not isinstance(test_blocks, list) or not all(
        isinstance(block, str) for block in test_blocks
    ):
        return ""
    setup_values = [row.get(name) for name in ("test_imports", "test_setup_code")]
    setup_lines = [
        line for value in setup_values for line in (value if isinstance(value, list) else [value])
    ]
    entry_point, program = row.get("entry_point"), "\n".join(test_blocks)
    # HumanEval's tests define `check` but do not call it.
    if isinstance(entry_point, str) and "def check(" in program:
        program += f"\ncheck({entry_point})"
    return "\n".join([*(line for line in setup_lines if isinstance(line, str)), program]).strip()


def first_assertion(tests: str) -> str:
    """Returns the first line that begins with `assert `.

    It shows the name of the function to write. The result is empty if there is no such line.
    """
    return next((line for line in tests.splitlines() if line.startswith("assert ")), "")


@functools.lru_cache(maxsize=32768)
def extract_reference(text: str) -> str:
    """Extracts the final answer of a reference.

    It is the rest of the line after the last `####`, or else the content of the final \\boxed{}, or
    else the full text.
    Returns an empty text if only an empty box is found, or if the normal form is empty.
    """
    # GSM8K marks final answers by `####`.
    _, mark, last_part = text.rpartition("####")
    if mark:
        answer = last_part.strip().partition("\n")[0]
    else:
        full_text = "" if _EMPTY_BOX.search(text) else text
        answer = extract_answer(text, "boxed") or full_text
    return answer.strip() if normalize_answer(answer) else ""
