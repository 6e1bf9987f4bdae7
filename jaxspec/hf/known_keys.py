"""Known keys of config.json.

Any other key is refused, because it may change the computation of the model.
"""

from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.inputs.checked import require
from jaxspec.inputs.json_keys import JsonObject, format_name, format_value


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ_KEYS = _word_set("""
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps tie_word_embeddings
    attention_bias mlp_bias max_position_embeddings rope_theta rope_scaling rope_parameters
    partial_rotary_factor use_sliding_window sliding_window max_window_layers layer_types use_mrope
    mlp_only_layers decoder_sparse_step pruned_heads num_experts num_local_experts
    num_experts_per_tok moe_intermediate_size norm_topk_prob rope_interleaved
    shared_expert_intermediate_size qkv_bias use_qk_norm
    """)
_INERT_KEYS = _word_set("""
    _name_or_path name_or_path _commit_hash transformers_version auto_map torch_dtype dtype
    use_bfloat16 torchscript use_cache pretraining_tp initializer_range gradient_checkpointing
    attn_implementation _attn_implementation _attn_implementation_autoset experts_implementation
    _experts_implementation _flash_attn_2_enabled use_flash_attention_2 chunk_size_feed_forward
    attention_dropout hidden_dropout_prob attn_pdrop embd_pdrop resid_pdrop router_aux_loss_coef
    output_router_logits output_attentions output_hidden_states return_dict use_return_dict
    loss_type problem_type id2label label2id num_labels task_specific_params finetuning_task
    is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size
    tie_encoder_decoder tf_legacy_loss model_max_length max_sequence_length
    tokenizer_model_max_length num_nextn_predict_layers unsloth_version unsloth_fixed
    transformers.js_config tokenizer_class prefix is_llama_config
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """)
"""Keys without an effect on the forward pass.

They are names, dtypes, dropout, outputs, losses and settings of generation.
"""
_QUANTIZATION_KEYS = frozenset({"quantization_config", "quantization", "compression_config"})
"""Keys of quantized weights, in transformers, MLX and compressed-tensors."""
# Quantization keys count as known, because `check_keys` refuses them with a message of their own.
DECODER_KEYS = _READ_KEYS | _INERT_KEYS | _QUANTIZATION_KEYS
_SCALING_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"}
ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(_SCALING_KEYS),
    # Linear scaling does not need the original context, but files may state it.
    "linear": frozenset(_SCALING_KEYS | {"original_max_position_embeddings"}),
    "llama3": frozenset(
        _SCALING_KEYS | {"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}
    ),
    "yarn": frozenset(
        _SCALING_KEYS
        | {"original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
        | {"attention_factor", "attn_factor", "mscale", "mscale_all_dim"}
        # `finetuned` records that the model was trained with the scaling, and has no effect.
        | {"extrapolation_factor", "apply_yarn_scaling", "finetuned"}
    ),
}
"""Known keys of a rope scaling, by its kind."""
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
"""Key of the policy's layers that an EAGLE-3 head reads."""
HEAD_FLAG_KEYS = _word_set("""
    eagle_aux_hidden_state_layer_ids num_aux_hidden_states use_aux_hidden_state norm_before_fc
    fc_norm use_aux_norm norm_output norm_before_residual logit_scale draft_vocab_size
    target_hidden_size use_input_layernorm_in_first_layer use_last_layernorm use_mtp_layernorm
    next_layer_regular parallel_draft_step parallel_draft_heads_num_layers has_lm_head head_dim
    """)
"""Flags of an EAGLE-3 head, at the top level or in eagle_config."""
HEAD_KEYS = HEAD_FLAG_KEYS | _word_set("""
    eagle_config speculators_model_type speculators_version speculators_config
    transformer_layer_config has_no_defaults_at_init embed_requires_grad target_model_type
    """)

_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "use_mrope": (False,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "pruned_heads": ({}, []),
    "rope_interleaved": (False,),
    "shared_expert_intermediate_size": (0,),
    # vLLM's YaRN reads these two keys, but transformers does not.
    "extrapolation_factor": (1,),
    "apply_yarn_scaling": (True,),
    # NVIDIA's EAGLE-3 heads state these keys.
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (0, 1),
}
"""Supported values of keys that are supported in part. None is always allowed."""


def check_keys(keys: JsonObject, known_keys: Collection[str], ignore_unknown: bool = False) -> None:
    """Checks that keys are known and values supported.

    Args:
      keys: object to check.
      known_keys: keys that may occur.
      ignore_unknown: allows other keys.

    Raises:
      ConfigError: a key is unknown, its value is not supported, or the weights are quantized.
    """
    for key, value in keys.content.items():
        # Writers state null for features that are off.
        if value is None:
            continue
        statement = f"{keys.source}: {format_name(key)} is {format_value(value)}"
        require(key not in _QUANTIZATION_KEYS, f"{statement}; give weights that are not quantized")
        require(
            ignore_unknown or key in known_keys,
            f"{statement}, and no such key is known, so that it might change what the model"
            " computes; if it does not, take it out of the file, or use --model.ignore for a"
            " policy",
        )
        if key in _ALLOWED_VALUES:
            # In Python True equals 1, so that booleans are compared by identity.
            is_allowed = any(
                value == allowed_value and type(value) is not bool
                for allowed_value in _ALLOWED_VALUES[key]
            )
            is_allowed |= any(value is allowed_value for allowed_value in _ALLOWED_VALUES[key])
            allowed_text = ", ".join(map(str, _ALLOWED_VALUES[key]))
            require(is_allowed, f"{statement}; only {allowed_text} is supported")
