"""Decides whether two mathematical answers are equal.

math-verify ignores text that it cannot read, such as units, words, bases, or the rest of a line.
So an answer is first split into its parts here. Each part must agree, and math-verify only
compares complete expressions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxspec.rewards.mathematics.expressions import expressions_equal
from jaxspec.rewards.mathematics.quantities import (
    BASE_NUMBER,
    NUMBER_WORDS,
    numerals_equal,
    parse_clock,
    ratios_equal,
    times_equal,
)
from jaxspec.rewards.mathematics.spelling import (
    is_enclosed,
    is_unbalanced,
    remove_spaces,
    split_list,
)
from jaxspec.rewards.mathematics.values import INDEX_PATTERN, AnswerValue, list_values, parse_value

_INEQUALITY_SIGN = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))")
_INTERVAL = re.compile(r"[(\[].*[)\]]", re.DOTALL)
_UNKNOWN_LETTER = re.compile(r"(?<![a-zA-Z\\])[a-df-hj-zA-Z](?![a-zA-Z(])")
"""Pattern of a letter that stands for a number, except the constants e and i."""

# Comparing all pairs of a longer list would take too long.
_MAX_RESTATED = 8
"""Length of the longest list in which restated values are looked for."""


def math_equal(reference: str, answer: str) -> bool:
    """Returns whether an answer equals the reference.

    Returns False if one of them cannot be read.
    """
    left, right = (list(list_values(text)) for text in (reference, answer))
    if not left or not right:
        return False
    # Equal texts need no parsing, which is slow and may fail.
    if [*map(remove_spaces, left)] == [*map(remove_spaces, right)]:
        return True
    return _lists_equal(left, right)


def is_readable(reference: str) -> bool:
    """Returns whether a reference states any value."""
    return bool(list_values(reference))


def _lists_equal(left: Sequence[str], right: Sequence[str]) -> bool:
    """Returns whether two lists have equal values.

    The order counts only if one list alone gives its values different names. A tuple may equal a
    list of its elements, in order.
    """
    references, answers = _align_intervals(left, right)
    if len(references) != len(answers):
        references, answers = _drop_restatements(references), _drop_restatements(answers)
    # A list without brackets may state a tuple.
    if len(references) != len(answers):
        shorter, longer = (
            (references, answers) if len(references) < len(answers) else (answers, references)
        )
        elements = _split_tuple(shorter[0]) if len(shorter) == 1 else None
        if elements is None or len(elements) != len(longer):
            return False
        # The reference stays on the left, as the comparison of values is not symmetric.
        pairs = (
            zip(elements, longer, strict=True)
            if shorter is references
            else zip(longer, elements, strict=True)
        )
        return all(_values_equal(reference, answer) for reference, answer in pairs)
    if len(references) == 1:
        return _values_equal(references[0], answers[0])
    groups = _group_named_values(references), _group_named_values(answers)
    # If only one side has names, as in `x=1, y=2` and `1, 2`, the order decides.
    if len(groups[0]) != len(groups[1]) and 1 in map(len, groups):
        return all(map(_values_equal, references, answers))
    return _groups_match(*groups)


def _drop_restatements(values: list[str]) -> list[str]:
    """Removes values that restate an earlier one.

    An example is `1\\frac12, or \\frac32`. A list of more than `_MAX_RESTATED` values is kept.
    """
    if len(values) > _MAX_RESTATED:
        return values
    distinct_values: list[str] = []
    for value in values:
        if not any(_values_equal(earlier_value, value) for earlier_value in distinct_values):
            distinct_values.append(value)
    return distinct_values


def _groups_match(left: list[tuple[str, ...]], right: list[tuple[str, ...]]) -> bool:
    """Returns whether groups are equal in some order."""
    if len(left) != len(right):
        return False
    unmatched_groups = list(right)
    for group in left:
        match = next(
            (
                candidate
                for candidate in unmatched_groups
                if len(group) == len(candidate) and all(map(_values_equal, group, candidate))
            ),
            None,
        )
        if match is None:
            return False
        unmatched_groups.remove(match)
    return True


def _group_named_values(values: Sequence[str]) -> list[tuple[str, ...]]:
    """Groups named values that belong together, such as `p=5, q=2`.

    A group is sorted by name. If a value has no name, or all have the same, each value is a group.
    """
    names = [_variable_name(value) for value in values]
    count = len(set(names))
    if not all(names) or count == 1:
        return [(value,) for value in values]
    # In `p=5, q=2; p=7, q=3` the names repeat after two values, so these form a group.
    groups = [values[index : index + count] for index in range(0, len(values), count)]
    return [tuple(sorted(group, key=_variable_name)) for group in groups]


def _variable_name(value: str) -> str:
    """Returns the name of a value without its index, its argument and spaces."""
    # x_1 and x_2 are two values of x.
    return re.sub(r"\s", "", INDEX_PATTERN.sub("", parse_value(value).name))


def _split_tuple(value: str) -> list[str] | None:
    """Splits a tuple into its elements. Returns None for any other value."""
    value = parse_value(value).value
    is_tuple = is_enclosed(value, "(") and value[-1] == ")"
    elements = split_list(value[1:-1]) if is_tuple else []
    return elements if len(elements) > 1 else None


def _align_intervals(left: Sequence[str], right: Sequence[str]) -> tuple[list[str], list[str]]:
    """Converts a side of inequalities to intervals if the other side has only intervals."""
    sides = [list(left), list(right)]
    for index in (0, 1):
        opposite = sides[1 - index]
        if all(
            _INTERVAL.search(value) and not _INEQUALITY_SIGN.search(value) for value in opposite
        ):
            intervals = [_to_interval(value) for value in sides[index]]
            if all(intervals):
                sides[index] = [" \\cup ".join(interval for interval in intervals if interval)]
    return sides[0], sides[1]


def _to_interval(value: str) -> str | None:
    """Converts an inequality to an interval.

    Returns None if it is not an inequality in one variable.
    """
    members = [member.strip() for member in _INEQUALITY_SIGN.split(value)]
    bounds = members[::2]
    if len(members) not in (3, 5) or not all(bounds):
        return None
    signs = members[1::2]
    # Reads a descending inequality from right to left.
    if signs[0] in (">", "\\ge"):
        bounds, signs = bounds[::-1], [_reverse_sign(sign) for sign in signs[::-1]]
    if any(sign not in ("<", "\\le") for sign in signs):
        return None
    # With one bound, the interval is infinite on the side of the variable.
    if len(bounds) == 2:
        number_first = bool(re.search(r"\d|\\infty|\\pi", bounds[0]))
        bounds = [*bounds, "\\infty"] if number_first else ["-\\infty", *bounds]
        signs = [*signs, "<"] if number_first else ["<", *signs]
    if not re.fullmatch(r"[a-zA-Z]|\\[a-z]+|[a-zA-Z]\([a-z]\)", bounds[1]):
        return None
    opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
    return f"{opening}{bounds[0]},{bounds[2]}{closing}"


def _reverse_sign(sign: str) -> str:
    """Reverses the sign of an inequality."""
    return {">": "<", "\\ge": "\\le"}.get(sign, ">" if sign == "<" else "\\ge")


def _values_equal(left: str, right: str) -> bool:
    """Returns whether two values are equal.

    `left` is the reference. The comparison is not symmetric.
    """
    if remove_spaces(left) == remove_spaces(right):
        return True
    times = [parse_clock(value) for value in (left, right)]
    # Without a.m. or p.m., `3:20` may also be a ratio, which `_cores_equal` compares.
    if any(time and time[1] for time in times):
        return bool(times[0] and times[1]) and times_equal(times[0], times[1])
    reference, answer = parse_value(left), parse_value(right)
    if not reference.words.agrees_with(answer.words) or not _attributes_agree(reference, answer):
        return False
    # An answer of words alone has no value, so the words themselves are compared.
    if not reference.value and not answer.value:
        return reference.words.phrase == answer.words.phrase
    if not reference.value or not answer.value:
        return _value_or_number(reference) == _value_or_number(answer) != ""
    return _cores_equal(reference, answer)


def _value_or_number(item: AnswerValue) -> str:
    """Returns a value, or the number that its words name.

    Returns an empty string if they name none.
    """
    if item.value:
        return item.value
    phrase = item.words.phrase
    return str(NUMBER_WORDS.index(phrase)) if phrase in NUMBER_WORDS else ""


def _attributes_agree(reference: AnswerValue, answer: AnswerValue) -> bool:
    """Returns whether modulus, primes, names and chains agree."""
    if reference.modulus and answer.modulus and reference.modulus != answer.modulus:
        return False
    # math-verify ignores primes, so f' would equal f.
    if reference.value.count("'") != answer.value.count("'"):
        return False
    # A single value cannot equal a chain whose numbers differ, such as `1 = 2`.
    if (
        not reference.name
        and len(reference.chain) > 1
        and len(answer.chain) == 1
        and not _chain_numbers_equal(reference)
    ):
        return False
    names = _comparable_name(reference), _comparable_name(answer)
    if names[0] and names[1] and names[0] != names[1]:
        return False
    # An equation in one unknown, such as `2x+1 = 3`, restates the problem, not its solution.
    if not reference.name and not _find_unknowns(reference.chain) and not answer.name:
        return len(_find_unknowns(answer.chain[:-1])) != 1 and _chain_numbers_equal(answer)
    return _chain_numbers_equal(answer)


def _find_unknowns(members: Sequence[str]) -> set[str]:
    """Returns the unknowns in members of a chain of `=`."""
    return {letter for member in members for letter in _UNKNOWN_LETTER.findall(member)}


def _comparable_name(item: AnswerValue) -> str:
    """Normalizes the name of a value for comparison."""
    name = re.sub(r"[\s{}]", "", item.name)
    # The argument in `f(x) = 3` does not matter, as the value has no letters.
    return name if re.search("[a-zA-Z]", item.value) else re.sub(r"\([^()]*\)$", "", name)


def _chain_numbers_equal(item: AnswerValue) -> bool:
    """Returns whether all numbers in a chain of `=` are equal. A single value passes."""
    if len(item.chain) < 2:
        return True
    numbers = [
        member for member in item.chain if not re.search(r"(?<!\\)(?<![a-z])[a-zA-Z]", member)
    ]
    return all(expressions_equal(numbers[0], member) for member in numbers[1:])


def _cores_equal(reference: AnswerValue, answer: AnswerValue) -> bool:
    """Returns whether two values are equal, apart from words."""
    left, right = reference.value, answer.value
    equations = [not item.name and len(item.chain) > 1 for item in (reference, answer)]
    # An equation as the reference, such as that of a line, is compared as a whole.
    if equations[0] and re.search("[a-zA-Z]", "".join(reference.chain)):
        left = "=".join(reference.chain)
        right = "=".join(answer.chain) if answer.name == "" else f"{answer.name}={right}"
        return expressions_equal(left, right)
    bases = [BASE_NUMBER.fullmatch(value) for value in (left, right)]
    # Without a digit it is taken for a variable with an index, such as x_1.
    bases = [base if base and re.search(r"\d", base[1]) else None for base in bases]
    if any(bases):
        return numerals_equal(left, right, bases)
    if ":" in left or ":" in right:
        return ratios_equal(left, right)
    # A percent sign may be left out: `50\%` equals `50`.
    if left.endswith("\\%") != right.endswith("\\%") and _values_equal(
        left.removesuffix("\\%"), right.removesuffix("\\%")
    ):
        return True
    tuples = [_split_brackets(value) for value in (left, right)]
    if tuples[0] and tuples[1]:
        (brackets, elements), (other_brackets, other_elements) = tuples[0], tuples[1]
        return (
            brackets == other_brackets
            and len(elements) == len(other_elements)
            and all(map(_values_equal, elements, other_elements))
        )
    # A letter after a number is a unit if the reference has no letters.
    if not re.search("[a-zA-Z]", left) and (unit := re.fullmatch(r"(.*\d)([mgshlLNJWVKA])", right)):
        right = unit[1]
    # A multiple-choice answer: case and parentheses do not matter.
    if re.fullmatch(r"\(?[A-Za-z]\)?", left) and re.fullmatch(r"\(?[A-Za-z]\)?", right):
        return left.strip("()").lower() == right.strip("()").lower()
    return expressions_equal(left, right)


def _split_brackets(value: str) -> tuple[str, list[str]] | None:
    """Splits a tuple or interval.

    Returns its brackets and its elements, or None for any other value.
    """
    if value[:1] not in ("(", "[") or value[-1:] not in (")", "]") or is_unbalanced(value[1:-1]):
        return None
    elements = split_list(value[1:-1])
    return (value[0] + value[-1], elements) if len(elements) > 1 else None
