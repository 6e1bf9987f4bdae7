"""Expressions: math-verify compares those that are read to their end, and numbers check it."""

from __future__ import annotations

import functools
import re
from typing import Any

from jaxspec.rewards.mathematics.spelling import without_spaces

_DECIMAL = re.compile(r"[-+]?\d*\.(\d+)")


def expressions_equal(left: str, right: str) -> bool:
    """Whether math-verify takes two expressions for equal, and numbers say nothing else."""
    from math_verify import verify  # pyright: ignore[reportMissingImports]

    one, other = _read(left), _read(right)
    if one is None or other is None:
        return without_spaces(left) == without_spaces(right)
    # Its own limits on time are alarms, which cannot stop what runs inside one operation.
    equal = verify(one, other, timeout_seconds=None, allow_set_relation_comp=True)
    return bool(equal) and _close(one, other, _decimals(left, right))


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> Any:
    """The expression that is all of a text, or None."""
    from latex2sympy2_extended.latex2sympy2 import (  # pyright: ignore[reportMissingImports]
        NormalizationConfig,
        latex2sympy,
    )

    if re.search(r"\d\s+\d|\\ldots|\\dots|\\cdots|\?", text):
        return None  # math-verify adds up what stands side by side
    whole = NormalizationConfig(
        basic_latex=True,
        units=False,
        malformed_operators=True,
        nits=True,
        boxed="none",  # pyright: ignore
    )
    try:
        return latex2sympy(text, normalization_config=whole)
    except Exception:  # noqa: BLE001 - the parser of a foreign grammar raises anything
        return None


def _decimals(*texts: str) -> int | None:
    """The digits after the point of the one side that is a decimal number."""
    found = [_DECIMAL.fullmatch(text.strip()) for text in texts]
    return (
        len(found[0][1])
        if found[0] and not found[1]
        else len(found[1][1])
        if found[1] and not found[0]
        else None
    )


def _close(one: Any, other: Any, decimals: int | None) -> bool:
    """Whether two numbers differ by rounding alone, relative to their size; anything else is."""
    from sympy import Expr, Float, Integral, Limit, N, Product, Rational, Sum  # pyright: ignore[reportMissingImports]

    if not (isinstance(one, Expr) and isinstance(other, Expr)):
        return True
    letters = sorted(one.free_symbols | other.free_symbols, key=str)
    if letters and (one - other).has(Sum, Product, Integral, Limit):
        return True
    values: Any = {letter: Rational(7 * n + 11, 5 * n + 9) for n, letter in enumerate(letters)}
    one, other = (side.subs(values).doit() for side in (one, other))
    rounded = one.has(Float) or other.has(Float)
    if not rounded and one.is_Rational and other.is_Rational:
        return one == other
    try:
        size, difference = abs(N(other, 30, maxn=400)), abs(N(one - other, 15, maxn=400))
        if not (size.is_Float and difference.is_number):
            return True
        if decimals is not None and not letters and difference > 0.999 / 10**decimals:
            return False
        return bool(difference <= size * (2e-6 if rounded else Rational(1, 10**60)))
    except (TypeError, ValueError, ArithmeticError):
        return True
