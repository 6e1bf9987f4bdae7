"""JSON objects of files that others wrote, read key by key: what has another type is named with its
file and its key."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.inputs.checked import ConfigError, require


@dataclass(frozen=True)
class JsonObject:
    """The keys of an object; `source` names its file in messages. A key that is null counts as
    absent.

    Every method raises ConfigError for a value of another type, and for an absent key without a
    default.
    """

    content: Mapping[str, Any]
    source: str

    def get_int(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number that is not below `minimum`."""
        value = self._get_value(key, default)
        self._require_type(
            is_integer(value) and minimum <= value <= _MAX_INTEGER,
            key,
            f"a whole number from {minimum} to {_MAX_INTEGER:,}",
        )
        return value

    def get_float(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self._get_value(key, default)
        is_positive = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 < value <= _MAX_NUMBER
        )
        self._require_type(is_positive, key, "a positive number")
        return float(value)

    def get_bool(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get_value(key, default)
        self._require_type(isinstance(value, bool), key, "true or false")
        return value

    def get_string(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get_value(key, default)
        self._require_type(isinstance(value, str), key, "a string")
        return value

    def get_strings(self, key: str) -> list[str]:
        """A list of strings; empty where the key is absent."""
        value = self._get_value(key, [])
        self._require_type(
            isinstance(value, list) and all(isinstance(item, str) for item in value),
            key,
            "a list of strings",
        )
        return value

    def get_ints(self, key: str) -> list[int]:
        """A list of whole numbers; empty where the key is absent."""
        value = self._get_value(key, [])
        self._require_type(
            isinstance(value, list) and all(is_integer(item) for item in value),
            key,
            "a list of whole numbers",
        )
        return value

    def get_object(self, key: str) -> "JsonObject":
        """An object; empty where the key is absent."""
        value = self._get_value(key, {})
        self._require_type(isinstance(value, Mapping), key, "an object or null")
        return JsonObject(value, f"{self.source}, {key}")

    def has_key(self, key: str) -> bool:
        """Whether the key is there, with a value that is not null."""
        return self.content.get(key) is not None

    def _get_value(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        value = default if value is None else value
        require(
            value is not None, f"{self.source}: no key {key!r}; add it, or download the file again"
        )
        return value

    def _require_type(self, is_valid: bool, key: str, expected: str) -> None:
        if not is_valid:  # only then is the value shown: it may be as long as the file
            raise ConfigError(
                f"{self.source}: {key} is {format_value(self.content.get(key))}; it must be"
                f" {expected}"
            )


_MAX_NUMBER, _MAX_INTEGER = 1e30, 2**31 - 1
"""Larger numbers are mistakes."""
_MAX_VALUE_LENGTH, _MAX_NAME_LENGTH, _MAX_NAMES = 60, 300, 5
"""Characters of a value and of a name, and names of a list, that a message shows."""


def is_integer(value: Any) -> bool:
    """Whether a value of JSON is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def format_value(value: Any) -> str:
    """A value for a message, in one line that is not too long."""
    text = json.dumps(value) if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


def format_name(text: str) -> str:
    """A name, or a reason, of somebody else's for a message: without quotes, in one line of
    printable characters that is not too long."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:_MAX_NAME_LENGTH])
    return plain if len(text) <= _MAX_NAME_LENGTH else f"{plain}..."


def join_names(names: Iterable[str], separator: str = ", ") -> str:
    """The first few names, and how many more there are, for a message."""
    all_names = list(names)
    suffix = f" and {len(all_names) - _MAX_NAMES} more" if len(all_names) > _MAX_NAMES else ""
    return separator.join(map(format_name, all_names[:_MAX_NAMES])) + suffix


def is_valid_utf8(text: str) -> bool:
    """Whether UTF-8 can hold a text: a string of JSON, or a word of the command line, may have half
    of a character."""
    return text.isascii() or text.encode(errors="ignore").decode() == text


def parse_json(text: str | bytes) -> Any:
    """The value that a JSON text holds; raises ValueError for one that is not valid, or nested
    beyond all sense."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        # only Python's limit on what it converts is of no class of its own
        if type(error) is ValueError:
            raise ValueError("a whole number of thousands of digits") from error
        raise


def parse_json_line(line: bytes, location: str, hint: str = "") -> dict[str, Any]:
    """The object that a line of a JSON-lines file holds; `hint` completes "give one JSON object a
    line" in messages.

    Raises:
      ConfigError: it holds something else; `location` names file and line.
    """
    remedy = f"give one JSON object a line{hint}"
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{location}: not JSON ({error}); {remedy}") from error
    require(
        isinstance(row, dict), f"{location}: a {type(row).__name__} instead of an object; {remedy}"
    )
    return row


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
      ConfigError: the file is missing, or holds something else.
    """
    # a pipe would never end
    require(
        not file.exists() or file.is_file(),
        f"{file}: not a regular file; give a folder that has it as one",
    )
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a folder that has it") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error}); download the file again") from error
    require(
        isinstance(content, dict),
        f"{file}: holds a {type(content).__name__} instead of an object; download the file again",
    )
    return content


def load_json_object(file: Path) -> JsonObject:
    """The keys of a JSON file; raises as `read_json` does."""
    return JsonObject(read_json(file), str(file))
