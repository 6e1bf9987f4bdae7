"""Options of a command line that do not exist, and those that were meant."""

import dataclasses
import difflib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jaxspec.inputs.checked import ConfigError

_MAX_SUGGESTIONS = 3
"""Options that a message names, at most."""


def option_names(settings: Any, prefix: str = "") -> Iterator[str]:
    """Names the options that settings have: fields of dataclasses, with dots between them."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from option_names(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def refuse_unknown_options(
    arguments: Sequence[str], known_options: Collection[str], common_options: Sequence[str] = ()
) -> None:
    """Refuses `arguments` of a command line that are no options, nor values of any.

    `common_options` has options in the order in which people need them.

    Raises:
      ConfigError: there are such words; the message names the options that were meant.
    """
    if not arguments:
        return
    options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    if not options:
        raise ConfigError(
            f"{arguments[0]!r} is given to no option; every option takes one value, or as many as"
            " its help says"
        )
    messages = []
    for option in dict.fromkeys(options):
        suggestions = _closest_options(option[2:].replace("-", "_"), known_options, common_options)
        remedy = (
            f"did you mean {' or '.join(f'--{name}' for name in suggestions)}?"
            if suggestions
            else ""
        )
        messages.append(f"there is no {option}; {remedy or '--help all lists all options'}")
    raise ConfigError("\n".join(messages))


def _closest_options(
    name: str, known_options: Collection[str], common_options: Sequence[str]
) -> list[str]:
    """Finds the options whose last word is that of `name`, else those that are spelt alike."""
    last_word = name.rpartition(".")[2]
    same_word = [option for option in known_options if option.rpartition(".")[2] == last_word]
    # what people need comes first; other options follow in the order of settings
    same_word.sort(
        key=lambda option: (
            common_options.index(option) if option in common_options else len(common_options)
        )
    )
    similar = difflib.get_close_matches(name, known_options, n=_MAX_SUGGESTIONS, cutoff=0.7)
    return (same_word or similar)[:_MAX_SUGGESTIONS]
