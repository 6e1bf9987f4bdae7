"""Writing of EAGLE-3 head configs."""

from typing import Any, Literal

from jaxspec.hf.known_keys import LAYER_IDS_KEY
from jaxspec.hf.policy_config import architecture_name
from jaxspec.hf.rope_config import rope_json
from jaxspec.inputs.checked import require
from jaxspec.inputs.spec import HeadSpec, ModelSpec
from jaxspec.models.decoder import tap_boundaries
from jaxspec.models.eagle3 import tap_count

HeadFormat = Literal["raw", "speculators"]
"""Format of a published head.

SafeAILab, SpecForge and AngelSlim write raw files, which name the first layer `midlayer.*`. The
speculators format names it `layers.0.*`.
"""


def head_config_json(
    config: ModelSpec,
    head: HeadSpec,
    target: ModelSpec,
    head_format: HeadFormat,
    vocab: int,
    draft_length: int = 3,
) -> dict[str, Any]:
    """Builds the config.json of a head.

    Args:
      config: decoder of the head.
      head: form of the head.
      target: the policy. The speculators format names its path.
      head_format: format of the file.
      vocab: size of the head's own vocabulary. 0 = the target's.
      draft_length: tokens to draft in each round, for the speculators format.

    Raises:
      ConfigError: the format cannot state the head's biases or layer numbers.
    """
    family = config.family
    require(
        family.attention_bias == family.output_bias,
        "no published format has attention biases on only the inputs or only the output; use both"
        " or neither",
    )
    # Default layer numbers are left out, so that no reader can take them for the other convention.
    taps = head.taps if head.taps != tap_boundaries(target.layers) else ()
    layer_ids = {LAYER_IDS_KEY: list(taps)} if taps else {}
    layer_config, flags = _decoder_json(config, target.vocab), _flags_json(head, target, vocab)
    if head_format == "raw":
        is_unambiguous = not taps or taps[0] != 1
        remedy = "readers of the raw form would count on from 1; write the speculators form"
        require(is_unambiguous, f"the head reads the policy after {list(taps)} layers; {remedy}")
        return {
            **layer_config,
            **flags,
            **layer_ids,
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {**_raw_flags_json(head), **layer_ids},
        }
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        **flags,
        **layer_ids,
        "eagle_config": {"use_aux_hidden_state": head.use_taps},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config,
        "speculators_config": _proposal_json(target, draft_length),
    }


def _decoder_json(config: ModelSpec, vocab: int) -> dict[str, Any]:
    """Builds the keys of a head's decoder layers."""
    family = config.family
    return {
        "architectures": ["Qwen3ForCausalLM" if family.query_key_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if family.query_key_norm else "llama",
        "vocab_size": vocab,
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


def _flags_json(head: HeadSpec, target: ModelSpec, vocab: int) -> dict[str, Any]:
    """Builds the flags of a head that both formats have."""
    # Every flag is stated, because readers differ in their defaults.
    return {
        "draft_vocab_size": vocab or target.vocab,
        "target_hidden_size": target.embed,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fuse,
        "fc_norm": head.fuse_norms,
        "norm_output": head.norm_output,
        "num_aux_hidden_states": tap_count(head),
        "logit_scale": head.logit_scale,
    }


def _raw_flags_json(head: HeadSpec) -> dict[str, bool]:
    """Builds the flags that the raw format nests."""
    # At the top level, SpecForge gives norm_output another meaning, so it is repeated here.
    return {
        "use_aux_hidden_state": head.use_taps,
        "norm_before_fc": head.norm_before_fuse,
        "norm_output": head.norm_output,
    }


def _proposal_json(target: ModelSpec, draft_length: int) -> dict[str, Any]:
    """Builds speculators' description of drafting and of its policy."""
    proposal_method = {
        "proposal_type": "greedy",
        "speculative_tokens": draft_length,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    verifier = {"name_or_path": target.path or None, "architectures": [architecture_name(target)]}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal_method],
        "verifier": verifier,
    }
