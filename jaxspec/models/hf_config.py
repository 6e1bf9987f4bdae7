"""config.json of a Hugging Face folder as a `ModelConfig`, and back."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.checked import read_from, require
from jaxspec.config import FamilyConfig, ModelConfig, RopeConfig

_QWEN3 = FamilyConfig()
_ARCHITECTURES: dict[str, FamilyConfig] = {
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": replace(_QWEN3, model_type="qwen3_moe"),
    "Qwen2ForCausalLM": FamilyConfig(model_type="qwen2", query_key_norm=False, attention_bias=True),
    "LlamaForCausalLM": FamilyConfig(model_type="llama", query_key_norm=False),
    "MiMoForCausalLM": FamilyConfig(model_type="mimo", query_key_norm=False, attention_bias=True),
}
"""Architectures by their name in config.json; what a file may vary in them is read by `_family`."""
_REFUSED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (),
    "use_mrope": (False,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
}
"""Keys whose other values ask for what is not built here; None always passes."""


_ROPE_NUMBERS = (
    *("rope_theta", "max_position_embeddings", "original_max_position_embeddings", "factor", "beta_fast", "beta_slow"),
    *("low_freq_factor", "high_freq_factor", "attention_factor"),
)


def model_config(raw: Mapping[str, Any], source: str, base: ModelConfig) -> ModelConfig:
    """The policy that a config.json (`raw`, at `source`) describes; path, ignore, dtype and remat are those of `base`.

    A `rope_factor` of `base` above 1 stretches the positions that the checkpoint allows for by YaRN, in place of any scaling of its own.

    Raises:
      ConfigError: an architecture that is not known, a key that is missing, or a value that is not supported, by name.
    """
    name = next(iter(raw.get("architectures") or ()), None)
    known = f"known are {', '.join(_ARCHITECTURES)}"
    require(name is not None, f"{source}: no key 'architectures'; {known}")
    require(name in _ARCHITECTURES, f"{source}: the architecture {name} is not supported; {known}")
    for key, allowed in _REFUSED.items():
        value = raw.get(key)
        remedy = f"only {', '.join(map(str, allowed))} is supported" if allowed else "give weights that are not quantized"
        require(value is None or value in allowed, f"{source}: {key} is {value}; {remedy}")
    _refuse_sliding(raw, source)
    family = _family(raw, source, _ARCHITECTURES[str(name)])
    heads = _number(raw, source, "num_attention_heads")
    embed = _number(raw, source, "hidden_size")
    theta, factor, rope = rope_of(raw, source)
    if base.rope_factor != 1:
        require(
            rope.context > 0, f"{source}: no key 'max_position_embeddings', which model.rope_factor {base.rope_factor:g} stretches; add it"
        )
        factor = base.rope_factor * (rope.longest or rope.context * factor) / rope.context
        rope = RopeConfig(context=rope.context)
    sizes: dict[str, Any] = {
        "vocab": _number(raw, source, "vocab_size"),
        "layers": _number(raw, source, "num_hidden_layers"),
        "embed": embed,
        "heads": heads,
        "kv_heads": _number(raw, source, "num_key_value_heads", heads),
        "head_size": _number(raw, source, "head_dim", embed // heads),
        "ffn": _number(raw, source, "moe_intermediate_size" if family.experts else "intermediate_size"),
        "rope_theta": theta,
        "rope_factor": factor,
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "tied": bool(raw.get("tie_word_embeddings", False)),
        "rope": rope,
        "family": family,
    }
    with read_from(source):
        return replace(base, **sizes)


def _family(raw: Mapping[str, Any], source: str, family: FamilyConfig) -> FamilyConfig:
    if family.model_type == "qwen3_moe":
        renamed = raw.get("num_local_experts")  # by transformers 5
        experts, chosen = _number(raw, source, "num_experts", renamed), _number(raw, source, "num_experts_per_tok")
        # transformers' own default, for files that leave it out
        family = replace(family, experts=experts, experts_per_token=chosen, normalize_experts=bool(raw.get("norm_topk_prob", False)))
    if family.model_type in ("qwen3", "qwen3_moe", "llama"):  # the others have biases whatever the key says
        bias = bool(raw.get("attention_bias", False))
        family = replace(family, attention_bias=bias, output_bias=bias)
    return family


def _refuse_sliding(raw: Mapping[str, Any], source: str) -> None:
    slides = bool(raw.get("use_sliding_window")) and raw.get("max_window_layers", 0) < raw.get("num_hidden_layers", 0)
    slides |= any(kind != "full_attention" for kind in raw.get("layer_types") or ())
    require(not slides, f"{source}: sliding-window attention (use_sliding_window, layer_types) is not supported; only full attention is")


def _number(raw: Mapping[str, Any], source: str, key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    require(value is not None, f"{source}: no key {key!r}; add it, or download the file again")
    require(isinstance(value, int) and value > 0, f"{source}: {key} is {value!r}; it must be a positive whole number")
    assert isinstance(value, int)
    return value


def rope_of(raw: Mapping[str, Any], source: str) -> tuple[float, float, RopeConfig]:
    """Base, factor and kind of the rotary positions, in the old form (rope_theta, rope_scaling) or that of transformers 5."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    require(isinstance(given, Mapping), f"{source}: rope_scaling is {given!r}; it must be an object or null")
    numbers = {**raw, **given}
    for key in _ROPE_NUMBERS:
        value = numbers.get(key)
        real = value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0)
        require(real, f"{source}: {key} is {value!r}; it must be a positive number")
    theta = float(given.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    longest = int(raw.get("max_position_embeddings") or 0)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return theta, 1.0, RopeConfig(context=longest)
    require(
        kind in ("linear", "yarn", "llama3"), f"{source}: rope scaling {kind!r} is not supported; known are default, linear, yarn, llama3"
    )
    original = int(given.get("original_max_position_embeddings") or longest)
    known = f"{source}: the rope scaling {kind!r} needs original_max_position_embeddings or max_position_embeddings; add one"
    require(original > 0 or kind == "linear", known)
    factor = given.get("factor") or (longest / original if kind == "yarn" and original else None)
    require(bool(factor), f"{source}: the rope scaling {kind!r} has no key 'factor'; add it")
    assert factor is not None
    rope = RopeConfig(kind=kind, context=original, longest=longest if longest > original * factor else 0)
    with read_from(source):
        if kind == "llama3":
            rope = replace(rope, **{key: float(given[key]) for key in ("low_freq_factor", "high_freq_factor") if key in given})
        if kind == "yarn":
            numbers = {key: float(given[key]) for key in ("beta_fast", "beta_slow") if given.get(key) is not None}
            rope = replace(rope, **numbers, attention_factor=_attention_factor(given, factor), truncate=given.get("truncate", True))
    return theta, float(factor), rope


def _attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """YaRN's factor on cosines and sines where the file sets it, as a number or by DeepSeek's mscale; else 0."""
    if given.get("attention_factor"):
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        numerator, denominator = (0.1 * given[key] * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim"))
        return numerator / denominator
    return 0.0


def architecture_of(config: ModelConfig) -> str:
    """The name of a model's class in config.json."""
    return next(name for name, entry in _ARCHITECTURES.items() if entry.model_type == config.family.model_type)


def config_json(config: ModelConfig, dtype: str, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """config.json of a policy with weights of `dtype`, in the form that transformers (4 and 5), vLLM and SGLang read alike.

    `special_ids` are added as they are: eos_token_id and the like.
    """
    family = config.family
    written: dict[str, Any] = {
        "architectures": [architecture_of(config)],
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
        written |= {
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
    return written


def rope_json(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json about positions; stretched ones allow for the context times the factor."""
    rope, factor = config.rope, config.rope_factor
    longest = {"max_position_embeddings": config.positions} if config.positions else {}
    written = {"rope_theta": config.rope_theta, "rope_scaling": None, **longest}
    if factor == 1:
        return written
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": factor, "original_max_position_embeddings": rope.context}
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling |= {"attention_factor": rope.attention_factor} if rope.attention_factor else {}
    return {**written, "rope_scaling": scaling}
