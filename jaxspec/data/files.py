"""Data files as batches of rows: local or on the hub, JSON lines or parquet."""

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from jaxspec.inputs.checked import ConfigError, first_line, require
from jaxspec.inputs.json_keys import join_names, parse_json_line
from jaxspec.system.files import hash_file

_BATCH_ROWS = 1024
"""Rows of a file in memory at a time."""
_DATA_PATTERNS = ("*.parquet", "*.jsonl")
"""Patterns of the data files of a dataset or folder without a GLOB."""
_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_NAME = re.compile(r".*\.(parquet|jsonl?|txt)")
"""Names of local files, some of which (`data/train.jsonl`) also have the form of an id."""


def find_data_files(path: str, key: str) -> list[Path]:
    """Finds the data files that a setting names.

    They are sorted by name. Files of the hub are downloaded into the hub's cache. A path that does
    not exist and is no dataset id is returned as it is, so that reading it raises OSError.

    Args:
      path: a file; a folder as FOLDER or FOLDER:GLOB; or a dataset on the hub as OWNER/NAME or
        OWNER/NAME:GLOB. In GLOB, `*` matches slashes too.
      key: the setting, for messages.

    Raises:
      ConfigError: the hub cannot give the dataset, no file matches, or several files match and
        there is no GLOB.
    """
    name, _, pattern = path.partition(":")
    # A local path takes precedence over a dataset id of the same form.
    is_local = Path(path).exists() or not (pattern or _DATASET_ID.fullmatch(name))
    if Path(name).is_dir():
        folder = Path(name)
    elif is_local or (not pattern and _FILE_NAME.fullmatch(name)):
        return [Path(path)]
    elif _DATASET_ID.fullmatch(name):
        folder = _download_dataset(path, key)
    else:
        return [Path(path)]
    return [folder / file for file in _select_files(path, key, _list_files(folder))]


# Cached, so that all of a run reads the same revision.
@functools.cache
def _download_dataset(path: str, key: str) -> Path:
    """Downloads selected files of a dataset. Returns their folder."""
    # Imported here because it is slow.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # The bases include the base class of the HTTP client's errors. The client raises these without
    # a network.
    unreachable = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
    refusals = (OSError, ValueError, *unreachable)
    name, _, pattern = path.partition(":")
    # If the hub cannot be reached, files of an earlier download will do. If there are none,
    # `snapshot_download` raises the error to report.
    with contextlib.suppress(*refusals):
        files = HfApi().dataset_info(name).siblings or ()
        # `_select_files` raises ConfigError, which is not suppressed, before any download.
        _select_files(path, key, [file.rfilename for file in files])
    patterns = [pattern] if pattern else [*_DATA_PATTERNS]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except refusals as error:
        raise ConfigError(
            f"{key} {path}: no such file here, and the hub cannot give a dataset {name}"
            f" ({first_line(error)}); correct the id, or download its files elsewhere and give"
            " FILE, or FOLDER:GLOB for several"
        ) from error


def _list_files(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]


def _select_files(path: str, key: str, names: Sequence[str]) -> list[str]:
    """Selects files of a dataset. Returns sorted names."""
    dataset, _, pattern = path.partition(":")
    patterns = [pattern] if pattern else _DATA_PATTERNS
    matches = sorted(name for name in names if any(fnmatchcase(name, glob) for glob in patterns))
    data_names = [name for name in names if any(fnmatchcase(name, glob) for glob in _DATA_PATTERNS)]
    # A README or license is no example of a file to name.
    examples = sorted(data_names or names)
    remedy = f"{dataset}:GLOB, such as {dataset}:{examples[0]}" if examples else "one that has some"
    require(
        bool(matches),
        f"{key} {path}: no file of {dataset} matches {' or '.join(patterns)}; it has"
        f" {join_names(examples) or 'none'}; give {remedy}",
    )
    require(
        bool(pattern) or len(matches) == 1,
        f"{key} {path}: {dataset} has {len(matches)} data files, {join_names(matches)}; say which"
        f" with {dataset}:GLOB, such as {dataset}:{matches[0]}",
    )
    return matches


def data_digest(path: str, key: str) -> str:
    """Returns a digest of all files of a setting.

    The digest is "-" if a file is missing.

    Raises:
      ConfigError: as `find_data_files`, or a file cannot be read.
    """
    digests = [_file_digest(file) for file in find_data_files(path, key)]
    if "-" in digests:
        return "-"
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _file_digest(file: Path) -> str:
    if not file.is_file():
        return hash_file(file)
    state = file.stat()
    return _hash_file_version(file.absolute(), state.st_size, state.st_mtime_ns)


# The start of a run needs a digest in several places. Size and time are keys of this cache only, so
# that a file that changes is read again.
@functools.lru_cache(maxsize=1024)
def _hash_file_version(file: Path, size: int, modified_ns: int) -> str:
    """Returns the digest of a file in this state."""
    return hash_file(file)


def count_lines(files: Sequence[Path], source: str) -> int:
    """Counts the lines that `iter_lines` yields. Raises the same errors."""
    count = 0
    for file in files:
        if file.suffix == ".parquet":
            # The metadata has the count, so no row has to be read.
            with _open_parquet(file, source) as rows:
                count += rows.metadata.num_rows
        else:
            with file.open("rb") as lines:
                count += sum(1 for _ in lines)
    return count


class LineBatch:
    """A batch of rows of a JSON-lines file.

    Its first row is row `first_row` of all files. `source` names the files in messages.
    """

    def __init__(self, lines: list[bytes], source: str, first_row: int) -> None:
        self._lines, self._source, self._first_row = lines, source, first_row
        self.sizes = [len(line) for line in lines]

    def __len__(self) -> int:
        return len(self._lines)

    def iter_values(self, names: Sequence[str]) -> Iterator[Sequence[Any] | None]:
        """Yields the values of columns row by row.

        A blank line gives None. The value of a missing column is None.

        Raises:
          ConfigError: a line is not a JSON object.
        """
        # No row is kept: thousands of rows would not fit the processor's caches.
        for index, line in enumerate(self._lines):
            row = self.read_row(index) if line.strip() else None
            yield None if row is None else [row.get(name) for name in names]

    def read_row(self, index: int) -> dict[str, Any]:
        """Returns a row as an object. Raises the same errors as `iter_values`."""
        return parse_json_line(
            self._lines[index], f"{self._source}, line {self._first_row + index + 1}"
        )

    def to_lines(self, indices: Sequence[int]) -> list[bytes]:
        """Returns selected rows as lines of JSON."""
        # The last line of a file may lack its newline.
        lines = (self._lines[index] for index in indices)
        return [line if line.endswith(b"\n") else line + b"\n" for line in lines]


class TableBatch:
    """A batch of rows of a parquet file.

    `source` names the file in messages. Methods raise `ConfigError` if the file is damaged.
    """

    def __init__(self, table: Any, source: str) -> None:
        self._table, self._source = table, source

    def __len__(self) -> int:
        return self._table.num_rows

    def iter_values(self, names: Sequence[str]) -> Iterator[Sequence[Any] | None]:
        """Yields the values of columns row by row. The value of a missing column is None."""
        column_names = self._table.schema.names
        missing_column = [None] * len(self)
        with _convert_arrow_errors(self._source):
            columns = [
                self._table[name].to_pylist() if name in column_names else missing_column
                for name in names
            ]
        return zip(*columns, strict=True)

    def read_row(self, index: int) -> dict[str, Any]:
        """Returns a row as an object."""
        # Parsed from its JSON text, so that values have the same types as in a JSON-lines file.
        return parse_json_line(self.to_lines([index])[0], self._source)

    def to_lines(self, indices: Sequence[int]) -> list[bytes]:
        """Returns selected rows as lines of JSON.

        Nested columns become objects and lists. Values of other types, such as dates, become text.
        """
        with _convert_arrow_errors(self._source):
            rows = self._table.take(list(indices)).to_pylist() if indices else []
        return [json.dumps(row, default=str).encode() + b"\n" for row in rows]


RowBatch = LineBatch | TableBatch


def iter_batches(files: Sequence[Path], source: str) -> Iterator[RowBatch]:
    """Yields the rows of all files in batches.

    Only one batch is in memory at a time.

    Raises:
      ConfigError: pyarrow is missing, or a file is damaged or has two columns of the same name.
        The message starts with `source`.
      OSError: a file cannot be read.
    """
    row_count = 0
    for file in files:
        if file.suffix == ".parquet":
            with _open_parquet(file, source) as rows:
                for table in rows.iter_batches(_BATCH_ROWS):
                    yield TableBatch(table, _label_file(file, source))
                    row_count += table.num_rows
        else:
            with file.open("rb") as lines:
                while chunk := list(itertools.islice(lines, _BATCH_ROWS)):
                    yield LineBatch(chunk, source, row_count)
                    row_count += len(chunk)


def iter_lines(files: Sequence[Path], source: str) -> Iterator[bytes]:
    """Yields all rows as lines of JSON. Raises the same errors as `iter_batches`."""
    for batch in iter_batches(files, source):
        yield from batch.to_lines(range(len(batch)))


@contextlib.contextmanager
def _open_parquet(file: Path, source: str) -> Iterator[Any]:
    """Opens a parquet file."""
    # pyarrow is an optional dependency, so it is imported only after this check.
    require(
        importlib.util.find_spec("pyarrow") is not None,
        f"{source}: parquet files need pyarrow, which is not installed: in a checkout run bash"
        " launch/venv.sh parquet, elsewhere pip install pyarrow; or give JSON lines",
    )
    from pyarrow import parquet

    with _convert_arrow_errors(_label_file(file, source)), parquet.ParquetFile(file) as rows:
        # A row becomes an object, which would lose one of two columns of the same name.
        names: list[str] = rows.schema_arrow.names
        duplicates = sorted({name for name in names if names.count(name) > 1})
        require(
            not duplicates,
            f"{_label_file(file, source)}: duplicate columns:"
            f" {join_names(duplicates)}; rename them",
        )
        yield rows


def _label_file(file: Path, source: str) -> str:
    """Appends the name of a file to `source`, unless it ends with it."""
    return source if source.endswith(file.name) else f"{source}, {file.name}"


@contextlib.contextmanager
def _convert_arrow_errors(source: str) -> Iterator[None]:
    """Raises errors of pyarrow as `ConfigError`."""
    import pyarrow

    try:
        yield
    # Text is decoded when a value is used. Bytes that are not UTF-8 raise a plain ValueError then.
    except (pyarrow.ArrowException, ValueError) as error:
        raise ConfigError(
            f"{source}: not a readable parquet file ({first_line(error)}); write it again"
        ) from error
