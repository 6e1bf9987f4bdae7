"""Words beside the mathematics of an answer: units, and words that change what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


_UNITS = {
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
_NEUTRAL = {"unit"}
_CRITICAL = _set_of(
    "not no none never neither nor except without minus negative plus less more least most greater"
    " fewer smaller larger half twice double hundred thousand million billion trillion dozen above"
    " below over under between until squared cubed undefined infinite false wrong incorrect nonzero"
    " imaginary mod modulo base"
)
_FILLERS = _set_of(
    "a an the is are be was it its this that these those of for to in at on by with from so thus"
    " hence therefore then we get have has obtain find answer final result value solution total"
    " number where when which as there here exactly only just x y z long each"
)
_SHORT = _set_of("yes no odd one two six ten all any sum mon tue wed thu fri sat sun red")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}(?:\s*\^\s*\{?\s*([23])\s*\}?)?")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?\s*(?:([CF])(?![a-zA-Z]))?\s*$")
_BARE = re.compile(
    r"(?<![\\a-zA-Z_{])([a-zA-Z]{2,}(?:\.[a-z]\.)?)(?![a-zA-Z(])(?:\s*\^\s*\{?\s*([23])\s*\}?)?"
)
_LETTER = re.compile(r"(?<=[\d})])\s+([mgshlLNJWVKA])(?:\s*\^\s*\{?\s*([23])\s*\}?)?\s*$")
_POWERS = {"2": "square", "3": "cubic"}


@dataclass(frozen=True)
class Words:
    """The words beside a value."""

    phrase: str
    """All of them, in order."""
    units: frozenset[str] = frozenset()
    critical: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()

    def agree(self, other: Words) -> bool:
        """Whether two values may be equal beside these words; one side may leave units out."""
        if self.critical != other.critical:
            return False
        if self.units and other.units and self.units != other.units:
            return False
        return self.others <= other.others or other.others <= self.others


def split_words(value: str) -> tuple[str, Words]:
    """Take the words off a value: what is left of it, and them."""
    taken: list[str] = []

    def take(found: re.Match[str]) -> str:
        word, power = found[1] or "", found[2] if found.re is not _DEGREES else None
        taken.extend([word, _POWERS[power]] if power else [word])
        return " "

    core = value
    if degrees := _DEGREES.search(core):
        core = core[: degrees.start()]
        taken.append({"C": "celsius", "F": "fahrenheit"}.get(degrees[1] or "", "degree"))
    core = _TEXT.sub(take, core) if not re.search(r"[_^]\s*\{?\s*\\text", core) else core
    core = _LETTER.sub(take, core)
    sentence = sum(len(word) > 3 for word, _ in _BARE.findall(core)) > 1
    core = _BARE.sub(
        lambda found: take(found) if sentence or _is_word(found[1]) else found[0], core
    )
    return core.strip(" .,"), _words(" ".join(taken))


def _is_word(text: str) -> bool:
    return len(text) > 3 or text.lower() in _SHORT | _FILLERS | _CRITICAL or text in _UNITS


def _words(text: str) -> Words:
    text = re.sub(r"\^\s*\{?2\}?", " square ", re.sub(r"\^\s*\{?3\}?", " cubic ", text))
    tokens = re.findall(r"[a-zA-Z]+|\d+", text.replace("/", " per "))
    units, critical, others = set(), set(), set()
    for token in tokens:
        word = token.lower()
        single = re.sub(r"s$", "", word) if len(word) > 2 else word
        if unit := _UNITS.get(token) or _UNITS.get(word) or _UNITS.get(single):
            units.add(unit)
        elif word in _CRITICAL:
            critical.add(word)
        elif word not in _FILLERS:
            others.add(single)
    phrase = " ".join(token.lower() for token in tokens)
    return Words(phrase, frozenset(units - _NEUTRAL), frozenset(critical), frozenset(others))
