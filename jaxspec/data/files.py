"""Data files, wherever they are and whatever they are written in, as the JSON lines that everything
else reads."""

import contextlib
import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from jaxspec.inputs.checked import ConfigError, first_line, require
from jaxspec.inputs.json_keys import listed
from jaxspec.storage.cache import cache_folder
from jaxspec.system.files import digest, replacing

_ROWS = 1024
"""Rows of a parquet file that are in memory at once."""
_DATA = ("*.parquet", "*.jsonl")
"""Files of a dataset on the hub that hold its rows, where nothing says which do."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE = re.compile(r".*\.(parquet|jsonl?|txt)")
"""Names that are meant as a file that is here, though they look like an id."""


def data_files(path: str, key: str) -> list[Path]:
    """Return the files that a setting names: a file; those of a dataset on the hub, OWNER/NAME or
    OWNER/NAME:GLOB, or of a folder, FOLDER:GLOB, in the order of their names.

    In GLOB, `*` stands for slashes as well. What is on the hub is downloaded into the hub's own
    cache first. A file that is absent is returned as it is: whoever reads it says so.
    Raises `ConfigError`, naming `key`, where the hub cannot give the dataset, no file matches, or
    there are several and no GLOB says which.
    """
    name, _, pattern = path.partition(":")
    here = Path(path).exists() or not (pattern or _ID.fullmatch(name))
    if here or (not pattern and _FILE.fullmatch(name)):
        return [Path(path)]
    if Path(name).is_dir():
        folder = Path(name)
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
    require(
        bool(found),
        f"{key} {path}: no file of {dataset} matches {' or '.join(patterns)}; it has"
        f" {listed(sorted(data or names)) or 'none'}; give {dataset}:GLOB that matches some",
    )
    require(
        bool(pattern) or len(found) == 1,
        f"{key} {path}: {dataset} has {len(found)} data files, {listed(found)}; say which with"
        f" {dataset}:GLOB, such as {dataset}:{found[0]}",
    )
    return found


def json_lines_of(path: str, key: str) -> str:
    """Return the path of one file with the rows of all `data_files` as JSON lines: a single file of
    JSON lines as it is; parquet and several files are written into one, once for each content, in
    the folder `data` of the cache.

    Raises `ConfigError` as `data_files` and `lines_of` do.
    """
    files = data_files(path, key)
    single = len(files) == 1
    if (single and files[0].suffix != ".parquet") or not files[0].is_file():
        return str(files[0])
    digests = [digest(file) for file in files]
    whole = digests[0] if single else hashlib.sha256(" ".join(digests).encode()).hexdigest()
    made = cache_folder() / "data" / f"{whole}.jsonl"
    if not made.is_file():
        with replacing(made, shared=True) as fresh, fresh.open("wb") as lines:
            lines.writelines(lines_of(files, f"{key} {path}"))
    return str(made)


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


def lines_of(files: Sequence[Path], where: str) -> Iterator[bytes]:
    """Give the rows of all files as lines of JSON, one file after the other; never more than some
    of them are in memory.

    Nested columns of parquet become objects and lists, and what JSON has no word for its text.
    Raises `ConfigError`, which `where` begins, where pyarrow is missing or a file is damaged, and
    OSError for one that cannot be read.
    """
    for file in files:
        if file.suffix == ".parquet":
            with _as_parquet(file, where) as rows:
                for batch in rows.iter_batches(_ROWS):
                    for row in batch.to_pylist():
                        yield json.dumps(row, default=str).encode() + b"\n"
        else:
            with file.open("rb") as lines:
                for line in lines:
                    yield line if line.endswith(b"\n") else line + b"\n"


@contextlib.contextmanager
def _as_parquet(file: Path, where: str) -> Iterator[Any]:
    """An open parquet file."""
    require(
        importlib.util.find_spec("pyarrow") is not None,
        f"{where}: parquet files need pyarrow, which is not installed: in a checkout run bash"
        " launch/venv.sh parquet, elsewhere pip install pyarrow; or give JSON lines",
    )
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as rows:
            yield rows
    except (pyarrow.ArrowException, ValueError) as error:
        named = where if where.endswith(file.name) else f"{where}, {file.name}"
        raise ConfigError(
            f"{named}: no parquet file that can be read ({first_line(error)}); write it anew"
        ) from error
