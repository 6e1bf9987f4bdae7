"""Errors for unknown command-line options, with suggestions."""

import dataclasses
import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jaxspec.inputs.checked import ConfigError

_MAX_SUGGESTIONS = 3
"""Maximum number of suggestions per option."""


def option_names(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yields the options of a config: paths of fields, with dots."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from option_names(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def refuse_unknown_options(
    arguments: Sequence[str],
    known_options: Collection[str],
    common_options: Sequence[str] = (),
    renamed_options: Mapping[str, str] | None = None,
) -> None:
    """Refuses arguments that the command line does not know.

    Args:
      arguments: unused arguments.
      known_options: all options.
      common_options: options in the order in which users need them.
      renamed_options: new names of options of earlier versions.

    Raises:
      ConfigError: there are unused arguments. The message suggests similar options.
    """
    if not arguments:
        return
    # Values of unknown options are unused too, but the option is the error to report.
    options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    if not options:
        raise ConfigError(
            f"{arguments[0]!r} is given to no option; every option takes one value, or as many as"
            " its help says"
        )
    messages = []
    for option in dict.fromkeys(options):
        name = option[2:].replace("-", "_")
        if new_name := (renamed_options or {}).get(name):
            messages.append(f"{option} is now --{new_name}; see --help all")
            continue
        suggestions = _closest_options(name, known_options, common_options)
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
    """Finds options that are similar to `name`.

    These have the same last word, or else a similar spelling.
    """
    last_word = name.rpartition(".")[2]
    same_word = [option for option in known_options if option.rpartition(".")[2] == last_word]
    # Common options come first. The others stay in the order of settings, as the sort is stable.
    same_word.sort(
        key=lambda option: (
            common_options.index(option) if option in common_options else len(common_options)
        )
    )
    similar = difflib.get_close_matches(name, known_options, n=_MAX_SUGGESTIONS, cutoff=0.7)
    return (same_word or similar)[:_MAX_SUGGESTIONS]
