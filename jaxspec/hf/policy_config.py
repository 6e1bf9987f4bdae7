"""config.json of a Hugging Face folder as a `ModelSpec`, and back."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.hf.known_keys import DECODER, ROPE, check_keys
from jaxspec.inputs.checked import called, read_from, require
from jaxspec.inputs.json_keys import Keys, named, shown
from jaxspec.inputs.spec import ARCHITECTURES, FamilySpec, ModelConfig, ModelSpec, RopeSpec, implied

KEYS = {
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
"""What settings that are read from a config.json are called there."""


def model_config(raw: Mapping[str, Any], source: str, base: ModelConfig) -> ModelSpec:
    """The policy that a config.json (`raw`, at `source`) describes; path, ignore, dtype and remat
    are those of `base`.

    A `rope_factor` of `base` above 1 stretches the positions that the checkpoint allows for by
    YaRN, in place of any scaling of its own.

    Raises:
      ConfigError: an architecture that is not known, a key that is missing, or a value that is not
        supported, by name.
    """
    keys = Keys(raw, source)
    name = next(iter(keys.texts("architectures")), None)
    known = f"known are {', '.join(ARCHITECTURES)}"
    require(name is not None, f"{source}: no key 'architectures'; {known}")
    require(
        name in ARCHITECTURES,
        f"{source}: the architecture {named(str(name))} is not supported; {known}",
    )
    own = ARCHITECTURES[str(name)].model_type
    kind = keys.text("model_type", own)
    require(
        kind == own,
        f"{source}: architectures has {name}, which is of model_type {own}, and model_type is"
        f" {shown(kind)}; correct one of them",
    )
    check_keys(keys, DECODER, base.ignore)
    refuse_sliding(keys)
    heads, embed = keys.whole("num_attention_heads"), keys.whole("hidden_size")
    with read_from(source), called(KEYS):
        family = _family(keys, ARCHITECTURES[str(name)])
        theta, factor, rope = rope_of(keys, base.ignore)
        if base.rope_factor != 1:
            stretched = f"which model.rope_factor {base.rope_factor:g} stretches"
            require(
                rope.context > 0, f"{source}: no key 'max_position_embeddings', {stretched}; add it"
            )
            factor = base.rope_factor * (rope.longest or rope.context * factor) / rope.context
            rope = RopeSpec(context=rope.context)
        return ModelSpec(
            path=base.path,
            ignore=base.ignore,
            dtype=base.dtype,
            remat=base.remat,
            vocab=keys.whole("vocab_size"),
            layers=keys.whole("num_hidden_layers"),
            embed=embed,
            heads=heads,
            kv_heads=keys.whole("num_key_value_heads", heads),
            head_size=head_size_of(keys, embed, heads),
            ffn=keys.whole("moe_intermediate_size" if family.experts else "intermediate_size"),
            rope_theta=theta,
            rope_factor=factor,
            norm_eps=keys.number("rms_norm_eps", 1e-6),
            tied=keys.flag("tie_word_embeddings", False),
            rope=rope,
            family=family,
        )


def _family(keys: Keys, family: FamilySpec) -> FamilySpec:
    if family.model_type == "qwen3_moe":
        # by transformers 5
        renamed = keys.whole("num_local_experts") if keys.has("num_local_experts") else None
        experts, chosen = keys.whole("num_experts", renamed), keys.whole("num_experts_per_tok")
        require(
            renamed in (None, experts),
            f"{keys.source}: num_experts is {experts} and num_local_experts {renamed}; correct one",
        )
        # transformers' own default, for files that leave it out
        family = replace(
            family,
            experts=experts,
            experts_per_token=chosen,
            normalize_experts=keys.flag("norm_topk_prob", False),
        )
    family = implied(replace(family, attention_bias=keys.flag("attention_bias", False)))
    for name, built in (
        ("qkv_bias", family.attention_bias),
        ("use_qk_norm", family.query_key_norm),
    ):
        require(
            keys.flag(name, built) == built,
            f"{keys.source}: {name} is {not built}, and {family.model_type} is built here with"
            f" {built} alone",
        )
    return family


def refuse_sliding(keys: Keys) -> None:
    """Raises ConfigError if some layers attend to a window only."""
    slides = any(kind != "full_attention" for kind in keys.texts("layer_types"))
    if keys.flag("use_sliding_window", False):
        full = keys.whole("max_window_layers", 0, least=0)
        # experts' layers all slide, whatever that key says
        slides |= full < keys.whole("num_hidden_layers") or keys.has("num_experts")
    remedy = "is not supported; only full attention is"
    require(
        not slides,
        f"{keys.source}: sliding-window attention (use_sliding_window, layer_types) {remedy}",
    )


def head_size_of(keys: Keys, width: int, heads: int) -> int:
    """The size of a head, by default the width over the heads."""
    few = (
        f"{keys.source}: no key 'head_dim', and hidden_size {width} is below num_attention_heads"
        f" {heads}; add it, or correct one of them"
    )
    require(keys.has("head_dim") or heads <= width, few)
    return keys.whole("head_dim", width // heads)


def rope_of(keys: Keys, ignore: bool = False) -> tuple[float, float, RopeSpec]:
    """Base, factor and kind of the rotary positions, in the old form (rope_theta, rope_scaling) or
    that of transformers 5; `ignore` is as in `check_keys`."""
    source = keys.source
    given = _rope_part(keys)
    theta = given.number("rope_theta", keys.number("rope_theta", 10_000.0))
    require(
        theta == keys.number("rope_theta", theta),
        f"{given.source}: rope_theta is {theta:g}, and {keys.content.get('rope_theta')} outside;"
        " readers differ in which they take: correct one",
    )
    longest = (
        int(keys.number("max_position_embeddings")) if keys.has("max_position_embeddings") else 0
    )
    kind = given.text("rope_type", given.text("type", "default"))
    require(
        kind == given.text("type", kind),
        f"{given.source}: rope_type is {shown(kind)} and type {shown(given.content.get('type'))};"
        " correct one",
    )
    if kind in ROPE:
        check_keys(given, ROPE[kind], ignore)
    if kind == "default":
        plain = given.number("factor", 1.0) == 1
        require(
            plain,
            f"{given.source}: factor is {shown(given.content.get('factor'))} without a rope_type,"
            " so that nothing is stretched; add rope_type, or take factor out",
        )
        return theta, 1.0, RopeSpec(context=longest)
    require(
        kind in ("linear", "yarn", "llama3"),
        f"{source}: rope scaling {shown(kind)} is not supported; known are default, linear, yarn,"
        " llama3",
    )
    original = (
        int(given.number("original_max_position_embeddings"))
        if given.has("original_max_position_embeddings")
        else longest
    )
    known = (
        f"{source}: the rope scaling {kind!r} needs original_max_position_embeddings or"
        " max_position_embeddings; add one"
    )
    require(original > 0 or kind == "linear", known)
    implied = longest / original if kind == "yarn" and longest else None
    require(
        given.has("factor") or implied is not None,
        f"{source}: the rope scaling {kind!r} has no key 'factor'; add it",
    )
    factor = given.number("factor", implied)
    short = (
        f"{given.source}: factor is {factor:g}"
        if given.has("factor")
        else f"{source}: max_position_embeddings {longest} is too small"
    )
    require(
        factor >= 1,
        f"{short}; positions are stretched by 1 or more times original_max_position_embeddings"
        f" {original}: correct one",
    )
    longest = longest if longest > original * factor else 0
    rope = RopeSpec(kind=kind, context=original, longest=longest)  # pyright: ignore[reportArgumentType]
    if kind == "llama3":
        rope = replace(
            rope,
            **{
                key: given.number(key)
                for key in ("low_freq_factor", "high_freq_factor")
                if given.has(key)
            },
        )
    if kind == "yarn":
        numbers = {key: given.number(key) for key in ("beta_fast", "beta_slow") if given.has(key)}
        rope = replace(
            rope,
            **numbers,
            attention_factor=_attention_factor(given, factor),
            truncate=given.flag("truncate", True),
        )
    return theta, factor, rope


def _rope_part(keys: Keys) -> Keys:
    """The object about positions, under either of its names."""
    parts = [keys.part(key) for key in ("rope_parameters", "rope_scaling") if keys.has(key)]
    parts = [part for part in parts if part.content] or [keys.part("rope_scaling")]
    # the base may stand outside, and the kind has two names
    said = [
        {"rope_type": part.content.get("type"), **part.content, "type": None, "rope_theta": None}
        for part in parts
    ]
    require(
        said[0] == said[-1],
        f"{keys.source}: rope_parameters and rope_scaling differ, and so do readers in which they"
        " take; correct one",
    )
    return parts[0]


def _attention_factor(given: Keys, factor: float) -> float:
    """YaRN's factor on cosines and sines where the file sets it; else 0.

    It is a number for transformers, or `attn_factor` times the usual one for vLLM and SGLang.
    """
    stated, usual = _stated_factor(given, factor), usual_factor(factor)
    if not given.has("attn_factor"):
        return stated
    product = given.number("attn_factor") * usual
    require(
        not stated or math.isclose(stated, product, rel_tol=1e-4),
        f"{given.source}: attn_factor {given.number('attn_factor'):g} times YaRN's own {usual:g} is"
        f" {product:g}, and attention_factor or mscale say {stated:g}; correct one",
    )
    return stated or product


def usual_factor(factor: float) -> float:
    """YaRN's own factor on cosines and sines (arXiv 2309.00071, equation 22)."""
    return 0.1 * math.log(factor) + 1


def _stated_factor(given: Keys, factor: float) -> float:
    """The factor as transformers reads it: a number, or by DeepSeek's mscale; else 0."""
    if given.has("attention_factor"):
        return given.number("attention_factor")
    if given.content.get("mscale") and given.content.get("mscale_all_dim"):
        numerator, denominator = (
            0.1 * given.number(key) * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim")
        )
        return numerator / denominator
    return 0.0


def architecture_of(config: ModelSpec) -> str:
    """The name of a model's class in config.json."""
    return next(
        name
        for name, entry in ARCHITECTURES.items()
        if entry.model_type == config.family.model_type
    )


def config_json(config: ModelSpec, dtype: str, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """config.json of a policy with weights of `dtype`, in the form that transformers (4 and 5),
    vLLM and SGLang read alike.

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


def rope_json(config: ModelSpec) -> dict[str, Any]:
    """The keys of config.json about positions; stretched ones allow for the context times the
    factor."""
    rope, factor = config.rope, config.rope_factor
    longest = {"max_position_embeddings": config.positions} if config.positions else {}
    written = {"rope_theta": config.rope_theta, "rope_scaling": None, **longest}
    if factor == 1:
        return written
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
            usual = usual_factor(factor)
            scaling |= {
                "attention_factor": rope.attention_factor,
                "attn_factor": rope.attention_factor / usual,
            }
    return {**written, "rope_scaling": scaling}
