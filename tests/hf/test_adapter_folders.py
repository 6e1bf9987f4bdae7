"""Folders of adapters that PEFT has written are checked before anything is merged."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.hf.pretrained import load_policy_config, make_adapter_merger, open_policy_checkpoint
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import ModelSpec
from tests.hf.policy_folders import shapes_of

SLOW = [
    "(q|(a*))*!",
    "((a*)b){2,}!",
    "((a+)b(c)?)+!",
    "(_|[a-z_]|.)+!",
    ".*.*.*.*!",
    "a?a?a?a?!",
    "(a)(b)(c)(d)",
    "(?:.)*",
    "(?=q)q",
    "q" * 501,
]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": "2"}, r"r is '2'; it must be a whole number"),
        ({"r": None}, "no key 'r'"),
        ({"lora_alpha": "6"}, r"lora_alpha is '6'; it must be a positive number"),
        ({"lora_alpha": None}, "no key 'lora_alpha'"),
        ({"use_rslora": "no"}, "use_rslora is 'no'; it must be true or false"),
        ({"target_modules": 3}, "target_modules is 3; it must be a list of strings"),
        ({"target_modules": [3]}, r"target_modules is \[3\]"),
        (
            {"layers_to_transform": "1"},
            "layers_to_transform is '1'; it must be a list of whole numbers",
        ),
        ({"rank_pattern": [2]}, r"rank_pattern is \[2\]; it must be an object"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern: q_proj is '2'"),
        ({"alpha_pattern": {"(": 2}}, r"alpha_pattern: '\(' is no regular expression"),
        (
            {"alpha_pattern": {"(?i)q_proj": 4}},
            r"alpha_pattern: '\(\?i\)q_proj' is no regular expression",
        ),
        (
            {"alpha_pattern": {"([a-z_.0-9]+)+!": 4}},
            r"alpha_pattern: '\(.*' may take for ever to match; .*repeats no group",
        ),
        *(
            (
                {"rank_pattern": {slow: 4}},
                r"may take for ever.*write it so, or name the modules one by one",
            )
            for slow in SLOW
        ),
        ({"a\nb": "c\nd\x1b" * 99}, r"a\\nb is 'c\\nd\\x1bc.*\.\.\., which cannot be merged"),
        ({"target_modules": "(("}, r"target_modules: '\(\(' is no regular expression"),
        ({"peft_type": 3}, "peft_type is 3"),
    ],
)
def test_settings_of_adapters_of_another_type_are_named(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    lora, name = tmp_path / "lora", "base_model.model.model.layers.1.self_attn.q_proj"
    lora.mkdir()
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
    }
    (lora / "adapter_config.json").write_text(json.dumps(settings | changes))
    a, b = np.zeros((2, 16), np.float32), np.zeros((16, 2), np.float32)
    save_file(
        {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, lora / "adapter_model.safetensors"
    )
    with pytest.raises(ConfigError, match=rf"^{lora}.*adapter_config\.json.*{words}"):
        make_adapter_merger(str(lora), shapes_of(load_policy_config(ModelSpec(path=str(folder)))))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "no tensors"),
        (
            {"layers.1.self_attn.q_proj.lora_A.weight": np.ones((2, 16), np.int32)},
            "is of type I32; it must be one of F64",
        ),
        (
            {"layers.1.self_attn.q_proj.lora_A.weight": np.ones((2, 16), ml_dtypes.float8_e4m3fn)},
            "is of type F8_E4M3; it must be",
        ),
        (
            {"layers.1.self_attn.q_proj.lora_A.weight": np.float32(1)},
            r"has shape \[\]; it must have 1 or 2 axes",
        ),
        (
            {"layers.01.self_attn.q_proj.lora_A.weight": np.ones((2, 16), np.float32)},
            r"layers\.01\..*not a LoRA matrix",
        ),
    ],
)
def test_adapters_of_another_type_are_named(
    folder: Path, tmp_path: Path, tensors: dict[str, np.ndarray], words: str
) -> None:
    lora, name = tmp_path / "lora", "base_model.model.model."
    lora.mkdir()
    (lora / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6})
    )
    save_file(
        {name + key: np.asarray(tensor) for key, tensor in tensors.items()},
        lora / "adapter_model.safetensors",
    )
    with pytest.raises(ConfigError, match=rf"^{lora}.*{words}"):
        make_adapter_merger(str(lora), shapes_of(load_policy_config(ModelSpec(path=str(folder)))))


def test_adapters_are_checked_before_and_merged_in_place(folder: Path, tmp_path: Path) -> None:
    """W + alpha / r * B A on a mesh, by hand; adapters for another model are refused with nothing
    but shapes at hand."""
    lora, config = tmp_path / "lora", load_policy_config(ModelSpec(path=str(folder)))
    lora.mkdir()
    random = np.random.default_rng(0)
    a = random.normal(size=(2, 16)).astype(np.float32)
    b = random.normal(size=(16, 2)).astype(np.float32)
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
    }
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    save_file(
        {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, lora / "adapter_model.safetensors"
    )
    shapes = shapes_of(config, 2, 2)
    before = open_policy_checkpoint(config, shapes).load(lambda _: None)
    wanted, layout = np.asarray(before.layers.query[...]).copy(), before.layers.query[...].sharding
    wanted[1] += 3 * (b @ a).T.reshape(16, 4, 4)
    found = make_adapter_merger(str(lora), shapes)(before)
    np.testing.assert_allclose(found.layers.query[...], wanted, rtol=0, atol=1e-5)
    assert found.layers.query[...].sharding == layout
    save_file(
        {f"{name}.lora_A.weight": a[:, :8], f"{name}.lora_B.weight": b},
        lora / "adapter_model.safetensors",
    )
    with pytest.raises(ConfigError, match=r"lora_A\.weight has shape \[2, 8\]"):
        make_adapter_merger(str(lora), shapes)
    b[3, 1] = np.inf
    save_file(
        {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, lora / "adapter_model.safetensors"
    )
    with pytest.raises(
        ConfigError,
        match=(
            rf"adapter_model\.safetensors: the tensor {name}\.lora_B\.weight has values that are"
            r" not finite"
        ),
    ):
        make_adapter_merger(str(lora), shapes)
