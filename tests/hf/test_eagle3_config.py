"""The config.json of published EAGLE-3 heads: the defaults and the conventions by which libraries
differ, and what is written of one."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config import presets
from jaxspec.hf.eagle3_config import parse_head_config
from jaxspec.hf.eagle3_json import HeadFormat, head_config_json
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import FamilySpec, HeadSpec, ModelSpec, RopeSpec
from jaxspec.models.eagle3 import llama_head_spec

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "num_hidden_layers": 1, "vocab_size": 151936, "draft_vocab_size": 32000,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None,
    "max_position_embeddings": 2048,
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32000,
    "transformer_layer_config": {
        name: value
        for name, value in RAW.items()
        if name not in ("draft_vocab_size", "architectures")
    },
}  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"
QWEN3_8B = ModelSpec.from_config(presets.QWEN3_8B)


def read(
    raw: dict[str, Any], convention: Any = "auto", target: ModelSpec = QWEN3_8B
) -> tuple[ModelSpec, HeadSpec, int, str]:
    told: list[str] = []
    return *parse_head_config(raw, "draft/config.json", convention, target, told.append), "\n".join(
        told
    )


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("architectures", ["LlamaForCausalLMEagle3", 3, [3], {}]),
        ("speculators_model_type", [3, ["eagle3"]]),
        ("model_type", [3, ["llama"]]),
        ("hidden_size", ["4096", 4096.0, [4096], 0]),
        ("intermediate_size", ["x", 0, -1, 0.5]),
        ("num_hidden_layers", ["1", 0]),
        ("num_key_value_heads", ["8", 5]),
        ("head_dim", ["128", 127]),
        ("vocab_size", ["151936", []]),
        ("draft_vocab_size", ["32000", -1, 0.5, [32000]]),
        ("target_hidden_size", ["4096", []]),
        ("rms_norm_eps", ["1e-6", -1]),
        ("rope_scaling", ["yarn", 3]),
        ("attention_bias", ["false", 0]),
        ("norm_before_residual", ["false", 1]),
        ("logit_scale", ["1", 0, [], float("nan")]),
        ("eagle_config", [3, "x", []]),
        ("num_aux_hidden_states", ["3", 0]),
        (IDS, [3, "1, 2", [1, "2"], [1.5], [True]]),
    ],
)
def test_values_of_another_type_are_refused_with_file_and_key(key: str, values: list[Any]) -> None:
    other = {"head_dim": "head_size", "num_key_value_heads": "kv_heads"}.get(key, key)
    for value in values:
        with pytest.raises(ConfigError, match=rf"^draft/config\.json: .*({key}|{other})") as error:
            read({**RAW, key: value})
        assert "\n" not in str(error.value)


def test_a_raw_config() -> None:
    config, head, vocab, told = read(RAW)
    assert (
        config.embed,
        config.ffn,
        config.heads,
        config.kv_heads,
        config.head_size,
        config.layers,
    ) == (4096, 12288, 32, 8, 128, 1)
    assert (config.norm_eps, config.rope_theta, config.rope_factor, config.rope.context) == (
        1e-6,
        1e6,
        1.0,
        2048,
    )
    assert config.family == FamilySpec(model_type="llama", query_key_norm=False)
    assert (head, vocab) == (HeadSpec(), 32000)
    assert "after 2, 18, 33 of its 36 layers" in told
    assert (
        read({**RAW, "draft_vocab_size": None})[2]
        == read({**RAW, "draft_vocab_size": 151936})[2]
        == 0
    )


@pytest.mark.parametrize(
    ("raw", "changed"),
    [
        # vLLM's default for a config that lacks it
        ({**SPECULATORS}, {"norm_before_residual": True}),
        (
            {**SPECULATORS, "norm_before_residual": False, "norm_output": True},
            {"norm_output": True},
        ),
        ({**RAW, "norm_before_residual": True}, {"norm_before_residual": True}),
        ({**RAW, "norm_before_fc": True}, {"norm_before_fuse": True}),
        ({**RAW, "eagle_config": {"norm_before_fc": True}}, {"norm_before_fuse": True}),
        ({**RAW, "fc_norm": True, "norm_output": True}, {"fuse_norms": True, "norm_output": True}),
        ({**RAW, "use_aux_norm": True}, {"fuse_norms": True}),
        ({**RAW, "norm_output": True}, {}),  # SpecForge's, of another meaning
        ({**RAW, "eagle_config": {"norm_output": True}}, {"norm_output": True}),
        ({**RAW, "eagle_config": {"use_aux_hidden_state": False}}, {"use_taps": False}),
        ({**RAW, "logit_scale": 0.25, "tie_word_embeddings": True}, {"logit_scale": 0.25}),
        (
            {**RAW, IDS: [1, 9, 17, 25, 33], "num_aux_hidden_states": 5},
            {"taps": (2, 10, 18, 26, 34)},
        ),
    ],
)
def test_flags(raw: dict[str, Any], changed: dict[str, Any]) -> None:
    assert read(raw)[1] == HeadSpec(**changed)


def test_what_is_ambiguous_is_told() -> None:
    assert "speculators without norm_before_residual" in read(SPECULATORS)[3]
    assert (
        "norm_output without fc_norm is taken as SpecForge's"
        in read({**RAW, "norm_output": True})[3]
    )
    assert (
        "lacks head_dim: 128"
        in read({name: value for name, value in RAW.items() if name != "head_dim"})[3]
    )


@pytest.mark.parametrize(
    ("raw", "convention", "taps"),
    [
        ({**RAW, IDS: [1, 17, 32]}, "auto", ()),  # outputs of those layers: the default 2, 18, 33
        ({**RAW, IDS: [2, 18, 33]}, "auto", ()),
        ({**SPECULATORS, IDS: [2, 18, 33]}, "auto", ()),
        ({**SPECULATORS, IDS: [1, 17, 32]}, "auto", (1, 17, 32)),
        ({**RAW, "eagle_config": {IDS: [1, 11, 21]}}, "auto", (2, 12, 22)),
        (
            {**RAW, "architectures": ["Eagle3LlamaForCausalLM"], IDS: [1, 17, 32]},
            "auto",
            (1, 17, 32),
        ),
        ({**RAW, IDS: [1, 17, 32]}, "boundary", (1, 17, 32)),
        ({**RAW, IDS: [2, 18, 33]}, "output_of", (3, 19, 34)),
        ({**RAW, IDS: None}, "output_of", ()),
    ],
)
def test_layer_numbers(raw: dict[str, Any], convention: str, taps: tuple[int, ...]) -> None:
    """`[1, 17, 32]` of SpecForge and `[2, 18, 33]` of vLLM are the same tensors; the ids are never
    corrected."""
    assert read(raw, convention)[1].taps == taps


def test_positions_are_the_heads_own() -> None:
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 16.0,
    }
    config = read({**RAW, "rope_theta": 5e5, "rope_scaling": yarn})[0]
    assert (config.rope_theta, config.rope_factor) == (5e5, 4.0)
    assert config.rope == RopeSpec(kind="yarn", context=32768, beta_fast=16.0)
    assert (
        read({name: value for name, value in RAW.items() if name != "rope_theta"})[0].rope_theta
        == 1e4
    )
    newer = {name: value for name, value in RAW.items() if not name.startswith("rope")}
    assert (
        read({**newer, "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}})[
            0
        ].rope_theta
        == 7e4
    )


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({**RAW, "architectures": ["PEagleDraftModel"]}, "kind P-EAGLE"),
        ({**RAW, "mask_hidden": True}, "P-EAGLE"),
        ({**RAW, "architectures": ["DFlashDraftModel"]}, "kind DFlash"),
        ({**SPECULATORS, "speculators_model_type": "dflash", "architectures": []}, "kind DFlash"),
        (
            {
                **SPECULATORS,
                "speculators_model_type": "eagle",
                "architectures": ["EagleSpeculator"],
            },
            "kind EAGLE-1 or EAGLE-2",
        ),
        ({**RAW, "architectures": ["EAGLEForCausalLM"]}, "EAGLE-1 or EAGLE-2"),
        ({**SPECULATORS, "speculators_model_type": "mlp", "architectures": []}, "kind mlp"),
        ({**RAW, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "latent attention"),
        ({**RAW, "target_hidden_size": 2048}, "width 2048; model.embed is 4096"),
        ({**RAW, "model_type": "gemma3"}, "model_type gemma3"),
        ({**RAW, "model_type": "a\nb"}, r"model_type a\\nb;"),
        (
            {**RAW, "hidden_size": 16, "target_hidden_size": 4096, "head_dim": None},
            r"no key 'head_dim', and hidden_size 16 is below",
        ),
        (
            {**RAW, "num_key_value_heads": 3},
            "num_key_value_heads 3 does not divide num_attention_heads 32",
        ),
        ({**RAW, "num_aux_hidden_states": 5}, "num_aux_hidden_states is 5"),
        (
            {**RAW, IDS: [2, 18], "num_aux_hidden_states": 3},
            r"num_aux_hidden_states is 3, and .* \[2, 18\]",
        ),
        (
            {**RAW, IDS: [2, 18, 37]},
            r"\[2, 18, 37\] \(boundary\) does not ascend inside 0 to model.layers 36",
        ),
        ({**RAW, "rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        (
            {name: value for name, value in RAW.items() if name != "hidden_size"},
            "no key 'hidden_size'",
        ),
        (
            {name: value for name, value in RAW.items() if name != "intermediate_size"},
            "lacks intermediate_size",
        ),
    ],
)
def test_other_drafts_and_heads_for_other_policies_are_refused(
    raw: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"draft/config.json.*{said}"):
        read(raw)


@pytest.mark.parametrize("form", ["raw", "speculators"])
@pytest.mark.parametrize(
    ("head", "sizes", "vocab"),
    [
        (HeadSpec(), {}, 32000),
        (
            HeadSpec(taps=(2, 10, 18, 34), fuse_norms=True, norm_output=True),
            {"layers": 2, "rope_factor": 4.0},
            0,
        ),
        (
            HeadSpec(norm_output=True, norm_before_residual=True, logit_scale=0.5),
            {"embed": 1024, "rope_theta": 1e4},
            7,
        ),
        (HeadSpec(norm_before_fuse=True), {"family": FamilySpec(query_key_norm=True)}, 7),
        (
            HeadSpec(use_taps=False),
            {
                "family": FamilySpec(
                    model_type="llama", query_key_norm=False, attention_bias=True, output_bias=True
                )
            },
            7,
        ),
    ],
)
def test_what_is_written_is_read_back(
    head: HeadSpec, sizes: dict[str, Any], vocab: int, form: HeadFormat
) -> None:
    config = ModelSpec(
        **{
            **vars(llama_head_spec(QWEN3_8B)),
            "tied": False,
            "rope": RopeSpec(context=32768),
            **sizes,
        }
    )
    written = json.loads(json.dumps(head_config_json(config, head, QWEN3_8B, form, vocab)))
    assert read(written)[:3] == (config, head, vocab)
    named = IDS in written or IDS in written["eagle_config"]
    # the default layers are the only spelling that all engines read alike
    assert named == bool(head.taps)
    flags = {
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "draft_vocab_size",
        "target_hidden_size",
    }
    assert flags <= written.keys()


def test_a_raw_config_cannot_name_layer_1_first() -> None:
    head = HeadSpec(taps=(1, 17, 32))
    with pytest.raises(ConfigError, match="write the speculators form"):
        head_config_json(llama_head_spec(QWEN3_8B), head, QWEN3_8B, "raw", 0)
    assert (
        read(head_config_json(llama_head_spec(QWEN3_8B), head, QWEN3_8B, "speculators", 0))[1]
        == head
    )


PUBLISHED = {
    "specforge/qwen3-8b-eagle3.json": ({"layers": 36, "embed": 4096}, 32000, {}),
    "torchspec/qwen3_8b_eagle3.json": ({"layers": 36, "embed": 4096}, 32000, {}),
    "specforge/qwen3-32b-eagle3.json": ({"layers": 64, "embed": 5120}, 32000, {}),
    "specforge/qwen3-4b-eagle3.json": ({"layers": 36, "embed": 2560}, 32000, {}),
    "specforge/qwen2.5-0.5b-eagle3.json": ({"layers": 24, "embed": 896}, 16000, {}),
    "specforge/qwen3-30B-A3B-eagle3.json": ({"layers": 48, "embed": 2048}, 32000, {}),
    "specforge/qwen3-30B-A3B-eagle3.1.json": (
        {"layers": 48, "embed": 2048},
        32000,
        {"fuse_norms": True, "norm_output": True},
    ),
    # [1, 46, 90] is its default rule
    "specforge/qwen3-235B-A22B-eagle3.json": ({"layers": 94, "embed": 4096}, 32000, {}),
    "specforge/llama3-8B-eagle3.json": ({"layers": 32, "embed": 4096, "vocab": 128256}, 32000, {}),
    "eagle/llama3-8b-traineagle3.json": ({"layers": 32, "embed": 4096, "vocab": 128256}, 32000, {}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(repository: Path, name: str) -> None:
    file = repository.parent / "shared" / "data" / "model_configs" / "drafts" / name
    if not file.is_file():
        pytest.skip(f"{file} is not here")
    sizes, vocab, flags = PUBLISHED[name]
    raw = json.loads(file.read_text(encoding="utf-8"))
    target = ModelSpec(**{**vars(QWEN3_8B), **sizes})
    config, head, found, _ = read(raw, target=target)
    assert (found, head) == (vocab, HeadSpec(**flags))
    assert (config.heads, config.ffn, config.norm_eps) == (
        raw["num_attention_heads"],
        raw["intermediate_size"],
        raw["rms_norm_eps"],
    )
    assert config.head_size == raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    for other in ("qwen3-8b-peagle", "qwen3-8b-dflash"):
        with pytest.raises(
            ConfigError,
            match=other.partition("b-")[2].replace("peagle", "P-EAGLE").replace("dflash", "DFlash"),
        ):
            read(
                json.loads(
                    (file.parents[1] / "specforge" / f"{other}.json").read_text(encoding="utf-8")
                )
            )
