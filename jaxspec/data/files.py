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
from jaxspec.inputs.json_keys import json_line, listed
from jaxspec.system.files import digest

_ROWS = 1024
"""Rows of a file that are in memory at once."""
_DATA = ("*.parquet", "*.jsonl")
"""Files of a dataset on the hub that hold its rows, where nothing says which do."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE = re.compile(r".*\.(parquet|jsonl?|txt)")
"""Names that are meant as a file that is here, though they look like an id."""


def data_files(path: str, key: str) -> list[Path]:
    """Return the files that a setting names: a file; those of a dataset on the hub, OWNER/NAME or
    OWNER/NAME:GLOB, or of a folder, FOLDER or FOLDER:GLOB, in the order of their names.

    In GLOB, `*` stands for slashes as well. What is on the hub is downloaded into the hub's own
    cache first. A file that is absent is returned as it is: whoever reads it says so.
    Raises `ConfigError`, naming `key`, where the hub cannot give the dataset, no file matches, or
    there are several and no GLOB says which.
    """
    name, _, pattern = path.partition(":")
    here = Path(path).exists() or not (pattern or _ID.fullmatch(name))
    if Path(name).is_dir():
        folder = Path(name)
    elif here or (not pattern and _FILE.fullmatch(name)):
        return [Path(path)]
    elif _ID.fullmatch(name):
        folder = _downloaded(path, key)
    else:
        return [Path(path)]
    return [folder / file for file in _chosen(path, key, _below(folder))]


@functools.cache
def _downloaded(path: str, key: str) -> Path:
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
        _chosen(path, key, [file.rfilename for file in files])
    patterns = [pattern] if pattern else [*_DATA]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except refusals as error:
        raise ConfigError(
            f"{key} {path}: no such file here, and the hub cannot give a dataset {name}"
            f" ({first_line(error)}); correct the id, or download its files elsewhere and give"
            " FILE, or FOLDER:GLOB for several"
        ) from error


def _below(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]


def _chosen(path: str, key: str, names: Sequence[str]) -> list[str]:
    """Those of a dataset's files that `path` asks for, sorted."""
    dataset, _, pattern = path.partition(":")
    patterns = [pattern] if pattern else _DATA
    found = sorted(name for name in names if any(fnmatchcase(name, each) for each in patterns))
    data = [name for name in names if any(fnmatchcase(name, each) for each in _DATA)]
    example = sorted(data or names)
    remedy = f"{dataset}:GLOB, such as {dataset}:{example[0]}" if example else "one that has some"
    require(
        bool(found),
        f"{key} {path}: no file of {dataset} matches {' or '.join(patterns)}; it has"
        f" {listed(example) or 'none'}; give {remedy}",
    )
    require(
        bool(pattern) or len(found) == 1,
        f"{key} {path}: {dataset} has {len(found)} data files, {listed(found)}; say which with"
        f" {dataset}:GLOB, such as {dataset}:{found[0]}",
    )
    return found


def data_digest(path: str, key: str) -> str:
    """Return the digest of all `data_files`; "-" where one is absent.

    Raises `ConfigError` as `data_files` does, and for a file that cannot be read.
    """
    digests = [_digest(file) for file in data_files(path, key)]
    if "-" in digests:
        return "-"
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _digest(file: Path) -> str:
    if not file.is_file():
        return digest(file)
    state = file.stat()
    return _digest_once(file.absolute(), state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _digest_once(file: Path, size: int, changed: int) -> str:
    """The digest of a file in this state: a start asks for it in several places."""
    return digest(file)


def count_lines(files: Sequence[Path], where: str) -> int:
    """Return how many lines `lines_of` gives, without making any of a parquet file; raises as it
    does."""
    count = 0
    for file in files:
        if file.suffix == ".parquet":
            with _as_parquet(file, where) as rows:
                count += rows.metadata.num_rows
        else:
            with file.open("rb") as lines:
                count += sum(1 for _ in lines)
    return count


class LineBatch:
    """Rows of a file of JSON lines; the first is row `first` of all files, which `where` names."""

    def __init__(self, lines: list[bytes], where: str, first: int) -> None:
        self._lines, self._where, self._first = lines, where, first
        self.sizes = [len(line) for line in lines]

    def __len__(self) -> int:
        return len(self._lines)

    def values(self, names: Sequence[str]) -> Iterator[Sequence[Any] | None]:
        """Give the values of some columns, row by row; None for a blank line.

        Raises `ConfigError` for a line that holds no object.
        """
        # nothing is kept: thousands of rows would not fit the processor's caches
        for place, line in enumerate(self._lines):
            row = self.row(place) if line.strip() else None
            yield None if row is None else [row.get(name) for name in names]

    def row(self, place: int) -> dict[str, Any]:
        """Return the object that a line holds; raises as `values` does."""
        return json_line(self._lines[place], f"{self._where}, line {self._first + place + 1}")

    def as_lines(self, places: Sequence[int]) -> list[bytes]:
        """Return some of its rows as lines of JSON."""
        lines = (self._lines[place] for place in places)
        return [line if line.endswith(b"\n") else line + b"\n" for line in lines]


class TableBatch:
    """Rows of a parquet file, which `where` names. Its methods raise `ConfigError` for damage."""

    def __init__(self, table: Any, where: str) -> None:
        self._table, self._where = table, where

    def __len__(self) -> int:
        return self._table.num_rows

    def values(self, names: Sequence[str]) -> Iterator[Sequence[Any] | None]:
        """Give the values of some columns, row by row."""
        there = self._table.schema.names
        absent = [None] * len(self)
        with _refusing_damage(self._where):
            columns = [self._table[name].to_pylist() if name in there else absent for name in names]
        return zip(*columns, strict=True)

    def row(self, place: int) -> dict[str, Any]:
        """Return a row as the object that its line of JSON would hold."""
        return json_line(self.as_lines([place])[0], self._where)

    def as_lines(self, places: Sequence[int]) -> list[bytes]:
        """Return some of its rows as lines of JSON.

        Nested columns become objects and lists, and what JSON has no word for its text.
        """
        with _refusing_damage(self._where):
            rows = self._table.take(list(places)).to_pylist() if places else []
        return [json.dumps(row, default=str).encode() + b"\n" for row in rows]


Batch = LineBatch | TableBatch


def batches_of(files: Sequence[Path], where: str) -> Iterator[Batch]:
    """Give the rows of all files, one file after the other; one batch is in memory at a time.

    Raises `ConfigError`, which `where` begins, where pyarrow is missing or a file is damaged, and
    OSError for one that cannot be read.
    """
    count = 0
    for file in files:
        if file.suffix == ".parquet":
            with _as_parquet(file, where) as rows:
                for table in rows.iter_batches(_ROWS):
                    yield TableBatch(table, _named(file, where))
                    count += table.num_rows
        else:
            with file.open("rb") as lines:
                while some := list(itertools.islice(lines, _ROWS)):
                    yield LineBatch(some, where, count)
                    count += len(some)


def lines_of(files: Sequence[Path], where: str) -> Iterator[bytes]:
    """Give the rows of all files as lines of JSON; raises as `batches_of` does."""
    for batch in batches_of(files, where):
        yield from batch.as_lines(range(len(batch)))


@contextlib.contextmanager
def _as_parquet(file: Path, where: str) -> Iterator[Any]:
    """An open parquet file."""
    require(
        importlib.util.find_spec("pyarrow") is not None,
        f"{where}: parquet files need pyarrow, which is not installed: in a checkout run bash"
        " launch/venv.sh parquet, elsewhere pip install pyarrow; or give JSON lines",
    )
    from pyarrow import parquet

    with _refusing_damage(_named(file, where)), parquet.ParquetFile(file) as rows:
        names: list[str] = rows.schema_arrow.names
        repeated = sorted({name for name in names if names.count(name) > 1})
        require(
            not repeated,
            f"{_named(file, where)}: columns that are there more than once: {listed(repeated)};"
            " rename them",
        )
        yield rows


def _named(file: Path, where: str) -> str:
    return where if where.endswith(file.name) else f"{where}, {file.name}"


@contextlib.contextmanager
def _refusing_damage(where: str) -> Iterator[None]:
    """Turns what pyarrow says of damage into ConfigError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, ValueError) as error:
        raise ConfigError(
            f"{where}: no parquet file that can be read ({first_line(error)}); write it anew"
        ) from error
