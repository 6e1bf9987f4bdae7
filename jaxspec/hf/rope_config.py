"""Conversion between config.json and rotary positions."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxspec.hf.known_keys import ROPE_KEYS, check_keys
from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import JsonObject, format_value
from jaxspec.inputs.spec import ModelSpec, RopeSpec


def parse_rope(keys: JsonObject, ignore: bool = False) -> tuple[float, float, RopeSpec]:
    """Parses the base, factor and kind of rotary positions.

    Reads the format of transformers 4 (rope_theta, rope_scaling) and that of transformers 5.
    `ignore` allows unknown keys.

    Raises:
      ConfigError: the kind is not supported, a key is missing or unknown, or keys contradict.
    """
    scaling = _find_scaling(keys)
    theta = _parse_theta(keys, scaling)
    max_positions = _parse_length(keys, "max_position_embeddings", 0)
    kind = _parse_kind(scaling)
    # Other kinds are refused below, with a message that lists the known ones.
    if kind in ROPE_KEYS:
        check_keys(scaling, ROPE_KEYS[kind], ignore)
    if kind == "default":
        _refuse_factor(scaling)
        return theta, 1.0, RopeSpec(context=max_positions)
    require(
        kind in ("linear", "yarn", "llama3"),
        f"{keys.source}: rope scaling {format_value(kind)} is not supported; known are default,"
        " linear, yarn, llama3",
    )
    original, factor = _parse_stretch(keys, scaling, kind, max_positions)
    # Files often keep the unscaled length, so only a length beyond original * factor counts.
    longest = max_positions if max_positions > original * factor else 0
    rope = RopeSpec(kind=kind, context=original, longest=longest)  # pyright: ignore[reportArgumentType]
    if kind == "llama3":
        rope = replace(rope, **_parse_numbers(scaling, ("low_freq_factor", "high_freq_factor")))
    if kind == "yarn":
        rope = replace(
            rope,
            **_parse_numbers(scaling, ("beta_fast", "beta_slow")),
            attention_factor=_parse_attention_factor(scaling, factor),
            truncate=scaling.get_bool("truncate", True),
        )
    return theta, factor, rope


def _parse_theta(keys: JsonObject, scaling: JsonObject) -> float:
    """Parses the base, inside or outside `scaling`."""
    theta = scaling.get_float("rope_theta", keys.get_float("rope_theta", 10_000.0))
    require(
        theta == keys.get_float("rope_theta", theta),
        f"{scaling.source}: rope_theta is {theta:g}, and {keys.content.get('rope_theta')} outside;"
        " libraries differ in the one that they use: correct one",
    )
    return theta


def _parse_length(keys: JsonObject, key: str, default: int) -> int:
    """Parses a number of positions. Files may write it as a float."""
    return int(keys.get_float(key)) if keys.has_key(key) else default


def _parse_kind(scaling: JsonObject) -> str:
    """Parses the kind of scaling, under either of its names."""
    kind = scaling.get_string("rope_type", scaling.get_string("type", "default"))
    require(
        kind == scaling.get_string("type", kind),
        f"{scaling.source}: rope_type is {format_value(kind)} and type"
        f" {format_value(scaling.content.get('type'))}; correct one",
    )
    return kind


def _refuse_factor(scaling: JsonObject) -> None:
    """Raises ConfigError for a factor without a kind."""
    is_unscaled = scaling.get_float("factor", 1.0) == 1
    require(
        is_unscaled,
        f"{scaling.source}: factor is {format_value(scaling.content.get('factor'))} without a"
        " rope_type, so that nothing is stretched; add rope_type, or take factor out",
    )


def _parse_stretch(
    keys: JsonObject, scaling: JsonObject, kind: str, max_positions: int
) -> tuple[int, float]:
    """Parses the unscaled context and its factor."""
    source = keys.source
    original = _parse_length(scaling, "original_max_position_embeddings", max_positions)
    message = (
        f"{source}: the rope scaling {kind!r} needs original_max_position_embeddings or"
        " max_position_embeddings; add one"
    )
    require(original > 0 or kind == "linear", message)
    # YaRN's factor follows from the two lengths if it is not stated.
    implied_factor = max_positions / original if kind == "yarn" and max_positions else None
    require(
        scaling.has_key("factor") or implied_factor is not None,
        f"{source}: the rope scaling {kind!r} has no key 'factor'; add it",
    )
    factor = scaling.get_float("factor", implied_factor)
    description = (
        f"{scaling.source}: factor is {factor:g}"
        if scaling.has_key("factor")
        else f"{source}: max_position_embeddings {max_positions} is too small"
    )
    require(
        factor >= 1,
        f"{description}; positions are stretched by 1 or more times"
        f" original_max_position_embeddings {original}: correct one",
    )
    return original, factor


def _parse_numbers(scaling: JsonObject, names: Sequence[str]) -> dict[str, Any]:
    """Parses optional numbers. Missing ones are left out."""
    return {name: scaling.get_float(name) for name in names if scaling.has_key(name)}


def _find_scaling(keys: JsonObject) -> JsonObject:
    """Returns the object with the rope scaling, under either of its names."""
    entries = [
        keys.get_object(key) for key in ("rope_parameters", "rope_scaling") if keys.has_key(key)
    ]
    entries = [entry for entry in entries if entry.content] or [keys.get_object("rope_scaling")]
    # The kind has two names, and the base may be outside, so these may differ.
    contents = [
        {"rope_type": entry.content.get("type"), **entry.content, "type": None, "rope_theta": None}
        for entry in entries
    ]
    require(
        contents[0] == contents[-1],
        f"{keys.source}: rope_parameters and rope_scaling differ, and libraries differ in the one"
        " that they use; correct one",
    )
    return entries[0]


def _parse_attention_factor(scaling: JsonObject, factor: float) -> float:
    """Parses YaRN's factor on cosines and sines. 0 = not stated."""
    # Transformers reads attention_factor or mscale. vLLM and SGLang use attn_factor times YaRN's
    # default. If both are given, they must agree.
    explicit, default = _explicit_factor(scaling, factor), yarn_attention_factor(factor)
    if not scaling.has_key("attn_factor"):
        return explicit
    product = scaling.get_float("attn_factor") * default
    require(
        not explicit or math.isclose(explicit, product, rel_tol=1e-4),
        f"{scaling.source}: attn_factor {scaling.get_float('attn_factor'):g} times YaRN's own"
        f" {default:g} is {product:g}, and attention_factor or mscale say {explicit:g}; correct"
        " one",
    )
    return explicit or product


def yarn_attention_factor(factor: float) -> float:
    """Computes YaRN's default attention factor (arXiv 2309.00071, equation 22)."""
    return 0.1 * math.log(factor) + 1


def _explicit_factor(scaling: JsonObject, factor: float) -> float:
    """Returns the attention factor as transformers reads it. 0 = not stated."""
    if scaling.has_key("attention_factor"):
        return scaling.get_float("attention_factor")
    # DeepSeek states two scales instead, of which transformers uses the quotient.
    if scaling.content.get("mscale") and scaling.content.get("mscale_all_dim"):
        numerator, denominator = (
            0.1 * scaling.get_float(key) * math.log(factor) + 1
            for key in ("mscale", "mscale_all_dim")
        )
        return numerator / denominator
    return 0.0


def rope_json(config: ModelSpec) -> dict[str, Any]:
    """Builds the keys of config.json for rotary positions."""
    rope, factor = config.rope, config.rope_factor
    context = {"max_position_embeddings": config.max_positions} if config.max_positions else {}
    content = {"rope_theta": config.rope_theta, "rope_scaling": None, **context}
    if factor == 1:
        return content
    scaling: dict[str, Any] = {
        "rope_type": rope.kind,
        "factor": factor,
        "original_max_position_embeddings": rope.context,
    }
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.kind == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
        if rope.attention_factor:
            default = yarn_attention_factor(factor)
            # Transformers reads the first key. vLLM and SGLang read the second.
            scaling |= {
                "attention_factor": rope.attention_factor,
                "attn_factor": rope.attention_factor / default,
            }
    return {**content, "rope_scaling": scaling}
