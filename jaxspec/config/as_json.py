"""A config as nested plain values (config.json of a run), back from them, and what differs between
two."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, get_args, get_origin

from jaxspec.config.settings import Config, ResolvedConfig
from jaxspec.inputs.checked import classes_in, require, types_of

_MESH = ("mesh.data", "mesh.expert", "mesh.tensor", "mesh.shard_above")
_ENGINE = (
    "rollout.engine.slots",
    "rollout.engine.page_size",
    "rollout.engine.pages",
    "rollout.engine.stack_layers",
    "rollout.engine.command_buffers",
)
SPEED = ("staged", "rollout.slice_rounds", "batch.micro_tokens", "optimizer.offload", *_ENGINE)
"""What changes nothing but the time and the memory that a program takes."""
_WHEN = ("steps", "save_every", "compare_plain", "profile")
FREE_ON_RESUME = frozenset({"workdir", "eval.", *_WHEN, *SPEED, *_MESH})
"""Keys that may differ when a run is resumed: they change where and how long it runs, and what is
measured of it, not what it computes. One that ends in a dot stands for all that start with it."""


def to_json(config: Config) -> dict[str, Any]:
    """Returns the config as nested plain values, for `config.json`."""
    # tuples become lists, as they will be when read back
    return json.loads(json.dumps(asdict(config)))


def from_json(saved: Mapping[str, Any]) -> ResolvedConfig:
    """Returns the config that `to_json` gave.

    Raises:
      ConfigError: a key is missing or unknown (another version wrote it), or a value is bad or of
        another type.
    """
    require_same_version(saved)
    return _filled(ResolvedConfig, saved)


def require_same_version(saved: Mapping[str, Any], remedy: str = "use that version") -> None:
    """Refuses a saved config whose settings are not those of this version.

    Raises:
      ConfigError: a key is missing or unknown.
    """
    missing, unknown = _differences(ResolvedConfig, saved)
    differing = [
        f"it lacks {', '.join(missing)}" if missing else "",
        f"it has {', '.join(unknown)}, which is unknown here" if unknown else "",
    ]
    another = (
        "the config was written by another version of jaxspec:"
        f" {'; '.join(filter(None, differing))}; {remedy}"
    )
    require(not missing and not unknown, another)


def _differences(cls: Any, saved: Any, prefix: str = "") -> tuple[list[str], list[str]]:
    """Settings of a class that the saved values lack, and saved ones that it does not have."""
    if isinstance(saved, list):
        inner = [_differences(cls, each, f"{prefix}{i}.") for i, each in enumerate(saved)]
        missing, unknown = ([name for each in inner for name in each[i]] for i in range(2))
        return missing, unknown
    if not isinstance(saved, Mapping):
        return [], []  # the class that it belongs to says what is wrong with it
    names = types_of(cls)
    missing = [f"{prefix}{name}" for name in names if name not in saved]
    unknown = [f"{prefix}{key}" for key in saved if key not in names]
    for name, wanted in _nested(cls).items():
        inner = _differences(wanted, saved.get(name), f"{prefix}{name}.")
        missing, unknown = missing + inner[0], unknown + inner[1]
    return missing, unknown


def _nested(cls: Any) -> dict[str, Any]:
    """The classes among a class's settings; one may be None instead."""
    return {
        name: found[0] for name, wanted in types_of(cls).items() if (found := classes_in(wanted))
    }


def _filled(cls: Any, saved: Mapping[str, Any]) -> Any:
    """An instance, which checks types and numbers itself; JSON has lists for tuples."""
    types, nested = types_of(cls), _nested(cls)

    def value(key: str, given: Any) -> Any:
        kinds = types[key], *get_args(types[key])
        if isinstance(given, list) and any(get_origin(kind) is tuple for kind in kinds):
            return tuple(value(key, each) for each in given)
        return (
            _filled(nested[key], given) if key in nested and isinstance(given, Mapping) else given
        )

    return cls(**{key: value(key, given) for key, given in saved.items()})


def differing_keys(
    saved: Mapping[str, Any], config: Config, free: frozenset[str] = FREE_ON_RESUME
) -> list[str]:
    """Lists the settings outside `free` that differ from a saved `to_json`, each as `key: saved ->
    now`."""
    if config.optimizer.schedule != "constant":  # which ends after `steps`
        free -= {"steps"}
    before, now = flat(saved), flat(to_json(config))
    pairs = {
        key: (before.get(key, "(absent)"), now.get(key, "(absent)"))
        for key in before | now
        if not stands_for(free, key)
    }
    return [f"{key}: {was} -> {value}" for key, (was, value) in pairs.items() if was != value]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a `to_json` by their dotted names."""
    nested = [
        flat(inner, f"{prefix}{key}.") if inner is not None else {f"{prefix}{key}": value}
        for key, value in tree.items()
        for inner in [_inside(value)]
    ]
    return {key: value for part in nested for key, value in part.items()}


def _inside(value: Any) -> Mapping[str, Any] | None:
    """What a value holds by name, or by number where it is a list of such; None: it is plain."""
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return {str(number): each for number, each in enumerate(value)}
    return value if isinstance(value, Mapping) else None


def stands_for(settings: Iterable[str], name: str) -> bool:
    """Whether a setting is among some, of which one that ends in a dot stands for all that start
    with it."""
    return any(
        name.startswith(setting) if setting.endswith(".") else name == setting
        for setting in settings
    )
