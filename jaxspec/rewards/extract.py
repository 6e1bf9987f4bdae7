"""The final answer inside a response: found, and written in one normal form. Pure string code that
accepts any text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

Style = Literal["hash", "boxed", "answer_line", "either", "dapo", "code"]

# characters from the end of a response that are searched, so that the work does not grow with its
# length
WINDOW = 4096

CODE_WINDOW = 2**15
"""The same for programs."""
DAPO_WINDOW = 300
"""Characters from the end that DAPO's rule searches."""

_LANGUAGES = "", "python", "python3", "py"
_FENCE = re.compile(r"(?P<mark>`{3,}|~{3,})[ {.]*(?P<language>[\w+#-]*)[^`~]*$")
_DEFINED = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_WORD = re.compile(r"[^\W\d]\w*")
_BRACES = re.compile(r"\\[{}]|\\boxed\s{0,8}\{|[{}]")
_ANSWER_LINE = re.compile(r"\banswer[*_ \t]{0,8}:[*_\s]{0,8}(\S[^\n]*)", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?")
_DAPO_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_DAPO_SPELLING = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_DAPO_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits"
    " cents degrees cm gm pounds meters meals edges students childrentickets multiples \\text{s}"
    ' \\text{.} \\text{}^2 \\text{}^3 \\text{} \\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'
)
"""What is removed, in this order. What the rule names with a line break is not in one line."""
_DAPO_FORMS = (
    (re.compile(r"(.*?)\$(.*?)\$(.*)"), r"$\2$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def extract(text: str, style: Style) -> str | None:
    """Return the final answer that `text` states after its last `</think>`, or None if it states
    none.

    `hash`: what follows the last run of `#` on its line, up to a space; `boxed`: the last balanced
    \\boxed{}; `answer_line`: what follows the last `Answer:`, in or out of a box or markdown
    emphasis; `either`: the last box, else that line; `dapo`: what follows the last `Answer:` in the
    last 300 characters, as it stands (DAPO, arXiv 2503.14476, in its code); `code`: the program
    in the last whole blocks between ``` or ~~~ marks. A number that is merely the last one in the
    text is no answer.
    """
    after = text.rpartition("</think>")[2]
    if style == "code":
        return _last_program(after[-CODE_WINDOW:])
    tail = after[-WINDOW:]
    match style:
        case "hash":
            found = _after_hash(tail)
        case "boxed":
            found = _last_box(tail)
        case "answer_line":
            found = _last_answer_line(tail)
        case "either":
            found = _last_box(tail) or _last_answer_line(tail)
        case "dapo":
            found = next(reversed(_DAPO_LINE.findall(tail[-DAPO_WINDOW:])), None)
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


def is_number(answer: str) -> bool:
    """Whether `answer` is a plain number, which equals another only if their normal forms do."""
    number = _NUMBER.fullmatch(normalise(answer))
    return number is not None and bool(number[2] or number[3])


def dapo_form(answer: str) -> str:
    """Return `answer` as DAPO's rule compares it, by Minerva's substitutions (Lewkowycz et al.,
    arXiv 2206.14858, appendix D.1). It is stricter than `normalise`: `42.` is not `42`."""
    text = answer.rpartition("=")[2]
    for word, other in (*_DAPO_SPELLING, *((unit, "") for unit in _DAPO_UNITS.split())):
        text = text.replace(word, other)
    for form, other in _DAPO_FORMS:
        text = form.sub(other, text)
    text = text.replace("$", "")
    bare = text.replace(",", "")
    return (bare if bare.isdigit() else text).strip()


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


def _last_program(text: str) -> str | None:
    """The last block that defines a function or a class, else the last one. If it uses a name that
    it does not define, the block before it that does comes first."""
    programs = [block for block in _blocks(text) if block.strip()]
    if not programs:
        return None
    defined = [{*_DEFINED.findall(program)} for program in programs]
    used = [{*_WORD.findall(program)} for program in programs]
    last = next((i for i in reversed(range(len(programs))) if defined[i]), len(programs) - 1)
    parts, missing = [programs[last]], used[last] - defined[last]
    for earlier in reversed(range(last)):
        if missing & defined[earlier]:
            parts.insert(0, programs[earlier])
            missing = (missing | used[earlier]) - defined[earlier]
    return "\n".join(parts)


def _blocks(text: str) -> Iterator[str]:
    """Whole blocks of Python, or of no language, between marks of ` or ~; others are passed over,
    and so is one that no mark closes."""
    mark, lines, indent, python = "", [], 0, False
    for line in text.splitlines():
        bare = line.strip()
        if not mark:
            opening = _FENCE.search(line)
            if opening:
                mark, lines, python = opening["mark"], [], opening["language"].lower() in _LANGUAGES
                indent = len(line) - len(line.lstrip())
        elif bare.startswith(mark) and not bare.strip(mark[0]):
            if python:
                yield "\n".join(lines) + "\n"
            mark = ""
        else:
            lines.append(line[indent:] if not line[:indent].strip() else line)


def _last_answer_line(text: str) -> str | None:
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return None
    return _last_box(lines[-1]) or lines[-1].strip("*_` \t\r")
