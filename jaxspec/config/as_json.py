"""A config as nested plain values (config.json of a run), back from them, and what differs between
two."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, get_args, get_origin

from jaxspec.config.settings import Config, ResolvedConfig
from jaxspec.inputs.checked import field_types, require, settings_classes

_MESH = ("mesh.data", "mesh.expert", "mesh.tensor", "mesh.shard_above")
_ENGINE = (
    "rollout.engine.slots",
    "rollout.engine.page_size",
    "rollout.engine.pages",
    "rollout.engine.stack_layers",
    "rollout.engine.command_buffers",
)
SPEED_SETTINGS = (
    "staged",
    "rollout.slice_rounds",
    "batch.micro_tokens",
    "optimizer.offload",
    *_ENGINE,
)
"""What changes nothing but the time and the memory that a program takes."""
_WHEN = ("steps", "save_every", "compare_plain", "profile")
FREE_ON_RESUME = frozenset({"workdir", "eval.", *_WHEN, *SPEED_SETTINGS, *_MESH})
"""Keys that may differ when a run is resumed: they change where and how long it runs, and what is
measured of it, not what it computes. One that ends in a dot stands for all that start with it."""


def to_json(config: Config) -> dict[str, Any]:
    """Returns the config as nested plain values, for `config.json`."""
    # tuples become lists, as they will be when read back
    return json.loads(json.dumps(asdict(config)))


def from_json(saved_settings: Mapping[str, Any]) -> ResolvedConfig:
    """Returns the config that `to_json` gave.

    Raises:
      ConfigError: a key is missing or unknown (another version wrote it), or a value is bad or of
        another type.
    """
    require_same_version(saved_settings)
    return _build_instance(ResolvedConfig, saved_settings)


def require_same_version(
    saved_settings: Mapping[str, Any], remedy: str = "use that version"
) -> None:
    """Refuses a saved config whose settings are not those of this version.

    Raises:
      ConfigError: a key is missing or unknown.
    """
    missing, unknown = _compare_keys(ResolvedConfig, saved_settings)
    differences = [
        f"it lacks {', '.join(missing)}" if missing else "",
        f"it has {', '.join(unknown)}, which is unknown here" if unknown else "",
    ]
    message = (
        "the config was written by another version of jaxspec:"
        f" {'; '.join(filter(None, differences))}; {remedy}"
    )
    require(not missing and not unknown, message)


def _compare_keys(cls: Any, saved_settings: Any, prefix: str = "") -> tuple[list[str], list[str]]:
    """Settings of a class that the saved values lack, and saved ones that it does not have."""
    if isinstance(saved_settings, list):
        pairs = [_compare_keys(cls, item, f"{prefix}{i}.") for i, item in enumerate(saved_settings)]
        missing, unknown = ([name for pair in pairs for name in pair[i]] for i in range(2))
        return missing, unknown
    if not isinstance(saved_settings, Mapping):
        return [], []  # the class that it belongs to says what is wrong with it
    names = field_types(cls)
    missing = [f"{prefix}{name}" for name in names if name not in saved_settings]
    unknown = [f"{prefix}{key}" for key in saved_settings if key not in names]
    for name, nested_class in _classes_in_fields(cls).items():
        nested = _compare_keys(nested_class, saved_settings.get(name), f"{prefix}{name}.")
        missing, unknown = missing + nested[0], unknown + nested[1]
    return missing, unknown


def _classes_in_fields(cls: Any) -> dict[str, Any]:
    """The classes among a class's settings; one may be None instead."""
    return {
        name: classes[0]
        for name, annotation in field_types(cls).items()
        if (classes := settings_classes(annotation))
    }


def _build_instance(cls: Any, saved_settings: Mapping[str, Any]) -> Any:
    """An instance, which checks types and numbers itself; JSON has lists for tuples."""
    types, nested = field_types(cls), _classes_in_fields(cls)

    def read_value(key: str, raw_value: Any) -> Any:
        alternatives = types[key], *get_args(types[key])
        if isinstance(raw_value, list) and any(
            get_origin(alternative) is tuple for alternative in alternatives
        ):
            return tuple(read_value(key, item) for item in raw_value)
        return (
            _build_instance(nested[key], raw_value)
            if key in nested and isinstance(raw_value, Mapping)
            else raw_value
        )

    return cls(**{key: read_value(key, raw_value) for key, raw_value in saved_settings.items()})


def list_changed_settings(
    saved_settings: Mapping[str, Any], config: Config, ignored: frozenset[str] = FREE_ON_RESUME
) -> list[str]:
    """Lists the settings outside `ignored` that differ from a saved `to_json`, each as `key: saved
    -> now`."""
    if config.optimizer.schedule != "constant":  # which ends after `steps`
        ignored -= {"steps"}
    saved_values, current_values = (
        flatten_settings(saved_settings),
        flatten_settings(to_json(config)),
    )
    pairs = {
        key: (saved_values.get(key, "(absent)"), current_values.get(key, "(absent)"))
        for key in saved_values | current_values
        if not includes_setting(ignored, key)
    }
    return [
        f"{key}: {saved_value} -> {current_value}"
        for key, (saved_value, current_value) in pairs.items()
        if saved_value != current_value
    ]


def flatten_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a `to_json` by their dotted names."""
    flat_children = [
        flatten_settings(child, f"{prefix}{key}.")
        if child is not None
        else {f"{prefix}{key}": value}
        for key, value in tree.items()
        for child in [_child_values(value)]
    ]
    return {key: value for flat_child in flat_children for key, value in flat_child.items()}


def _child_values(value: Any) -> Mapping[str, Any] | None:
    """What a value holds by name, or by number where it is a list of such; None: it is plain."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, Mapping) else None


def includes_setting(settings: Iterable[str], name: str) -> bool:
    """Whether a setting is among some, of which one that ends in a dot stands for all that start
    with it."""
    return any(
        name.startswith(setting) if setting.endswith(".") else name == setting
        for setting in settings
    )
