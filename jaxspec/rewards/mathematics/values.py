"""Splits answers into values, and values into parts."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from jaxspec.rewards.extract import extract_answer
from jaxspec.rewards.mathematics.spelling import (
    CONNECTIVE,
    is_enclosed,
    is_unbalanced,
    normalize_spelling,
    remove_spaces,
    split_list,
    split_outside_brackets,
)
from jaxspec.rewards.mathematics.words import AnswerWords, split_words

_MATH_SPAN = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL
)
_MATH_DELIMITER = re.compile(r"\\[\[\]()]|(?<!\\)\$")
_ANSWER_PHRASE = re.compile(r"\bfinal answer:|\b(?:final )?answer is:?|\banswer:", re.IGNORECASE)
_POLITE_ENDING = re.compile(r"\bI hope it is correct\b\.?.*", re.IGNORECASE | re.DOTALL)
_MODULUS = re.compile(r"\s*\(?\s*(?:\\pmod|\\p?mod|\\bmod|\bmod)\s*\{?\s*(\w+)\s*\}?\s*\)?$")
_VARIABLE_NAME = re.compile(r"[^\d+\-<>=]*")
INDEX_PATTERN = re.compile(r"_\s*(?:\{[^{}]*\}|\\[a-zA-Z]+|\w)|\([^()]*\)")
_FUNCTIONS = re.compile(r"\\(?:sqrt|frac|sin|cos|tan|cot|sec|csc|log|ln|exp|sum|int|prod|lim)")
_NO_SOLUTION = re.compile(r"(?:there (?:is|are) )?no (?:real )?solutions?|(?:the )?empty set")


@dataclass(frozen=True)
class AnswerValue:
    """Parts of a value such as `x = 3 cm`."""

    name: str
    """Variable left of the first `=`, or empty."""
    value: str
    """Text right of the last `=`."""
    chain: tuple[str, ...]
    """All members of a chain of `=`, except the name."""
    words: AnswerWords
    """Units and other words."""
    modulus: str = ""
    """Modulus m of `\\pmod{m}`, or empty."""


@functools.lru_cache(maxsize=4096)
def list_values(text: str) -> tuple[str, ...]:
    """Lists the values that an answer states.

    These are one value, or the distinct values of a list, in normalized spelling. Returns none if
    the answer cannot be read.
    """
    body = _extract_statement(extract_answer(text, "boxed") or text)
    if body is None:
        return ()
    body = normalize_spelling(body)
    # A set `\{1, 2\}` is read as the list of its elements.
    inner = body[2:-2] if body.startswith("\\{") and body.endswith("\\}") else None
    if inner is None and is_enclosed(body, "{"):
        inner = body[1:-1]
    elements = split_list(body if inner is None or is_unbalanced(inner) else inner)
    values = (value for element in elements for value in _expand_plus_minus(element) if value)
    # Drops values that are stated again.
    return tuple({remove_spaces(value): value for value in values}.values())


def _extract_statement(text: str) -> str | None:
    """Reduces a text to its formulas and words.

    The delimiters of formulas are removed, and words beside formulas are put into \\text{}. Text
    before "the answer is" is dropped. Returns None if prose separates several formulas.
    """
    text = _POLITE_ENDING.sub("", text)
    phrases = list(_ANSWER_PHRASE.finditer(text))
    # Text before "the answer is" is the worked solution.
    if phrases and phrases[-1].end() < len(text.rstrip()):
        text = text[phrases[-1].end() :]
    # With the pattern's four groups, every fifth piece is prose, and the others are formulas.
    pieces = _MATH_SPAN.split(text)
    if len(pieces) == 1:
        return _MATH_DELIMITER.sub(" ", text)
    prose = [_wrap_prose(piece) for piece in pieces[::5]]
    formulas = [
        "".join(fragment or "" for fragment in pieces[index + 1 : index + 5])
        for index in range(0, len(pieces) - 1, 5)
    ]
    # Formulas with only connectives between them are a list. With other words between them, it is
    # unclear which formula is the answer.
    if any("\\text" in piece for piece in prose[1:-1]):
        return None
    return " ".join(
        fragment for pair in zip(prose, [*formulas, ""], strict=True) for fragment in pair
    )


def _wrap_prose(text: str) -> str:
    """Puts words into \\text{}, except connectives of a list. Drops articles and punctuation."""
    text = re.sub(r"[.:!?](?=\s|$)|(?<![a-zA-Z\\])[aAI](?![a-zA-Z])", " ", text)
    text = CONNECTIVE.sub(r" \\and ", _MATH_DELIMITER.sub(" ", text))
    return re.sub(r"(?<![\\a-zA-Z])[a-zA-Z][a-zA-Z']*", lambda word: rf"\text{{ {word[0]} }}", text)


def _expand_plus_minus(value: str) -> list[str]:
    """Splits a value at its plus-minus sign.

    The two values have plus and minus. Without exactly one sign outside of brackets, the value is
    kept.
    """
    left_side, sign, right_side = value.partition("\\pm")
    if not sign or "\\pm" in right_side or is_unbalanced(left_side):
        return [value]
    # `\pm 2` gives `2`, and `1 \pm 2` gives `1+2`.
    plus_sign = "+" if re.search(r"[\w})\]]\s*$", left_side) else ""
    return [f"{left_side}{plus_sign}{right_side}", f"{left_side}-{right_side}"]


@functools.lru_cache(maxsize=4096)
def parse_value(value: str) -> AnswerValue:
    """Splits one value into its parts."""
    core, words = split_words(value)
    modulus = _MODULUS.search(core)
    if modulus:
        core = core[: modulus.start()]
    core = core.replace("\\equiv", "=")
    # The approximation after an exact value is not compared.
    core = re.split(r"\\approx(?![a-z])", core)[0] if "\\approx" in core else core
    members = split_outside_brackets(re.sub(r"\\in(?![a-z])", "=", core), "=")
    has_name = len(members) > 1 and (not members[0] or is_name(members[0]))
    chain = tuple(members[has_name:])
    value = _strip_brackets(chain[-1])
    # "no solution" equals the empty set.
    if not value and _NO_SOLUTION.fullmatch(words.phrase):
        value, words = "\\emptyset", AnswerWords("")
    return AnswerValue(
        members[0] if has_name else "",
        value,
        chain,
        words,
        modulus[1] if modulus else "",
    )


def is_name(text: str) -> bool:
    """Returns whether the left side of `=` is a name.

    Names are, for example, `x_1`, `f(2)` and `\\frac{dy}{dx}`.
    """
    return (
        not _FUNCTIONS.search(text) and bool(_VARIABLE_NAME.fullmatch(INDEX_PATTERN.sub("", text)))
    ) or (text.startswith("\\frac") and not re.search(r"\d", text))


def _strip_brackets(value: str) -> str:
    """Removes enclosing brackets, except those of a tuple."""
    while is_enclosed(value, "{") or (
        is_enclosed(value, "(") and value[-1] == ")" and len(split_list(value[1:-1])) == 1
    ):
        value = value[1:-1].strip()
    return value
