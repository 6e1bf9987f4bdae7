"""Expressions: math-verify compares those that are read to their end, and numbers check it."""

from __future__ import annotations

import functools
import re
from typing import Any

from jaxspec.rewards.mathematics.spelling import remove_spaces

_DECIMAL = re.compile(r"[-+]?\d*\.(\d+)")


def expressions_equal(left: str, right: str) -> bool:
    """Whether math-verify takes two expressions for equal, and numbers say nothing else."""
    from math_verify import verify  # pyright: ignore[reportMissingImports]

    left_expression, right_expression = _parse_expression(left), _parse_expression(right)
    if left_expression is None or right_expression is None:
        return remove_spaces(left) == remove_spaces(right)
    # Its own limits on time are alarms, which cannot stop what runs inside one operation.
    equal = verify(
        left_expression, right_expression, timeout_seconds=None, allow_set_relation_comp=True
    )
    return bool(equal) and _is_close(
        left_expression, right_expression, _count_decimals(left, right)
    )


@functools.lru_cache(maxsize=4096)
def _parse_expression(text: str) -> Any:
    """The expression that is all of a text, or None."""
    from latex2sympy2_extended.latex2sympy2 import (  # pyright: ignore[reportMissingImports]
        NormalizationConfig,
        latex2sympy,
    )

    if re.search(r"\d\s+\d|\\ldots|\\dots|\\cdots|\?", text):
        return None  # math-verify adds up what stands side by side
    config = NormalizationConfig(
        basic_latex=True,
        units=False,
        malformed_operators=True,
        nits=True,
        boxed="none",  # pyright: ignore
    )
    try:
        return latex2sympy(text, normalization_config=config)
    except Exception:  # noqa: BLE001 - the parser of a foreign grammar raises anything
        return None


def _count_decimals(*texts: str) -> int | None:
    """The digits after the point of the one side that is a decimal number."""
    matches = [_DECIMAL.fullmatch(text.strip()) for text in texts]
    return (
        len(matches[0][1])
        if matches[0] and not matches[1]
        else len(matches[1][1])
        if matches[1] and not matches[0]
        else None
    )


def _is_close(left: Any, right: Any, decimals: int | None) -> bool:
    """Whether two numbers differ by rounding alone, relative to their size; anything else is."""
    from sympy import Expr, Float, Integral, Limit, N, Product, Rational, Sum  # pyright: ignore[reportMissingImports]

    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return True
    letters = sorted(left.free_symbols | right.free_symbols, key=str)
    if letters and (left - right).has(Sum, Product, Integral, Limit):
        return True
    values: Any = {letter: Rational(7 * n + 11, 5 * n + 9) for n, letter in enumerate(letters)}
    left, right = (side.subs(values).doit() for side in (left, right))
    rounded = left.has(Float) or right.has(Float)
    if not rounded and left.is_Rational and right.is_Rational:
        return left == right
    try:
        size, difference = abs(N(right, 30, maxn=400)), abs(N(left - right, 15, maxn=400))
        if not (size.is_Float and difference.is_number):
            return True
        if decimals is not None and not letters and difference > 0.999 / 10**decimals:
            return False
        return bool(difference <= size * (2e-6 if rounded else Rational(1, 10**60)))
    except (TypeError, ValueError, ArithmeticError):
        return True
