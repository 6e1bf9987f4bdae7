"""Texts and chats as rows of tokens."""

import difflib
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from jaxspec.data.files import count_lines, find_data_files, iter_lines
from jaxspec.data.messages import UnrenderedCounter, parse_messages, parse_tools
from jaxspec.inputs.checked import ConfigError, prefix_errors, require
from jaxspec.inputs.json_keys import format_value, join_names, parse_json_line
from jaxspec.tokens.tokenizer import Tokenizer

_COLUMNS = ("text", "messages")
_OTHER_COLUMNS = ("conversations", "data")
"""Names of columns of other published chats, read if a row has none of `_COLUMNS`.

`conversations` is that of Magpie and ShareGPT. `data` is that of the first UltraChat: a list of
texts, of user and assistant in turn.
"""
_BLANK, _EMPTY, _REPEATED = (
    "blank lines passed over",
    "empty texts left out",
    "repeated texts (kept)",
)
_REPORT_SECONDS = 10.0
"""Seconds between two progress reports on a long file."""


class _Tally:
    """Counts of skipped and changed rows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.counts = Counter[str]()
        self.unrendered = UnrenderedCounter(tokenizer.render_chat)
        # Rows without a column are skipped like empty ones, unless no row has any text.
        self.column_error: ConfigError | None = None
        """Error for the first row that has none of the columns."""


@dataclass(frozen=True)
class TextFile:
    """Reader of the files of `offline.text`."""

    path: str
    tokenizer: Tokenizer
    encodes_any_text: bool
    """Whether the tokenizer can encode any character."""
    length: int
    """Tokens of a row. Longer rows are cut."""

    def read_rows(
        self, max_rows: int, rng: np.random.Generator, report: Callable[[str], Any]
    ) -> tuple[Int32[np.ndarray, "rows length"], Bool[np.ndarray, "rows length"]]:
        """Reads padded tokens and their loss masks.

        The mask of a text covers all but the beginning token. The mask of a chat covers the
        messages of the assistant.

        Args:
          max_rows: maximum number of lines. If the file has more, a random subset is read.
          rng: source of that subset.
          report: called with progress on a long file, and with counts of rows that were skipped,
            cut or repeated.

        Raises:
          ConfigError: the file cannot be read, or a row cannot be used. The message names file,
            line and column if these are known.
        """
        tally = _Tally(self.tokenizer)
        try:
            files = find_data_files(self.path, "offline.text")
            self._require_regular_files(files)
            line_count = count_lines(files, self.name)
            is_selected = np.ones(line_count, bool)
            # A subset bounds memory by the rows that can be trained on, whatever the file's size.
            if line_count > max_rows:
                is_selected[:] = False
                is_selected[rng.choice(line_count, max_rows, replace=False)] = True
            size = int(is_selected.sum()), self.length
            tokens, loss_mask = np.full(size, self.tokenizer.pad_id, np.int32), np.zeros(size, bool)
            row_count, report_time = 0, time.monotonic()
            lines = enumerate(iter_lines(files, self.name), start=1)
            for number, line in itertools.compress(lines, is_selected.tolist()):
                ids, row_mask = self._parse_row(line, number, tally)
                tokens[row_count, : len(ids)], loss_mask[row_count, : len(ids)] = ids, row_mask
                # A skipped line has no ids. The next line then takes its row.
                row_count += len(ids) > 0
                if time.monotonic() - report_time > _REPORT_SECONDS:
                    report_time = time.monotonic()
                    report(f"{self.name}: {number:,} of {line_count:,} lines are read")
        except OSError as error:
            raise ConfigError(
                f"{self.name}: {error.strerror}; give a readable JSON-lines file, or `generic`"
            ) from error
        if not row_count:
            raise tally.column_error or ConfigError(
                f"{self.name}: {self._explain_empty_file(tally.counts)}"
            )
        # Hashes take far less memory than a set of the rows themselves.
        tally.counts[_REPEATED] = row_count - len(
            {hash(row.tobytes()) for row in tokens[:row_count]}
        )
        remarks = self._list_remarks(tally)
        if line_count > max_rows:
            remarks.insert(
                0, f"{max_rows:,} of {line_count:,} lines drawn, as many as can be trained on"
            )
        if remarks:
            report(f"{self.name}: {', '.join(remarks)}; {row_count} to train on")
        return tokens[:row_count], loss_mask[:row_count]

    @property
    def name(self) -> str:
        """Setting and path, for messages."""
        return f"offline.text {self.path}"

    @property
    def _cut_label(self) -> str:
        return f"cut to {self.length} tokens"

    @property
    def _unanswered_label(self) -> str:
        return f"chats left out, whose first {self.length} tokens have no answer"

    def _require_regular_files(self, files: list[Path]) -> None:
        """Raises ConfigError for pipes and other special files."""
        # Lines are counted before they are read, and a pipe can be read only once.
        for file in files:
            require(
                file.is_file() or file.is_dir() or not file.exists(),
                f"{self.name}: {file} is not a regular file; copy its content to one, and name"
                " that",
            )

    def _explain_empty_file(self, counts: Counter[str]) -> str:
        """Explains why a file has nothing to train on."""
        if counts[self._unanswered_label]:
            return (
                f"none of its {counts[self._unanswered_label]} chats has an answer in its first"
                f" {self.length} tokens (data.max_prompt_length + rollout.max_new_tokens); raise"
                " --rollout.max_new_tokens"
            )
        reason = f"all {counts[_EMPTY]} texts are empty" if counts[_EMPTY] else "the file is empty"
        return f"{reason}; give one JSON object a line, with a column 'text' or 'messages'"

    def _list_remarks(self, tally: _Tally) -> list[str]:
        """Lists the counts of skipped, changed and repeated rows."""
        kinds = _BLANK, _EMPTY, self._cut_label, self._unanswered_label, _REPEATED
        remarks = [f"{tally.counts[kind]} {kind}" for kind in kinds if tally.counts[kind]]
        remarks += [
            f"the chat template does not write {description}, in {count} chats"
            for description, count in tally.unrendered.counts.items()
        ]
        return remarks

    def _parse_row(self, line: bytes, number: int, tally: _Tally) -> tuple[list[int], list[bool]]:
        """Returns tokens and loss mask of a line. Both are empty if it is skipped."""
        if not line.strip():
            tally.counts[_BLANK] += 1
            return [], []
        location = f"{self.name}, line {number}"
        row = parse_json_line(line, location, ", with a column 'text' or 'messages'")
        column = _find_column(row, location)
        if not column:
            tally.column_error = tally.column_error or _missing_column_error(row, location)
        if not column or _is_blank(row[column]):
            tally.counts[_EMPTY] += 1
            return [], []
        with prefix_errors(location):
            if column == "text":
                ids, row_mask = self._tokenize_text(row, column, location)
            else:
                ids, row_mask = self._tokenize_chat(row, column, location, tally)
        # A long chat may be cut before its first answer, and then has nothing to learn.
        if len(ids) > self.length:
            ids, row_mask = ids[: self.length], row_mask[: self.length]
            tally.counts[self._cut_label if any(row_mask) else self._unanswered_label] += 1
        return (ids, row_mask) if any(row_mask) else ([], [])

    def _tokenize_text(
        self, row: dict[str, Any], column: str, location: str
    ) -> tuple[list[int], list[bool]]:
        """Returns tokens and loss mask of a text."""
        text = row[column]
        if not isinstance(text, str):
            raise ConfigError(
                f"{location}: column {column!r} holds a {type(text).__name__} instead of text; put"
                " its text in quotes"
            )
        # Only the built-in tokenizer lacks characters.
        unknown = "" if self.encodes_any_text else self.tokenizer.unknown_characters(text)
        require(
            not unknown,
            f"{location}: the built-in tokenizer lacks {unknown[:20]!r} of column {column!r}; set"
            " --data.tokenizer to a folder",
        )
        bos_ids = self.tokenizer.bos_ids
        ids = [*self.tokenizer.encode(text), self.tokenizer.stop_ids[0]]
        return [*bos_ids, *ids], [False] * len(bos_ids) + [True] * len(ids)

    def _tokenize_chat(
        self, row: dict[str, Any], column: str, location: str, tally: _Tally
    ) -> tuple[list[int], list[bool]]:
        """Returns tokens and loss mask of a chat."""
        chat = _texts_to_messages(row[column]) if column == "data" else row[column]
        messages = parse_messages(chat)
        if messages is None:
            raise ConfigError(
                f"{location}: column {column!r} is not a list of objects with a role and its"
                " content (or from and value); correct the row"
            )
        require(
            any(message["role"] == "assistant" for message in messages),
            f"{location}: column {column!r} has no message of role 'assistant', so there is"
            " nothing to learn; remove the row",
        )
        tools = parse_tools(row.get("tools"))
        rendered = self.tokenizer.encode_chat(messages, tools)
        tally.unrendered.count_chat(messages, tools)
        return rendered


def _texts_to_messages(chat: Any) -> Any:
    """Turns a list of texts into messages. Other values are unchanged."""
    if not isinstance(chat, list) or not all(isinstance(text, str) for text in chat):
        return chat
    turns = zip(itertools.cycle(("user", "assistant")), chat, strict=False)
    return [{"role": role, "content": text} for role, text in turns]


def _is_blank(value: Any) -> bool:
    """Returns whether a column has no content."""
    return value == [] or (isinstance(value, str) and not value.strip())


def _find_column(row: dict[str, Any], location: str) -> str:
    """Returns the column to read, or an empty text if all are null or missing.

    Raises:
      ConfigError: the row has both 'text' and 'messages'.
    """
    columns = [name for name in _COLUMNS if row.get(name) is not None]
    if len(columns) > 1:
        raise ConfigError(
            f"{location}: the row has both 'text' and 'messages'; keep the one to train on"
        )
    columns += [name for name in _OTHER_COLUMNS if row.get(name) is not None]
    return columns[0] if columns else ""


def _missing_column_error(row: dict[str, Any], location: str) -> ConfigError | None:
    """Returns the error for a row that lacks all columns. Returns None if it has one."""
    # A column that is null is not missing.
    if any(name in row for name in (*_COLUMNS, *_OTHER_COLUMNS)):
        return None
    matches = [
        (match, name) for name in _COLUMNS for match in difflib.get_close_matches(name, row, 1)
    ]
    remedy = (
        f"; rename {matches[0][0]!r} to {matches[0][1]!r}?"
        if matches
        else "; give the row one of the two (or 'conversations', or 'data')"
    )
    return ConfigError(
        f"{location}: no column 'text' or 'messages' among"
        f" {join_names(map(format_value, row)) or 'none'}{remedy}"
    )
