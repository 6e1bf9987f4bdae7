"""Equality of mathematical answers: an own reading in front of math-verify.

math-verify drops whatever it does not read: units, words, bases, a.m. and p.m., and the tails of
texts. Here an answer is taken apart first. Each part must agree, and math-verify compares only
expressions that it has read to their end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxspec.rewards.mathematics.expressions import expressions_equal
from jaxspec.rewards.mathematics.quantities import (
    BASE,
    NUMBERS,
    bases_equal,
    ratios_equal,
    read_clock,
    same_time,
)
from jaxspec.rewards.mathematics.spelling import encloses, is_unbalanced, split_list, without_spaces
from jaxspec.rewards.mathematics.values import INDEX, Item, take_apart, values_of

_ORDER = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))")
_INTERVAL = re.compile(r"[(\[].*[)\]]", re.DOTALL)
_UNKNOWN = re.compile(r"(?<![a-zA-Z\\])[a-df-hj-zA-Z](?![a-zA-Z(])")
"""A letter but for e and i."""


_RESTATED = 8
"""Values of a list that are compared with one another, at most."""


def math_equal(reference: str, answer: str) -> bool:
    """Whether an answer equals the reference; what cannot be read is not equal."""
    left, right = (list(values_of(text)) for text in (reference, answer))
    if not left or not right:
        return False
    if [*map(without_spaces, left)] == [*map(without_spaces, right)]:
        return True
    return _lists_equal(left, right)


def is_readable(reference: str) -> bool:
    """Whether a reference states anything that an answer can equal."""
    return bool(values_of(reference))


def _lists_equal(left: Sequence[str], right: Sequence[str]) -> bool:
    a, b = _regions(left, right)
    if len(a) != len(b):
        a, b = _each_once(a), _each_once(b)
    if len(a) != len(b):
        whole, parts = (a, b) if len(a) < len(b) else (b, a)
        inner = _elements(whole[0]) if len(whole) == 1 else None
        if inner is None or len(inner) != len(parts):
            return False
        pairs = zip(inner, parts, strict=True) if whole is a else zip(parts, inner, strict=True)
        return all(_values_equal(one, other) for one, other in pairs)
    if len(a) == 1:
        return _values_equal(a[0], b[0])
    groups = _grouped(a), _grouped(b)
    if len(groups[0]) != len(groups[1]) and 1 in map(len, groups):  # names on one side alone
        return all(map(_values_equal, a, b))
    return _matched(*groups)


def _each_once(values: list[str]) -> list[str]:
    """Values without those that restate an earlier one, as in `1\\frac12, or \\frac32`."""
    if len(values) > _RESTATED:
        return values
    found: list[str] = []
    for value in values:
        if not any(_values_equal(one, value) for one in found):
            found.append(value)
    return found


def _matched(left: list[tuple[str, ...]], right: list[tuple[str, ...]]) -> bool:
    """Whether values are equal in some order."""
    if len(left) != len(right):
        return False
    rest = list(right)
    for one in left:
        same = next(
            (
                other
                for other in rest
                if len(one) == len(other) and all(map(_values_equal, one, other))
            ),
            None,
        )
        if same is None:
            return False
        rest.remove(same)
    return True


def _grouped(values: Sequence[str]) -> list[tuple[str, ...]]:
    """Values by themselves; named ones that belong together as a group, sorted by name."""
    names = [_letter(value) for value in values]
    count = len(set(names))
    if not all(names) or count == 1:
        return [(value,) for value in values]
    groups = [values[at : at + count] for at in range(0, len(values), count)]
    return [tuple(sorted(group, key=_letter)) for group in groups]


def _letter(value: str) -> str:
    """The name of a value without its index: x_1 and x_2 are values of x."""
    return re.sub(r"\s", "", INDEX.sub("", take_apart(value).name))


def _elements(value: str) -> list[str] | None:
    """The elements of a tuple."""
    value = take_apart(value).value
    inside = encloses(value, "(") and value[-1] == ")"
    found = split_list(value[1:-1]) if inside else []
    return found if len(found) > 1 else None


def _regions(left: Sequence[str], right: Sequence[str]) -> tuple[list[str], list[str]]:
    """Both sides; inequalities as intervals where the other side has intervals."""
    sides = [list(left), list(right)]
    for at in (0, 1):
        other = sides[1 - at]
        if all(_INTERVAL.search(value) and not _ORDER.search(value) for value in other):
            intervals = [_interval(value) for value in sides[at]]
            if all(intervals):
                sides[at] = [" \\cup ".join(each for each in intervals if each)]
    return sides[0], sides[1]


def _interval(value: str) -> str | None:
    """The interval of an inequality in one variable."""
    parts = [part.strip() for part in _ORDER.split(value)]
    ends = parts[::2]
    if len(parts) not in (3, 5) or not all(ends):
        return None
    signs = parts[1::2]
    if signs[0] in (">", "\\ge"):
        ends, signs = ends[::-1], [_turned(sign) for sign in signs[::-1]]
    if any(sign not in ("<", "\\le") for sign in signs):
        return None
    if len(ends) == 2:
        number_first = bool(re.search(r"\d|\\infty|\\pi", ends[0]))
        ends = [*ends, "\\infty"] if number_first else ["-\\infty", *ends]
        signs = [*signs, "<"] if number_first else ["<", *signs]
    if not re.fullmatch(r"[a-zA-Z]|\\[a-z]+|[a-zA-Z]\([a-z]\)", ends[1]):
        return None
    opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
    return f"{opening}{ends[0]},{ends[2]}{closing}"


def _turned(sign: str) -> str:
    return {">": "<", "\\ge": "\\le"}.get(sign, ">" if sign == "<" else "\\ge")


def _values_equal(left: str, right: str) -> bool:
    """Whether two values are equal; `left` is the reference."""
    if without_spaces(left) == without_spaces(right):
        return True
    times = [read_clock(value) for value in (left, right)]
    if any(time and time[1] for time in times):
        return bool(times[0] and times[1]) and same_time(times[0], times[1])
    one, other = take_apart(left), take_apart(right)
    if not one.words.agree(other.words) or not _facts_agree(one, other):
        return False
    if not one.value and not other.value:
        return one.words.phrase == other.words.phrase
    if not one.value or not other.value:
        return _number_word(one) == _number_word(other) != ""
    return _cores_equal(one, other)


def _number_word(item: Item) -> str:
    if item.value:
        return item.value
    phrase = item.words.phrase
    return str(NUMBERS.index(phrase)) if phrase in NUMBERS else ""


def _facts_agree(one: Item, other: Item) -> bool:
    if one.modulus and other.modulus and one.modulus != other.modulus:
        return False
    if one.value.count("'") != other.value.count("'"):
        return False
    if not one.name and len(one.chain) > 1 and len(other.chain) == 1 and not _is_chain(one):
        return False
    names = _plain_name(one), _plain_name(other)
    if names[0] and names[1] and names[0] != names[1]:
        return False
    # an equation in one unknown says what it is to be solved for, not what the solution is
    if not one.name and not _unknowns(one.chain) and not other.name:
        return len(_unknowns(other.chain[:-1])) != 1 and _is_chain(other)
    return _is_chain(other)


def _unknowns(members: Sequence[str]) -> set[str]:
    """Letters that stand for numbers in members of a chain of `=`."""
    return {letter for part in members for letter in _UNKNOWN.findall(part)}


def _plain_name(item: Item) -> str:
    """The name as it is compared: what a function is of matters only if its value has letters."""
    name = re.sub(r"[\s{}]", "", item.name)
    return name if re.search("[a-zA-Z]", item.value) else re.sub(r"\([^()]*\)$", "", name)


def _is_chain(item: Item) -> bool:
    """Whether the members of a chain of `=` that are numbers are equal."""
    if len(item.chain) < 2:
        return True
    numbers = [part for part in item.chain if not re.search(r"(?<!\\)(?<![a-z])[a-zA-Z]", part)]
    return all(expressions_equal(numbers[0], part) for part in numbers[1:])


def _cores_equal(one: Item, other: Item) -> bool:
    left, right = one.value, other.value
    equations = [not item.name and len(item.chain) > 1 for item in (one, other)]
    if equations[0] and re.search("[a-zA-Z]", "".join(one.chain)):
        left = "=".join(one.chain)
        right = "=".join(other.chain) if other.name == "" else f"{other.name}={right}"
        return expressions_equal(left, right)
    bases = [BASE.fullmatch(value) for value in (left, right)]
    bases = [base if base and re.search(r"\d", base[1]) else None for base in bases]
    if any(bases):
        return bases_equal(left, right, bases)
    if ":" in left or ":" in right:
        return ratios_equal(left, right)
    if left.endswith("\\%") != right.endswith("\\%") and _values_equal(
        left.removesuffix("\\%"), right.removesuffix("\\%")
    ):
        return True
    parts = [_bracketed(value) for value in (left, right)]
    if parts[0] and parts[1]:
        (ends, elements), (other_ends, others) = parts[0], parts[1]
        return (
            ends == other_ends
            and len(elements) == len(others)
            and all(map(_values_equal, elements, others))
        )
    if not re.search("[a-zA-Z]", left) and (unit := re.fullmatch(r"(.*\d)([mgshlLNJWVKA])", right)):
        right = unit[1]  # a letter where the reference has none is a unit
    if re.fullmatch(r"\(?[A-Za-z]\)?", left) and re.fullmatch(r"\(?[A-Za-z]\)?", right):
        return left.strip("()").lower() == right.strip("()").lower()
    return expressions_equal(left, right)


def _bracketed(value: str) -> tuple[str, list[str]] | None:
    """The brackets and elements of a tuple or an interval."""
    if value[:1] not in ("(", "[") or value[-1:] not in (")", "]") or is_unbalanced(value[1:-1]):
        return None
    elements = split_list(value[1:-1])
    return (value[0] + value[-1], elements) if len(elements) > 1 else None
