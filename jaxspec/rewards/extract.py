"""Extracts final answers from responses, and normalizes them.

This is string code without dependencies. It accepts any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

Style = Literal["hash", "boxed", "answer_line", "either", "dapo", "number", "code"]

# The windows bound the work for a response of any length.
ANSWER_WINDOW = 4096
"""Characters at the end of a response that are searched for an answer."""
CODE_WINDOW = 2**15
"""Characters at the end of a response that are searched for a program."""
DAPO_WINDOW = 300
"""Characters at the end of a response that DAPO's rule searches."""

_PYTHON_LANGUAGES = "", "python", "python3", "py"
_FENCE = re.compile(r"[^`~]*(?P<mark>`{3,}|~{3,})(?P<info>[^`~]*)")
_FENCE_LANGUAGE = re.compile(r"[ {.]*([\w+#-]*)")
_DEFINITION = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
# Repetitions are bounded: `re` retries an unbounded one from every position where it may start,
# which takes quadratic time on some responses. `\x08oxed` is `\boxed` after its `\b` was decoded as
# a backspace.
_BOX_OPENING = (
    r"(?:\\(?:boxed|Boxed|fbox|framebox|bbox|ovalbox|colorbox\s{0,8}\{[^{}]{0,20}\}"
    r"|fcolorbox\s{0,8}\{[^{}]{0,20}\}\s{0,8}\{[^{}]{0,20}\})"
    r"|\x08oxed|(?<![a-zA-Z\\])boxed)\s{0,8}(?:\[[^][{}\n]{0,40}\]\s{0,8})?\{"
)
"""Pattern of the start of a box up to its brace, in the forms that models write."""
_BOX_PATTERN = re.compile(_BOX_OPENING)
_BRACE = re.compile(rf"\\[{{}}]|{_BOX_OPENING}|[{{}}]")
_UNBRACED_BOX = re.compile(
    r"\\(?:boxed|fbox)(?:\s{1,8}|(?=[0-9]))([-+]?[0-9a-zA-Z][^\s{}$\\]{0,80})"
)
"""Pattern of a box without braces, such as `\\boxed 42`."""
MAX_BOX_GAP = 70
"""Maximum number of characters between two boxes of one list."""
_CONCLUSION = re.compile(
    r"\b(?:so|thus|hence|therefore|final(?:ly)?|but|wait|actually|instead|correct(?:ion|ed))\b",
    re.IGNORECASE,
)
"""Words that announce a conclusion. Boxes before them are not part of the final answer."""
_ANSWER_LINE = re.compile(r"\banswer[*_ \t]{0,8}:[*_\s]{0,8}(\S[^\n]*)", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_SPACED_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]*)?\.?")
_LIST_SEPARATOR = re.compile(r"\s*,\s+|\s+,\s*")
_REDUNDANT_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")
"""Pattern of a space that does not separate two numbers."""
_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?")
_LAST_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3}){1,9}|[0-9]{1,99})(?:\.[0-9]{1,99})?"
)
"""Pattern of a number in running text. A sign after a word or number is an operator."""
_DAPO_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_DAPO_SUBSTITUTIONS = (
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
_DAPO_REMOVED = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits"
    " cents degrees cm gm pounds meters meals edges students childrentickets multiples \\text{s}"
    ' \\text{.} \\text{}^2 \\text{}^3 \\text{} \\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'
)
"""Texts to remove, in this order.

The published rule also has texts with a line break. An answer of this rule is a single line, so
they are left out.
"""
_DAPO_PATTERNS = (
    (re.compile(r"(.*?)\$(.*?)\$(.*)"), r"$\2$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def extract_answer(text: str, style: Style, *, in_thought: bool = False) -> str | None:
    """Extracts the final answer of a response.

    Returns None if `text` states no answer. Text up to the last </think> is ignored, and so is text
    after a <think> that follows it. With `in_thought`, the text begins inside a block that the
    prompt has opened.

    Styles:
      hash: first word after the last `#`, on the same line.
      boxed: content of the last balanced \\boxed{}, or of all final ones (`find_final_boxes`). If
        there is none, the word after the last \\boxed.
      answer_line: content of a box on the line after the last `Answer:`, or else the rest of that
        line, without Markdown emphasis.
      either: as `boxed`, or else as `answer_line`.
      dapo: rest of the line after the last `Answer:` in the last 300 characters. This is the rule
        of DAPO's published code (arXiv 2503.14476).
      number: last number in the text, for policies that do not mark answers (flexible-extract of
        lm-evaluation-harness).
      code: program in the last complete code blocks, between ``` or ~~~ marks.
    """
    if in_thought and "</think>" not in text:
        return None
    # A response may open another thought after the first, and may be cut off inside it.
    visible_text = text.rpartition("</think>")[2].partition("<think>")[0]
    if style == "code":
        return _extract_program(visible_text[-CODE_WINDOW:])
    tail = visible_text[-ANSWER_WINDOW:]
    match style:
        case "hash":
            answer = _extract_hash_answer(tail)
        case "boxed":
            answer = _extract_boxed_answer(tail)
        case "answer_line":
            answer = _extract_answer_line(tail)
        case "either":
            answer = _extract_boxed_answer(tail) or _extract_answer_line(tail)
        case "dapo":
            answer = next(reversed(_DAPO_LINE.findall(tail[-DAPO_WINDOW:])), None)
        case "number":
            answer = next(reversed(_LAST_NUMBER.findall(tail)), None)
    return (answer or "").strip() or None


def opens_thought(prompt: str) -> bool:
    """Returns whether a prompt ends by opening a <think> block."""
    return prompt.rstrip().endswith("<think>")


def normalize_answer(answer: str) -> str:
    """Normalizes an answer for comparison as text.

    Removes `$`, spaces, trailing dots and thousands separators, and shortens numbers: `042.0`
    becomes `42`. Spaces that separate numbers are kept: `1, 234` does not become 1234, nor `1 2`
    12.
    """
    stripped = answer.replace("\\$", "").replace("$", "").strip()
    elements = [_normalize_element(element) for element in _LIST_SEPARATOR.split(stripped)]
    text = ",".join(elements)
    # A list such as `1, 234` keeps its space, as it would otherwise read as thousands.
    return ", ".join(elements) if len(elements) > 1 and _THOUSANDS.fullmatch(text) else text


def _normalize_element(element: str) -> str:
    """Normalizes one element of a list."""
    single_spaced = " ".join(element.split())
    if _SPACED_THOUSANDS.fullmatch(single_spaced):
        single_spaced = single_spaced.replace(" ", "")
    compact = _REDUNDANT_SPACE.sub("", single_spaced).rstrip(".")
    if _THOUSANDS.fullmatch(compact):
        compact = compact.replace(",", "")
    number = _NUMBER.fullmatch(compact)
    if number is None or not (number[2] or number[3]):
        return compact
    integer_digits, fraction_digits = number[2].lstrip("0") or "0", (number[3] or "").rstrip("0")
    magnitude = f"{integer_digits}.{fraction_digits}" if fraction_digits else integer_digits
    return f"-{magnitude}" if number[1] == "-" and magnitude != "0" else magnitude


def is_number(answer: str) -> bool:
    """Returns whether `answer` is a plain decimal number.

    Two such numbers are equal if and only if their normal forms are.
    """
    number = _NUMBER.fullmatch(normalize_answer(answer))
    return number is not None and bool(number[2] or number[3])


def normalize_dapo_answer(answer: str) -> str:
    """Normalizes an answer by DAPO's rule.

    The rule has Minerva's substitutions (Lewkowycz et al., arXiv 2206.14858, appendix D.1). It is
    stricter than `normalize_answer`: `42.` is not `42`.
    """
    text = answer.rpartition("=")[2]
    for expression, replacement in (
        *_DAPO_SUBSTITUTIONS,
        *((unit, "") for unit in _DAPO_REMOVED.split()),
    ):
        text = text.replace(expression, replacement)
    for pattern, replacement in _DAPO_PATTERNS:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


def _extract_hash_answer(text: str) -> str | None:
    _, hash_mark, after_hash = text.rpartition("#")
    words = after_hash.partition("\n")[0].split()
    return words[0] if hash_mark and words else None


def find_final_boxes(text: str) -> list[str]:
    """Returns the contents of the final boxes.

    These are the last box, and the boxes before it that form a list with it.

    Boxes of a list have at most `MAX_BOX_GAP` characters between them, and no word that announces
    a conclusion, such as `so`. A box inside another box is part of its content.
    """
    # For each box: its start, the start of its content, and its end.
    spans: list[tuple[int, int, int]] = []
    open_braces: list[tuple[bool, int, int]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "}" and open_braces:
            is_box, box_start, content_start = open_braces.pop()
            if is_box:
                # Inner boxes close first. The outer one replaces them.
                while spans and spans[-1][0] > box_start:
                    spans.pop()
                spans.append((box_start, content_start, brace.start()))
        elif brace[0][-1] == "{" and brace[0] != "\\{":
            open_braces.append((brace[0] != "{", brace.start(), brace.end()))
    first_box = len(spans) - 1
    while first_box > 0 and _is_list_gap(text[spans[first_box - 1][2] + 1 : spans[first_box][0]]):
        first_box -= 1
    contents: list[str] = []
    for _, content_start, content_end in spans[max(first_box, 0) :]:
        content = _BOX_PATTERN.sub("{", text[content_start:content_end]).strip()
        # Removes redundant braces, but not those of a set such as {1, 2}.
        while (
            content.startswith("{")
            and content.endswith("}")
            and not set("{},") & set(content[1:-1])
        ):
            content = content[1:-1].strip()
        # An answer that is boxed twice in a row is one value.
        if not contents or normalize_answer(contents[-1]) != normalize_answer(content):
            contents.append(content)
    return contents


def _is_list_gap(gap: str) -> bool:
    return len(gap) <= MAX_BOX_GAP and not _CONCLUSION.search(gap)


def _extract_boxed_answer(text: str) -> str | None:
    boxes = find_final_boxes(text)
    if not boxes:
        return next(reversed(_UNBRACED_BOX.findall(text)), "").rstrip(".,;:") or None
    return ", ".join(filter(None, boxes)) if boxes[-1] else None


def _extract_program(text: str) -> str | None:
    """Extracts the program from a response's code blocks.

    This is the last block that defines a function or class, or else the last block. Earlier blocks
    that define names used in it come before it.
    """
    programs = [block for block in _find_python_blocks(text) if block.strip()]
    if not programs:
        return None
    definitions = [{*_DEFINITION.findall(program)} for program in programs]
    identifiers = [{*_IDENTIFIER.findall(program)} for program in programs]
    # Later blocks without a definition are often examples of use, or output.
    last = next((i for i in reversed(range(len(programs))) if definitions[i]), len(programs) - 1)
    selected, missing = [programs[last]], identifiers[last] - definitions[last]
    for index in reversed(range(last)):
        if missing & definitions[index]:
            selected.insert(0, programs[index])
            missing = (missing | identifiers[index]) - definitions[index]
    return "\n".join(selected)


def _find_python_blocks(text: str) -> Iterator[str]:
    """Yields the complete Python blocks of a text.

    A block without a language counts as Python. A block that is not closed is left out.
    """
    fence, lines, indent, is_python = "", [], 0, False
    for line in text.splitlines():
        stripped = line.strip()
        if not fence:
            # Two marks in one line enclose code inside a sentence, so the whole line must match.
            fence_match = _FENCE.fullmatch(line)
            if fence_match:
                language_match = _FENCE_LANGUAGE.match(fence_match["info"])
                is_python = (
                    language_match is not None and language_match[1].lower() in _PYTHON_LANGUAGES
                )
                fence, lines = fence_match["mark"], []
                indent = len(line) - len(line.lstrip())
        elif stripped.startswith(fence) and not stripped.strip(fence[0]):
            if is_python:
                yield "\n".join(lines) + "\n"
            fence = ""
        else:
            # A block inside a list item is indented as a whole.
            lines.append(line[indent:] if not line[:indent].strip() else line)
            # Some models close a block at the end of its last line of code.
            if is_python and stripped.endswith(fence):
                lines[-1] = lines[-1].rstrip().removesuffix(fence)
                yield "\n".join(lines) + "\n"
                fence = ""


def _extract_answer_line(text: str) -> str | None:
    lines = _ANSWER_LINE.findall(text)
    if not lines:
        return None
    return _extract_boxed_answer(lines[-1]) or lines[-1].strip("*_` \t\r")
