"""Conversion between config.json and `ModelSpec`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.hf.known_keys import DECODER_KEYS, ROPE_KEYS, check_keys
from jaxspec.inputs.checked import prefix_errors, require, translate_settings
from jaxspec.inputs.json_keys import JsonObject, format_name, format_value
from jaxspec.inputs.spec import (
    ARCHITECTURES,
    FamilySpec,
    ModelConfig,
    ModelSpec,
    RopeSpec,
    implied_family,
)

JSON_KEYS = {
    "model.vocab": "vocab_size",
    "model.layers": "num_hidden_layers",
    "model.embed": "hidden_size",
    "model.heads": "num_attention_heads",
    "model.kv_heads": "num_key_value_heads",
    "model.head_size": "head_dim",
    "model.ffn": "intermediate_size",
    "model.norm_eps": "rms_norm_eps",
    "model.family.experts": "num_experts",
    "model.family.experts_per_token": "num_experts_per_tok",
    "model.rope_theta": "rope_theta",
    **{
        f"model.rope.{key}": key
        for key in (
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "low_freq_factor",
            "high_freq_factor",
        )
    },
}
"""Keys of config.json by setting, for error messages."""


def parse_policy_config(content: Mapping[str, Any], source: str, base: ModelConfig) -> ModelSpec:
    """Parses the config.json of a policy.

    Args:
      content: content of the file.
      source: name of the file in messages.
      base: has path, ignore, dtype and remat of the policy. A rope_factor above 1 extends the
        positions of the checkpoint by YaRN, in place of its own scaling.

    Raises:
      ConfigError: the architecture is unknown, a key is missing, or a value is not supported.
    """
    keys = JsonObject(content, source)
    architecture = next(iter(keys.get_strings("architectures")), None)
    supported = f"known are {', '.join(ARCHITECTURES)}"
    require(architecture is not None, f"{source}: no key 'architectures'; {supported}")
    require(
        architecture in ARCHITECTURES,
        f"{source}: the architecture {format_name(str(architecture))} is not supported;"
        f" {supported}",
    )
    expected_type = ARCHITECTURES[str(architecture)].model_type
    model_type = keys.get_string("model_type", expected_type)
    require(
        model_type == expected_type,
        f"{source}: architectures has {architecture}, which is of model_type {expected_type}, and"
        f" model_type is {format_value(model_type)}; correct one of them",
    )
    check_keys(keys, DECODER_KEYS, base.ignore)
    refuse_sliding_window(keys)
    heads, embed = keys.get_int("num_attention_heads"), keys.get_int("hidden_size")
    with prefix_errors(source), translate_settings(JSON_KEYS):
        family = _parse_family(keys, ARCHITECTURES[str(architecture)])
        theta, factor, rope = parse_rope(keys, base.ignore)
        if base.rope_factor != 1:
            reason = f"which model.rope_factor {base.rope_factor:g} stretches"
            require(
                rope.context > 0, f"{source}: no key 'max_position_embeddings', {reason}; add it"
            )
            # The new factor covers the old one, as YaRN scales from the unscaled context.
            factor = base.rope_factor * (rope.longest or rope.context * factor) / rope.context
            rope = RopeSpec(context=rope.context)
        return ModelSpec(
            path=base.path,
            ignore=base.ignore,
            dtype=base.dtype,
            remat=base.remat,
            vocab=keys.get_int("vocab_size"),
            layers=keys.get_int("num_hidden_layers"),
            embed=embed,
            heads=heads,
            kv_heads=keys.get_int("num_key_value_heads", heads),
            head_size=parse_head_size(keys, embed, heads),
            ffn=keys.get_int("moe_intermediate_size" if family.experts else "intermediate_size"),
            rope_theta=theta,
            rope_factor=factor,
            norm_eps=keys.get_float("rms_norm_eps", 1e-6),
            tied=keys.get_bool("tie_word_embeddings", False),
            rope=rope,
            family=family,
        )


def _parse_family(keys: JsonObject, family: FamilySpec) -> FamilySpec:
    """Parses the flags of an architecture."""
    if family.model_type == "qwen3_moe":
        # Transformers 5 writes num_local_experts.
        alias = keys.get_int("num_local_experts") if keys.has_key("num_local_experts") else None
        experts, active = (keys.get_int("num_experts", alias), keys.get_int("num_experts_per_tok"))
        require(
            alias in (None, experts),
            f"{keys.source}: num_experts is {experts} and num_local_experts {alias}; correct one",
        )
        # Transformers has the same default for norm_topk_prob.
        family = replace(
            family,
            experts=experts,
            experts_per_token=active,
            normalize_experts=keys.get_bool("norm_topk_prob", False),
        )
    family = implied_family(replace(family, attention_bias=keys.get_bool("attention_bias", False)))
    for name, expected in (
        ("qkv_bias", family.attention_bias),
        ("use_qk_norm", family.query_key_norm),
    ):
        require(
            keys.get_bool(name, expected) == expected,
            f"{keys.source}: {name} is {not expected}, and {family.model_type} is built here with"
            f" {expected} alone",
        )
    return family


def refuse_sliding_window(keys: JsonObject) -> None:
    """Raises ConfigError if a layer has sliding-window attention."""
    has_window = any(kind != "full_attention" for kind in keys.get_strings("layer_types"))
    if keys.get_bool("use_sliding_window", False):
        full_layers = keys.get_int("max_window_layers", 0, minimum=0)
        # Layers with experts ignore max_window_layers, and all have a window.
        has_window |= full_layers < keys.get_int("num_hidden_layers") or keys.has_key("num_experts")
    remedy = "is not supported; choose a model with full attention"
    require(
        not has_window,
        f"{keys.source}: sliding-window attention (use_sliding_window, layer_types) {remedy}",
    )


def parse_head_size(keys: JsonObject, width: int, heads: int) -> int:
    """Parses the size of a head. The default is width / heads."""
    message = (
        f"{keys.source}: no key 'head_dim', and hidden_size {width} is below num_attention_heads"
        f" {heads}; add it, or correct one of them"
    )
    require(keys.has_key("head_dim") or heads <= width, message)
    return keys.get_int("head_dim", width // heads)


def parse_rope(keys: JsonObject, ignore: bool = False) -> tuple[float, float, RopeSpec]:
    """Parses the base, factor and kind of rotary positions.

    Reads the format of transformers 4 (rope_theta, rope_scaling) and that of transformers 5.
    `ignore` allows unknown keys.
    """
    source = keys.source
    scaling = _find_scaling(keys)
    theta = scaling.get_float("rope_theta", keys.get_float("rope_theta", 10_000.0))
    require(
        theta == keys.get_float("rope_theta", theta),
        f"{scaling.source}: rope_theta is {theta:g}, and {keys.content.get('rope_theta')} outside;"
        " libraries differ in the one that they use: correct one",
    )
    max_positions = (
        int(keys.get_float("max_position_embeddings"))
        if keys.has_key("max_position_embeddings")
        else 0
    )
    kind = scaling.get_string("rope_type", scaling.get_string("type", "default"))
    require(
        kind == scaling.get_string("type", kind),
        f"{scaling.source}: rope_type is {format_value(kind)} and type"
        f" {format_value(scaling.content.get('type'))}; correct one",
    )
    # Other kinds are refused below, with a message that lists the known ones.
    if kind in ROPE_KEYS:
        check_keys(scaling, ROPE_KEYS[kind], ignore)
    if kind == "default":
        is_unscaled = scaling.get_float("factor", 1.0) == 1
        require(
            is_unscaled,
            f"{scaling.source}: factor is {format_value(scaling.content.get('factor'))} without a"
            " rope_type, so that nothing is stretched; add rope_type, or take factor out",
        )
        return theta, 1.0, RopeSpec(context=max_positions)
    require(
        kind in ("linear", "yarn", "llama3"),
        f"{source}: rope scaling {format_value(kind)} is not supported; known are default, linear,"
        " yarn, llama3",
    )
    original = (
        int(scaling.get_float("original_max_position_embeddings"))
        if scaling.has_key("original_max_position_embeddings")
        else max_positions
    )
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
    # Files often keep the unscaled length, so only one beyond original * factor counts.
    max_positions = max_positions if max_positions > original * factor else 0
    rope = RopeSpec(kind=kind, context=original, longest=max_positions)  # pyright: ignore[reportArgumentType]
    if kind == "llama3":
        rope = replace(
            rope,
            **{
                key: scaling.get_float(key)
                for key in ("low_freq_factor", "high_freq_factor")
                if scaling.has_key(key)
            },
        )
    if kind == "yarn":
        numbers = {
            key: scaling.get_float(key)
            for key in ("beta_fast", "beta_slow")
            if scaling.has_key(key)
        }
        rope = replace(
            rope,
            **numbers,
            attention_factor=_parse_attention_factor(scaling, factor),
            truncate=scaling.get_bool("truncate", True),
        )
    return theta, factor, rope


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
    # Transformers reads this factor. vLLM and SGLang multiply attn_factor by YaRN's default.
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


def architecture_name(config: ModelSpec) -> str:
    """Returns the class name of a model in transformers."""
    return next(
        name
        for name, entry in ARCHITECTURES.items()
        if entry.model_type == config.family.model_type
    )


def policy_config_json(
    config: ModelSpec, dtype: str, special_ids: Mapping[str, int]
) -> dict[str, Any]:
    """Builds the config.json of a policy with weights of `dtype`.

    Transformers 4 and 5, vLLM and SGLang can read it. `special_ids` are added unchanged, such as
    eos_token_id.
    """
    family = config.family
    content: dict[str, Any] = {
        "architectures": [architecture_name(config)],
        "model_type": family.model_type,
        "vocab_size": config.vocab,
        "num_hidden_layers": config.layers,
        "hidden_size": config.embed,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_bias": family.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.layers,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
        **special_ids,
        **rope_json(config),
    }
    if family.experts:
        content |= {
            "intermediate_size": config.ffn * family.experts_per_token,
            "moe_intermediate_size": config.ffn,
            "num_experts": family.experts,
            "num_experts_per_tok": family.experts_per_token,
            "norm_topk_prob": family.normalize_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
    return content


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
            # Transformers reads the first, vLLM and SGLang the second.
            scaling |= {
                "attention_factor": rope.attention_factor,
                "attn_factor": rope.attention_factor / default,
            }
    return {**content, "rope_scaling": scaling}
