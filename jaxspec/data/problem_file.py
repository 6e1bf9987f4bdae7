"""Problems of data files: a scan finds the distinct rows that give one, which are read when asked
for."""

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

from jaxspec.data.files import Batch, LineBatch, batches_of, data_digest, data_files
from jaxspec.data.json_lines import Question, RowParser
from jaxspec.data.messages import Unrendered
from jaxspec.data.problem_source import LeftOut, Problem, Problems
from jaxspec.inputs.checked import ConfigError, read_from
from jaxspec.storage.cache import cached, content_key, sources
from jaxspec.system.files import writing

_CODE = ("data/*.py", "tokens/*.py", "rewards/extract.py", "inputs/json_keys.py")
"""Files that say which problem a row gives."""
_SMALL = 2**23
"""Bytes of a file that is scanned at every start; the scan of a larger one is kept in the cache."""
_PENDING = 1024
"""Questions that are rendered and tokenised at once."""
_FIELDS = ("offset", "size", "row", "key", "answered", "tokens", "times")
_OFFSET, _SIZE, _ROW, _KEY, _ANSWERED, _TOKENS, _TIMES = range(len(_FIELDS))
_REMEDY = "free some space or name another folder with JAXSPEC_CACHE"
_COUNTED = ("unanswered", "empty", "blank")
_CUT = "the assistant's messages after the last question"


class Scan(NamedTuple):
    """The distinct problems of some files, whatever their length."""

    lines: str
    """The file that has their rows as lines of JSON."""
    table: Int64[np.ndarray, "rows fields"]
    """For each: offset and size of its line, number of its row, key of its question, whether it has
    an answer, tokens of its prompt, rows that ask the same."""
    counts: Mapping[str, int]
    """Rows without a problem, by the fields of `LeftOut`."""
    unrendered: Mapping[str, int]


class ProblemFile(Problems):
    """Some problems of a scan. Only places of rows are in memory."""

    def __init__(
        self,
        parser: RowParser,
        scan: Scan,
        table: Int64[np.ndarray, "rows fields"],
        left_out: LeftOut,
    ) -> None:
        self.left_out, self.unrendered = left_out, scan.unrendered
        self._parser, self._scan, self._table = parser, scan, table
        self._file = os.open(scan.lines, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        return self._parser.parse(*self._line(index))

    def _line(self, index: int) -> tuple[bytes, int]:
        offset, size, row, *_ = self._table[index].tolist()
        return os.pread(self._file, size, offset), row

    def take(self, places: Any, *, left_out: LeftOut | None = None) -> ProblemFile:
        """Return the problems at some places, or those of a slice."""
        taken = self._table[places]
        kept = self.left_out if left_out is None else left_out
        return ProblemFile(self._parser, self._scan, taken, kept)

    def references(self) -> Iterator[tuple[str, str]]:
        """The line of each problem, for a message, and its reference answer."""
        for line, row in map(self._line, range(len(self))):
            yield self._parser.where(row), self._parser.answer(line, row)

    @property
    def answered(self) -> Int64[np.ndarray, " rows"]:
        """1 for each problem that has a reference answer, else 0."""
        return self._table[:, _ANSWERED]

    def shared(self, other: ProblemFile) -> int:
        """Return how many of these problems are among those of `other`."""
        return int(np.isin(self._table[:, _KEY], other._table[:, _KEY]).sum())


def load_file(parser: RowParser) -> ProblemFile:
    """Return the usable problems of the parser's files: distinct and short enough.

    The scan of what is not one small file of JSON lines is kept in the cache, by all that it
    depends on. Raises `ConfigError` naming file, line and column of what cannot be used.
    """
    files = data_files(parser.path, parser.key)
    in_place = len(files) == 1 and files[0].suffix != ".parquet"
    try:
        size = sum(file.stat().st_size for file in files)
        if in_place and size < _SMALL:
            scan = _scan(parser, files, None)
        else:
            scan = _cached_scan(parser, files, in_place)
    except OSError as error:
        where = f"{parser.key} {parser.path}: {error.strerror}"
        raise ConfigError(
            f"{where}; give a readable file of JSON lines or parquet, or FOLDER:GLOB for several"
        ) from error
    limit, tokens, times = parser.config.max_prompt_length, *scan.table[:, [_TOKENS, _TIMES]].T
    fits = tokens <= limit
    left_out = LeftOut(
        too_long=int(times[~fits].sum()), repeated=int((times[fits] - 1).sum()), **scan.counts
    )
    if not fits.any():
        sizes = (int(tokens.min()), int(tokens.max())) if len(tokens) else (0, 0)
        why = _why_none(parser, left_out, *sizes)
        raise ConfigError(f"{parser.key} {parser.path}: {why}")
    return ProblemFile(parser, scan, scan.table[fits], left_out)


def _cached_scan(parser: RowParser, files: Sequence[Path], in_place: bool) -> Scan:
    """The scan of files, from the cache if nothing has changed."""
    config = parser.config
    columns = config.prompt_column, config.answer_column, config.answer_style, config.instruction
    key = content_key(
        "problems",
        sources(*_CODE),
        data_digest(parser.path, parser.key),
        [columns, bool(config.tokenizer), parser.answers, in_place],
        parser.tokenizer.fingerprint,
    )

    def build(folder: Path) -> None:
        with (folder / "lines.jsonl").open("wb") as lines:
            scan = _scan(parser, files, None if in_place else lines)
        counts = json.dumps([scan.counts, scan.unrendered])
        with writing(f"cache {folder} cannot be written to", _REMEDY):
            np.save(folder / "table.npy", scan.table)
            (folder / "counts.json").write_text(counts, encoding="utf-8")

    folder = cached(f"problems-{key}", build)
    counts, unrendered = json.loads((folder / "counts.json").read_text(encoding="utf-8"))
    lines = files[0] if in_place else folder / "lines.jsonl"
    return Scan(str(lines), np.load(folder / "table.npy"), counts, unrendered)


def _scan(parser: RowParser, files: Sequence[Path], lines: BinaryIO | None) -> Scan:
    """The scan of files, whose distinct rows are written to `lines`; without, of one file of JSON
    lines, which has them already."""
    scanner, row, offset = _Scanner(parser), 0, 0
    for batch in batches_of(files, f"{parser.key} {parser.path}"):
        first = len(scanner)
        new = scanner.add(batch, row)
        if lines is None:
            sizes = cast("LineBatch", batch).sizes
            starts = [*itertools.accumulate(sizes, initial=offset)]
            scanner.place(first, [(starts[place], sizes[place]) for place in new])
        else:
            with writing(f"{lines.name} cannot be written to", _REMEDY):
                sizes = [lines.write(line) for line in batch.as_lines(new)]
                lines.flush()
            starts = itertools.accumulate(sizes, initial=offset)
            scanner.place(first, [*zip(starts, sizes, strict=False)])
        offset, row = offset + sum(sizes), row + len(batch)
    where = str(files[0]) if lines is None else lines.name
    return scanner.end(where)


class _Scanner:
    """Collects the distinct questions of rows, with the length of their prompts."""

    def __init__(self, parser: RowParser) -> None:
        self._parser, self._table = parser, array("q")
        names = parser.config.prompt_column, parser.config.answer_column, "tools"
        self._columns = sorted({part for name in names for part in (name, name.split(".")[0])})
        self._places: dict[int, int] = {}
        self._places_of_raw: dict[int, int] = {}
        self._pending: list[tuple[int, Question, int]] = []
        self._counts, self._unrendered = Counter[str](), Unrendered(parser.tokenizer.render)
        self._rows, self._absent = 0, Counter[str]()
        self._refusals: dict[str, ConfigError] = {}

    def __len__(self) -> int:
        return len(self._table) // len(_FIELDS)

    def add(self, batch: Batch, first: int) -> list[int]:
        """Adds the rows of a batch, from number `first` on; returns the places of those that ask
        something usable that no earlier row has asked."""
        new = []
        for place, values in enumerate(batch.values(self._columns)):
            if values is None:
                self._counts["blank"] += 1
                continue
            self._rows += 1
            # a row that says the same as a usable one is not even looked into
            raw = _raw_key(values)
            if raw in self._places_of_raw:
                self._table[self._places_of_raw[raw] * len(_FIELDS) + _TIMES] += 1
            elif self._add_row(batch.row(place), first + place, raw):
                new.append(place)
        return new

    def _add_row(self, row: Mapping[str, Any], index: int, raw: int | None) -> bool:
        """Adds a row; returns whether it asks something usable that no earlier row has asked."""
        question = self._parser.read(row, index)
        self._note_absent(question, row, index)
        if not question.chat:
            self._counts["empty"] += 1
            return False
        if self._parser.answers and not question.answer:
            self._counts["unanswered"] += 1
            return False
        key = question.key
        place = self._places.setdefault(key, len(self))
        if raw is not None:
            self._places_of_raw[raw] = place
        if place < len(self):
            self._table[place * len(_FIELDS) + _TIMES] += 1
            return False
        self._table.extend((0, 0, index, key, bool(question.answer), 0, 1))
        self._pending.append((place, question, index))
        if len(self._pending) == _PENDING:
            self._measure()
        return True

    def _note_absent(self, question: Question, row: Mapping[str, Any], index: int) -> None:
        """Counts the columns that a row lacks, with what would be said of them."""
        for setting in question.absent:
            self._absent[setting] += 1
            if setting not in self._refusals:
                self._refusals[setting] = self._parser.no_column(row, setting, index)

    def place(self, first: int, lines: Sequence[tuple[int, int]]) -> None:
        """Says where the lines of the rows from `first` on stand, each by its offset and size."""
        for place, (offset, size) in enumerate(lines, start=first):
            at = place * len(_FIELDS)
            self._table[at + _OFFSET], self._table[at + _SIZE] = offset, size

    def end(self, lines: str) -> Scan:
        """Returns the scan, whose lines are in a file.

        Raises `ConfigError` where no row has a column that is needed.
        """
        self._measure()
        for setting in ("prompt_column", "answer_column"):
            needed = setting == "prompt_column" or self._parser.answers
            if needed and self._rows and self._absent[setting] == self._rows:
                raise self._refusals[setting]
        table = np.array(self._table, np.int64).reshape(-1, len(_FIELDS))
        counts = {name: self._counts[name] for name in _COUNTED}
        return Scan(lines, table, counts, +self._unrendered.counts)

    def _measure(self) -> None:
        """Renders and tokenises the pending questions together."""
        parser, pending = self._parser, self._pending
        try:
            asked = [(parser.asked(each, index), each.tools) for _, each, index in pending]
            lengths = parser.tokenizer.lengths(parser.tokenizer.render_each(asked))
        except ConfigError:  # one by one, so that the message names the row
            lengths = [self._length(question, index) for _, question, index in pending]
        for (place, question, _), length in zip(pending, lengths, strict=True):
            self._table[place * len(_FIELDS) + _TOKENS] = length
            self._unrendered.add(question.chat, question.tools)
            self._unrendered.counts[_CUT] += question.cut > 0
        self._pending = []

    def _length(self, question: Question, index: int) -> int:
        prompt = self._parser.render(question, index)
        with read_from(self._parser.where(index)):
            return len(self._parser.tokenizer.encode(prompt))


def _raw_key(values: Sequence[Any]) -> int | None:
    """A number that is the same for the same values; None if they are no values of JSON."""
    try:
        # version 2 does not write which values are one object
        return hash(marshal.dumps(tuple(values), 2))
    except ValueError:
        return None


def _why_none(parser: RowParser, left_out: LeftOut, shortest: int, longest: int) -> str:
    """Return why no line of a file gives a problem, and the remedy; `shortest` and `longest` are
    lengths of prompts that do not fit."""
    config = parser.config
    if left_out.too_long:
        return (
            f"none of {left_out.too_long} prompts fits data.max_prompt_length ="
            f" {config.max_prompt_length}; the shortest takes {shortest} tokens, and all fit with"
            f" --data.max_prompt_length {longest}"
        )
    if left_out.unanswered:
        column = f"column {config.answer_column!r} states no answer in any of"
        return f"{column} {left_out.unanswered} lines; set data.answer_column"
    if left_out.problems:
        column = f"column {config.prompt_column!r} is empty in all of"
        return f"{column} {left_out.empty} lines; set data.prompt_column"
    return "the file is empty; give one JSON object a line"
