"""Settings that are checked when they are made, whatever makes them: every field by its type, and
every number by its range."""

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
INT32 = 2**31 - 1
"""The largest whole number where a range states no other: what devices and array libraries count
with."""
FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest and the largest number that float32 keeps as it is; beyond, it has 0 or infinity
instead."""


class _ShortRepr(reprlib.Repr):
    """Values in messages: shortened, and whole numbers of thousands of digits, which Python does
    not write out, by their length."""

    def repr_int(self, x: int, level: int) -> str:
        """A whole number."""
        return (
            repr(x)
            if abs(x) < 10**self.maxlong
            else f"a whole number of about {int(x.bit_length() * 0.30103)} digits"
        )


_REPR = _ShortRepr()
_REPR.maxstring = _REPR.maxother = 120


class ConfigError(Exception):
    """Bad input that the user can mend; programs print it without a traceback and exit with code 2.

    It is no `ValueError`, which tyro would print as a message of its own.
    """


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def first_line(error: Exception) -> str:
    """What an error says, without the pages that some libraries add."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def divisors(number: int) -> list[int]:
    """What divides a number, ascending: for messages about what does not."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


@contextlib.contextmanager
def prefix_errors(source: str) -> Iterator[None]:
    """Puts the file that settings are made from before what is wrong with them, unless the message
    names it."""
    try:
        yield
    except ConfigError as error:
        if source in str(error):
            raise
        raise ConfigError(f"{source}: {error}") from error


@contextlib.contextmanager
def translate_settings(names: Mapping[str, str]) -> Iterator[None]:
    """Calls settings in messages what they were given as, where `names` says so: the keys of a
    file, the options of another command."""
    try:
        yield
    except ConfigError as error:
        translated = re.sub(
            r"(?:--)?\b[a-z_]+(?:\.[a-z_]+)+",
            lambda match: names.get(match[0].removeprefix("--"), match[0]),
            str(error),
        )
        if translated == str(error):
            raise
        raise ConfigError(translated) from error


@dataclass(frozen=True, kw_only=True)
class Range:
    """What numbers a setting takes, as part of its type: `Annotated[float, Range(above=0)]`."""

    min: int | float = -INF
    above: int | float = -INF
    max: int | float = INF
    below: int | float = INF
    or_zero: bool = False
    """Zero is taken as well."""
    remedy: str = ""
    """What to do instead, where the bounds do not say it."""

    def contains(self, number: int | float) -> bool:
        """Whether a number is inside."""
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
    """A frozen dataclass whose fields are checked after `__init__`; a subclass adds what crosses
    its fields in `check`.

    `prefix` is what messages put before the name of a field. A whole number is kept as a float
    where the field is one.
    """

    prefix: ClassVar[str] = ""

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
                object.__setattr__(self, name, float(value))
        self.check()

    def check(self) -> None:
        """Raises ConfigError where fields do not go together; each of them is good by itself."""


@functools.cache
def field_types(cls: Any) -> Mapping[str, Any]:
    """The types of a dataclass's fields, with their ranges."""
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in fields(cls)}


def _unwrap_annotated(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def describe_mismatch(value: Any, annotation: Any) -> str:
    """What a value must be, in words, if it is not of a setting's type or outside its range; else
    nothing."""
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
    return f"at most {INT32}" if kind is int and bounds.max == INF and number > INT32 else ""


def _has_type(value: Any, expected_type: type) -> bool:
    if expected_type is float:
        return (_has_type(value, int) or isinstance(value, float)) and (
            value == 0 or FLOAT32[0] <= abs(value) <= FLOAT32[1]
        )
    if expected_type is str:
        return isinstance(value, str) and "\0" not in value
    if is_dataclass(expected_type):
        return type(value) is expected_type  # a subclass may leave out the checks
    return isinstance(value, expected_type) and (
        expected_type is not int or not isinstance(value, bool)
    )


def _describe_expected(value: Any, expected_type: Any) -> str:
    """What a value must be in place of what it is; the nearer it comes, the more is said."""
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
    """The classes of settings that a field's type names; there are none in most."""
    return [
        candidate for candidate in (annotation, *get_args(annotation)) if is_dataclass(candidate)
    ]


class Unused(NamedTuple):
    """Settings, and where they do nothing."""

    settings: str
    """Names; one that ends in a dot stands for all that start with it."""
    fact: str
    """What makes them useless, with `c` for the config."""
    applies: Callable[[Any], bool]
    set_by_files: bool = False
    """Files say what is used instead, so that even a value that is the default is in vain."""
