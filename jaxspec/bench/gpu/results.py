"""File of results.

A section is added as soon as it is measured, so that a crash loses no earlier one.
"""

import json
from pathlib import Path
from typing import Any

from jaxspec.inputs.checked import ConfigError, first_line
from jaxspec.system.files import utc_timestamp, write_text_atomic

_FORMAT = 1


class Results:
    """Sections of one run by number.

    A run is identified by card, versions, code and sizes.
    """

    def __init__(self, file: Path, identity: dict[str, Any]) -> None:
        """Reads the sections that `file` has for `identity`, and writes it once to try that.

        Raises:
          ConfigError: the file has other content, or cannot be read or written.
        """
        self.file, self._runs = file, []
        if file.exists():
            self._runs = _read_runs(file)
        # JSON turns tuples into lists, so this identity passes through it like those of the file.
        identity = json.loads(json.dumps(identity))
        matches = [run for run in self._runs if run["identity"] == identity]
        if not matches:
            matches = [{"identity": identity, "sections": {}}]
            self._runs += matches
        self._run = matches[-1]
        # Written before the first measurement, so that none is lost to a file that is read-only.
        self._write_file()

    def has_section(self, section: int) -> bool:
        """Returns whether a section is complete."""
        return bool(self._run["sections"].get(str(section), {}).get("complete"))

    def get_section(self, section: int) -> dict[str, Any]:
        """Returns the numbers of a section, complete or not, or none if it was not measured."""
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
        """Identity and sections of this run, for the last line of the output."""
        return {"bench": "gpu", **self._run}


def _read_runs(file: Path) -> list[dict[str, Any]]:
    # A file of something else must never be overwritten.
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
            f"--out {file} is not a file of bench gpu ({type(error).__name__}:"
            f" {first_line(error)}); {remedy}"
        ) from error
    if not is_valid:
        raise ConfigError(f"--out {file} does not have format {_FORMAT}; {remedy}")
    return runs
