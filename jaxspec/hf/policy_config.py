"""Conversion between config.json and `ModelSpec`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.hf.known_keys import DECODER_KEYS, check_keys
from jaxspec.hf.rope_config import parse_rope, rope_json
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
    architecture = _parse_architecture(keys)
    check_keys(keys, DECODER_KEYS, base.ignore)
    refuse_sliding_window(keys)
    heads, embed = keys.get_int("num_attention_heads"), keys.get_int("hidden_size")
    with prefix_errors(source), translate_settings(JSON_KEYS):
        family = _parse_family(keys, architecture)
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


def _parse_architecture(keys: JsonObject) -> FamilySpec:
    """Returns the family of the architecture, without its flags."""
    source, architecture = keys.source, next(iter(keys.get_strings("architectures")), None)
    supported = f"known are {', '.join(ARCHITECTURES)}"
    require(architecture is not None, f"{source}: no key 'architectures'; {supported}")
    require(
        architecture in ARCHITECTURES,
        f"{source}: the architecture {format_name(str(architecture))} is not supported;"
        f" {supported}",
    )
    family = ARCHITECTURES[str(architecture)]
    expected_type = family.model_type
    model_type = keys.get_string("model_type", expected_type)
    require(
        model_type == expected_type,
        f"{source}: architectures has {architecture}, which is of model_type {expected_type}, and"
        f" model_type is {format_value(model_type)}; correct one of them",
    )
    return family


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
