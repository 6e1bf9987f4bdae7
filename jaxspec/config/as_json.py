"""Conversion of configs to and from JSON, and comparison of two."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, get_args, get_origin

from jaxspec.config.algorithm import resolve_importance
from jaxspec.config.settings import Config, GenerationConfig, ResolvedConfig, ScheduleConfig
from jaxspec.drafts.kinds import SECTIONS
from jaxspec.inputs.checked import field_types, require, settings_classes

# Checkpoints are restored on any mesh.
_MESH = ("mesh.data", "mesh.expert", "mesh.tensor", "mesh.shard_above", "generation.")
_ENGINE = (
    "rollout.engine.slots",
    "rollout.engine.page_size",
    "rollout.engine.pages",
    "rollout.engine.stack_layers",
    "rollout.engine.command_buffers",
)
SPEED_SETTINGS = (
    "schedule.kind",
    "schedule.slice_rounds",
    "batch.micro_tokens",
    "optimizer.offload",
    *_ENGINE,
)
"""Settings that change time and memory, but results only by rounding."""
_WHEN = ("steps", "save_every", "compare_plain", "profile")
# Evaluations leave the rest of a run bitwise the same.
FREE_ON_RESUME = frozenset({"workdir", "eval.", *_WHEN, *SPEED_SETTINGS, *_MESH})
"""Settings that may differ when a run is resumed.

They change where and how long it runs, and its measurements, but results only by rounding. A name
that ends in a dot stands for all settings that start with it.
"""

_RENAMED_OPTIONS = {
    "staged": "schedule.kind staged",
    "no_staged": "schedule.kind fused",
    "rollout.slice_rounds": "schedule.slice_rounds",
}
# One setting of several kinds has become one of each. The last entry is an option only.
_SECTIONS_OF_DRAFT_SETTINGS = {
    "vocab": ("eagle3",),
    "ffn": ("eagle3", "mtp", "model"),
    "layers": ("mtp", "model"),
    "embedding_first": ("mtp",),
    "tap_convention": ("eagle3",),
    "no_embedding_first": ("mtp",),
}


def list_renamed_options(draft_kind: str) -> dict[str, str]:
    """Lists new words for options of earlier versions.

    Options of single kinds of draft are those of `draft_kind`, if it has them.
    """
    names = dict(_RENAMED_OPTIONS)
    for name, kinds in _SECTIONS_OF_DRAFT_SETTINGS.items():
        sections = [draft_kind] if draft_kind in kinds else kinds
        new_names = [f"rollout.draft.{section}.{name}" for section in sections]
        names[f"rollout.draft.{name}"] = " or --".join(new_names)
    return names


def rename_settings(saved_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Moves saved settings of earlier versions to their new names."""
    settings = dict(saved_settings)
    if not isinstance(settings.get("rollout"), Mapping):
        return settings
    rollout = settings["rollout"] = dict(settings["rollout"])
    if "schedule" not in settings and "staged" in settings:
        schedule = {"kind": "staged" if settings.pop("staged") else "fused"}
        if "slice_rounds" in rollout:
            schedule["slice_rounds"] = rollout.pop("slice_rounds")
        settings["schedule"] = schedule
    if isinstance(settings.get("schedule"), Mapping):
        # Earlier versions had no pipelined schedule. The defaults of its settings have no effect.
        settings["schedule"] = {"lag": ScheduleConfig().lag, **settings["schedule"]}
        settings.setdefault("generation", asdict(GenerationConfig()))
    if isinstance(rollout.get("draft"), Mapping):
        rollout["draft"] = _rename_draft_settings(rollout["draft"])
    return settings


def _rename_draft_settings(saved_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Moves settings of single kinds of draft to their sections."""
    settings = dict(saved_settings)
    sections: dict[str, dict[str, Any]] = {}
    for name, kinds in _SECTIONS_OF_DRAFT_SETTINGS.items():
        if name not in settings:
            continue
        value = settings.pop(name)
        # Kinds that are not in use get the value as well. Nothing reads theirs.
        for kind in kinds:
            sections.setdefault(kind, {})[name] = value
    return settings | sections


def list_unread_sections(config: Config) -> frozenset[str]:
    """Lists the sections of kinds of draft that are not in use."""
    kind = config.rollout.draft.kind
    return frozenset(f"rollout.draft.{section}." for section in SECTIONS if section != kind)


def to_json(config: Config) -> dict[str, Any]:
    """Returns nested plain values, for `config.json`."""
    # Tuples become lists, as in a config that is read back.
    return json.loads(json.dumps(asdict(config)))


def from_json(saved_settings: Mapping[str, Any]) -> ResolvedConfig:
    """Returns the config that `to_json` was given.

    Raises:
      ConfigError: A key is missing or unknown (another version wrote it), or a value is invalid.
    """
    # First, since a missing key would otherwise get a default that the run did not have.
    require_same_version(saved_settings)
    return _build_instance(ResolvedConfig, saved_settings)


def require_same_version(
    saved_settings: Mapping[str, Any], remedy: str = "use that version"
) -> None:
    """Refuses a saved config with other settings.

    Raises:
      ConfigError: A key is missing or unknown.
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
    """Returns missing and unknown settings of saved values."""
    if isinstance(saved_settings, list):
        # A list of settings, such as `mixture`.
        pairs = [_compare_keys(cls, item, f"{prefix}{i}.") for i, item in enumerate(saved_settings)]
        missing, unknown = ([name for pair in pairs for name in pair[i]] for i in range(2))
        return missing, unknown
    if not isinstance(saved_settings, Mapping):
        return [], []  # its class reports the wrong type
    names = field_types(cls)
    missing = [f"{prefix}{name}" for name in names if name not in saved_settings]
    unknown = [f"{prefix}{key}" for key in saved_settings if key not in names]
    for name, nested_class in _classes_in_fields(cls).items():
        nested = _compare_keys(nested_class, saved_settings.get(name), f"{prefix}{name}.")
        missing, unknown = missing + nested[0], unknown + nested[1]
    return missing, unknown


def _classes_in_fields(cls: Any) -> dict[str, Any]:
    """Returns the settings class of each field that has one, by field name."""
    return {
        name: classes[0]
        for name, annotation in field_types(cls).items()
        # A field's type names at most one dataclass: alone, next to None or inside a tuple.
        if (classes := settings_classes(annotation))
    }


def _build_instance(cls: Any, saved_settings: Mapping[str, Any]) -> Any:
    """Builds a dataclass from saved values."""
    types, nested = field_types(cls), _classes_in_fields(cls)

    def read_value(key: str, raw_value: Any) -> Any:
        # JSON has lists for tuples, also where a tuple is one of several types.
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


def _resolve_lag(values: dict[str, Any]) -> dict[str, Any]:
    """Resolves the lag of a schedule, and the correction that depends on it."""
    # The kind of schedule may change on resume, but not a lag, which changes results.
    lag = values.get("schedule.lag", 0) if values.get("schedule.kind") == "pipelined" else 0
    values = values | {"schedule.lag": lag}
    if values.get("loss.importance") == "auto":
        names = ("loss.kind", "loss.function", "loss.logprobs")
        correction = resolve_importance(lag, *(values.get(name, "") for name in names))
        values |= dict(zip(("loss.importance", "loss.logprobs"), correction, strict=True))
    return values


def list_changed_settings(
    saved_settings: Mapping[str, Any], config: Config, ignored: frozenset[str] = FREE_ON_RESUME
) -> list[str]:
    """Lists settings that differ from a saved `to_json`.

    Each is `key: saved -> now`. Those in `ignored` are left out, and those of kinds of draft that
    are not in use.
    """
    ignored |= list_unread_sections(config)
    # Other schedules depend on `steps`, the batch at which they end.
    if config.optimizer.schedule != "constant":
        ignored -= {"steps"}
    # Both go through `to_json`, so that tuples and lists compare equal.
    saved_values, current_values = (
        _resolve_lag(flatten_settings(saved_settings)),
        _resolve_lag(flatten_settings(to_json(config))),
    )
    pairs = {
        # Lists of sets may differ in length, so either side can lack a key.
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
    """Flattens the result of `to_json` to values by dotted name."""
    flat_children = [
        flatten_settings(child, f"{prefix}{key}.")
        if child is not None
        else {f"{prefix}{key}": value}
        for key, value in tree.items()
        for child in [_child_values(value)]
    ]
    return {key: value for flat_child in flat_children for key, value in flat_child.items()}


def _child_values(value: Any) -> Mapping[str, Any] | None:
    """Returns a value's children by name, or None if it is plain.

    Children of a list of mappings are named by their index.
    """
    # An empty list has no children, and must stay a value.
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, Mapping) else None


def includes_setting(settings: Iterable[str], name: str) -> bool:
    """Returns whether settings include a name.

    An entry that ends in a dot stands for all names that start with it.
    """
    return any(
        name.startswith(setting) if setting.endswith(".") else name == setting
        for setting in settings
    )
