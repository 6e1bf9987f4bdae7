"""Typed access to JSON of other programs.

Errors name the file and the key.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.inputs.checked import ConfigError, require


@dataclass(frozen=True)
class JsonObject:
    """A JSON object with typed access to its keys.

    A null counts as a missing key. Methods raise ConfigError for a value of another type, and for a
    missing key without a default.
    """

    content: Mapping[str, Any]
    source: str
    """Name of the file in messages."""

    def get_int(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """Returns a whole number that is at least `minimum`."""
        value = self._get_value(key, default)
        self._require_type(
            is_integer(value) and minimum <= value <= _MAX_INTEGER,
            key,
            f"a whole number from {minimum} to {_MAX_INTEGER:,}",
        )
        return value

    def get_float(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0."""
        value = self._get_value(key, default)
        is_positive = (
            isinstance(value, int | float)
            # JSON's true and false are of type `bool`, a subclass of `int`.
            and not isinstance(value, bool)
            and 0 < value <= _MAX_NUMBER
        )
        self._require_type(is_positive, key, "a positive number")
        return float(value)

    def get_bool(self, key: str, default: bool) -> bool:
        """Returns a boolean."""
        value = self._get_value(key, default)
        self._require_type(isinstance(value, bool), key, "true or false")
        return value

    def get_string(self, key: str, default: str | None = None) -> str:
        """Returns a string."""
        value = self._get_value(key, default)
        self._require_type(isinstance(value, str), key, "a string")
        return value

    def get_strings(self, key: str) -> list[str]:
        """Returns a list of strings, which is empty if the key is missing."""
        value = self._get_value(key, [])
        self._require_type(
            isinstance(value, list) and all(isinstance(item, str) for item in value),
            key,
            "a list of strings",
        )
        return value

    def get_ints(self, key: str) -> list[int]:
        """Returns a list of whole numbers, which is empty if the key is missing."""
        value = self._get_value(key, [])
        self._require_type(
            isinstance(value, list) and all(is_integer(item) for item in value),
            key,
            "a list of whole numbers",
        )
        return value

    def get_object(self, key: str) -> "JsonObject":
        """Returns an object, which is empty if the key is missing."""
        value = self._get_value(key, {})
        self._require_type(isinstance(value, Mapping), key, "an object or null")
        return JsonObject(value, f"{self.source}, {key}")

    def has_key(self, key: str) -> bool:
        """Returns whether a key has a value that is not null."""
        return self.content.get(key) is not None

    def _get_value(self, key: str, default: Any) -> Any:
        # `get` with a default would return the null of a key.
        value = self.content.get(key)
        value = default if value is None else value
        require(
            value is not None, f"{self.source}: no key {key!r}; add it, or download the file again"
        )
        return value

    def _require_type(self, is_valid: bool, key: str, expected: str) -> None:
        # A value may be as long as its file, so it is formatted only for an error.
        if not is_valid:
            raise ConfigError(
                f"{self.source}: {key} is {format_value(self.content.get(key))}; it must be"
                f" {expected}"
            )


_MAX_NUMBER, _MAX_INTEGER = 1e30, 2**31 - 1
"""Maxima of numbers and of whole numbers. Larger ones are taken as errors."""
_MAX_VALUE_LENGTH, _MAX_NAME_LENGTH, _MAX_NAMES = 60, 300, 5
"""Maximum characters of a value and of a name, and maximum names of a list, in a message."""


def is_integer(value: Any) -> bool:
    """Returns whether a JSON value is a whole number."""
    # JSON's true and false are of type `bool`, a subclass of `int`.
    return isinstance(value, int) and not isinstance(value, bool)


def format_value(value: Any) -> str:
    """Formats a value as one short line."""
    text = json.dumps(value) if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


def format_name(text: str) -> str:
    """Formats a name for a message, without quotes.

    The result is one short line of printable characters.
    """
    # Line breaks or terminal codes in a file must not change how a message looks.
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:_MAX_NAME_LENGTH])
    return plain if len(text) <= _MAX_NAME_LENGTH else f"{plain}..."


def join_names(names: Iterable[str], separator: str = ", ") -> str:
    """Joins the first names, and counts the others."""
    all_names = list(names)
    suffix = f" and {len(all_names) - _MAX_NAMES} more" if len(all_names) > _MAX_NAMES else ""
    return separator.join(map(format_name, all_names[:_MAX_NAMES])) + suffix


def is_valid_utf8(text: str) -> bool:
    """Returns whether a text can be encoded as UTF-8."""
    # Strings of JSON and arguments of the command line may have unpaired surrogates.
    return text.isascii() or text.encode(errors="ignore").decode() == text


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text.

    Raises:
      ValueError: the text is not valid JSON, is nested too deeply, or has a number of too many
        digits.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        # Only Python's limit on the digits of a number raises ValueError itself. Its own message is
        # about a setting of Python.
        if type(error) is ValueError:
            raise ValueError("a whole number of thousands of digits") from error
        raise


def parse_json_line(line: bytes, location: str, hint: str = "") -> dict[str, Any]:
    """Parses a line of a JSON-lines file.

    Args:
      line: the line.
      location: file and line number, for messages.
      hint: text after "give one JSON object a line" in messages.

    Raises:
      ConfigError: the line is not a JSON object.
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
    """Reads a JSON object from a file.

    Raises:
      ConfigError: the file cannot be read, or is not a JSON object.
    """
    # Reading a pipe could block forever.
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
    """Reads a JSON file as a `JsonObject`. Raises the same errors as `read_json`."""
    return JsonObject(read_json(file), str(file))
