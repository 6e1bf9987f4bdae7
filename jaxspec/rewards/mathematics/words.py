"""Classifies the words next to a value.

They are units, words that change the value's meaning, and others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_UNIT_NAMES = {
    name: words[0]
    for words in (
        line.split()
        for line in (
            "m metre meter",
            "cm centimetre centimeter",
            "mm millimetre millimeter",
            "km kilometre kilometer",
            "in inch inche",
            "ft foot feet",
            "yd yard",
            "mi mile",
            "s sec second",
            "min minute",
            "h hr hour",
            "day",
            "week",
            "month",
            "yr year",
            "kg kilogram",
            "g gm gram",
            "mg milligram",
            "lb pound",
            "oz ounce",
            "ton tonne",
            "l litre liter",
            "ml millilitre milliliter",
            "gal gallon",
            "quart",
            "pint",
            "cup",
            "mph",
            "kmh kph",
            "N newton",
            "J joule",
            "W watt",
            "V volt",
            "A ampere amp",
            "K kelvin",
            "Hz hertz",
            "Pa pascal",
            "mol mole",
            "ohm",
            "degree deg",
            "celsius",
            "fahrenheit",
            "radian rad",
            "dollar usd buck",
            "cent",
            "euro eur",
            "yen",
            "yuan rmb",
            "rupee",
            "acre",
            "hectare",
            "unit",
            "square sq",
            "cubic cu",
            "per",
        )
    )
    for name in words
}
# The word names no particular unit, so `12 units` agrees with `12 cm`.
_NEUTRAL_UNITS = {"unit"}
# Two answers with different words of this kind are never equal.
_CRITICAL_WORDS = _word_set(
    "not no none never neither nor except without minus negative plus less more least most greater"
    " fewer smaller larger half twice double hundred thousand million billion trillion dozen above"
    " below over under between until squared cubed undefined infinite false wrong incorrect nonzero"
    " imaginary mod modulo base"
)
# Words that do not change a value, and need not agree.
_FILLER_WORDS = _word_set(
    "a an the is are be was it its this that these those of for to in at on by with from so thus"
    " hence therefore then we get have has obtain find answer final result value solution total"
    " number where when which as there here exactly only just x y z long each"
)
# Up to three other letters in a row are read as a product of variables.
_SHORT_WORDS = _word_set("yes no odd one two six ten all any sum mon tue wed thu fri sat sun red")
_TEXT_COMMAND = re.compile(r"\\text\s*\{([^{}]*)\}(?:\s*\^\s*\{?\s*([23])\s*\}?)?")
_DEGREE_SIGN = re.compile(r"\^\s*\{?\s*\\circ\s*\}?\s*(?:([CF])(?![a-zA-Z]))?\s*$")
_PLAIN_WORD = re.compile(
    r"(?<![\\a-zA-Z_{])([a-zA-Z]{2,}(?:\.[a-z]\.)?)(?![a-zA-Z(])(?:\s*\^\s*\{?\s*([23])\s*\}?)?"
)
_UNIT_LETTER = re.compile(r"(?<=[\d})])\s+([mgshlLNJWVKA])(?:\s*\^\s*\{?\s*([23])\s*\}?)?\s*$")
_UNIT_POWERS = {"2": "square", "3": "cubic"}


@dataclass(frozen=True)
class AnswerWords:
    """Words next to a value."""

    phrase: str
    """All words in order, in lower case."""
    units: frozenset[str] = frozenset()
    """Units, each under one name."""
    critical_words: frozenset[str] = frozenset()
    """Words that change the meaning of a value, such as `not` or `million`."""
    other_words: frozenset[str] = frozenset()
    """Other words, without fillers such as `the`."""

    def agrees_with(self, other: AnswerWords) -> bool:
        """Returns whether values with these words can be equal.

        Critical words must be the same. Units may be missing on one side, and so may other words.
        """
        if self.critical_words != other.critical_words:
            return False
        if self.units and other.units and self.units != other.units:
            return False
        return self.other_words <= other.other_words or other.other_words <= self.other_words


def split_words(value: str) -> tuple[str, AnswerWords]:
    """Separates a value from its words."""
    removed_words: list[str] = []

    def remove_word(match: re.Match[str]) -> str:
        # A power after a unit, as in `cm^2`, becomes a word of its own.
        word, power = match[1] or "", match[2] if match.re is not _DEGREE_SIGN else None
        removed_words.extend([word, _UNIT_POWERS[power]] if power else [word])
        return " "

    core = value
    if degrees := _DEGREE_SIGN.search(core):
        core = core[: degrees.start()]
        removed_words.append({"C": "celsius", "F": "fahrenheit"}.get(degrees[1] or "", "degree"))
    # A \text in an index or exponent is part of a name, as in x_{\text{max}}.
    core = (
        _TEXT_COMMAND.sub(remove_word, core)
        if not re.search(r"[_^]\s*\{?\s*\\text", core)
        else core
    )
    core = _UNIT_LETTER.sub(remove_word, core)
    # Next to two longer words, short ones are words as well, not products of variables.
    is_sentence = sum(len(word) > 3 for word, _ in _PLAIN_WORD.findall(core)) > 1
    core = _PLAIN_WORD.sub(
        lambda match: remove_word(match) if is_sentence or _is_word(match[1]) else match[0], core
    )
    return core.strip(" .,"), _classify_words(" ".join(removed_words))


def _is_word(text: str) -> bool:
    """Returns whether letters form a word or unit.

    Otherwise they are a product of variables.
    """
    return (
        len(text) > 3
        or text.lower() in _SHORT_WORDS | _FILLER_WORDS | _CRITICAL_WORDS
        or text in _UNIT_NAMES
    )


def _classify_words(text: str) -> AnswerWords:
    """Classifies the words of a text."""
    text = re.sub(r"\^\s*\{?2\}?", " square ", re.sub(r"\^\s*\{?3\}?", " cubic ", text))
    tokens = re.findall(r"[a-zA-Z]+|\d+", text.replace("/", " per "))
    units, critical_words, other_words = set(), set(), set()
    for token in tokens:
        word = token.lower()
        singular = re.sub(r"s$", "", word) if len(word) > 2 else word
        # The exact spelling comes first: `A` is ampere, and `a` is a filler word.
        if unit := _UNIT_NAMES.get(token) or _UNIT_NAMES.get(word) or _UNIT_NAMES.get(singular):
            units.add(unit)
        elif word in _CRITICAL_WORDS:
            critical_words.add(word)
        elif word not in _FILLER_WORDS:
            other_words.add(singular)
    phrase = " ".join(token.lower() for token in tokens)
    return AnswerWords(
        phrase, frozenset(units - _NEUTRAL_UNITS), frozenset(critical_words), frozenset(other_words)
    )
