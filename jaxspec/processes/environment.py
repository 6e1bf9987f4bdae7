"""Numbers and texts that environment variables hold."""

import os

from jaxspec.inputs.checked import INT32, require
from jaxspec.inputs.json_keys import format_value


def environment_text(name: str) -> str:
    """Returns an environment variable, empty if unset or blank."""
    return os.environ.get(name, "").strip()


def environment_number(name: str, minimum: int, maximum: int = INT32) -> int | None:
    """Reads a whole number from an environment variable.

    Returns None if it is unset or blank.

    Raises:
      ConfigError: it holds something else, or a number out of range.
    """
    text = environment_text(name)
    if not text:
        return None
    number = parse_whole_number(text)
    is_valid = number is not None and minimum <= number <= maximum
    require(
        is_valid,
        f"{name} is {format_value(text)}; give a whole number, {minimum} or more and at most"
        f" {maximum}, or unset it",
    )
    return number


def parse_whole_number(text: str) -> int | None:
    """Parses digits. Returns None for other text or a far too large number."""
    # `int` also accepts signs, blanks and other scripts' digits, and fails on thousands of digits.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(INT32)) else None
