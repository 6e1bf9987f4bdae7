"""Problems of data files.

A scan finds the distinct rows that give a problem, and measures their prompts. Rows are read on
demand.
"""

from __future__ import annotations

import itertools
import json
import marshal
import os
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from jaxtyping import Int64

from jaxspec.data.files import LineBatch, RowBatch, data_digest, find_data_files, iter_batches
from jaxspec.data.json_lines import Question, RowParser
from jaxspec.data.messages import UnrenderedCounter
from jaxspec.data.problem_source import Problem, Problems, SkippedLines
from jaxspec.inputs.checked import ConfigError, prefix_errors
from jaxspec.storage.cache import content_key, get_or_build, read_sources
from jaxspec.system.files import explain_write_errors

_PARSER_SOURCES = ("data/*.py", "tokens/*.py", "rewards/extract.py", "inputs/json_keys.py")
"""Source files that determine the problem of a row."""
_SMALL_FILE = 2**23
"""Minimum size in bytes of a file whose scan is cached. Smaller ones are scanned at each start."""
_PENDING_QUESTIONS = 1024
"""Number of questions rendered and tokenized together."""
_FIELDS = ("offset", "size", "row", "key", "answered", "tokens", "times")
_OFFSET, _SIZE, _ROW, _KEY, _ANSWERED, _TOKENS, _TIMES = range(len(_FIELDS))
_REMEDY = "free some space or name another folder with JAXSPEC_CACHE"
_SKIP_REASONS = ("unanswered", "empty", "blank")
_DROPPED_TURNS = "the assistant's messages after the last question"


class Scan(NamedTuple):
    """Result of a scan: distinct problems of any length."""

    lines_file: str
    """File with the rows of the problems as lines of JSON."""
    table: Int64[np.ndarray, "rows fields"]
    """One row for each problem, with the columns `_FIELDS`.

    These are offset and size of its line in bytes, number of its row, key of its question, whether
    it has an answer, tokens of its prompt, and number of rows with this question.
    """
    counts: Mapping[str, int]
    """Number of rows without a problem, by field of `SkippedLines`."""
    unrendered: Mapping[str, int]
    """Number of problems by the part of their row that prompts leave out."""


class ProblemFile(Problems):
    """Problems of a scan. Only its table is in memory."""

    def __init__(
        self,
        parser: RowParser,
        scan: Scan,
        table: Int64[np.ndarray, "rows fields"],
        skipped_lines: SkippedLines,
    ) -> None:
        self.skipped_lines, self.unrendered = skipped_lines, scan.unrendered
        self._parser, self._scan, self._table = parser, scan, table
        # An open file stays readable, even if the cache is deleted during a run.
        self._descriptor = os.open(scan.lines_file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        return self._parser.parse_problem(*self._load_line(index))

    def _load_line(self, index: int) -> tuple[bytes, int]:
        offset, size, row, *_ = self._table[index].tolist()
        # `pread` does not use the file position, so threads can read at the same time.
        return os.pread(self._descriptor, size, offset), row

    def select_problems(
        self, indices: Any, *, skipped_lines: SkippedLines | None = None
    ) -> ProblemFile:
        """Selects problems by indices or a slice."""
        selected_rows = self._table[indices]
        counts = self.skipped_lines if skipped_lines is None else skipped_lines
        return ProblemFile(self._parser, self._scan, selected_rows, counts)

    def iter_references(self) -> Iterator[tuple[str, str]]:
        """Yields location and reference answer of each problem."""
        for line, row in map(self._load_line, range(len(self))):
            yield self._parser.describe_row(row), self._parser.parse_answer(line, row)

    @property
    def has_answer(self) -> Int64[np.ndarray, " rows"]:
        """1 for problems with a reference answer, else 0."""
        return self._table[:, _ANSWERED]

    def count_shared_problems(self, other: ProblemFile) -> int:
        """Counts the problems that are also in `other`."""
        return int(np.isin(self._table[:, _KEY], other._table[:, _KEY]).sum())


def load_problem_file(parser: RowParser) -> ProblemFile:
    """Loads the usable problems of a parser's files.

    These are distinct and have prompts of at most `data.max_prompt_length` tokens. The scan is
    cached, unless there is only one file of JSON lines and it is small.

    Raises:
      ConfigError: a file cannot be used, or no problem is left. The message names file, line and
        column if these are known.
    """
    files = find_data_files(parser.path, parser.key)
    # Lines of a single file need no copy. Otherwise one file must hold the lines of all.
    is_in_place = len(files) == 1 and files[0].suffix != ".parquet"
    try:
        size = sum(file.stat().st_size for file in files)
        if is_in_place and size < _SMALL_FILE:
            scan = _scan_files(parser, files, None)
        else:
            scan = _load_scan(parser, files, is_in_place)
    except OSError as error:
        location = f"{parser.key} {parser.path}: {error.strerror}"
        raise ConfigError(
            f"{location}; give a readable file of JSON lines or parquet, or FOLDER:GLOB for several"
        ) from error
    limit, tokens, repeats = parser.config.max_prompt_length, *scan.table[:, [_TOKENS, _TIMES]].T
    # Applied after the scan, so that a cached scan serves any limit.
    fits = tokens <= limit
    skipped_lines = SkippedLines(
        too_long=int(repeats[~fits].sum()), repeated=int((repeats[fits] - 1).sum()), **scan.counts
    )
    if not fits.any():
        length_range = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
        reason = _explain_empty_file(parser, skipped_lines, *length_range)
        raise ConfigError(f"{parser.key} {parser.path}: {reason}")
    return ProblemFile(parser, scan, scan.table[fits], skipped_lines)


def _load_scan(parser: RowParser, files: Sequence[Path], is_in_place: bool) -> Scan:
    """Loads or builds the cached scan of files."""
    config = parser.config
    columns = config.prompt_column, config.answer_column, config.answer_style, config.instruction
    # The key has all that the table depends on, so that any change leads to a new scan.
    key = content_key(
        "problems",
        read_sources(*_PARSER_SOURCES),
        data_digest(parser.path, parser.key),
        [columns, bool(config.tokenizer), parser.needs_answers, is_in_place],
        parser.tokenizer.fingerprint,
    )

    def build(folder: Path) -> None:
        with (folder / "lines.jsonl").open("wb") as lines:
            scan = _scan_files(parser, files, None if is_in_place else lines)
        counts = json.dumps([scan.counts, scan.unrendered])
        with explain_write_errors(f"cache {folder} cannot be written to", _REMEDY):
            np.save(folder / "table.npy", scan.table)
            (folder / "counts.json").write_text(counts, encoding="utf-8")

    folder = get_or_build(f"problems-{key}", build)
    counts, unrendered = json.loads((folder / "counts.json").read_text(encoding="utf-8"))
    lines = files[0] if is_in_place else folder / "lines.jsonl"
    return Scan(str(lines), np.load(folder / "table.npy"), counts, unrendered)


def _scan_files(parser: RowParser, files: Sequence[Path], lines: BinaryIO | None) -> Scan:
    """Finds the distinct questions in files, and measures their prompts.

    Args:
      parser: parser of the rows.
      files: files to scan.
      lines: file to which distinct rows are written. None refers to the lines of the only file.
    """
    scanner, row, offset = _Scanner(parser), 0, 0
    for batch in iter_batches(files, f"{parser.key} {parser.path}"):
        first_question = len(scanner)
        new_rows = scanner.add_batch(batch, row)
        if lines is None:
            # Skipped lines count too, since offsets are positions in the original file.
            sizes = cast("LineBatch", batch).sizes
            offsets = [*itertools.accumulate(sizes, initial=offset)]
            scanner.set_line_spans(
                first_question, [(offsets[index], sizes[index]) for index in new_rows]
            )
        else:
            with explain_write_errors(f"{lines.name} cannot be written to", _REMEDY):
                sizes = [lines.write(line) for line in batch.to_lines(new_rows)]
                # A full disk is reported here, not by a later write.
                lines.flush()
            offsets = itertools.accumulate(sizes, initial=offset)
            scanner.set_line_spans(first_question, [*zip(offsets, sizes, strict=False)])
        offset, row = offset + sum(sizes), row + len(batch)
    lines_file = str(files[0]) if lines is None else lines.name
    return scanner.finish_scan(lines_file)


class _Scanner:
    """Collector of distinct questions and their prompt lengths."""

    def __init__(self, parser: RowParser) -> None:
        # A flat array of int64 takes far less memory than objects for millions of rows.
        self._parser, self._table = parser, array("q")
        names = parser.config.prompt_column, parser.config.answer_column, "tools"
        # A name with a dot is a column, or a path into the column before the dot.
        self._columns = sorted({column for name in names for column in (name, name.split(".")[0])})
        self._index_by_key: dict[int, int] = {}
        self._index_by_raw_key: dict[int, int] = {}
        self._pending: list[tuple[int, Question, int]] = []
        self._counts, self._unrendered = (
            Counter[str](),
            UnrenderedCounter(parser.tokenizer.render_prompt),
        )
        self._row_count, self._absent_counts = 0, Counter[str]()
        self._column_errors: dict[str, ConfigError] = {}

    def __len__(self) -> int:
        return len(self._table) // len(_FIELDS)

    def add_batch(self, batch: RowBatch, first_row: int) -> list[int]:
        """Adds the rows of a batch.

        The first one has number `first_row`. Returns the indices of the rows whose question is
        usable and new.
        """
        new_rows = []
        for index, values in enumerate(batch.iter_values(self._columns)):
            if values is None:
                self._counts["blank"] += 1
                continue
            self._row_count += 1
            # A row with the same values as an earlier usable one need not be parsed.
            raw_key = _hash_values(values)
            if raw_key in self._index_by_raw_key:
                self._table[self._index_by_raw_key[raw_key] * len(_FIELDS) + _TIMES] += 1
            elif self._add_row(batch.read_row(index), first_row + index, raw_key):
                new_rows.append(index)
        return new_rows

    def _add_row(self, row: Mapping[str, Any], index: int, raw_key: int | None) -> bool:
        """Adds a row. Returns whether its question is usable and new."""
        question = self._parser.parse_question(row, index)
        self._count_absent_columns(question, row, index)
        if not question.chat:
            self._counts["empty"] += 1
            return False
        if self._parser.needs_answers and not question.answer:
            self._counts["unanswered"] += 1
            return False
        key = question.key
        question_index = self._index_by_key.setdefault(key, len(self))
        if raw_key is not None:
            self._index_by_raw_key[raw_key] = question_index
        if question_index < len(self):
            self._table[question_index * len(_FIELDS) + _TIMES] += 1
            return False
        # `set_line_spans` sets offset and size later, and `_measure_prompts` the tokens.
        self._table.extend((0, 0, index, key, bool(question.answer), 0, 1))
        self._pending.append((question_index, question, index))
        if len(self._pending) == _PENDING_QUESTIONS:
            self._measure_prompts()
        return True

    def _count_absent_columns(self, question: Question, row: Mapping[str, Any], index: int) -> None:
        """Counts the columns that a row lacks. Keeps the first error of each."""
        for setting in question.absent_columns:
            self._absent_counts[setting] += 1
            if setting not in self._column_errors:
                self._column_errors[setting] = self._parser.missing_column_error(
                    row, setting, index
                )

    def set_line_spans(self, first_index: int, spans: Sequence[tuple[int, int]]) -> None:
        """Sets offset and size of lines, from question `first_index` on."""
        for index, (offset, size) in enumerate(spans, start=first_index):
            table_offset = index * len(_FIELDS)
            self._table[table_offset + _OFFSET], self._table[table_offset + _SIZE] = offset, size

    def finish_scan(self, lines_file: str) -> Scan:
        """Returns the scan of all rows added.

        Raises:
          ConfigError: no row has the column of the problem, or of the answer if it is needed.
        """
        self._measure_prompts()
        # A row may leave out an empty column, so only a column that all rows lack is an error.
        for setting in ("prompt_column", "answer_column"):
            is_needed = setting == "prompt_column" or self._parser.needs_answers
            if is_needed and self._row_count and self._absent_counts[setting] == self._row_count:
                raise self._column_errors[setting]
        table = np.array(self._table, np.int64).reshape(-1, len(_FIELDS))
        counts = {name: self._counts[name] for name in _SKIP_REASONS}
        # The unary plus drops counts of 0.
        return Scan(lines_file, table, counts, +self._unrendered.counts)

    def _measure_prompts(self) -> None:
        """Renders and tokenizes the pending questions together."""
        parser, pending = self._parser, self._pending
        try:
            requests = [
                (parser.add_instruction(question, index), question.tools)
                for _, question, index in pending
            ]
            lengths = parser.tokenizer.count_tokens(parser.tokenizer.render_prompts(requests))
        # The error of a batch does not name its row. Prompts are rendered again one by one, and the
        # bad one raises an error that does.
        except ConfigError:
            lengths = [self._prompt_length(question, index) for _, question, index in pending]
        for (question_index, question, _), length in zip(pending, lengths, strict=True):
            self._table[question_index * len(_FIELDS) + _TOKENS] = length
            self._unrendered.count_chat(question.chat, question.tools)
            self._unrendered.counts[_DROPPED_TURNS] += question.dropped_turns > 0
        self._pending = []

    def _prompt_length(self, question: Question, index: int) -> int:
        prompt = self._parser.render_prompt(question, index)
        with prefix_errors(self._parser.describe_row(index)):
            return len(self._parser.tokenizer.encode(prompt))


def _hash_values(values: Sequence[Any]) -> int | None:
    """Hashes values. Returns None if they cannot be serialized."""
    try:
        # Versions after 2 also record which values are the same object, so equal values could
        # give different bytes.
        return hash(marshal.dumps(tuple(values), 2))
    except ValueError:
        return None


def _explain_empty_file(
    parser: RowParser, skipped_lines: SkippedLines, shortest: int, longest: int
) -> str:
    """Explains why a file has no usable problem.

    Args:
      parser: parser of the rows.
      skipped_lines: counts of skipped lines.
      shortest: tokens of the shortest prompt.
      longest: tokens of the longest prompt.
    """
    config = parser.config
    if skipped_lines.too_long:
        return (
            f"none of {skipped_lines.too_long} prompts fits data.max_prompt_length ="
            f" {config.max_prompt_length}; the shortest takes {shortest} tokens, and all fit with"
            f" --data.max_prompt_length {longest}"
        )
    if skipped_lines.unanswered:
        column = f"column {config.answer_column!r} states no answer in any of"
        return f"{column} {skipped_lines.unanswered} lines; set data.answer_column"
    if skipped_lines.problem_count:
        column = f"column {config.prompt_column!r} is empty in all of"
        return f"{column} {skipped_lines.empty} lines; set data.prompt_column"
    return "the file is empty; give one JSON object a line"
