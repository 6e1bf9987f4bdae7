"""Values that are no expressions: times of day, numbers in a base, and ratios."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from jaxspec.rewards.mathematics.expressions import expressions_equal

_CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?(?::(\d\d))?\s*(?:(a|p)\.?\s?m\b\.?)?", re.IGNORECASE)
BASE_NUMBER = re.compile(r"\(?([0-9A-Za-z]+)\)?\s*_\s*\{?\s*(?:base\s*)?([0-9]+|[a-z]+)\s*\}?")
NUMBER_WORDS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    *("nineteen", "twenty"),
]


def parse_clock(value: str) -> tuple[tuple[int, int, int], str] | None:
    """The time of day that a value states, with a for a.m. and p for p.m."""
    flat = re.sub(r"\\text\s*|[{}]", "", value).strip()
    time = _CLOCK.fullmatch(re.sub(r"\s+", " ", flat))
    if time is None or not (time[2] or time[4]):
        return None
    return (int(time[1]), int(time[2] or 0), int(time[3] or 0)), (time[4] or "").lower()


def times_equal(left: Any, right: Any) -> bool:
    """Whether two times are one; without a.m. or p.m. an answer has 24 hours."""
    (left_hours, left_meridiem), (right_hours, right_meridiem) = left, right
    if not left_meridiem:
        return left_hours == right_hours
    return _to_24_hours(left_hours, left_meridiem) == _to_24_hours(right_hours, right_meridiem)


def _to_24_hours(time: tuple[int, int, int], meridiem: str) -> tuple[int, int, int]:
    hour = time[0] % 12 + 12 * (meridiem == "p") if meridiem else time[0]
    return (hour, *time[1:])


def bases_equal(left: str, right: str, bases: list[re.Match[str] | None]) -> bool:
    """Whether two numbers have the same digits in the same base; 10 may be left out."""
    numerals = []
    for value, base in zip((left, right), bases, strict=True):
        digits, number = (base[1], base[2]) if base else (value, "10")
        numerals.append(
            (
                digits.lstrip("0").lower(),
                str(NUMBER_WORDS.index(number)) if number in NUMBER_WORDS else number,
            )
        )
    return numerals[0] == numerals[1]


def ratios_equal(left: str, right: str) -> bool:
    ratios = [value.split(":") for value in (left, right)]
    if len(ratios[0]) != len(ratios[1]):
        return (
            min(map(len, ratios)) == 1
            and max(map(len, ratios)) == 2
            and expressions_equal(
                *(
                    "/".join(f"({term})" for term in ratio) if len(ratio) > 1 else ratio[0]
                    for ratio in ratios
                )
            )
        )
    numbers = [[_to_fraction(term) for term in ratio] for ratio in ratios]
    if any(term is None for ratio in numbers for term in ratio):
        return all(map(expressions_equal, *ratios))
    clock = all(re.fullmatch(r"\d{1,2}(?::[0-5]\d){1,2}", value.strip()) for value in (left, right))
    left_terms, right_terms = numbers
    if clock or not all(left_terms) or not all(right_terms):
        return left_terms == right_terms
    return all(
        a * right_terms[0] == b * left_terms[0]  # pyright: ignore
        for a, b in zip(left_terms, right_terms, strict=True)
    )


def _to_fraction(text: str) -> Fraction | None:
    try:
        return Fraction(re.sub(r"\s+", "", text)) if len(text) < 40 else None
    except (ValueError, ZeroDivisionError):
        return None
