"""The file of results: a section is added as soon as it is measured, so that none is lost."""

import json
from pathlib import Path
from typing import Any

from jaxspec.inputs.checked import ConfigError, first_line
from jaxspec.system.files import utc_timestamp, write_text_atomic

_FORMAT = 1


class Results:
    """Sections by number, for one card, one set of versions and one set of sizes."""

    def __init__(self, file: Path, identity: dict[str, Any]) -> None:
        """Reads what a file has of the same identity.

        Raises:
          ConfigError: it is not such a file, or cannot be written.
        """
        self.file, self._runs = file, []
        if file.exists():
            self._runs = _read_runs(file)
        # as it is read back
        identity = json.loads(json.dumps(identity))
        matches = [run for run in self._runs if run["identity"] == identity]
        if not matches:
            matches = [{"identity": identity, "sections": {}}]
            self._runs += matches
        self._run = matches[-1]
        self._write_file()  # before anything is measured that could not be kept

    def has_section(self, section: int) -> bool:
        """Whether a section is there, whole."""
        return bool(self._run["sections"].get(str(section), {}).get("complete"))

    def get_section(self, section: int) -> dict[str, Any]:
        """What was measured in a section; empty if nothing was."""
        return self._run["sections"].get(str(section), {})

    def add_section(self, section: int, numbers: dict[str, Any], complete: bool) -> None:
        """Adds a section and writes the file."""
        self._run["sections"][str(section)] = {
            **numbers,
            "complete": complete,
            "at": utc_timestamp(),
        }
        self._write_file()

    def _write_file(self) -> None:
        content = {"format": _FORMAT, "runs": self._runs}
        write_text_atomic(self.file, json.dumps(content, indent=1))

    @property
    def record(self) -> dict[str, Any]:
        """All of this identity, for the last line of the output."""
        return {"bench": "gpu", **self._run}


def _read_runs(file: Path) -> list[dict[str, Any]]:
    remedy = "give another --out, or remove it"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        runs = content["runs"]
        is_valid = content["format"] == _FORMAT and all(
            isinstance(run["identity"], dict) and isinstance(run["sections"], dict) for run in runs
        )
    except OSError as error:
        raise ConfigError(f"--out {file} cannot be read: {error.strerror}; {remedy}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--out {file} is no file of bench gpu ({type(error).__name__}: {first_line(error)});"
            f" {remedy}"
        ) from error
    if not is_valid:
        raise ConfigError(f"--out {file} has another format than {_FORMAT}; {remedy}")
    return runs
