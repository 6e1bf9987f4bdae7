"""Normalizes the spelling of mathematics.

Unicode, spacing and wrappers become plain LaTeX. This is string code without dependencies. It
accepts any text.
"""

# ruff: noqa: RUF001 - this file maps characters that look like others

from __future__ import annotations

import re
import unicodedata

_UNICODE_SIGNS = (
    dict.fromkeys("−–—‒﹣－", "-")
    | dict.fromkeys("×✕⨯", r"\times ")
    | dict.fromkeys("·∙⋅•", r"\cdot ")
    | dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f", " ")
    | dict.fromkeys("\u200b\u2060\ufeff", "")
    | dict.fromkeys("′’ʹ", "'")
    | {"÷": "/", "∕": "/", "⁄": "/", "∶": ":", "，": ",", "；": ";", "：": ":", "％": r"\%"}
    | {"≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne "}
    | {"≈": r"\approx ", "∞": r"\infty ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap "}
    | {"∈": r"\in ", "∅": r"\emptyset ", "≡": r"\equiv ", "°": r"^{\circ}", "º": r"^{\circ}"}
    | {"√": r"\sqrt ", "∛": r"\sqrt[3] ", "…": r"\ldots ", "∠": r"\angle "}
    | {"€": r"\text{ euro }", "£": r"\text{ pound }", "¥": r"\text{ yen }"}
    | {"∨": r"\lor ", "∧": r"\land ", "⟨": r"\langle ", "⟩": r"\rangle "}
    | {"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}"}
    | {"ℂ": r"\mathbb{C}"}
)
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()", strict=True))
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_SUBSCRIPT_RUN = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")

_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\(?:thinspace|enspace|nobreakspace)(?![a-zA-Z])|~|\s+")
# The order matters: some rewrites produce commands that later ones match, such as `\text`.
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Special tokens of a tokenizer, such as <|im_end|>.
        (r"<\|[^|<>]{0,40}\|>", " "),
        (r"\\\$", r"\\text{ dollar }"),
        (r"\\!\s*|\\(?:displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])", ""),
        (r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr|biggl?|biggr)(?![a-zA-Z])\s*", ""),
        (r"\\(?:d|t|c)frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:mbox|hbox|textbf|textit|textrm|textnormal|textsf|texttt|emph)(?=\s*\{)", r"\\text"),
        (r"\\(?:math(?:rm|bf|it|sf|tt)|boldsymbol|operatorname\*?)(?=\s*\{)", r"\\text"),
        # A missing space, as in \lex for \le x.
        (r"\\(le|ge|leq|geq)(?![qs])([a-zA-Z])(?![a-zA-Z])", r"\\\1 \2"),
        (r"\\(?:leq|leqslant|leqq)(?![a-zA-Z])", r"\\le "),
        (r"\\(?:geq|geqslant|geqq)(?![a-zA-Z])", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|!=|\\not\s*=", r"\\ne "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset "),
        (r"\\degree(?![a-zA-Z])", r"^{\\circ}"),
        (r"\\lbrace(?![a-zA-Z])\s*", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\\{\s*\\\}", r"\\emptyset "),
        (r"(?<=\d)\{,\}(?=\d{3}(?!\d))", ","),
        # Comes after the rule for thousands above. Other braced commas are decimal commas.
        (r"(?<=\d)\{,\}(?=\d)", "."),
        (r"(?<!\\)%", r"\\%"),
        (r"(?<![a-zA-Z\\])(?:percent|pct)(?![a-zA-Z])", r"\\%"),
        (r"\*\*", "^"),
        (r"\^\s*(-?\d{2,}|-\d)", r"^{\1}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        # A mixed number, such as 3 4/5.
        (r"(?<![a-zA-Z\\])(\d+) +(\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}"),
        (
            r"(?<![a-zA-Z\\])(sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|infty|theta|alpha|beta"
            r"|gamma|lambda|phi|omega|arcsin|arccos|arctan|sinh|cosh|tanh|gcd|lcm)(?![a-zA-Z])",
            r"\\\1 ",
        ),
        (r"(?<![a-zA-Z\\])(?:infinity|inf)(?![a-zA-Z])", r"\\infty "),
        (r"\\sqrt\s*(\[\d+\])?\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
        (r"\\sqrt\s+(\[\d+\]\s*)?(\d+|[a-zA-Z])", r"\\sqrt\1{\2}"),
        (r"_\s*(?:\{\s*\\text\s*\{([^{}]*)\}\s*\}|\\text\s*\{([^{}]*)\})", r"_{\1\2}"),
        (r"\\text\s*\{\s*(?:and|or)\s*\}", r" \\and "),
    )
)  # fmt: skip
CONNECTIVE = re.compile(
    r"(?:\\and|\\lor|\\land|\\vee|\\wedge)(?![a-zA-Z])"
    r"|(?:(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|(?<=\d)(?:and|or)(?=[A-Z]))"
)
"""Pattern of a connective between elements of a list."""
OPENING_BRACKETS, CLOSING_BRACKETS = "([{", ")]}"
_PLAIN_TEXT = re.compile(r"\\text\s*\{((?:[^a-zA-Z{}]|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z]))*)\}")
_DIGIT_GROUPS = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?: \d{3})+|(?:,\d{3})+)(?![\d]|,\d)")
# The counts bound the size of the integers in `_expand_repeating`.
_REPEATING = re.compile(
    r"(?<!\d)(\d{0,40})\.(\d{0,40})(?:\\overline\s*\{(\d{1,40})\}|\\bar\s*\{(\d{1,40})\}|\\dot\s*\{?(\d)\}?)"
)
_EMPHASIS = re.compile(r"\s*(?:\*\*(.*)\*\*|__(.*)__|`(.*)`)\s*", re.DOTALL)
_TRAILING_MARKS = re.compile(r"(?:[\s.,;:]|(?<!\\)\\(?:\\)?$|\\quad|\\qquad)+$")


def normalize_spelling(text: str) -> str:
    """Normalizes the spelling of a text.

    The result has LaTeX commands, single spaces, and no thousands separators.
    """
    if emphasis := _EMPHASIS.fullmatch(text):
        text = next(content for content in emphasis.groups() if content is not None)
    text = _SPACES.sub(" ", _replace_unicode(text))
    # In a matrix, `\\` separates rows. Elsewhere the backslash of a command was escaped twice.
    if "\\begin" not in text:
        text = re.sub(r"\\{2}(?=[a-zA-Z%])", r"\\", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _PLAIN_TEXT.sub(r"\1", text)
    text = _REPEATING.sub(_expand_repeating, text)
    text = _SPACES.sub(" ", join_thousands(text)).strip()
    text = _TRAILING_MARKS.sub("", text)
    # The comma in `0,125` is a decimal comma, as thousands do not begin with zero.
    return re.sub(r"^([-+]?0),(\d+)$", r"\1.\2", text)


def join_thousands(text: str) -> str:
    """Removes thousands separators, except commas in brackets."""
    pieces, position = [], 0
    for group in _DIGIT_GROUPS.finditer(text):
        # In brackets a comma separates elements, as in the interval (1,234).
        in_brackets = bracket_depth(text, group.start()) > 0
        if "," in group[2] and in_brackets:
            continue
        pieces += [text[position : group.start()], group[1] + re.sub("[ ,]", "", group[2])]
        position = group.end()
    return "".join([*pieces, text[position:]])


def remove_spaces(value: str) -> str:
    """Removes spaces, except those between two digits."""
    # Between two digits a space separates numbers.
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", value)


def is_unbalanced(text: str) -> bool:
    """Returns whether opening and closing brackets do not match.

    All kinds of brackets are treated alike.
    """
    # Half-open intervals such as [0,1) mix two kinds.
    depth = 0
    for mark in text:
        depth += (mark in OPENING_BRACKETS) - (mark in CLOSING_BRACKETS)
        if depth < 0:
            return True
    return depth != 0


def is_enclosed(text: str, mark: str) -> bool:
    """Returns whether one pair of brackets encloses a text.

    The opening bracket is `mark`.
    """
    return (
        text[:1] == mark and text[-1:] in list(CLOSING_BRACKETS) and not is_unbalanced(text[1:-1])
    )


def bracket_depth(text: str, position: int) -> int:
    """Counts the open brackets at a position."""
    prefix = text[:position]
    open_count = sum(prefix.count(mark) for mark in OPENING_BRACKETS)
    return open_count - sum(prefix.count(mark) for mark in CLOSING_BRACKETS)


def split_list(text: str, marks: str = ",;") -> list[str]:
    """Splits a list into its elements.

    The elements are separated by `marks` outside of brackets, by connectives, and by line breaks
    `\\\\` outside of matrices. Empty ones are dropped.
    """
    # NUL marks the separators, as answers do not contain it.
    text = CONNECTIVE.sub(" \x00 ", text)
    text = re.sub(r"\\q?quad", " ", text)
    if "\\begin" not in text:
        text = text.replace("\\\\", "\x00")
    return [value for value in split_outside_brackets(text, f"{marks}\x00") if value]


def split_outside_brackets(text: str, marks: str) -> list[str]:
    """Splits a text at the characters `marks`.

    Inside of brackets only a NUL splits.
    """
    values, depth, value_start = [], 0, 0
    for position, mark in enumerate(text):
        depth += (mark in OPENING_BRACKETS) - (mark in CLOSING_BRACKETS)
        if mark in marks and (depth == 0 or mark == "\x00"):
            values.append(text[value_start:position])
            value_start = position + 1
    return [value.strip() for value in [*values, text[value_start:]]]


def _replace_unicode(text: str) -> str:
    if text.isascii():
        return text
    for run_pattern, translations, operator in (
        (_SUPERSCRIPT_RUN, _SUPERSCRIPTS, "^"),
        (_SUBSCRIPT_RUN, _SUBSCRIPTS, "_"),
    ):
        table = str.maketrans(translations)
        # Several characters in a row form one exponent or index.
        text = run_pattern.sub(lambda run: f"{operator}{{{run[0].translate(table)}}}", text)  # noqa: B023
    return "".join(
        character if character.isascii() else _replace_character(character) for character in text
    )


def _replace_character(character: str) -> str:
    if character in _UNICODE_SIGNS:
        return _UNICODE_SIGNS[character]
    decomposed = unicodedata.normalize("NFKC", character)
    # A character such as ½ becomes numerator, fraction slash (U+2044) and denominator.
    if "⁄" in decomposed:
        numerator, _, denominator = decomposed.partition("⁄")
        return rf"\frac{{{numerator}}}{{{denominator}}}" if denominator else decomposed
    name = unicodedata.name(character, "").split()
    if (
        name[:1] == ["GREEK"]
        and len(name) == 4
        and name[1:3] in (["SMALL", "LETTER"], ["CAPITAL", "LETTER"])
    ):
        # Unicode spells the name of this letter LAMDA.
        letter = name[3].lower().replace("lamda", "lambda")
        return f"\\{letter if name[1] == 'SMALL' else letter.capitalize()} "
    return decomposed


def _expand_repeating(number: re.Match[str]) -> str:
    """Converts a repeating decimal to a fraction."""
    # With p digits before the period and q in it, the number is (all digits as an integer, minus
    # those before the period) / ((10^q - 1) 10^p).
    integer, prefix, period = number[1], number[2], number[3] or number[4] or number[5]
    denominator = (10 ** len(period) - 1) * 10 ** len(prefix)
    numerator = int(f"{integer}{prefix}{period}") - int(f"{integer}{prefix}" or "0")
    return rf"\frac{{{numerator}}}{{{denominator}}}"
