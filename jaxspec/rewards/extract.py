"""The final answer inside a response: found, and written in one normal form. Pure string code that
accepts any text."""

from __future__ import annotations

import re
from typing import Literal

Style = Literal["hash", "boxed", "answer_line"]

# characters from the end of a response that are searched, so that the work does not grow with its
# length
WINDOW = 4096

_BRACES = re.compile(r"\\[{}]|\\boxed\s{0,8}\{|[{}]")
_ANSWER_LINE = re.compile(r"\banswer[*_ \t]{0,8}:[*_\s]{0,8}(\S[^\n]*)", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?")


def extract(text: str, style: Style) -> str | None:
    """Return the final answer that `text` states after its last `</think>`, or None if it states
    none.

    `hash`: what follows the last run of `#` on its line, up to a space; `boxed`: the last balanced
    \\boxed{}; `answer_line`: what follows the last `Answer:`, in or out of a box or markdown
    emphasis. A number that is merely the last one in the text is no answer.
    """
    tail = text.rpartition("</think>")[2][-WINDOW:]
    match style:
        case "hash":
            found = _after_hash(tail)
        case "boxed":
            found = _last_box(tail)
        case "answer_line":
            found = _last_answer_line(tail)
    return (found or "").strip() or None


def normalise(answer: str) -> str:
    """Return `answer` without `$`, spaces, trailing dots and thousands commas, and a number in its
    shortest form: `042.0` is `42`."""
    bare = re.sub(r"\s+", "", answer.replace("\\$", "").replace("$", ""))
    if _THOUSANDS.fullmatch(bare.rstrip(".")):
        bare = bare.replace(",", "")
    number = _NUMBER.fullmatch(bare.rstrip("."))
    if number is None or not (number[2] or number[3]):
        return bare.rstrip(".")
    whole, fraction = number[2].lstrip("0") or "0", (number[3] or "").rstrip("0")
    size = f"{whole}.{fraction}" if fraction else whole
    return f"-{size}" if number[1] == "-" and size != "0" else size


def _after_hash(text: str) -> str | None:
    _, mark, rest = text.rpartition("#")
    line = rest.partition("\n")[0].split()
    return line[0] if mark and line else None


def _last_box(text: str) -> str | None:
    last: tuple[int, int] | None = None
    opened: list[tuple[bool, int]] = []  # whether a box, where its content starts
    for brace in _BRACES.finditer(text):
        if brace[0] == "}" and opened:
            boxed, start = opened.pop()
            if boxed and (last is None or start > last[0]):
                last = start, brace.start()
        elif brace[0] == "{" or brace[0].startswith("\\boxed"):
            opened.append((brace[0] != "{", brace.end()))
    return None if last is None else text[slice(*last)]


def _last_answer_line(text: str) -> str | None:
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return None
    return _last_box(lines[-1]) or lines[-1].strip("*_` \t\r")
