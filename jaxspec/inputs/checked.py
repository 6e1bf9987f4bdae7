"""Config dataclasses that check their fields."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

INF = float("inf")
# Devices and array libraries count with 32 bits.
INT32 = 2**31 - 1
"""Maximum of whole-number settings whose range has no maximum."""
# Settings become float32 on devices, where smaller numbers may become 0 and larger ones infinity.
FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Smallest and largest positive normal number of float32."""


class _ShortRepr(reprlib.Repr):
    """Representation of values in messages, shortened."""

    def repr_int(self, x: int, level: int) -> str:
        """Formats a whole number. A huge one is given by its length."""
        # Python refuses to convert numbers of thousands of digits to text. A bit is 0.30103 digits.
        return (
            repr(x)
            if abs(x) < 10**self.maxlong
            else f"a whole number of about {int(x.bit_length() * 0.30103)} digits"
        )


_REPR = _ShortRepr()
_REPR.maxstring = _REPR.maxother = 120


class ConfigError(Exception):
    """Invalid input that the user can correct.

    Programs print it without a traceback and exit with code 2.
    """

    # Not a `ValueError`, since tyro catches those and prints them in its own way.


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition` is true."""
    if not condition:
        raise ConfigError(message)


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message."""
    # Some libraries add pages of explanation.
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def error_text(error: BaseException) -> str:
    """Returns the message of any error, on one line."""
    try:
        return " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - an exception's own code may fail in any way
        return "(its message cannot be read)"


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    # Divisors come in pairs, one of which is at most the square root.
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


@contextlib.contextmanager
def prefix_errors(source: str) -> Iterator[None]:
    """Puts `source` before messages of ConfigError that lack it."""
    try:
        yield
    except ConfigError as error:
        if source in str(error):
            raise
        raise ConfigError(f"{source}: {error}") from error


@contextlib.contextmanager
def translate_settings(names: Mapping[str, str]) -> Iterator[None]:
    """Renames settings in the message of a ConfigError.

    Args:
      names: for a setting, the name under which the user gave it, such as a key of a file.
    """
    try:
        yield
    except ConfigError as error:
        # All keys of `names` have a dot. Words without one, such as `seed`, may be plain English.
        translated = re.sub(
            r"(?:--)?\b[a-z_][a-z_0-9]*(?:\.[a-z_0-9]+)+",
            lambda match: names.get(match[0].removeprefix("--"), match[0]),
            str(error),
        )
        if translated == str(error):
            raise
        raise ConfigError(translated) from error


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of a number, as part of its type: `Annotated[float, Range(above=0)]`."""

    min: int | float = -INF
    above: int | float = -INF
    max: int | float = INF
    below: int | float = INF
    or_zero: bool = False
    """Whether 0 is valid too."""
    remedy: str = ""
    """Hint for the user, where the bounds do not explain themselves."""

    def contains(self, number: int | float) -> bool:
        """Returns whether a number is in the range."""
        inside = self.min <= number <= self.max and self.above < number < self.below
        return inside or (self.or_zero and number == 0)

    def __str__(self) -> str:
        bounds = {
            "at least": self.min,
            "above": self.above,
            "at most": self.max,
            "below": self.below,
        }
        words = " and ".join(
            f"{word} {bound}" for word, bound in bounds.items() if abs(bound) < INF
        )
        return "0, or " * self.or_zero + words + f" ({self.remedy})" * bool(self.remedy)


class CheckedConfig:
    """Base of dataclasses that check their fields.

    Subclasses are frozen. They override `check` for conditions on several fields. Fields of type
    float accept whole numbers and store them as floats.
    """

    prefix: ClassVar[str] = ""
    """Text before the name of a field in messages."""

    def __init_subclass__(cls, prefix: str = "") -> None:
        super().__init_subclass__()
        cls.prefix = prefix

    def __post_init__(self) -> None:
        for name, annotation in field_types(type(self)).items():
            value = getattr(self, name)
            if expected := describe_mismatch(value, annotation):
                raise ConfigError(
                    f"{self.prefix}{name} is {' '.join(_REPR.repr(value).split())}; it must be"
                    f" {expected}"
                )
            if _unwrap_annotated(annotation) is float:
                # The dataclass is frozen, which forbids plain assignment.
                object.__setattr__(self, name, float(value))
        self.check()

    def check(self) -> None:
        """Raises ConfigError if fields contradict each other."""


@functools.cache
def field_types(cls: Any) -> Mapping[str, Any]:
    """Returns types and ranges of a dataclass's fields."""
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in fields(cls)}


def _unwrap_annotated(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def describe_mismatch(value: Any, annotation: Any) -> str:
    """Describes the values that an annotation allows.

    Returns an empty text if the value has the type and is in its range.
    """
    kind = get_origin(annotation)
    if kind is Annotated:
        return describe_mismatch(value, _unwrap_annotated(annotation)) or _range_mismatch(
            value, *get_args(annotation)
        )
    if kind in (Union, UnionType):
        mismatches = [describe_mismatch(value, option) for option in get_args(annotation)]
        return " or ".join(mismatches) if all(mismatches) else ""
    if kind is tuple:
        item_type = get_args(annotation)[0]
        if not isinstance(value, tuple):
            return f"a tuple, each item {_describe_type(_unwrap_annotated(item_type))}"
        return next(
            (
                f"a tuple, each item {expected}"
                for expected in (describe_mismatch(item, item_type) for item in value)
                if expected
            ),
            "",
        )
    if kind is Literal:
        return (
            ""
            if isinstance(value, str) and value in get_args(annotation)
            else f"one of {', '.join(get_args(annotation))}"
        )
    return "" if _has_type(value, annotation) else _describe_expected(value, annotation)


def _range_mismatch(number: Any, kind: type, bounds: Range) -> str:
    if not bounds.contains(number):
        return str(bounds)
    # A setting may exceed 32 bits only if its range has a maximum.
    return f"at most {INT32}" if kind is int and bounds.max == INF and number > INT32 else ""


def _has_type(value: Any, expected_type: type) -> bool:
    if expected_type is float:
        return (_has_type(value, int) or isinstance(value, float)) and (
            value == 0 or FLOAT32[0] <= abs(value) <= FLOAT32[1]
        )
    if expected_type is str:
        # Paths and arguments of processes cannot hold NUL.
        return isinstance(value, str) and "\0" not in value
    if is_dataclass(expected_type):
        return type(value) is expected_type  # a subclass may skip the checks
    # `bool` is a subclass of `int`.
    return isinstance(value, expected_type) and (
        expected_type is not int or not isinstance(value, bool)
    )


def _describe_expected(value: Any, expected_type: Any) -> str:
    """Describes the type that a value should have."""
    if expected_type is str and isinstance(value, str):
        return "text without the character NUL"
    if expected_type is float and isinstance(value, int | float) and not isinstance(value, bool):
        return "a number that float32 can hold"
    return _describe_type(expected_type) + " itself, not of a subclass" * (
        is_dataclass(expected_type) and isinstance(value, expected_type)
    )


def _describe_type(expected_type: Any) -> str:
    words = {
        bool: "True or False",
        int: "a whole number",
        float: "a number, as an int or a float",
        str: "text",
        type(None): "None",
    }
    return words.get(expected_type) or f"of type {expected_type.__name__}"


def settings_classes(annotation: Any) -> list[Any]:
    """Returns the dataclasses in a field's type."""
    return [
        candidate for candidate in (annotation, *get_args(annotation)) if is_dataclass(candidate)
    ]


class Unused(NamedTuple):
    """Rule for settings without effect."""

    settings: str
    """Names of settings. A name that ends in a dot stands for all settings that start with it."""
    fact: str
    """Condition that makes them useless, as a format string for messages. `c` is the config."""
    applies: Callable[[Any], bool]
    """Whether the condition holds for a config."""
    set_by_files: bool = False
    """Whether files replace the setting. If so, even its default value has no effect."""
