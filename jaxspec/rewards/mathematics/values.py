"""Takes an answer apart: the values that it states, and the parts of each."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from jaxspec.rewards.extract import extract
from jaxspec.rewards.mathematics.spelling import (
    AND,
    encloses,
    is_unbalanced,
    respell,
    split_list,
    split_outside,
    without_spaces,
)
from jaxspec.rewards.mathematics.words import Words, split_words

_DELIMITED = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL
)
_MARKS = re.compile(r"\\[\[\]()]|(?<!\\)\$")
_FINAL = re.compile(r"\bfinal answer:|\b(?:final )?answer is:?|\banswer:", re.IGNORECASE)
_POLITE = re.compile(r"\bI hope it is correct\b\.?.*", re.IGNORECASE | re.DOTALL)
_MODULUS = re.compile(r"\s*\(?\s*(?:\\pmod|\\p?mod|\\bmod|\bmod)\s*\{?\s*(\w+)\s*\}?\s*\)?$")
_NAME = re.compile(r"[^\d+\-<>=]*")
INDEX = re.compile(r"_\s*(?:\{[^{}]*\}|\\[a-zA-Z]+|\w)|\([^()]*\)")
_FUNCTIONS = re.compile(r"\\(?:sqrt|frac|sin|cos|tan|cot|sec|csc|log|ln|exp|sum|int|prod|lim)")
_NOTHING = re.compile(r"(?:there (?:is|are) )?no (?:real )?solutions?|(?:the )?empty set")


@dataclass(frozen=True)
class Item:
    """One value of an answer, taken apart."""

    name: str
    """Left of `=`; empty without one."""
    value: str
    """Right of the last `=`."""
    chain: tuple[str, ...]
    """All members of a chain of `=` but the name."""
    words: Words
    modulus: str = ""


@functools.lru_cache(maxsize=4096)
def values_of(text: str) -> tuple[str, ...]:
    """The values that a text states: one, or those of a list, in one spelling."""
    body = _statement(extract(text, "boxed") or text)
    if body is None:
        return ()
    body = respell(body)
    inner = body[2:-2] if body.startswith("\\{") and body.endswith("\\}") else None
    if inner is None and encloses(body, "{"):
        inner = body[1:-1]
    found = split_list(body if inner is None or is_unbalanced(inner) else inner)
    values = (value for one in found for value in _both_signs(one) if value)
    return tuple({without_spaces(value): value for value in values}.values())  # each once


def _statement(text: str) -> str | None:
    """A text without the marks of mathematics, its prose in \\text{}; None where it states more
    than one thing."""
    text = _POLITE.sub("", text)
    marks = list(_FINAL.finditer(text))
    if marks and marks[-1].end() < len(text.rstrip()):
        text = text[marks[-1].end() :]
    pieces = _DELIMITED.split(text)
    if len(pieces) == 1:
        return _MARKS.sub(" ", text)
    prose = [_prose(piece) for piece in pieces[::5]]
    inside = [
        "".join(part or "" for part in pieces[at + 1 : at + 5])
        for at in range(0, len(pieces) - 1, 5)
    ]
    # Between values of one list stand connectives alone; else nobody says which of them counts.
    if any("\\text" in piece for piece in prose[1:-1]):
        return None
    return " ".join(part for pair in zip(prose, [*inside, ""], strict=True) for part in pair)


def _prose(text: str) -> str:
    """Prose between mathematics: connectives stay, other words go into \\text{}."""
    text = re.sub(r"[.:!?](?=\s|$)|(?<![a-zA-Z\\])[aAI](?![a-zA-Z])", " ", text)
    text = AND.sub(r" \\and ", _MARKS.sub(" ", text))
    return re.sub(r"(?<![\\a-zA-Z])[a-zA-Z][a-zA-Z']*", lambda word: rf"\text{{ {word[0]} }}", text)


def _both_signs(value: str) -> list[str]:
    """A value with one plus-minus sign as its two values."""
    before, sign, after = value.partition("\\pm")
    if not sign or "\\pm" in after or is_unbalanced(before):
        return [value]
    joint = "+" if re.search(r"[\w})\]]\s*$", before) else ""
    return [f"{before}{joint}{after}", f"{before}-{after}"]


@functools.lru_cache(maxsize=4096)
def take_apart(value: str) -> Item:
    core, words = split_words(value)
    modulus = _MODULUS.search(core)
    if modulus:
        core = core[: modulus.start()]
    core = core.replace("\\equiv", "=")
    core = re.split(r"\\approx(?![a-z])", core)[0] if "\\approx" in core else core
    members = split_outside(re.sub(r"\\in(?![a-z])", "=", core), "=")
    named = len(members) > 1 and (not members[0] or is_name(members[0]))
    chain = tuple(members[named:])
    value = _bare(chain[-1])
    if not value and _NOTHING.fullmatch(words.phrase):
        value, words = "\\emptyset", Words("")
    return Item(
        members[0] if named else "",
        value,
        chain,
        words,
        modulus[1] if modulus else "",
    )


def is_name(text: str) -> bool:
    return (not _FUNCTIONS.search(text) and bool(_NAME.fullmatch(INDEX.sub("", text)))) or (
        text.startswith("\\frac") and not re.search(r"\d", text)
    )


def _bare(value: str) -> str:
    """A value without brackets around all of it."""
    while encloses(value, "{") or (
        encloses(value, "(") and value[-1] == ")" and len(split_list(value[1:-1])) == 1
    ):
        value = value[1:-1].strip()
    return value
