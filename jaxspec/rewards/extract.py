"""The final answer inside a response: found, and written in one normal form. Pure string code that
accepts any text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

Style = Literal["hash", "boxed", "answer_line", "either", "dapo", "number", "code"]

# characters from the end of a response that are searched, so that the work does not grow with its
# length
WINDOW = 4096

CODE_WINDOW = 2**15
"""The same for programs."""
DAPO_WINDOW = 300
"""Characters from the end that DAPO's rule searches."""

_LANGUAGES = "", "python", "python3", "py"
_FENCE = re.compile(r"[^`~]*(?P<mark>`{3,}|~{3,})(?P<info>[^`~]*)")
_LANGUAGE = re.compile(r"[ {.]*([\w+#-]*)")
_DEFINED = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_WORD = re.compile(r"[^\W\d]\w*")
_BOX = (
    r"(?:\\(?:boxed|Boxed|fbox|framebox|bbox|ovalbox|colorbox\s{0,8}\{[^{}]{0,20}\}"
    r"|fcolorbox\s{0,8}\{[^{}]{0,20}\}\s{0,8}\{[^{}]{0,20}\})"
    r"|\x08oxed|(?<![a-zA-Z\\])boxed)\s{0,8}(?:\[[^][{}\n]{0,40}\]\s{0,8})?\{"
)
"""How the content of a box begins, in the forms that models write."""
_BOXES = re.compile(_BOX)
_BRACES = re.compile(rf"\\[{{}}]|{_BOX}|[{{}}]")
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s{1,8}|(?=[0-9]))([-+]?[0-9a-zA-Z][^\s{}$\\]{0,80})")
"""A box without braces."""
GAP = 70
"""Characters between two boxes of one list, at most."""
_CONCLUSION = re.compile(
    r"\b(?:so|thus|hence|therefore|final(?:ly)?|but|wait|actually|instead|correct(?:ion|ed))\b",
    re.IGNORECASE,
)
"""What says that boxes before it are no part of the final answer."""
_ANSWER_LINE = re.compile(r"\banswer[*_ \t]{0,8}:[*_\s]{0,8}(\S[^\n]*)", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_SPACED_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]*)?\.?")
_LIST = re.compile(r"\s*,\s+|\s+,\s*")
_LOOSE = re.compile(r"(?<![0-9]) | (?![0-9])")
"""Spaces that do not part two numbers."""
_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?")
_LAST_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3}){1,9}|[0-9]{1,99})(?:\.[0-9]{1,99})?"
)
"""A number in running text. A sign after a word or number is an operator."""
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


def extract(text: str, style: Style, *, in_thought: bool = False) -> str | None:
    """Return the final answer that `text` states outside its thoughts, or None if it states none.

    `in_thought`: the text begins inside a thought, whose first mark is in the prompt. A thought
    that never closes holds no answer.

    `hash`: what follows the last run of `#` on its line, up to a space; `boxed`: the last balanced
    \\boxed{}, or all final ones as a list (`final_boxes`); `answer_line`: what follows the last
    `Answer:`, in or out of a box or markdown emphasis; `either`: the last box, else that line;
    `dapo`: what follows the last `Answer:` in the last 300 characters, as it stands (DAPO, arXiv
    2503.14476, in its code); `number`: the last number of the text, for a policy that marks no
    answer (flexible-extract of lm-evaluation-harness); `code`: the program in the last whole blocks
    between ``` or ~~~ marks. For all but `number`, the last number of the text is no answer.
    """
    if in_thought and "</think>" not in text:
        return None
    after = text.rpartition("</think>")[2].partition("<think>")[0]
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
        case "number":
            found = next(reversed(_LAST_NUMBER.findall(tail)), None)
    return (found or "").strip() or None


def opens_thought(prompt: str) -> bool:
    """Whether a response to `prompt` begins inside a thought."""
    return prompt.rstrip().endswith("<think>")


def normalise(answer: str) -> str:
    """Return `answer` without `$`, spaces, trailing dots and thousands commas, and a number in its
    shortest form: `042.0` is `42`.

    Spaces make lists: `1, 234` is not 1234, and `1 2` is not 12.
    """
    bare = answer.replace("\\$", "").replace("$", "").strip()
    parts = [_normal_part(part) for part in _LIST.split(bare)]
    joined = ",".join(parts)
    return ", ".join(parts) if len(parts) > 1 and _THOUSANDS.fullmatch(joined) else joined


def _normal_part(part: str) -> str:
    """The normal form of one part of a list."""
    spaced = " ".join(part.split())
    if _SPACED_THOUSANDS.fullmatch(spaced):
        spaced = spaced.replace(" ", "")
    bare = _LOOSE.sub("", spaced).rstrip(".")
    if _THOUSANDS.fullmatch(bare):
        bare = bare.replace(",", "")
    number = _NUMBER.fullmatch(bare)
    if number is None or not (number[2] or number[3]):
        return bare
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


def final_boxes(text: str) -> list[str]:
    """Return the contents of the last box and of those that make one list with it.

    Between boxes of one list stand at most `GAP` characters, and nothing that announces a
    conclusion. A box inside a box is a part of its content.
    """
    spans: list[tuple[int, int, int]] = []  # start of the box, of its content, and its end
    opened: list[tuple[bool, int, int]] = []
    for brace in _BRACES.finditer(text):
        if brace[0] == "}" and opened:
            boxed, start, content = opened.pop()
            if boxed:
                while spans and spans[-1][0] > start:
                    spans.pop()
                spans.append((start, content, brace.start()))
        elif brace[0][-1] == "{" and brace[0] != "\\{":
            opened.append((brace[0] != "{", brace.start(), brace.end()))
    first = len(spans) - 1
    while first > 0 and _is_joint(text[spans[first - 1][2] + 1 : spans[first][0]]):
        first -= 1
    found: list[str] = []
    for _, content, end in spans[max(first, 0) :]:
        inside = _BOXES.sub("{", text[content:end]).strip()
        while (
            inside.startswith("{") and inside.endswith("}") and not set("{},") & set(inside[1:-1])
        ):
            inside = inside[1:-1].strip()
        if not found or normalise(found[-1]) != normalise(inside):
            found.append(inside)
    return found


def _is_joint(between: str) -> bool:
    return len(between) <= GAP and not _CONCLUSION.search(between)


def _last_box(text: str) -> str | None:
    found = final_boxes(text)
    if not found:
        return next(reversed(_OPEN_BOX.findall(text)), "").rstrip(".,;:") or None
    return ", ".join(filter(None, found)) if found[-1] else None


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
            # two marks in a line are code inside a sentence
            opening = _FENCE.fullmatch(line)
            if opening:
                language = _LANGUAGE.match(opening["info"])
                python = language is not None and language[1].lower() in _LANGUAGES
                mark, lines = opening["mark"], []
                indent = len(line) - len(line.lstrip())
        elif bare.startswith(mark) and not bare.strip(mark[0]):
            if python:
                yield "\n".join(lines) + "\n"
            mark = ""
        else:
            lines.append(line[indent:] if not line[:indent].strip() else line)
            if python and bare.endswith(mark):
                lines[-1] = lines[-1].rstrip().removesuffix(mark)
                yield "\n".join(lines) + "\n"
                mark = ""


def _last_answer_line(text: str) -> str | None:
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return None
    return _last_box(lines[-1]) or lines[-1].strip("*_` \t\r")
