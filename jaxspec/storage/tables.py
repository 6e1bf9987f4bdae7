"""Saves small tables of measurements for later runs."""

import json
from pathlib import Path

import jax
import numpy as np

from jaxspec.inputs.json_keys import parse_json
from jaxspec.storage.cache import content_key
from jaxspec.system.files import SaveError, atomic_replace
from jaxspec.system.terminal import print_line


def save_table(file: Path, table: np.ndarray, consequence: str) -> None:
    """Writes a table for the next run. If that fails, a warning ends in `consequence`."""
    try:
        with atomic_replace(file, consequence, shared=True) as new_file:
            new_file.write_text(
                json.dumps({"cost": table.tolist(), "digest": content_key(table.tolist())}),
                encoding="utf-8",
            )
    except SaveError as error:
        print_line(f"warning: {error}")


def load_table(file: Path, shape: tuple[int, ...], consequence: str) -> np.ndarray:
    """Loads a table that `save_table` wrote.

    Returns zeros if there is none of this shape. A damaged file counts as none, with a
    warning that ends in `consequence`.
    """
    table, damage = [], ""
    try:
        saved = parse_json(file.read_text(encoding="utf-8"))
        table = saved["cost"]
        damage = "" if saved["digest"] == content_key(saved["cost"]) else "is damaged"
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        damage = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError):
        damage = "is damaged"
    if damage and jax.process_index() == 0:
        print_line(f"warning: {file} {damage}: {consequence}")
    return (
        np.asarray(table, np.float32)
        if not damage and np.shape(table) == shape
        else np.zeros(shape, np.float32)
    )
