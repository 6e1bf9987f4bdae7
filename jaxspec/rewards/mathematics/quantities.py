"""Compares times of day, numerals in bases, and ratios."""

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
    """Parses a time of day.

    Returns hours, minutes and seconds, and `a` for a.m., `p` for p.m. or an empty string. Returns
    None if the value is not a time.
    """
    flat = re.sub(r"\\text\s*|[{}]", "", value).strip()
    time = _CLOCK.fullmatch(re.sub(r"\s+", " ", flat))
    # A plain number such as `12` also matches, but is not a time.
    if time is None or not (time[2] or time[4]):
        return None
    return (int(time[1]), int(time[2] or 0), int(time[3] or 0)), (time[4] or "").lower()


def times_equal(left: Any, right: Any) -> bool:
    """Returns whether an answer's time is that of the reference.

    Both come from `parse_clock`. `left` is the reference.
    """
    (left_time, left_meridiem), (right_time, right_meridiem) = left, right
    # Without a.m. or p.m. in the reference, an answer is right in the morning and the afternoon.
    if not left_meridiem:
        return left_time == right_time
    # An answer without a.m. or p.m. is read as a 24-hour time.
    return _to_24_hours(left_time, left_meridiem) == _to_24_hours(right_time, right_meridiem)


def _to_24_hours(time: tuple[int, int, int], meridiem: str) -> tuple[int, int, int]:
    hour = time[0] % 12 + 12 * (meridiem == "p") if meridiem else time[0]
    return (hour, *time[1:])


def numerals_equal(left: str, right: str, bases: list[re.Match[str] | None]) -> bool:
    """Returns whether two numerals and their bases are equal.

    `bases` holds the matches of `BASE_NUMBER`. A number without a match is in base 10.
    """
    numerals = []
    for value, base in zip((left, right), bases, strict=True):
        digits, number = (base[1], base[2]) if base else (value, "10")
        # A base may also be written in words, as in `101_{two}`.
        numerals.append(
            (
                digits.lstrip("0").lower(),
                str(NUMBER_WORDS.index(number)) if number in NUMBER_WORDS else number,
            )
        )
    return numerals[0] == numerals[1]


def ratios_equal(left: str, right: str) -> bool:
    """Returns whether two ratios are equal.

    For example, `2:3` equals `4:6`. A ratio of two terms may also equal a fraction. Times of day,
    and ratios with a zero, must have the same terms.
    """
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
    # Times such as 1:20 and 2:40 are not proportions. Ratios with a zero, such as 0:1 and 0:2, are
    # not scaled either.
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
