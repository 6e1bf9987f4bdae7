"""Options of a command line that do not exist, and those that were meant."""

import dataclasses
import difflib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jaxspec.inputs.checked import ConfigError

_SHOWN = 3
"""Options that a message names, at most."""


def option_names(settings: Any, under: str = "") -> Iterator[str]:
    """Names the options that settings have: fields of dataclasses, with dots between them."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from option_names(value, f"{under}{field.name}.")
        else:
            yield under + field.name


def refuse_unknown(
    words: Sequence[str], known: Collection[str], needed: Sequence[str] = ()
) -> None:
    """Refuses `words` of a command line that are no options, nor values of any.

    `needed` has options in the order in which people need them.

    Raises:
      ConfigError: there are such words; the message names the options that were meant.
    """
    if not words:
        return
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    if not options:
        raise ConfigError(
            f"{words[0]!r} is given to no option; every option takes one value, or as many as its"
            " help says"
        )
    told = []
    for option in dict.fromkeys(options):
        meant = _meant(option[2:].replace("-", "_"), known, needed)
        remedy = f"did you mean {' or '.join(f'--{name}' for name in meant)}?" if meant else ""
        told.append(f"there is no {option}; {remedy or '--help all lists all options'}")
    raise ConfigError("\n".join(told))


def _meant(name: str, known: Collection[str], needed: Sequence[str]) -> list[str]:
    """Finds the options whose last word is that of `name`, else those that are spelt alike."""
    last = name.rpartition(".")[2]
    same = [option for option in known if option.rpartition(".")[2] == last]
    # what people need comes first; other options follow in the order of settings
    same.sort(key=lambda option: needed.index(option) if option in needed else len(needed))
    alike = difflib.get_close_matches(name, known, n=_SHOWN, cutoff=0.7)
    return (same or alike)[:_SHOWN]
