"""Small tables of measurements, kept in files of their own for the next run."""

import json
from pathlib import Path

import jax
import numpy as np

from jaxspec.inputs.json_keys import parse_json
from jaxspec.storage.cache import content_key
from jaxspec.system.files import SaveError, replacing
from jaxspec.system.terminal import say


def save_table(file: Path, table: np.ndarray, otherwise: str) -> None:
    """Writes a table for the next run. If that fails, a warning ends in `otherwise`."""
    try:
        with replacing(file, otherwise, shared=True) as fresh:
            fresh.write_text(
                json.dumps({"cost": table.tolist(), "digest": content_key(table.tolist())}),
                encoding="utf-8",
            )
    except SaveError as reason:
        say(f"warning: {reason}")


def load_table(file: Path, shape: tuple[int, ...], otherwise: str) -> np.ndarray:
    """Returns the table in a file, or zeros if there is none of this shape.

    A damaged file counts as none, with a warning that ends in `otherwise`.
    """
    table, damage = [], ""
    try:
        saved = parse_json(file.read_text(encoding="utf-8"))
        table = saved["cost"]
        damage = "" if saved["digest"] == content_key(saved["cost"]) else "is damaged"
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as reason:
        damage = f"cannot be read ({reason.strerror})"
    except (ValueError, KeyError, TypeError):
        damage = "is damaged"
    if damage and jax.process_index() == 0:
        say(f"warning: {file} {damage}: {otherwise}")
    return (
        np.asarray(table, np.float32)
        if not damage and np.shape(table) == shape
        else np.zeros(shape, np.float32)
    )
