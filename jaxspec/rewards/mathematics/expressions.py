"""Compares expressions, by math-verify and numerically.

math-verify is imported inside the functions, as it is an optional dependency.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from jaxspec.rewards.mathematics.spelling import remove_spaces

_DECIMAL = re.compile(r"[-+]?\d*\.(\d+)")


def expressions_equal(left: str, right: str) -> bool:
    """Returns whether two expressions are equal.

    They are if math-verify accepts them, and their numerical values do not contradict it. If one of
    them cannot be parsed, the texts must be the same apart from spaces.
    """
    from math_verify import verify  # pyright: ignore[reportMissingImports]

    left_expression, right_expression = _parse_expression(left), _parse_expression(right)
    if left_expression is None or right_expression is None:
        return remove_spaces(left) == remove_spaces(right)
    # math-verify's own time limit is an alarm, which cannot interrupt a single long operation, such
    # as a power of large integers. The pool's keeper limits the time instead.
    equal = verify(
        left_expression, right_expression, timeout_seconds=None, allow_set_relation_comp=True
    )
    return bool(equal) and _is_close(
        left_expression, right_expression, _count_decimals(left, right)
    )


@functools.lru_cache(maxsize=4096)
def _parse_expression(text: str) -> Any:
    """Parses a text as one expression.

    Returns None if the whole text is not an expression.
    """
    from latex2sympy2_extended.latex2sympy2 import (  # pyright: ignore[reportMissingImports]
        NormalizationConfig,
        latex2sympy,
    )

    # latex2sympy reads `1 2` as 1 + 2, and does not know ellipses.
    if re.search(r"\d\s+\d|\\ldots|\\dots|\\cdots|\?", text):
        return None
    config = NormalizationConfig(
        basic_latex=True,
        units=False,
        malformed_operators=True,
        nits=True,
        boxed="none",  # pyright: ignore
    )
    try:
        return latex2sympy(text, normalization_config=config)
    except Exception:  # noqa: BLE001 - latex2sympy raises errors of many types
        return None


def _count_decimals(*texts: str) -> int | None:
    """Counts the decimals of a rounded number.

    Returns None unless exactly one of two texts is a decimal number.
    """
    matches = [_DECIMAL.fullmatch(text.strip()) for text in texts]
    return (
        len(matches[0][1])
        if matches[0] and not matches[1]
        else len(matches[1][1])
        if matches[1] and not matches[0]
        else None
    )


def _is_close(left: Any, right: Any, decimals: int | None) -> bool:
    """Returns whether two expressions have close values.

    Returns True if they cannot be evaluated, such as sets. Letters get fixed values. Rational
    numbers must be equal. Other exact numbers must agree to 60 digits, and decimal numbers to about
    six, relative to their size. Without letters, a number rounded to `decimals` places must also be
    within one unit of its last place.
    """
    from sympy import Expr, Float, Integral, Limit, N, Product, Rational, Sum  # pyright: ignore[reportMissingImports]

    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return True
    letters = sorted(left.free_symbols | right.free_symbols, key=str)
    if letters and (left - right).has(Sum, Product, Integral, Limit):
        return True
    # Any distinct rational values do, as equal expressions agree everywhere.
    values: Any = {letter: Rational(7 * n + 11, 5 * n + 9) for n, letter in enumerate(letters)}
    left, right = (side.subs(values).doit() for side in (left, right))
    rounded = left.has(Float) or right.has(Float)
    if not rounded and left.is_Rational and right.is_Rational:
        return left == right
    try:
        # `maxn` limits the digits of intermediate results, and so the time.
        size, difference = abs(N(right, 30, maxn=400)), abs(N(left - right, 15, maxn=400))
        if not (size.is_Float and difference.is_number):
            return True
        if decimals is not None and not letters and difference > 0.999 / 10**decimals:
            return False
        return bool(difference <= size * (2e-6 if rounded else Rational(1, 10**60)))
    except (TypeError, ValueError, ArithmeticError):
        return True
