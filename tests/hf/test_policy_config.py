"""Real configs give the published sizes; what is not supported is refused by name."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any, get_args

import jax
import pytest

from jaxspec.hf.policy_config import implied_family, parse_policy_config, policy_config_json
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import FamilySpec, ModelSpec, ModelType, RopeSpec
from jaxspec.models.decoder import Decoder

RAW: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 40, "num_hidden_layers": 4,
    "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 24, "max_position_embeddings": 64, "rope_theta": 100.0,
}  # fmt: skip


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def read(base: ModelSpec | None = None, **changes: Any) -> ModelSpec:
    raw = {key: value for key, value in {**RAW, **changes}.items() if value != "absent"}
    return parse_policy_config(raw, "FOLDER/config.json", base or ModelSpec())


# Billions of parameters: all, those without embedding and head, and those that one token uses, as
# the model cards say.
PUBLISHED = {
    "Qwen--Qwen3-0.6B": (0.6, 0.44, None),
    "Qwen--Qwen3-1.7B": (1.7, 1.4, None),
    "Qwen--Qwen3-8B": (8.2, 6.95, None),
    "Qwen--Qwen3-32B": (32.8, 31.2, None),
    "Qwen--Qwen3-30B-A3B": (30.5, 29.9, 3.3),
    "Qwen--Qwen3-235B-A22B": (235, 234, 22),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_real_configs_give_the_published_sizes(name: str, repository: Path) -> None:
    file = repository.parent / "shared" / "data" / "model_configs" / "targets" / f"{name}.json"
    if not file.is_file():
        pytest.skip("the published configs are not here")
    config = parse_policy_config(
        json.loads(file.read_text()), str(file), ModelSpec(dtype="bfloat16")
    )
    shapes = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) / 1e9
    ends = config.vocab * config.embed * (1 if config.tied else 2) / 1e9
    whole, inner, active = PUBLISHED[name]
    assert total == pytest.approx(whole, rel=0.02)
    assert total - ends == pytest.approx(inner, rel=0.02)
    if active:
        idle = (
            3
            * config.layers
            * config.embed
            * config.ffn
            * (config.family.experts - config.family.experts_per_token)
            / 1e9
        )
        assert total - idle == pytest.approx(active, rel=0.02)


def test_mimo_is_qwen2_with_its_own_name(repository: Path) -> None:
    """And its sizes, its parameters worked out by hand: 36 layers of 4096, biases of queries, keys
    and values, an untied head."""
    file = (
        repository.parent
        / "shared"
        / "data"
        / "model_configs"
        / "targets"
        / "XiaomiMiMo--MiMo-7B-Base.json"
    )
    if not file.is_file():
        pytest.skip("the published configs are not here")
    config = parse_policy_config(json.loads(file.read_text()), str(file), ModelSpec())
    assert config.family == FamilySpec(model_type="mimo", query_key_norm=False, attention_bias=True)
    assert (config.layers, config.embed, config.ffn, config.rope_theta, config.max_positions) == (
        36,
        4096,
        11008,
        640_000,
        32_768,
    )
    shapes = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 + 2 * 1024 + 3 * 4096 * 11008 + 2 * 4096
    assert (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        == 36 * layer + 2 * 151_680 * 4096 + 4096
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            ["GemmaForCausalLM is not supported", "Qwen3MoeForCausalLM", "LlamaForCausalLM"],
        ),
        ({"architectures": "absent"}, ["no key 'architectures'"]),
        ({"hidden_size": "absent"}, ["no key 'hidden_size'"]),
        ({"num_hidden_layers": "four"}, ["num_hidden_layers is 'four'"]),
        ({"num_attention_heads": 0}, ["num_attention_heads is 0"]),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, ["no key 'num_experts'"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ({"architectures": ["a\nb\x1b[31m"]}, ["the architecture a\\nb\\x1b[31m is not supported"]),
        ({"hidden_act": "a\nb" + "c" * 9999}, ["hidden_act is 'a\\nbcc", "...; only silu"]),
        ({"rope_scaling": {"rope_type": "a\nb"}}, ["rope scaling 'a\\nb'"]),
        (
            {"num_attention_heads": 32, "head_dim": "absent"},
            ["no key 'head_dim'", "16 is below num_attention_heads 32; add it"],
        ),
        (
            {"rope_scaling": {**YARN, "factor": 4.54e-05, "mscale": 1, "mscale_all_dim": 1}},
            ["rope_scaling: factor is 4.54e-05", "correct one"],
        ),
        (
            {"rope_scaling": {**YARN, "factor": None}, "max_position_embeddings": 8},
            ["max_position_embeddings 8 is too small", "correct one"],
        ),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "not quantized"]),
        ({"use_sliding_window": True, "max_window_layers": 2}, ["sliding-window"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding-window"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope scaling 'longrope'", "yarn"]),
        ({"rope_scaling": {"type": "linear"}}, ["no key 'factor'"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling is 'yarn'", "an object or null"]),
        ({"rope_theta": "1e6"}, ["rope_theta is '1e6'", "positive number"]),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 4},
                "max_position_embeddings": "absent",
            },
            ["'yarn' needs", "add one"],
        ),
        ({"mlp_only_layers": [0]}, ["mlp_only_layers is [0]"]),
        (
            {"num_key_value_heads": 3},
            ["num_key_value_heads 3 does not divide num_attention_heads 4; give one of 1, 2, 4"],
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        read(**changes)
    for word in words:
        assert word in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("key", "values", "more"),
    [
        (
            "architectures",
            ["Qwen3ForCausalLM", 3, {"Qwen3ForCausalLM": 1}, [["Qwen3ForCausalLM"]], [None]],
            {},
        ),
        ("hidden_size", ["64", 64.0, -16, True, [16], {}, 0, 10**12], {}),
        ("vocab_size", ["40", 0.5, False, []], {}),
        ("head_dim", ["8", 7, 0, [8]], {}),
        ("num_key_value_heads", ["2", 0, 2.0], {}),
        ("max_window_layers", ["4", [4]], {"use_sliding_window": True}),
        ("use_sliding_window", ["no", 1], {}),
        ("layer_types", ["full_attention", [3], {"full_attention": 4}], {}),
        ("rms_norm_eps", ["1e-6", 0, -1e-6, [], float("nan"), float("inf"), True], {}),
        ("tie_word_embeddings", ["false", 0, []], {}),
        ("attention_bias", ["false", 1], {}),
        ("rope_theta", [[1e4], 0, -1, True, float("inf")], {}),
        ("max_position_embeddings", ["64", -1, []], {}),
        ("rope_scaling", ["yarn", 4, ["yarn"], True], {}),
        ("rope_parameters", ["yarn", 4, ["yarn"]], {}),
        ("num_experts", ["8", 8.0, 0, [8]], MOE),
        ("num_experts_per_tok", ["2", 0, 9], MOE),
        ("num_local_experts", ["8", 0], {**MOE, "num_experts": None}),
        ("norm_topk_prob", ["true", 1], MOE),
    ],
)
def test_values_of_another_type_are_refused_with_file_and_key(
    key: str, values: list[Any], more: dict[str, Any]
) -> None:
    other = {"head_dim": "head_size", "num_experts_per_tok": "experts_per_token"}.get(key, key)
    for value in values:
        with pytest.raises(ConfigError, match=rf"^FOLDER/config\.json: .*({key}|{other})") as error:
            read(**{**more, key: value})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("rope_type", [3, ["yarn"], {}]),
        ("factor", ["4", 0, -1, [], 0.5]),
        ("original_max_position_embeddings", ["16", -1]),
        ("beta_fast", ["32", 0, 0.5]),
        ("attention_factor", ["1", -1, [1]]),
        ("truncate", ["no", 0]),
    ],
)
def test_values_of_a_rope_scaling_of_another_type_are_refused(key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^FOLDER/config\.json(, rope_scaling)?: .*{key}"):
            read(rope_scaling={**YARN, key: value})


def test_old_files_leave_keys_out() -> None:
    """Defaults of transformers: heads without grouping, their size from the width, base 10,000."""
    config = read(
        architectures=["LlamaForCausalLM"],
        num_key_value_heads="absent",
        head_dim="absent",
        rope_theta="absent",
    )
    assert (config.kv_heads, config.head_size, config.rope_theta, config.tied) == (4, 4, 1e4, False)


@pytest.mark.parametrize("stretched", [True, False])
def test_positions_are_stretched_on_request(stretched: bool) -> None:
    """`--model.rope_factor 4` means YaRN for four times the positions that the checkpoint allows
    for, whatever a preset says of them."""
    own: dict[str, Any] = {}
    if stretched:
        own = {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 32,
            }
        }
    preset = RopeSpec(context=16, kind="linear")
    plain = read(ModelSpec(rope=preset), **own)
    wanted = read(ModelSpec(rope_factor=4.0, rope=preset), **own)
    context, factor = (32, 2) if stretched else (64, 1)
    assert (plain.rope_factor, plain.rope.kind, plain.rope.context, plain.max_positions) == (
        factor,
        "yarn",
        context,
        64,
    )
    assert (wanted.rope_factor, wanted.rope, wanted.max_positions) == (
        4 * factor,
        RopeSpec(context=context),
        256,
    )


def test_bands_of_llama_3_give_way_to_yarn() -> None:
    """Four times the 128 positions that it allows for, of which it was made for 4; nothing of a
    preset's context is left."""
    own = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 4}
    plain = read(
        ModelSpec(rope=RopeSpec(context=40_960)), rope_scaling=own, max_position_embeddings=128
    )
    assert (plain.rope_factor, plain.rope.kind, plain.rope.context, plain.max_positions) == (
        8,
        "llama3",
        4,
        128,
    )
    wanted = read(
        ModelSpec(rope_factor=4.0, rope=RopeSpec(context=40_960)),
        rope_scaling=own,
        max_position_embeddings=128,
    )
    assert (wanted.rope_factor, wanted.rope, wanted.max_positions) == (
        128,
        RopeSpec(context=4),
        512,
    )


@pytest.mark.parametrize(
    "config",
    [
        read(),
        read(tie_word_embeddings=True, attention_bias=True),
        read(
            architectures=["Qwen3MoeForCausalLM"],
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=6,
            norm_topk_prob=True,
        ),
        read(architectures=["Qwen2ForCausalLM"]),
        read(architectures=["LlamaForCausalLM"], attention_bias=True, rms_norm_eps=1e-5),
        read(architectures=["MiMoForCausalLM"]),
        read(
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.5,
            }
        ),
        read(rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "truncate": False}),
        read(
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 4,
                "low_freq_factor": 1.5,
            },
            max_position_embeddings=128,
        ),
        read(rope_scaling={"type": "linear", "factor": 2}),
    ],
)
def test_a_config_that_leaves_comes_back(config: ModelSpec) -> None:
    written = json.loads(json.dumps(policy_config_json(config, "bfloat16", {"eos_token_id": 3})))
    assert parse_policy_config(written, "config.json", ModelSpec()) == config
    assert (written["eos_token_id"], written["torch_dtype"]) == (3, "bfloat16")


@pytest.mark.parametrize("kind", get_args(ModelType))
@pytest.mark.parametrize(
    ("norms", "biases", "experts"),
    list(product((True, False), ((False, False), (True, True), (True, False)), (0, 8))),
)
def test_a_family_is_read_back_as_it_is_where_its_type_implies_it(
    kind: ModelType, norms: bool, biases: tuple[bool, bool], experts: int
) -> None:
    family = FamilySpec(
        model_type=kind,
        query_key_norm=norms,
        attention_bias=biases[0],
        output_bias=biases[1],
        experts=experts,
    )
    written = policy_config_json(ModelSpec(family=family), "float32", {})
    if kind == "qwen3_moe" and not experts:
        assert implied_family(family) != family
        return
    read_back = parse_policy_config(written, "config.json", ModelSpec()).family
    assert (implied_family(family) == family) == (read_back == family)
