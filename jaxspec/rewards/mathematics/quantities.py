"""Values that are no expressions: times of day, numbers in a base, and ratios."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from jaxspec.rewards.mathematics.expressions import expressions_equal

_CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?(?::(\d\d))?\s*(?:(a|p)\.?\s?m\b\.?)?", re.IGNORECASE)
BASE = re.compile(r"\(?([0-9A-Za-z]+)\)?\s*_\s*\{?\s*(?:base\s*)?([0-9]+|[a-z]+)\s*\}?")
NUMBERS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    *("nineteen", "twenty"),
]


def read_clock(value: str) -> tuple[tuple[int, int, int], str] | None:
    """The time of day that a value states, with a for a.m. and p for p.m."""
    flat = re.sub(r"\\text\s*|[{}]", "", value).strip()
    time = _CLOCK.fullmatch(re.sub(r"\s+", " ", flat))
    if time is None or not (time[2] or time[4]):
        return None
    return (int(time[1]), int(time[2] or 0), int(time[3] or 0)), (time[4] or "").lower()


def same_time(one: Any, other: Any) -> bool:
    """Whether two times are one; without a.m. or p.m. an answer has 24 hours."""
    (hours, half), (other_hours, other_half) = one, other
    if not half:
        return hours == other_hours
    return _of_day(hours, half) == _of_day(other_hours, other_half)


def _of_day(time: tuple[int, int, int], half: str) -> tuple[int, int, int]:
    hour = time[0] % 12 + 12 * (half == "p") if half else time[0]
    return (hour, *time[1:])


def bases_equal(left: str, right: str, bases: list[re.Match[str] | None]) -> bool:
    """Whether two numbers have the same digits in the same base; 10 may be left out."""
    found = []
    for value, base in zip((left, right), bases, strict=True):
        digits, number = (base[1], base[2]) if base else (value, "10")
        found.append(
            (
                digits.lstrip("0").lower(),
                str(NUMBERS.index(number)) if number in NUMBERS else number,
            )
        )
    return found[0] == found[1]


def ratios_equal(left: str, right: str) -> bool:
    parts = [value.split(":") for value in (left, right)]
    if len(parts[0]) != len(parts[1]):
        return (
            min(map(len, parts)) == 1
            and max(map(len, parts)) == 2
            and expressions_equal(
                *(
                    "/".join(f"({part})" for part in side) if len(side) > 1 else side[0]
                    for side in parts
                )
            )
        )
    numbers = [[_fraction(part) for part in side] for side in parts]
    if any(part is None for side in numbers for part in side):
        return all(map(expressions_equal, *parts))
    clock = all(re.fullmatch(r"\d{1,2}(?::[0-5]\d){1,2}", value.strip()) for value in (left, right))
    one, other = numbers
    if clock or not all(one) or not all(other):
        return one == other
    return all(a * other[0] == b * one[0] for a, b in zip(one, other, strict=True))  # pyright: ignore


def _fraction(text: str) -> Fraction | None:
    try:
        return Fraction(re.sub(r"\s+", "", text)) if len(text) < 40 else None
    except (ValueError, ZeroDivisionError):
        return None
