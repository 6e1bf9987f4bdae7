"""Keys of config.json that are not known, or whose value is not built, are refused; what a message
tells to do then works."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxspec.hf.eagle3_config import parse_head_config
from jaxspec.hf.policy_config import parse_policy_config, policy_config_json
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import ModelSpec
from tests.hf.test_eagle3_config import QWEN3_8B, SPECULATORS
from tests.hf.test_eagle3_config import RAW as HEAD
from tests.hf.test_policy_config import MOE, YARN, read

ATTN_FACTOR = 0.8782488562869419
"""Of DeepSeek-R1-0528-Qwen3-8B: one over YaRN's own factor for 4 times the context."""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"is_causal": False}, "is_causal is False"),
        ({"original_max_position_embeddings": 16}, "original_max_position_embeddings is 16"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config is"),
        ({"text_config": {"hidden_size": 16}}, "text_config is"),
        ({"rope_scaling": {**YARN, "alpha": 1000.0}}, "rope_scaling: alpha is 1000.0"),
        ({"rope_scaling": {**YARN, "short_factor": [1.0]}}, "rope_scaling: short_factor is"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "beta_fast is 32"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention is"),
    ],
)
def test_keys_that_are_not_known_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"FOLDER/config\.json.*no such key is known") as error:
        read(**changes)
    assert words in str(error.value)
    assert "take it out of the file, or use --model.ignore" in str(error.value)
    read(ModelSpec(ignore=True), **changes)  # as the message says
    read(**{key: None for key in changes if key not in MOE})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        ({"use_qk_norm": False}, "use_qk_norm is False"),
        ({"qkv_bias": True}, "qkv_bias is True"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"shared_expert_intermediate_size": 8, **MOE}, "shared_expert_intermediate_size is 8"),
        ({"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}, "partial_rot"),
        ({"rope_scaling": {**YARN, "extrapolation_factor": 0.5}}, "extrapolation_factor is 0.5"),
        ({"rope_scaling": {**YARN, "apply_yarn_scaling": False}}, "apply_yarn_scaling is False"),
        ({"decoder_sparse_step": True}, "decoder_sparse_step is True; only 1"),
        ({"quantization": {"bits": 4}}, "quantization is .*not quantized"),
        ({"compression_config": {"format": "nvfp4"}}, "compression_config is .*not quantized"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2'; correct one of them"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_type is 'yarn' and type 'linear'"),
        ({"rope_scaling": {"factor": 4.0}}, "factor is 4.0 without a rope_type"),
        ({"rope_scaling": {**YARN, "rope_theta": 7.0}}, "rope_theta is 7, and 100.0 outside"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 100.0}},
            "rope_parameters and rope_scaling differ",
        ),
        ({**MOE, "num_local_experts": 4}, "num_experts is 8 and num_local_experts 4"),
        # its layers of experts all slide
        ({**MOE, "use_sliding_window": True, "max_window_layers": 4}, "sliding-window"),
        (
            {"rope_scaling": {**YARN, "attn_factor": 0.9, "attention_factor": 1.0}},
            "attn_factor 0.9 times YaRN's own 1.13863 is 1.02477, and .* say 1; correct one",
        ),
    ],
)
def test_values_that_are_not_built_or_disagree_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read(**changes)


def test_the_same_scaling_under_both_names_is_read() -> None:
    new = {**YARN, "rope_theta": 100.0}
    old = {("type" if key == "rope_type" else key): value for key, value in YARN.items()}
    assert read(rope_parameters=new, rope_scaling=old) == read(rope_scaling=YARN)


def test_attn_factor_multiplies_the_usual_factor_as_in_vllm(tmp_path: Path) -> None:
    """And leaves so that vLLM and transformers, which read different keys, have the same number."""
    config = read(rope_scaling={**YARN, "attn_factor": ATTN_FACTOR})
    assert config.rope.attention_factor == pytest.approx(1.0, abs=1e-12)
    half = read(rope_scaling={**YARN, "attn_factor": 0.5})
    assert half.rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4.0) + 1))
    written = json.loads(json.dumps(policy_config_json(half, "float32", {})))["rope_scaling"]
    assert written["attention_factor"] == half.rope.attention_factor
    assert written["attn_factor"] == pytest.approx(0.5)
    again = parse_policy_config(
        policy_config_json(half, "float32", {}), "FOLDER/config.json", ModelSpec()
    )
    assert again.rope == half.rope


def test_keys_without_effect_are_let_through() -> None:
    plain = read()
    changes = {
        "attention_dropout": 0.1, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "pretraining_tp": 2, "unsloth_fixed": True, "temperature": 0.6, "is_decoder": False,
        "sliding_window": 4096, "_name_or_path": "x", "a_key_of_tomorrow": None,
    }  # fmt: skip
    assert read(**changes) == plain


def test_keys_that_say_what_is_built_are_let_through() -> None:
    """Of Qwen3-Coder-480B-A35B, and of SmolLM2."""
    coder = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    assert read(**coder, **MOE) == read(**MOE)
    assert read(is_llama_config=True, rope_interleaved=False) == read()


@pytest.mark.hf
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe", "Qwen2", "Llama"])
def test_every_key_that_transformers_writes_is_known(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")()
    written = json.loads(config.to_json_string(use_diff=False))
    parse_policy_config({**written, "architectures": [f"{family}ForCausalLM"]}, "C", ModelSpec())


FLAGS = {
    "eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
}  # fmt: skip
"""As NVIDIA writes them of the form that is built."""


def _head(raw: dict[str, Any]) -> Any:
    return parse_head_config(raw, "draft/config.json", "auto", QWEN3_8B, lambda _: None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_mtp_layernorm", True),
        ("use_input_layernorm_in_first_layer", False),
        ("use_last_layernorm", False),
        ("next_layer_regular", False),
        ("parallel_draft_step", 4),
        ("a_flag_of_tomorrow", False),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_flags_of_a_head_that_are_not_built_are_refused(key: str, value: Any, nested: bool) -> None:
    plain = _head({**HEAD, "eagle_config": FLAGS})
    assert plain == _head(HEAD)
    changed = {**FLAGS, key: value}
    raw = {**HEAD, "eagle_config": changed} if nested else {**HEAD, key: value}
    where = r"draft/config\.json, eagle_config" if nested else r"draft/config\.json"
    with pytest.raises(ConfigError, match=rf"^{where}: {key} is {value}"):
        _head(raw)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("partial_rotary_factor", 0.5),
        ("use_sliding_window", True),
        ("quantization_config", {"bits": 4}),
        ("final_logit_softcapping", 30.0),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "alpha": 1.0}),
    ],
)
def test_layers_of_a_head_are_read_by_the_same_list(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key.partition('_')[0]}"):
        _head({**HEAD, key: value})
    layers = {**SPECULATORS["transformer_layer_config"], key: value}
    with pytest.raises(ConfigError, match=f"{key.partition('_')[0]}"):
        _head({**SPECULATORS, "transformer_layer_config": layers})


def test_a_flag_of_a_head_with_two_values_is_refused() -> None:
    raw = {**HEAD, "norm_before_fc": False, "eagle_config": {**FLAGS, "norm_before_fc": True}}
    with pytest.raises(ConfigError, match="norm_before_fc is True, and False at the top level"):
        _head(raw)
