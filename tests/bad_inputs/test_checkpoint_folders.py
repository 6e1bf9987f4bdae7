"""Bad folders of checkpoints end in one line that names the file, or the setting that named the
folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.hf.eagle3_json import head_config_json
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.bad_inputs.programs import (
    ALONE,
    MODEL,
    TINY,
    assert_one_line,
    edited,
    ended,
    put,
    trained,
)
from tests.conftest import eagle3, save_policy, tiny_network
from tests.hf_checkpoints import draft_tensors


def spoilt(**values: Any) -> Callable[[Path], None]:
    return edited("config.json", lambda content: content.update(values))


def tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return edit


def _nan(held: dict[str, np.ndarray]) -> None:
    held["model.norm.weight"][0] = np.nan


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


FOLDERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "empty config": (put("config.json", ""), ["config.json", "not valid JSON"]),
    "a list of config": (put("config.json", "[]"), ["config.json", "list"]),
    "an unknown architecture": (
        spoilt(architectures=["Mamba"], model_type="mamba"),
        ["config.json"],
    ),
    "text of a size": (spoilt(hidden_size="64"), ["config.json", "hidden_size"]),
    "no size": (
        edited("config.json", lambda content: content.pop("hidden_size")),
        ["config.json", "hidden_size"],
    ),
    "a null size": (spoilt(num_hidden_layers=None), ["config.json", "num_hidden_layers"]),
    "a negative size": (spoilt(vocab_size=-3), ["config.json", "vocab_size"]),
    "a float of a size": (spoilt(num_attention_heads=2.5), ["config.json", "num_attention_heads"]),
    "a list of eps": (spoilt(rms_norm_eps=[1]), ["config.json", "rms_norm_eps"]),
    "text of rope scaling": (spoilt(rope_scaling="yarn"), ["config.json", "rope_scaling"]),
    "an unknown rope scaling": (
        spoilt(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
        ["config.json", "spiral"],
    ),
    "text of a flag": (spoilt(tie_word_embeddings="no"), ["config.json", "tie_word_embeddings"]),
    "weights of another shape": (spoilt(intermediate_size=25), ["another shape"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors"]),
    "weights cut short": (_cut, ["model.safetensors", "truncated"]),
    "empty weights": (put("model.safetensors", b""), ["model.safetensors"]),
    "a missing tensor": (
        tensors(lambda held: held.pop("model.norm.weight")),
        ["model.norm.weight"],
    ),
    "a foreign tensor": (
        tensors(lambda held: held.update(extra=np.ones(3, np.float32))),
        ["extra"],
    ),
    "whole numbers": (
        tensors(lambda held: held.update({"model.norm.weight": np.ones(16, np.int32)})),
        ["model.norm.weight"],
    ),
    "an index of a list": (put("model.safetensors.index.json", "[]"), ["index.json"]),
    "an index that leads outside": (
        put(
            "model.safetensors.index.json",
            json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}),
        ),
        ["index.json", "../elsewhere"],
    ),
    "an index of numbers": (
        put("model.safetensors.index.json", json.dumps({"weight_map": {"a": 3}})),
        ["index.json"],
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer.json"]),
    "an empty tokenizer": (put("tokenizer.json", ""), ["tokenizer.json"]),
    "half a tokenizer": (
        lambda folder: put("tokenizer.json", (folder / "tokenizer.json").read_bytes()[:500])(
            folder
        ),
        ["tokenizer.json"],
    ),
    "a tokenizer of text": (
        edited("tokenizer.json", lambda content: content.update(model="words")),
        ["tokenizer.json"],
    ),
    "a number of an end": (
        edited("tokenizer_config.json", lambda content: content.update(eos_token=3)),
        ["eos_token"],
    ),
    "an unknown end": (
        edited("tokenizer_config.json", lambda content: content.update(eos_token="<end>")),
        ["eos_token"],
    ),
    "a number of a template": (
        edited("tokenizer_config.json", lambda content: content.update(chat_template=3)),
        ["chat_template"],
    ),
    "half a template": (
        edited("tokenizer_config.json", lambda content: content.update(chat_template="{% for")),
        ["chat template"],
    ),
    "a template without end": (
        edited(
            "tokenizer_config.json",
            lambda content: content.update(
                chat_template=(
                    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
                )
            ),
        ),
        ["chat template", "seconds"],
    ),
    "an end beyond the vocabulary": (
        put("generation_config.json", '{"eos_token_id": 999}'),
        ["generation_config.json", "999"],
    ),
    "text of an end": (
        put("generation_config.json", '{"eos_token_id": "x"}'),
        ["generation_config.json", "eos_token_id"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_checkpoint_folders(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, words = FOLDERS[name]
    folder = save_policy(tmp_path / "policy", MODEL)
    character_tokenizer().save(str(folder))
    spoil(folder)
    status, printed = ended(
        lambda: trained("--model.path", str(folder), *ALONE, "--workdir", "run"), capsys
    )
    assert status == 2
    assert_one_line(printed, *words)


@pytest.mark.slow
def test_weights_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_policy(tmp_path / "policy", MODEL)
    character_tokenizer().save(str(folder))
    tensors(_nan)(folder)
    status, printed = ended(
        lambda: trained("--model.path", str(folder), *ALONE, "--workdir", "run"), capsys
    )
    assert status == 2
    assert_one_line(printed, "model.norm.weight", "not finite")


HEADS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a missing tensor": (tensors(lambda held: held.pop("midlayer.mlp.up_proj.weight")), ["lacks"]),
    "another width": (spoilt(intermediate_size=25), ["gate_proj.weight has shape"]),
    "a flag that is not built": (
        edited(
            "config.json",
            lambda content: content["eagle_config"].update(use_mtp_layernorm=True),
        ),
        ["config.json, eagle_config: use_mtp_layernorm is True"],
    ),
    "quantized": (
        put("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}'),
        ["quant_algo is 'FP8'; give weights that are not quantized"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_a_drafts_folder_is_judged_before_anything_is_compiled(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, words = HEADS[name]
    folder, head = save_policy(tmp_path / "policy", MODEL), tmp_path / "head"
    character_tokenizer().save(str(folder))
    head.mkdir()
    made = tiny_network(eagle3, MODEL, 2)
    save_file(draft_tensors(made, "raw"), head / "model.safetensors")
    content = head_config_json(made.config, made.form, MODEL, "raw", 0)
    (head / "config.json").write_text(json.dumps(content))
    spoil(head)
    words = [str(head), *words]
    given = ["--model.path", str(folder), "--rollout.draft.path", str(head)]
    rest = ["--sft.steps", "0", "--offline.steps", "0", "--workdir", "run"]
    status, printed = ended(lambda: trained(*given, *rest), capsys)
    assert status == 2
    assert_one_line(printed, *words)
    assert "compil" not in printed


PATHS = ["--model.path", "--rollout.draft.path", "--lora.path", "--data.tokenizer"]


@pytest.mark.parametrize("setting", PATHS)
@pytest.mark.parametrize("path", ["nowhere", "file", "~nosuch/x"])
def test_folders_that_are_none(
    setting: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    kind = "eagle3" if "draft" in setting else "none"
    sizes = [] if setting == "--model.path" else TINY
    status, printed = ended(
        lambda: trained(*sizes, "--sft.steps", "0", "--rollout.draft.kind", kind, setting, path),
        capsys,
    )
    assert status == 2
    assert_one_line(printed, setting.removeprefix("--"), path)


def test_a_folder_without_a_config_is_named_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    status, printed = ended(lambda: trained("--model.path", "~", "--sft.steps", "0"), capsys)
    assert status == 2
    assert_one_line(printed, "model.path ~: ", str(tmp_path / "config.json"))
