"""A config as nested plain values (config.json of a run), back from them, and what differs between two."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxspec.config import Config, require

_MESH = ("mesh.data", "mesh.tensor", "mesh.shard_above")
FREE_ON_RESUME = frozenset({"steps", "workdir", "staged", "save_every", "eval_every", "profile", "rollout.slice_rounds", *_MESH})
"""Keys that may differ when a run is resumed: they change where and how long it runs, not what it computes."""


def to_json(config: Config) -> dict[str, Any]:
    """Returns the config as nested plain values, for `config.json`."""
    return json.loads(json.dumps(asdict(config)))  # tuples become lists, as they will be when read back


def from_json(saved: Mapping[str, Any]) -> Config:
    """Returns the config that `to_json` gave.

    Raises:
      ConfigError: a key is missing or unknown (another version wrote it), or a value is bad or of another type.
    """
    missing, unknown = _differences(Config, saved)
    differing = [
        f"it lacks {', '.join(missing)}" if missing else "",
        f"it has {', '.join(unknown)}, which is unknown here" if unknown else "",
    ]
    another = f"the config was written by another version of jaxspec: {'; '.join(filter(None, differing))}; use that version"
    require(not missing and not unknown, another)
    return _filled(Config, saved)


def _differences(cls: Any, saved: Any, prefix: str = "") -> tuple[list[str], list[str]]:
    """Settings of a class that the saved values lack, and saved ones that it does not have."""
    if not isinstance(saved, Mapping):
        return [], []  # `_filled` says what is wrong with it
    names = [item.name for item in fields(cls)]
    missing, unknown = [f"{prefix}{name}" for name in names if name not in saved], [f"{prefix}{key}" for key in saved if key not in names]
    for name, wanted in _nested(cls).items():
        inner = _differences(wanted, saved.get(name), f"{prefix}{name}.")
        missing, unknown = missing + inner[0], unknown + inner[1]
    return missing, unknown


def _nested(cls: Any) -> dict[str, Any]:
    """The classes among a class's settings; one may be None instead."""
    found = {
        name: next((part for part in (wanted, *get_args(wanted)) if is_dataclass(part)), None)
        for name, wanted in get_type_hints(cls).items()
    }
    return {name: part for name, part in found.items() if part is not None}


def _filled(cls: Any, saved: Any, prefix: str = "") -> Any:
    require(isinstance(saved, Mapping), f"{prefix.rstrip('.')} is {saved!r}; it must be an object")
    types, nested, values = get_type_hints(cls), _nested(cls), {}
    for key, value in saved.items():
        wanted = types[key]
        if value is None and type(None) in get_args(wanted):
            values[key] = None
        elif key in nested:
            values[key] = _filled(nested[key], value, f"{prefix}{key}.")
        else:
            require(_fits(value, wanted), f"{prefix}{key} is {value!r}; it must be {_named(wanted)}")
            values[key] = _typed(value, wanted)
    return cls(**values)


def _typed(value: Any, wanted: Any) -> Any:
    return float(value) if wanted is float else tuple(value) if isinstance(value, list) else value


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value of JSON is of a setting's type."""
    if get_origin(wanted) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(wanted))
    if get_origin(wanted) is tuple:
        return isinstance(value, list) and all(_fits(item, get_args(wanted)[0]) for item in value)
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    return type(value) is wanted or (wanted is float and type(value) is int)


def _named(wanted: Any) -> str:
    """A setting's type, in words."""
    if get_origin(wanted) in (Union, UnionType):
        return " or ".join(_named(part) for part in get_args(wanted))
    if get_origin(wanted) is tuple:
        return f"a list of {get_args(wanted)[0].__name__}"
    return f"one of {', '.join(get_args(wanted))}" if get_origin(wanted) is Literal else f"of type {wanted.__name__}"


def differing_keys(saved: Mapping[str, Any], config: Config, free: frozenset[str] = FREE_ON_RESUME) -> list[str]:
    """Lists the settings outside `free` that differ from a saved `to_json`, each as `key: saved -> now`."""
    before, now = _flat(saved), _flat(to_json(config))
    pairs = {key: (before.get(key, "(absent)"), now.get(key, "(absent)")) for key in before | now if key not in free}
    return [f"{key}: {was} -> {value}" for key, (was, value) in pairs.items() if was != value]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    nested = [_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value} for key, value in tree.items()]
    return {key: value for part in nested for key, value in part.items()}
