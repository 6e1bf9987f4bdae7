"""Numbers and texts that environment variables hold."""

import os

from jaxspec.inputs.checked import INT32, require
from jaxspec.inputs.json_keys import format_value


def environment_text(name: str) -> str:
    """What an environment variable holds; empty where it is unset or only blanks."""
    return os.environ.get(name, "").strip()


def environment_number(name: str, minimum: int, maximum: int = INT32) -> int | None:
    """The whole number that an environment variable holds; None where it is unset or empty.

    Raises:
      ConfigError: it holds something else.
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
    """The number that digits write; None for another text, and for a number far too large."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(INT32)) else None
