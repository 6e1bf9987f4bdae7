"""Data files, wherever they are and whatever they are written in, as batches of rows."""

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
"""Rows of a file that are in memory at once."""
_DATA_PATTERNS = ("*.parquet", "*.jsonl")
"""Files of a dataset on the hub that hold its rows, where nothing says which do."""
_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_NAME = re.compile(r".*\.(parquet|jsonl?|txt)")
"""Names that are meant as a file that is here, though they look like an id."""


def find_data_files(path: str, key: str) -> list[Path]:
    """Return the files that a setting names: a file; those of a dataset on the hub, OWNER/NAME or
    OWNER/NAME:GLOB, or of a folder, FOLDER or FOLDER:GLOB, in the order of their names.

    In GLOB, `*` stands for slashes as well. What is on the hub is downloaded into the hub's own
    cache first. A file that is absent is returned as it is: whoever reads it says so.
    Raises `ConfigError`, naming `key`, where the hub cannot give the dataset, no file matches, or
    there are several and no GLOB says which.
    """
    name, _, pattern = path.partition(":")
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


@functools.cache
def _download_dataset(path: str, key: str) -> Path:
    """The folder of a dataset on the hub with the files that are asked for; the hub is asked once,
    so that all of a run reads one revision."""
    # imported only here: it takes a while
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # its other base is what the library's HTTP client raises for want of a network
    unreachable = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
    refusals = (OSError, ValueError, *unreachable)
    name, _, pattern = path.partition(":")
    # where that fails, what was downloaded before will do; if nothing was, the download says why
    with contextlib.suppress(*refusals):
        files = HfApi().dataset_info(name).siblings or ()
        # before anything is downloaded in vain
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
    """Those of a dataset's files that `path` asks for, sorted."""
    dataset, _, pattern = path.partition(":")
    patterns = [pattern] if pattern else _DATA_PATTERNS
    matches = sorted(name for name in names if any(fnmatchcase(name, glob) for glob in patterns))
    data_names = [name for name in names if any(fnmatchcase(name, glob) for glob in _DATA_PATTERNS)]
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
    """Return the digest of all files of `find_data_files`; "-" where one is absent.

    Raises `ConfigError` as `find_data_files` does, and for a file that cannot be read.
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
    return _digest_version(file.absolute(), state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _digest_version(file: Path, size: int, modified_ns: int) -> str:
    """The digest of a file in this state: a start asks for it in several places."""
    return hash_file(file)


def count_lines(files: Sequence[Path], source: str) -> int:
    """Return how many lines `iter_lines` gives, without making any of a parquet file; raises as it
    does."""
    count = 0
    for file in files:
        if file.suffix == ".parquet":
            with _open_parquet(file, source) as rows:
                count += rows.metadata.num_rows
        else:
            with file.open("rb") as lines:
                count += sum(1 for _ in lines)
    return count


class LineBatch:
    """Rows of a file of JSON lines; the first is row `first_row` of all files, which `source`
    names."""

    def __init__(self, lines: list[bytes], source: str, first_row: int) -> None:
        self._lines, self._source, self._first_row = lines, source, first_row
        self.sizes = [len(line) for line in lines]

    def __len__(self) -> int:
        return len(self._lines)

    def iter_values(self, names: Sequence[str]) -> Iterator[Sequence[Any] | None]:
        """Give the values of some columns, row by row; None for a blank line.

        Raises `ConfigError` for a line that holds no object.
        """
        # nothing is kept: thousands of rows would not fit the processor's caches
        for index, line in enumerate(self._lines):
            row = self.read_row(index) if line.strip() else None
            yield None if row is None else [row.get(name) for name in names]

    def read_row(self, index: int) -> dict[str, Any]:
        """Return the object that a line holds; raises as `iter_values` does."""
        return parse_json_line(
            self._lines[index], f"{self._source}, line {self._first_row + index + 1}"
        )

    def to_lines(self, indices: Sequence[int]) -> list[bytes]:
        """Return some of its rows as lines of JSON."""
        lines = (self._lines[index] for index in indices)
        return [line if line.endswith(b"\n") else line + b"\n" for line in lines]


class TableBatch:
    """Rows of a parquet file, which `source` names. Its methods raise `ConfigError` for damage."""

    def __init__(self, table: Any, source: str) -> None:
        self._table, self._source = table, source

    def __len__(self) -> int:
        return self._table.num_rows

    def iter_values(self, names: Sequence[str]) -> Iterator[Sequence[Any] | None]:
        """Give the values of some columns, row by row."""
        column_names = self._table.schema.names
        missing_column = [None] * len(self)
        with _convert_arrow_errors(self._source):
            columns = [
                self._table[name].to_pylist() if name in column_names else missing_column
                for name in names
            ]
        return zip(*columns, strict=True)

    def read_row(self, index: int) -> dict[str, Any]:
        """Return a row as the object that its line of JSON would hold."""
        return parse_json_line(self.to_lines([index])[0], self._source)

    def to_lines(self, indices: Sequence[int]) -> list[bytes]:
        """Return some of its rows as lines of JSON.

        Nested columns become objects and lists, and what JSON has no word for its text.
        """
        with _convert_arrow_errors(self._source):
            rows = self._table.take(list(indices)).to_pylist() if indices else []
        return [json.dumps(row, default=str).encode() + b"\n" for row in rows]


RowBatch = LineBatch | TableBatch


def iter_batches(files: Sequence[Path], source: str) -> Iterator[RowBatch]:
    """Give the rows of all files, one file after the other; one batch is in memory at a time.

    Raises `ConfigError`, which `source` begins, where pyarrow is missing or a file is damaged, and
    OSError for one that cannot be read.
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
    """Give the rows of all files as lines of JSON; raises as `iter_batches` does."""
    for batch in iter_batches(files, source):
        yield from batch.to_lines(range(len(batch)))


@contextlib.contextmanager
def _open_parquet(file: Path, source: str) -> Iterator[Any]:
    """An open parquet file."""
    require(
        importlib.util.find_spec("pyarrow") is not None,
        f"{source}: parquet files need pyarrow, which is not installed: in a checkout run bash"
        " launch/venv.sh parquet, elsewhere pip install pyarrow; or give JSON lines",
    )
    from pyarrow import parquet

    with _convert_arrow_errors(_label_file(file, source)), parquet.ParquetFile(file) as rows:
        names: list[str] = rows.schema_arrow.names
        duplicates = sorted({name for name in names if names.count(name) > 1})
        require(
            not duplicates,
            f"{_label_file(file, source)}: columns that are there more than once:"
            f" {join_names(duplicates)}; rename them",
        )
        yield rows


def _label_file(file: Path, source: str) -> str:
    return source if source.endswith(file.name) else f"{source}, {file.name}"


@contextlib.contextmanager
def _convert_arrow_errors(source: str) -> Iterator[None]:
    """Turns what pyarrow says of damage into ConfigError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, ValueError) as error:
        raise ConfigError(
            f"{source}: no parquet file that can be read ({first_line(error)}); write it anew"
        ) from error
