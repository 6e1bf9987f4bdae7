"""Numbers and texts that environment variables hold."""

import os

from jaxspec.inputs.checked import INT32, require
from jaxspec.inputs.json_keys import shown


def given(name: str) -> str:
    """What an environment variable holds; empty where it is unset or only blanks."""
    return os.environ.get(name, "").strip()


def environment_number(name: str, at_least: int, most: int = INT32) -> int | None:
    """The whole number that an environment variable holds; None where it is unset or empty.

    Raises:
      ConfigError: it holds something else.
    """
    text = given(name)
    if not text:
        return None
    number = whole_number(text)
    good = number is not None and at_least <= number <= most
    require(
        good,
        f"{name} is {shown(text)}; give a whole number, {at_least} or more and at most {most}, or"
        " unset it",
    )
    return number


def whole_number(text: str) -> int | None:
    """The number that digits write; None for another text, and for a number far too large."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(INT32)) else None
