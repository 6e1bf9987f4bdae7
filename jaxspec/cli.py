"""From the command line to a `Config`: config files, their scales, and overrides of single settings."""

from __future__ import annotations

import argparse
import difflib
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import tyro

from jaxspec.config import Config, ConfigError, RolloutConfig, require

_T = TypeVar("_T")

_PACKAGE = Path(__file__).resolve().parent
_SHIPPED = next((folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()), _PACKAGE / "configs")
"""The configs that come with jaxspec: inside an installed package, beside the package in a checkout."""


def load_config(argv: Sequence[str], program: str, description: str) -> tuple[Config, str]:
    """Reads `--config NAME.py[:SCALE]` and the overrides beside it, for `python -m jaxspec.<program>`.

    Returns the config and the run's name such as `rl_think-tiny`; an empty `workdir` becomes `runs/` and that name.

    Raises:
      ConfigError: no config, an unknown config or scale, or a draft setting where there is no draft.
      SystemExit: 0 after `--help`; 2 after a message, for a setting or value that does not exist.
    """
    command = f"python -m jaxspec.{program}"
    given, overrides = take_option(argv, command, "config", "NAME.py[:SCALE]")
    if given:
        file, _, scale = given.partition(":")
        default, name = read_config(_find(file), scale)
    else:
        found = f"configs found: {', '.join(_found())}"
        require(bool({"-h", "--help"} & set(overrides)), f"no --config; {found}; try {command} --config rl_think.py, or {command} --help")
        default, name = Config(), ""
    config = override(default, overrides, f"{command} --config {given or 'NAME.py[:SCALE]'}", f"{description}\n\n{_guide(command)}")
    refuse_foreign(config.rollout, overrides, "rollout.")
    return (config if config.workdir else replace(config, workdir=f"runs/{name}")), name


def take_option(argv: Sequence[str], command: str, name: str, form: str, default: str = "") -> tuple[str, list[str]]:
    """Returns the value of `--name`, which decides what other options there are, and the words that are left; `form` shows its use."""
    usage = f"%(prog)s --{name} {form} ..."
    parser = argparse.ArgumentParser(prog=command, usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", dest="value", default=default)
    known, rest = parser.parse_known_args(argv)
    return known.value, rest


def override(default: _T, argv: Sequence[str], prog: str, about: str) -> _T:
    """Returns a frozen dataclass with the fields that the command line names exchanged; ends the program as `load_config` does."""
    flat = (tyro.conf.AvoidSubcommands,)
    return tyro.cli(type(default), prog=prog, description=about, args=argv, default=default, config=flat, use_underscores=True)


_DRAFT_FIELDS = {
    "none": set(),
    "ngram": {"draft_length"},
    "history": {"draft_length"},
    "eagle3": {"draft_length", "sampling", "temperature", "vocab", "ffn"},
    "mtp": {"draft_length", "sampling", "temperature", "ffn", "layers", "embedding_first"},
    "model": {"draft_length", "sampling", "temperature", "ffn", "layers"},
}
"""What each kind of draft makes use of."""
_LOOKUP_FIELDS = {"none": set(), "ngram": {"rule", "min_match", "max_match"}, "history": {"past", "min_match", "max_match"}}


def refuse_foreign(rollout: RolloutConfig, argv: Sequence[str], prefix: str) -> None:
    """Raises ConfigError for settings on the command line, such as `--{prefix}draft.vocab`, that the chosen kind has no use for."""
    named = {word.partition("=")[0].removeprefix("--") for word in argv}
    draft, lookup = rollout.draft, rollout.lookup_kind
    used = {f"{prefix}draft.{field}" for field in _DRAFT_FIELDS[draft.kind] | {"kind"}}
    used |= {f"{prefix}lookup.{field}" for field in _LOOKUP_FIELDS[lookup] | {"beside"}}
    if draft.sampling != "sample":
        used -= {f"{prefix}draft.temperature"}
    foreign = ", ".join(sorted(f"--{key}" for key in named - used if key.startswith((f"{prefix}draft.", f"{prefix}lookup."))))
    chosen = f"{prefix}draft.kind {draft.kind}, sampling {draft.sampling} and look-up {lookup}"
    require(not foreign, f"{chosen} have no use for {foreign}; leave it out, or choose another kind")


def read_config(path: Path, scale: str = "") -> tuple[Config, str]:
    """Runs a config file and returns its config at `scale` (empty: the first of its SCALES) with the run's name.

    Raises:
      ConfigError: the file is not Python, lacks SCALES or get_config, or does not list the scale.
    """
    try:
        names = runpy.run_path(str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path} is not a Python file: {error}") from error
    scales = names.get("SCALES", ())
    require(bool(scales) and "get_config" in names, f"{path} must define SCALES and get_config(scale), as rl_think.py does")
    scale = scale or scales[0]
    require(scale in scales, f"{path} has no scale {scale!r}; {_nearest(scale, scales)}it has {', '.join(scales)}")
    config = names["get_config"](scale)
    require(isinstance(config, Config), f"{path}: get_config({scale!r}) returns a {type(config).__name__}, not a jaxspec.config.Config")
    return config, f"{path.stem}-{scale}"


def _find(file: str) -> Path:
    for folder in (Path(), Path("configs"), _SHIPPED):
        if (folder / file).is_file():
            return folder / file
    hint = _nearest(Path(file).name, _found())
    raise ConfigError(f"--config {file}: no such file here, in configs/ or in {_SHIPPED}; {hint}configs found: {', '.join(_found())}")


def _found() -> list[str]:
    return sorted({path.name for folder in (Path("configs"), _SHIPPED) for path in folder.glob("[!_]*.py")})


def _nearest(word: str, words: Sequence[str]) -> str:
    return "".join(f"did you mean {match}? " for match in difflib.get_close_matches(word, words, n=1))


def _guide(command: str) -> str:
    return f"""A config file names every setting for some scales (the first is the default); options after it change single settings.
NAME.py is looked up as given, then in configs/, then in {_SHIPPED}.
Configs found: {", ".join(_found())}. Examples:
  {command} --config rl_think.py --rollout.draft.draft_length 5 --grpo.group_size 32
  {command} --config rl_think.py --rollout.draft.kind none    (plain decoding)
  {command} --config rl_think.py:qwen3_0.6b --data.path train.jsonl --data.tokenizer FOLDER
  {command} --config rl_think.py:qwen3_8b --help    (the defaults of that config and scale)"""
