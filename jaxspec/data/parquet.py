"""Parquet files as the JSON lines that everything else reads."""

import hashlib
import importlib.util
import json
from pathlib import Path

from jaxspec.inputs.checked import ConfigError, require
from jaxspec.storage.cache import cache_folder
from jaxspec.system.files import replacing
from jaxspec.system.processes import first_line

_ROWS = 1024
"""Rows that are in memory at once."""


def json_lines_of(path: str, key: str) -> str:
    """Return the path of a file with a parquet file's rows as JSON lines, which is made once for
    each content, in the folder `data` of the cache; the path of any other file as it is.

    Nested columns become objects and lists, and what JSON has no word for its text. `key` names the
    file in messages. Raises `ConfigError` where pyarrow is missing, or the file is damaged.
    """
    if not path.endswith(".parquet") or not Path(path).is_file():
        return path
    require(
        importlib.util.find_spec("pyarrow") is not None,
        f"{key} {path}: parquet files need pyarrow, which is not installed: in a checkout run bash"
        " launch/venv.sh parquet, elsewhere pip install pyarrow; or give JSON lines",
    )
    import pyarrow
    from pyarrow import parquet

    with Path(path).open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    made = cache_folder() / "data" / f"{digest}.jsonl"
    if made.is_file():
        return str(made)
    try:
        with replacing(made, shared=True) as fresh, fresh.open("w", encoding="utf-8") as lines:
            for batch in parquet.ParquetFile(path).iter_batches(_ROWS):
                for row in batch.to_pylist():
                    lines.write(json.dumps(row, default=str) + "\n")
    except (pyarrow.ArrowException, ValueError) as error:
        raise ConfigError(
            f"{key} {path}: no parquet file that can be read ({first_line(error)}); write it anew"
        ) from error
    return str(made)
