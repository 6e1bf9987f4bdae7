"""Reading of configs from files and command lines."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import inspect
import re
import runpy
import signal
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

import tyro

from jaxspec.config.algorithms import ALGORITHMS, describe_algorithms, with_algorithm
from jaxspec.config.as_json import (
    flatten_settings,
    includes_setting,
    list_renamed_options,
    to_json,
)
from jaxspec.config.settings import SHARED_SETTINGS, Config, DraftConfig, LookupConfig
from jaxspec.config.unused import refuse_unread_settings, refuse_unused_settings
from jaxspec.inputs.checked import CheckedConfig, ConfigError, error_text, require
from jaxspec.inputs.docstrings import field_docstrings, first_sentence
from jaxspec.inputs.options import option_names, refuse_unknown_options
from jaxspec.system.terminal import silence_stdout
from jaxspec.system.version import DISTRIBUTION, package_version

_T = TypeVar("_T", bound=CheckedConfig)
_C = TypeVar("_C", bound=Config)

SHORT_HELP = (
    "steps",
    "sft.steps",
    "offline.steps",
    "workdir",
    "model.path",
    "data.path",
    "data.prompt_column",
    "data.answer_column",
    "data.answer_style",
    "data.instruction",
    "data.max_prompt_length",
    "reward.verifier",
    "reward.function",
    "batch.prompts",
    "batch.group_size",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "optimizer.learning_rate",
    "lora.rank",
    "rollout.draft.kind",
    "rollout.draft.path",
    "rollout.draft.draft_length",
    "eval.every",
    "eval.samples",
    "save_every",
    "mesh.tensor",
)
"""Settings in the short `--help`, in the order in which people need them."""
EXAMPLES = {
    "train": (
        "--config rl_think.py --rollout.draft.draft_length 5 --batch.group_size 32",
        "--config rl_think.py --rollout.draft.kind none    (plain decoding)",
        "--config rl_think.py:qwen3_0.6b --model.path FOLDER --data.path FILE",
        "--config rl_think.py --algorithm dapo --batch.epochs 2 --loss.clip_high 0.3",
        "--config rl_think.py:qwen3_8b --help    (the defaults of that config and scale)",
    ),
    "train_sft": ("--config rl_think.py --sft.steps 720",),
    "train_draft": (
        "--config draft_offline.py",
        "--config rl_think.py:qwen3_0.6b --model.path FOLDER --data.path FILE",
    ),
}
"""Example command lines of programs whose description has none."""

_PACKAGE = Path(__file__).resolve().parent.parent
_BUNDLED = next(
    # An installed package contains them. In a checkout they are next to it.
    (folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()),
    _PACKAGE / "configs",
)
"""Folder of the bundled configs, in an installed package or a checkout."""


def load_config(
    argv: Sequence[str],
    program: str,
    description: str,
    swept_settings: Sequence[str] = (),
    used_settings: str = "",
    base: Config | None = None,
) -> tuple[Config, str]:
    """Reads `--config NAME.py[:SCALE]` and overrides.

    Returns the config and the run's name, such as `rl_think-tiny`. `workdir` defaults to runs/NAME.

    Args:
      swept_settings: settings of drafts that the program itself sets.
      used_settings: settings that it reads (empty = all). If it reads no draft, there is none.
      base: config to start from. `--config` is then optional, and replaces its evaluation only.

    Raises:
      ConfigError: A config or scale is unknown, or a setting invalid, unknown or without effect.
      SystemExit: 0 after `--help` or `--help all`. 2 after a message, for an unreadable value.
    """
    command = f"python -m jaxspec.{program}"
    source, overrides = take_option(argv, command, "config", "NAME.py[:SCALE]")
    default, name = _read_default(source, overrides, command, base)
    # Before the overrides, which can then change settings of the algorithm.
    algorithm, overrides = take_option(overrides, command, "algorithm", "|".join(ALGORITHMS))
    if algorithm:
        default = with_algorithm(default, algorithm)
    prog = f"{command} --config {source or 'NAME.py[:SCALE]'}"
    help_text = f"{description}\n\n{_usage_guide(program)}"
    if help_kind := _help_request(overrides):
        if help_kind != "all":
            _print_short_help(default, prog, help_text, used_settings, swept_settings)
        # Other words are dropped: `--help` alone shows the defaults of config and scale.
        overrides, help_text = ["--help"], f"{help_text}\n{_algorithm_help()}"
    config = override_settings(default, overrides, prog, help_text)
    named = _setting_names(overrides)
    swept = ", ".join(f"--{name}" for name in swept_settings if name in named)
    require(not swept, f"{command} tries the values of {swept} by itself; leave it out")
    if used_settings:
        refuse_unread_settings(
            named | ({"algorithm"} if algorithm else set()), used_settings, command
        )
    # The program reads no draft, so none should be built or checked.
    if used_settings and not includes_setting(used_settings.split(), "rollout.draft.kind"):
        rollout = replace(config.rollout, draft=DraftConfig(kind="none"), lookup=LookupConfig())
        config = replace(config, rollout=rollout)
    if swept_settings:
        refuse_unused_settings(config, named, with_draft=False)
    else:
        config = settle_draft_settings(config, overrides)
    return (config if config.workdir else replace(config, workdir=f"runs/{name}")), name


def _read_default(
    source: str, overrides: Sequence[str], command: str, base: Config | None
) -> tuple[Config, str]:
    """Returns the config before its overrides, and its name."""
    if source:
        file, _, scale = source.partition(":")
        config, name = read_config(_find_config(file), scale)
        return (config if base is None else _merge_evaluation(base, config)), name
    if base is None:
        configs = f"configs found: {', '.join(_list_configs())}"
        require(
            bool({"-h", "--help"} & set(overrides)),
            f"no --config; {configs}; try {command} --config rl_think.py, or {command} --help",
        )
    return base or Config(), ""


def _help_request(words: Sequence[str]) -> str:
    """Returns the requested help: `all`, `short`, or empty for none."""
    for index, word in enumerate(words):
        if word in ("-h", "--help"):
            return "all" if words[index + 1 : index + 2] == ["all"] else "short"
    return ""


def _print_short_help(
    config: Config, prog: str, help_text: str, used_settings: str, swept: Sequence[str]
) -> NoReturn:
    """Prints the settings of `SHORT_HELP` that a program reads, and exits."""
    values = flatten_settings(to_json(config))
    names = [
        key
        for key in SHORT_HELP
        if key not in swept and (not used_settings or includes_setting(used_settings.split(), key))
    ]
    lines = [
        f"usage: {prog} [--SETTING VALUE ...]",
        "",
        help_text,
        "",
        "Settings in the order of need:",
    ]
    for name in names:
        *sections, field_name = name.split(".")
        owner = functools.reduce(getattr, sections, config)
        text = first_sentence(field_docstrings(type(owner))[field_name])
        value = " ".join(values[name]) if isinstance(values[name], list) else values[name]
        default = f" (default: {value})" if value != "" else ""
        lines += textwrap.wrap(
            f"  --{name}  {text}{default}", 100, subsequent_indent=" " * 6, break_on_hyphens=False
        )
    if not used_settings:
        lines.append(f"  --algorithm  A published one: {', '.join(ALGORITHMS)}.")
    lines.append(f"--help all shows all {len(values)} settings.")
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # `--help | head` closes the pipe
        silence_stdout()
    raise SystemExit(0)


def _merge_evaluation(base: Config, config: Config) -> Config:
    """Returns `base` with another config's evaluation, and room for its prompts."""
    # Evaluation sets may have longer prompts than the training data.
    longest = max(base.data.max_prompt_length, config.data.max_prompt_length)
    workers = {name: getattr(config.reward, name) for name in SHARED_SETTINGS["reward"]}
    return replace(
        base,
        eval=config.eval,
        data=replace(base.data, max_prompt_length=longest),
        reward=replace(base.reward, **workers),
    )


def take_option(
    argv: Sequence[str], command: str, name: str, form: str, default: str = ""
) -> tuple[str, list[str]]:
    """Splits an option and its value from a command line.

    `form` is its usage. `--version` prints the version and exits with status 0.
    """
    usage = f"%(prog)s --{name} {form} ..."
    parser = argparse.ArgumentParser(prog=command, usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--version", action="version", version=f"{DISTRIBUTION} {package_version()}"
    )
    parser.add_argument(f"--{name}", dest="value", default=default)
    options, words = parser.parse_known_args(argv)
    return options.value, words


def override_settings(default: _T, argv: Sequence[str], prog: str, help_text: str) -> _T:
    """Applies the overrides of a command line.

    Raises:
      ConfigError: A value is out of range, values contradict each other, or an option is unknown.
      SystemExit: As in `load_config`.
    """
    flags = (tyro.conf.AvoidSubcommands,)
    try:
        settings, unknown = tyro.cli(
            type(default),
            prog=prog,
            description=help_text,
            args=argv,
            default=default,
            config=flags,
            use_underscores=True,
            # tyro would print unknown options in its own way, without similar names.
            return_unknown_args=True,
        )
    except BrokenPipeError:  # `--help | head` closes the pipe
        silence_stdout()
        raise SystemExit(0) from None
    renamed = (
        list_renamed_options(settings.rollout.draft.kind) if isinstance(settings, Config) else {}
    )
    refuse_unknown_options(unknown, list(option_names(default)), SHORT_HELP, renamed)
    return settings


def settle_draft_settings(config: _C, argv: Sequence[str], prefix: str = "") -> _C:
    """Fits settings to the kind of draft on the command line.

    Drops an unnamed look-up of another kind. Names on the command line lack `prefix`.

    Raises:
      ConfigError: A setting on the command line has no effect.
    """
    named = {prefix + name for name in _setting_names(argv)}
    rollout = config.rollout
    if (
        "rollout.draft.kind" in named
        and not rollout.draft.is_learned
        and "rollout.lookup.beside" not in named
    ):
        rollout = replace(rollout, lookup=replace(rollout.lookup, beside="none"))
    config = replace(config, rollout=rollout)
    refuse_unused_settings(config, named)
    return config


def _setting_names(argv: Sequence[str]) -> set[str]:
    """Returns the settings that a command line names."""
    options = (
        word.partition("=")[0].removeprefix("--").replace("-", "_")
        for word in argv
        if word.startswith("--")
    )
    # tyro accepts `-` for `_`, and `no_` before a flag.
    return {re.sub(r"\bno_(?=\w+$)", "", option) for option in options}


def read_config(path: Path, scale: str = "") -> tuple[Config, str]:
    """Runs a config file.

    Returns its config at `scale` (empty = the first of its SCALES) and the run's name.

    Raises:
      ConfigError: The file is not Python, fails, lacks SCALES or get_config, or has no such scale.
    """
    with _report_in_one_line(path):
        namespace = runpy.run_path(str(path))
    scales = namespace.get("SCALES", ())
    is_valid = isinstance(scales, tuple | list) and all(isinstance(name, str) for name in scales)
    require(
        is_valid,
        f"{path}: SCALES is {' '.join(repr(scales).split())}; it must be a tuple of names, such as"
        " ('tiny',)",
    )
    require(
        bool(scales) and "get_config" in namespace,
        f"{path} must define SCALES and get_config(scale), as rl_think.py does",
    )
    require(
        not inspect.iscoroutinefunction(namespace["get_config"]),
        f"{path}: get_config is an `async def`; make it a `def`",
    )
    scale = scale or scales[0]
    require(
        scale in scales,
        f"{path} has no scale {scale!r}; {_suggest_name(scale, scales)}it has {', '.join(scales)}",
    )
    with _report_in_one_line(path):
        config = namespace["get_config"](scale)
    # A subclass may skip checks.
    fault = "not a jaxspec.config.Config" + " itself but of a subclass" * isinstance(config, Config)
    require(
        type(config) is Config,
        f"{path}: get_config({scale!r}) returns a {type(config).__name__}, {fault}",
    )
    return config, f"{path.stem}-{scale}"


@contextlib.contextmanager
def _report_in_one_line(path: Path) -> Iterator[None]:
    """Turns errors of a config file, but not Ctrl-C, into a ConfigError with the line."""
    try:
        yield
    except SyntaxError as error:
        raise ConfigError(f"{path} is not a Python file: {error}") from error
    # A file can raise anything. KeyboardInterrupt is Ctrl-C only under Python's own handler.
    except BaseException as error:
        if (
            isinstance(error, KeyboardInterrupt)
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            raise
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        location = f"{path}, line {lines[-1]}" if lines else str(path)
        prefix = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{location}: {prefix}{error_text(error)}") from error


def _find_config(file: str) -> Path:
    for folder in (Path(), Path("configs"), _BUNDLED):
        with contextlib.suppress(OSError):  # the name is too long, or a link circular
            if (folder / file).is_file():
                return folder / file
    hint = _suggest_name(Path(file).name, _list_configs())
    raise ConfigError(
        f"--config {repr(file)[1:-1]}: no such file here, in configs/ or in {_BUNDLED};"
        f" {hint}configs found: {', '.join(_list_configs())}"
    )


def _list_configs() -> list[str]:
    return sorted(
        {path.name for folder in (Path("configs"), _BUNDLED) for path in folder.glob("[!_]*.py")}
    )


def _suggest_name(word: str, words: Sequence[str]) -> str:
    return "".join(f"did you mean {name}? " for name in difflib.get_close_matches(word, words, n=1))


def _usage_guide(program: str) -> str:
    command = f"python -m jaxspec.{program}"
    examples = "\n".join(f"  {command} {words}" for words in EXAMPLES.get(program, ()))
    guide = f"""A config file names every setting for some scales (the first is the default);
options after it change single settings. NAME.py is looked up as given, then in configs/, then in
{_BUNDLED}. Configs found: {", ".join(_list_configs())}."""
    return f"{guide}\nExamples:\n{examples}" if examples else guide


def _algorithm_help() -> str:
    return f"""--algorithm NAME sets advantage., loss., kl., overlong. and dynamic_sampling. to
defaults, but for:
{describe_algorithms()}"""
