"""Parsing of EAGLE-3 head configs.

Heads are published in the raw or the speculators format. Missing flags are read as their defaults.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxspec.hf.known_keys import DECODER_KEYS, HEAD_FLAG_KEYS, HEAD_KEYS, LAYER_IDS_KEY, check_keys
from jaxspec.hf.policy_config import (
    JSON_KEYS,
    parse_head_size,
    refuse_sliding_window,
)
from jaxspec.hf.rope_config import parse_rope
from jaxspec.inputs.checked import prefix_errors, require, translate_settings
from jaxspec.inputs.json_keys import JsonObject, format_name, format_value
from jaxspec.inputs.spec import FamilySpec, HeadSpec, ModelSpec
from jaxspec.models.decoder import tap_boundaries

TapConvention = Literal["auto", "boundary", "output_of"]
"""Meaning of layer numbers in config.json.

They are numbers of layers applied (`boundary`), or layers whose output is read (`output_of`).
`auto` decides by the file.
"""

# Markers of other drafts, in lower case, as parts of architectures or types.
_UNSUPPORTED_DRAFTS = {
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "medusa": "Medusa",
    "eagle3deepseek": "EAGLE-3 with latent attention",
}
_JSON_KEYS = JSON_KEYS | {
    "head.taps": LAYER_IDS_KEY,
    "head.use_taps": "use_aux_hidden_state",
    "head.norm_before_fuse": "norm_before_fc",
    "head.fuse_norms": "fc_norm",
    "head.logit_scale": "logit_scale",
}


def parse_head_config(
    content: Mapping[str, Any],
    source: str,
    convention: TapConvention,
    target: ModelSpec,
    log: Callable[[str], Any],
) -> tuple[ModelSpec, HeadSpec, int]:
    """Parses the config.json of an EAGLE-3 head.

    Reports how ambiguous flags are read to `log`. Where the tensors disagree with the result,
    `eagle3_tensors.reconcile_with_tensors` corrects it. `tie_word_embeddings` is ignored.

    Args:
      content: content of the file.
      source: name of the file in messages.
      convention: meaning of layer numbers.
      target: the policy.
      log: receives messages.

    Returns:
      The decoder of the head, its form, and the size of its own vocabulary (0 = the target's).

    Raises:
      ConfigError: the file describes another kind of draft, or a head for another policy.
    """
    keys = JsonObject(content, source)
    _refuse_other_drafts(keys)
    eagle_config, layer_keys = keys.get_object("eagle_config"), _find_layer_keys(keys)
    _check_head_keys(keys, eagle_config, layer_keys)
    # Flags may be in eagle_config or at the top level, where null means unset.
    flags = JsonObject(
        {
            **eagle_config.content,
            **{key: value for key, value in content.items() if value is not None},
        },
        source,
    )
    vocab = vocabulary_size(content, source) or target.vocab
    target_width = flags.get_int("target_hidden_size", layer_keys.get_int("hidden_size"))
    require(
        target_width == target.embed,
        f"{source}: the head was made for hidden states of width {target_width}; model.embed is"
        f" {target.embed}",
    )
    head = _parse_form(keys, flags, convention, target, log)
    with prefix_errors(source), translate_settings(_JSON_KEYS):
        layer_vocab = layer_keys.get_int("draft_vocab_size", 0, minimum=0)
        draft_vocab = flags.get_int("draft_vocab_size", layer_vocab, minimum=0) or vocab
        decoder = _parse_decoder(layer_keys, target, log)
        return decoder, head, 0 if draft_vocab == vocab else draft_vocab


def vocabulary_size(content: Mapping[str, Any], source: str) -> int:
    """Returns the vocabulary size in a head's config. 0 = not stated."""
    return _find_layer_keys(JsonObject(content, source)).get_int("vocab_size", 0, minimum=0)


def _find_layer_keys(keys: JsonObject) -> JsonObject:
    """Returns the keys of the decoder, nested in the speculators format."""
    is_speculators = keys.has_key("speculators_model_type")
    return keys.get_object("transformer_layer_config") if is_speculators else keys


def _refuse_other_drafts(keys: JsonObject) -> None:
    """Checks that a config.json describes an EAGLE-3 head."""
    content, source, kind = (
        keys.content,
        keys.source,
        keys.get_string("speculators_model_type", "eagle3"),
    )
    markers = [*keys.get_strings("architectures"), kind]
    markers += [
        key.removesuffix("_config") for key in ("dflash_config", "dspark_config") if key in content
    ]
    for name in (marker.lower() for marker in markers):
        other_kind = next(
            (title for marker, title in _UNSUPPORTED_DRAFTS.items() if marker in name), ""
        )
        # Names of EAGLE-1 and EAGLE-2 lack the 3.
        older_kind = "EAGLE-1 or EAGLE-2" if "eagle" in name and "eagle3" not in name else ""
        require(
            not other_kind and not older_kind,
            f"{source} describes a draft of kind {other_kind or older_kind}; only EAGLE-3 heads"
            " can be loaded",
        )
    require(
        kind == "eagle3",
        f"{source} describes a draft of kind {format_name(kind)}; only EAGLE-3 heads can be loaded",
    )
    # P-EAGLE drafts may state the architecture of an EAGLE-3 head, and differ in this key.
    require(
        "mask_hidden" not in content,
        f"{source} describes a draft of kind P-EAGLE (mask_hidden); only EAGLE-3 heads can be"
        " loaded",
    )


def _check_head_keys(keys: JsonObject, eagle_config: JsonObject, layer_keys: JsonObject) -> None:
    """Checks that a head's keys are supported and consistent."""
    check_keys(keys, DECODER_KEYS | HEAD_KEYS)
    check_keys(eagle_config, HEAD_FLAG_KEYS)
    if layer_keys is not keys:
        check_keys(layer_keys, DECODER_KEYS | HEAD_FLAG_KEYS)
    refuse_sliding_window(layer_keys)
    for key, value in eagle_config.content.items():
        top_value = keys.content.get(key)
        # At the top level, SpecForge writes a norm_output with another meaning.
        agrees = value is None or top_value is None or value == top_value or key == "norm_output"
        require(
            agrees,
            f"{eagle_config.source}: {key} is {format_value(value)}, and {format_value(top_value)}"
            " at the top level; correct one",
        )


def _parse_form(
    keys: JsonObject,
    flags: JsonObject,
    convention: TapConvention,
    target: ModelSpec,
    log: Callable[[str], Any],
) -> HeadSpec:
    """Parses the form of a head.

    `flags` are those at the top level of `keys` and in its eagle_config.
    """
    source, is_speculators = keys.source, keys.has_key("speculators_model_type")
    use_taps = flags.get_bool("use_aux_hidden_state", True)
    fuse_norms = flags.get_bool("fc_norm", False) or flags.get_bool("use_aux_norm", False)
    norm_output = flags.get_bool("norm_output", False)
    # Elsewhere norm_output means a norm in the recurrence. SpecForge's top-level flag means the one
    # before lm_head, which every head has.
    in_eagle_config = "norm_output" in keys.get_object("eagle_config").content
    is_unambiguous = is_speculators or fuse_norms or in_eagle_config
    if norm_output and not is_unambiguous:
        norm_output = False
        log(
            f"{source}: norm_output without fc_norm is taken as SpecForge's: a norm before lm_head,"
            " not in the recurrence"
        )
    if is_speculators and "norm_before_residual" not in keys.content:
        log(f"{source}: speculators without norm_before_residual: taken as true, as vLLM does")
    taps = _parse_taps(flags, convention, target, log) if use_taps else ()
    with prefix_errors(source), translate_settings(_JSON_KEYS):
        return HeadSpec(
            taps=taps,
            use_taps=use_taps,
            norm_before_fuse=flags.get_bool("norm_before_fc", False),
            fuse_norms=fuse_norms,
            norm_before_residual=flags.get_bool("norm_before_residual", is_speculators),
            norm_output=norm_output,
            logit_scale=flags.get_float("logit_scale", 1.0),
        )


def _parse_taps(
    flags: JsonObject, convention: TapConvention, target: ModelSpec, log: Callable[[str], Any]
) -> tuple[int, ...]:
    """Parses the boundaries that the head reads. Returns an empty tuple for the default ones.

    A boundary is the number of decoder layers that have been applied. SpecForge writes the layers
    whose output is read, such as [1, 17, 32]. vLLM and speculators write the boundaries, which are
    [2, 18, 33] for the same tensors.
    """
    source, layer_ids = flags.source, flags.get_ints(LAYER_IDS_KEY)
    count = (
        flags.get_int("num_aux_hidden_states") if flags.has_key("num_aux_hidden_states") else None
    )
    default = tap_boundaries(target.layers)
    if not layer_ids:
        require(
            count in (None, 3),
            f"{source}: num_aux_hidden_states is {count} without {LAYER_IDS_KEY}; name the layers"
            " there",
        )
        log(
            f"{source} names no layers: the head reads the policy after"
            f" {', '.join(map(str, default))} of its {target.layers} layers"
        )
        return ()
    require(
        count in (None, len(layer_ids)),
        f"{source}: num_aux_hidden_states is {count}, and {LAYER_IDS_KEY} is"
        f" {format_value(layer_ids)}; correct one",
    )
    if convention == "auto":
        # The default boundaries start at 2, which SpecForge writes as layer 1.
        is_specforge = (
            not flags.has_key("speculators_model_type")
            and "LlamaForCausalLMEagle3" in flags.get_strings("architectures")
            and layer_ids[0] == 1
        )
        convention = "output_of" if is_specforge else "boundary"
    taps = tuple(layer_id + (convention == "output_of") for layer_id in layer_ids)
    is_valid = list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= target.layers
    require(
        is_valid,
        f"{source}: {LAYER_IDS_KEY} {format_value(layer_ids)} ({convention}) does not ascend inside"
        f" 0 to model.layers {target.layers}",
    )
    meaning = "as layers applied" if convention == "boundary" else "as layers whose output is read"
    description = (
        f"the head reads the policy after {', '.join(map(str, taps))} of its {target.layers} layers"
    )
    log(
        f"{source}: {LAYER_IDS_KEY} {list(layer_ids)} {meaning}: {description}"
        " (--rollout.draft.tap_convention)"
    )
    return () if taps == default else taps


def _parse_decoder(
    layer_keys: JsonObject, target: ModelSpec, log: Callable[[str], Any]
) -> ModelSpec:
    """Parses the decoder layers of a head."""
    source, kind = layer_keys.source, layer_keys.get_string("model_type", "llama")
    require(
        kind in ("llama", "qwen3"),
        f"{source}: the head's layers are of model_type {format_name(kind)}; llama and qwen3 can be"
        " loaded",
    )
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    missing = [name for name in names if not layer_keys.has_key(name)]
    require(not missing, f"{source} lacks {', '.join(missing)}; add the sizes of the head's layers")
    width, ffn, heads = (layer_keys.get_int(name) for name in names)
    # Published heads may leave head_dim out and still have heads of another size.
    if not layer_keys.has_key("head_dim"):
        log(
            f"{source} lacks head_dim: {width // heads}, the width over its heads, unless the"
            " tensors say otherwise"
        )
    bias = layer_keys.get_bool("attention_bias", False)
    # A head may be trained with other rotary positions than its policy.
    theta, factor, rope = parse_rope(layer_keys)
    return ModelSpec(
        vocab=target.vocab,
        layers=layer_keys.get_int("num_hidden_layers", 1),
        embed=width,
        heads=heads,
        kv_heads=layer_keys.get_int("num_key_value_heads", heads),
        head_size=parse_head_size(layer_keys, width, heads),
        ffn=ffn,
        norm_eps=layer_keys.get_float("rms_norm_eps", 1e-6),
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
