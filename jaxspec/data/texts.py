"""Files of texts or chats as rows of tokens, of which some are to be learnt."""

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

from jaxspec.data.files import count_lines, data_files, lines_of
from jaxspec.data.messages import Unrendered, messages_of, tools_of
from jaxspec.inputs.checked import ConfigError, read_from, require
from jaxspec.inputs.json_keys import json_line, listed, shown
from jaxspec.tokens.tokenizer import Tokenizer

_COLUMNS = ("text", "messages")
_OTHERS = ("conversations", "data")
"""What published chats are called elsewhere, where a row has neither of those: Magpie's and
ShareGPT's, and the first UltraChat's, which is a list of what user and assistant say in turn."""
_BLANK, _EMPTY, _REPEATED = (
    "blank lines passed over",
    "empty texts left out",
    "repeated texts (kept)",
)
_SAY_SECONDS = 10.0
"""Between two words about how far a long file is."""


class _Tally:
    """What was met while a file was read, beside texts to learn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.counts = Counter[str]()
        self.unrendered = Unrendered(tokenizer.render_whole)
        self.refusal: ConfigError | None = None
        """Of the first row that has none of the columns: they count as null ones do, unless no
        row has any text."""


@dataclass(frozen=True)
class TextFile:
    """What `offline.text` names, and how its lines become rows of tokens."""

    path: str
    tokenizer: Tokenizer
    any_text: bool
    """Whether the tokenizer has tokens for all text."""
    length: int
    """Tokens of a row; what is longer is cut."""

    def read(
        self, most: int, rng: np.random.Generator, say: Callable[[str], Any]
    ) -> tuple[Int32[np.ndarray, "rows length"], Bool[np.ndarray, "rows length"]]:
        """Return padded rows of tokens, and True at those to be learnt: of a text all but the
        beginning token, of a chat what the assistant wrote.

        Of more than `most` lines, so many are drawn by `rng`, and the others passed over: what is
        in memory is bounded by what can be trained on. `say` is told what was left out, cut or
        repeated, and now and then how far a long file is.
        Raises `ConfigError`, which names file, line and column of what cannot be used, and a
        remedy.
        """
        tally = _Tally(self.tokenizer)
        try:
            files = data_files(self.path, "offline.text")
            self._require_regular(files)
            there = count_lines(files, self.name)
            drawn = np.ones(there, bool)
            if there > most:
                drawn[:] = False
                drawn[rng.choice(there, most, replace=False)] = True
            size = int(drawn.sum()), self.length
            tokens, mask = np.full(size, self.tokenizer.pad_id, np.int32), np.zeros(size, bool)
            rows, said = 0, time.monotonic()
            lines = enumerate(lines_of(files, self.name), start=1)
            for number, line in itertools.compress(lines, drawn.tolist()):
                ids, learnt = self._row(line, number, tally)
                tokens[rows, : len(ids)], mask[rows, : len(ids)] = ids, learnt
                rows += len(ids) > 0
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    say(f"{self.name}: {number:,} of {there:,} lines are read")
        except OSError as error:
            raise ConfigError(
                f"{self.name}: {error.strerror}; give a readable JSON-lines file, or `generic`"
            ) from error
        if not rows:
            raise tally.refusal or ConfigError(f"{self.name}: {self._why_none(tally.counts)}")
        tally.counts[_REPEATED] = rows - len({hash(row.tobytes()) for row in tokens[:rows]})
        kinds = _BLANK, _EMPTY, self._cut, self._unanswered, _REPEATED
        told = [f"{tally.counts[kind]} {kind}" for kind in kinds if tally.counts[kind]]
        told += [
            f"the chat template does not write {part}, in {count} chats"
            for part, count in tally.unrendered.counts.items()
        ]
        if there > most:
            told = [f"{most:,} of {there:,} lines drawn, as many as can be trained on", *told]
        if told:
            say(f"{self.name}: {', '.join(told)}; {rows} to train on")
        return tokens[:rows], mask[:rows]

    @property
    def name(self) -> str:
        """The file, for messages."""
        return f"offline.text {self.path}"

    @property
    def _cut(self) -> str:
        return f"cut to {self.length} tokens"

    @property
    def _unanswered(self) -> str:
        return f"chats left out, whose first {self.length} tokens have no answer"

    def _require_regular(self, files: list[Path]) -> None:
        """Refuses what can be read only once, such as a pipe: files are counted first."""
        for file in files:
            require(
                file.is_file() or file.is_dir() or not file.exists(),
                f"{self.name}: {file} is not a regular file; copy what it gives to one, and name"
                " that",
            )

    def _why_none(self, counts: Counter[str]) -> str:
        """Why a file has nothing to train on, and the remedy."""
        if counts[self._unanswered]:
            return (
                f"none of its {counts[self._unanswered]} chats has an answer in its first"
                f" {self.length} tokens (data.max_prompt_length + rollout.max_new_tokens); raise"
                " --rollout.max_new_tokens"
            )
        what = f"all {counts[_EMPTY]} texts are empty" if counts[_EMPTY] else "the file is empty"
        return f"{what}; give one JSON object a line, with a column 'text' or 'messages'"

    def _row(self, line: bytes, number: int, tally: _Tally) -> tuple[list[int], list[bool]]:
        """The tokens of a line, and which are to be learnt; none where it is left out."""
        if not line.strip():
            tally.counts[_BLANK] += 1
            return [], []
        where = f"{self.name}, line {number}"
        row = json_line(line, where, ", with a column 'text' or 'messages'")
        column = _column(row, where)
        if not column:
            tally.refusal = tally.refusal or _no_column(row, where)
        if not column or _is_blank(row[column]):
            tally.counts[_EMPTY] += 1
            return [], []
        with read_from(where):
            if column == "text":
                ids, learnt = self._text(row, column, where)
            else:
                ids, learnt = self._chat(row, column, where, tally)
        if len(ids) > self.length:
            ids, learnt = ids[: self.length], learnt[: self.length]
            tally.counts[self._cut if any(learnt) else self._unanswered] += 1
        return (ids, learnt) if any(learnt) else ([], [])

    def _text(self, row: dict[str, Any], column: str, where: str) -> tuple[list[int], list[bool]]:
        """A text between the beginning token, if there is one, and the end token."""
        text = row[column]
        if not isinstance(text, str):
            raise ConfigError(
                f"{where}: column {column!r} holds a {type(text).__name__} instead of text; put its"
                " text in quotes"
            )
        unknown = "" if self.any_text else self.tokenizer.unknown(text)
        require(
            not unknown,
            f"{where}: the built-in tokenizer lacks {unknown[:20]!r} of column {column!r}; set"
            " --data.tokenizer to a folder",
        )
        first = self.tokenizer.bos_ids
        ids = [*self.tokenizer.encode(text), self.tokenizer.stop_ids[0]]
        return [*first, *ids], [False] * len(first) + [True] * len(ids)

    def _chat(
        self, row: dict[str, Any], column: str, where: str, tally: _Tally
    ) -> tuple[list[int], list[bool]]:
        """A chat as the checkpoint's own template writes it."""
        chat = _in_turn(row[column]) if column == "data" else row[column]
        messages = messages_of(chat)
        if messages is None:
            raise ConfigError(
                f"{where}: column {column!r} is not a list of objects with a role and its content"
                " (or from and value); correct the row"
            )
        require(
            any(message["role"] == "assistant" for message in messages),
            f"{where}: column {column!r} has none of role 'assistant', so there is nothing to"
            " learn; leave the row out",
        )
        tools = tools_of(row.get("tools"))
        written = self.tokenizer.conversation(messages, tools)
        tally.unrendered.add(messages, tools)
        return written


def _in_turn(chat: Any) -> Any:
    """What user and assistant say in turn, as messages; anything else as it is."""
    if not isinstance(chat, list) or not all(isinstance(text, str) for text in chat):
        return chat
    turns = zip(itertools.cycle(("user", "assistant")), chat, strict=False)
    return [{"role": role, "content": text} for role, text in turns]


def _is_blank(value: Any) -> bool:
    """Whether a column says no more than a null would."""
    return value == [] or (isinstance(value, str) and not value.strip())


def _column(row: dict[str, Any], where: str) -> str:
    """Which column of a row is read; empty where all are null or absent."""
    found = [name for name in _COLUMNS if row.get(name) is not None]
    if len(found) > 1:
        raise ConfigError(f"{where}: columns 'text' and 'messages' both; keep the one to train on")
    found += [name for name in _OTHERS if row.get(name) is not None]
    return found[0] if found else ""


def _no_column(row: dict[str, Any], where: str) -> ConfigError | None:
    """The refusal of a file whose rows have none of the columns; None for a row that has one, as
    null."""
    if any(name in row for name in (*_COLUMNS, *_OTHERS)):
        return None
    near = [(match, name) for name in _COLUMNS for match in difflib.get_close_matches(name, row, 1)]
    remedy = (
        f"; rename {near[0][0]!r} to {near[0][1]!r}?"
        if near
        else "; give the row one of the two (or 'conversations', or 'data')"
    )
    return ConfigError(
        f"{where}: no column 'text' or 'messages' among {listed(map(shown, row)) or 'none'}{remedy}"
    )
