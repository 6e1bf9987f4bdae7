"""The config.json of published EAGLE-3 heads, in the raw form and in that of speculators: read with
every default, written with none."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxspec.hf.known_keys import DECODER, HEAD, HEAD_FLAGS, check_keys
from jaxspec.hf.policy_config import (
    KEYS,
    architecture_of,
    head_size_of,
    refuse_sliding,
    rope_json,
    rope_of,
)
from jaxspec.inputs.checked import called, read_from, require
from jaxspec.inputs.json_keys import Keys, named, shown
from jaxspec.inputs.spec import FamilySpec, HeadSpec, ModelSpec
from jaxspec.models.decoder import tap_boundaries
from jaxspec.models.eagle3 import tap_count

Form = Literal["raw", "speculators"]
"""Names `midlayer.*` (SafeAILab, SpecForge, AngelSlim) or `layers.0.*` (speculators)."""
Convention = Literal["auto", "boundary", "output_of"]

_OTHERS = {
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "medusa": "Medusa",
    "eagle3deepseek": "EAGLE-3 with latent attention",
}
_IDS = "eagle_aux_hidden_state_layer_ids"
_KEYS = KEYS | {
    "head.taps": _IDS,
    "head.use_taps": "use_aux_hidden_state",
    "head.norm_before_fuse": "norm_before_fc",
    "head.fuse_norms": "fc_norm",
    "head.logit_scale": "logit_scale",
}


def head_config(
    raw: Mapping[str, Any],
    source: str,
    convention: Convention,
    target: ModelSpec,
    say: Callable[[str], Any],
) -> tuple[ModelSpec, HeadSpec, int]:
    """The decoder, the form and the size of the own vocabulary (0: the target's) of an EAGLE-3
    head, from config.json.

    What is ambiguous is decided and told to `say`; the tensors have the last word
    (`eagle3_tensors.settle`). `tie_word_embeddings` means nothing here: the head's rows are its
    own.

    Raises:
      ConfigError: another kind of draft, or a head for another policy; `source` is named.
    """
    keys = Keys(raw, source)
    _refuse_others(keys)
    published, nested = keys.has("speculators_model_type"), keys.part("eagle_config")
    inner = keys.part("transformer_layer_config") if published else keys
    _check_keys(keys, nested, inner)
    flags = Keys(
        {**nested.content, **{key: value for key, value in raw.items() if value is not None}},
        source,
    )
    vocab = vocabulary_of(raw, source) or target.vocab
    width = flags.whole("target_hidden_size", inner.whole("hidden_size"))
    require(
        width == target.embed,
        f"{source}: the head was made for hidden states of width {width}; model.embed is"
        f" {target.embed}",
    )
    use_taps = flags.flag("use_aux_hidden_state", True)
    fuse_norms = flags.flag("fc_norm", False) or flags.flag("use_aux_norm", False)
    norm_output = flags.flag("norm_output", False)
    sure = published or fuse_norms or "norm_output" in nested.content
    if norm_output and not sure:
        norm_output = False
        say(
            f"{source}: norm_output without fc_norm is taken as SpecForge's: a norm before lm_head,"
            " not in the recurrence"
        )
    if published and "norm_before_residual" not in raw:
        say(f"{source}: speculators without norm_before_residual: taken as true, as vLLM does")
    taps = _taps(flags, convention, target, say) if use_taps else ()
    with read_from(source), called(_KEYS):
        head = HeadSpec(
            taps=taps,
            use_taps=use_taps,
            norm_before_fuse=flags.flag("norm_before_fc", False),
            fuse_norms=fuse_norms,
            norm_before_residual=flags.flag("norm_before_residual", published),
            norm_output=norm_output,
            logit_scale=flags.number("logit_scale", 1.0),
        )
        own_vocab = (
            flags.whole("draft_vocab_size", inner.whole("draft_vocab_size", 0, least=0), least=0)
            or vocab
        )
        return _decoder(inner, target, say), head, 0 if own_vocab == vocab else own_vocab


def vocabulary_of(raw: Mapping[str, Any], source: str) -> int:
    """The rows of the vocabulary that a head was made for; 0: not said."""
    keys = Keys(raw, source)
    inner = keys.part("transformer_layer_config") if keys.has("speculators_model_type") else keys
    return inner.whole("vocab_size", 0, least=0)


def _refuse_others(keys: Keys) -> None:
    raw, source, kind = keys.content, keys.source, keys.text("speculators_model_type", "eagle3")
    marks = [*keys.texts("architectures"), kind]
    marks += [
        key.removesuffix("_config") for key in ("dflash_config", "dspark_config") if key in raw
    ]
    for name in (mark.lower() for mark in marks):
        other = next((title for mark, title in _OTHERS.items() if mark in name), "")
        old = "EAGLE-1 or EAGLE-2" if "eagle" in name and "eagle3" not in name else ""
        require(
            not other and not old,
            f"{source} describes a draft of kind {other or old}; only EAGLE-3 heads can be loaded",
        )
    require(
        kind == "eagle3",
        f"{source} describes a draft of kind {named(kind)}; only EAGLE-3 heads can be loaded",
    )
    require(
        "mask_hidden" not in raw,
        f"{source} describes a draft of kind P-EAGLE (mask_hidden); only EAGLE-3 heads can be"
        " loaded",
    )


def _check_keys(keys: Keys, nested: Keys, inner: Keys) -> None:
    """Raises ConfigError for what a head does here that is not built, or that is not known."""
    check_keys(keys, DECODER | HEAD)
    check_keys(nested, HEAD_FLAGS)
    if inner is not keys:
        check_keys(inner, DECODER | HEAD_FLAGS)
    refuse_sliding(inner)
    for key, value in nested.content.items():
        outer = keys.content.get(key)
        # SpecForge has a norm_output of another meaning at the top level
        same = value is None or outer is None or value == outer or key == "norm_output"
        require(
            same,
            f"{nested.source}: {key} is {shown(value)}, and {shown(outer)} at the top level;"
            " correct one",
        )


def _taps(
    flags: Keys, convention: Convention, target: ModelSpec, say: Callable[[str], Any]
) -> tuple[int, ...]:
    """Boundaries that the head reads; empty: the default ones.

    A boundary is the number of decoder layers that have been applied. SpecForge writes the layers
    whose outputs are read, vLLM and speculators the boundaries: [1, 17, 32] and [2, 18, 33] are the
    same tensors.
    """
    source, ids = flags.source, flags.wholes(_IDS)
    count = flags.whole("num_aux_hidden_states") if flags.has("num_aux_hidden_states") else None
    default = tap_boundaries(target.layers)
    if not ids:
        require(
            count in (None, 3),
            f"{source}: num_aux_hidden_states is {count} without {_IDS}; name the layers there",
        )
        say(
            f"{source} names no layers: the head reads the policy after"
            f" {', '.join(map(str, default))} of its {target.layers} layers"
        )
        return ()
    require(
        count in (None, len(ids)),
        f"{source}: num_aux_hidden_states is {count}, and {_IDS} is {shown(ids)}",
    )
    if convention == "auto":
        specforge = (
            not flags.has("speculators_model_type")
            and "LlamaForCausalLMEagle3" in flags.texts("architectures")
            and ids[0] == 1
        )
        convention = "output_of" if specforge else "boundary"
    taps = tuple(number + (convention == "output_of") for number in ids)
    inside = list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= target.layers
    require(
        inside,
        f"{source}: {_IDS} {shown(ids)} ({convention}) does not ascend inside 0 to model.layers"
        f" {target.layers}",
    )
    meaning = "as layers applied" if convention == "boundary" else "as layers whose output is read"
    applied = (
        f"the head reads the policy after {', '.join(map(str, taps))} of its {target.layers} layers"
    )
    say(f"{source}: {_IDS} {list(ids)} {meaning}: {applied} (--rollout.draft.tap_convention)")
    return () if taps == default else taps


def _decoder(inner: Keys, target: ModelSpec, say: Callable[[str], Any]) -> ModelSpec:
    """The head's own layers."""
    source, kind = inner.source, inner.text("model_type", "llama")
    require(
        kind in ("llama", "qwen3"),
        f"{source}: the head's layers are of model_type {named(kind)}; llama and qwen3 can be"
        " loaded",
    )
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    missing = [name for name in names if not inner.has(name)]
    require(not missing, f"{source} lacks {', '.join(missing)}")
    width, ffn, heads = (inner.whole(name) for name in names)
    if not inner.has("head_dim"):
        say(
            f"{source} lacks head_dim: {width // heads}, the width over its heads, unless the"
            " tensors say otherwise"
        )
    bias = inner.flag("attention_bias", False)
    theta, factor, rope = rope_of(inner)  # the head's own, not the policy's
    return ModelSpec(
        vocab=target.vocab,
        layers=inner.whole("num_hidden_layers", 1),
        embed=width,
        heads=heads,
        kv_heads=inner.whole("num_key_value_heads", heads),
        head_size=head_size_of(inner, width, heads),
        ffn=ffn,
        norm_eps=inner.number("rms_norm_eps", 1e-6),
        tied=False,
        dtype=target.dtype,
        remat=target.remat,
        family=FamilySpec(
            model_type="qwen3" if kind == "qwen3" else "llama",
            query_key_norm=kind == "qwen3",
            attention_bias=bias,
            output_bias=bias,
        ),
        rope_theta=theta,
        rope_factor=factor,
        rope=rope,
    )


def draft_config_json(
    config: ModelSpec,
    head: HeadSpec,
    target: ModelSpec,
    form: Form,
    vocab: int,
    draft_length: int = 3,
) -> dict[str, Any]:
    """The config.json of a head, with every flag in words; layer numbers are left out where the
    default ones are meant.

    The speculators form names `target.path` as the policy to draft for, `draft_length` tokens a
    round.

    Raises:
      ConfigError: the raw form cannot say which layers are read, since its readers would differ by
        one.
    """
    family, taps = config.family, head.taps if head.taps != tap_boundaries(target.layers) else ()
    require(
        family.attention_bias == family.output_bias,
        "a head with biases on only one side of its attention has no published form; both or"
        " neither",
    )
    layer = {
        "architectures": ["Qwen3ForCausalLM" if family.query_key_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if family.query_key_norm else "llama",
        "vocab_size": target.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "attention_bias": family.attention_bias,
        "tie_word_embeddings": False,
        **rope_json(config),
    }
    flags = {
        "draft_vocab_size": vocab or target.vocab,
        "target_hidden_size": target.embed,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fuse,
        "fc_norm": head.fuse_norms,
        "norm_output": head.norm_output,
        "num_aux_hidden_states": tap_count(head),
        "logit_scale": head.logit_scale,
    }
    layers = {_IDS: list(taps)} if taps else {}
    if form == "raw":
        sure = not taps or taps[0] != 1
        remedy = "readers of the raw form would count on from 1; write the speculators form"
        require(sure, f"the head reads the policy after {list(taps)} layers; {remedy}")
        # SpecForge has a norm_output of another meaning, at the top level only.
        nested = {
            "use_aux_hidden_state": head.use_taps,
            "norm_before_fc": head.norm_before_fuse,
            "norm_output": head.norm_output,
        }
        return {
            **layer,
            **flags,
            **layers,
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {**nested, **layers},
        }
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": draft_length,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    verifier = {"name_or_path": target.path or None, "architectures": [architecture_of(target)]}
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        **flags,
        **layers,
        "eagle_config": {"use_aux_hidden_state": head.use_taps},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
    }
