"""Weights in several files: they hold what one would, and a damaged index is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.config.from_checkpoint import resolve_config
from jaxspec.config.settings import Config
from jaxspec.hf.tensor_files import WEIGHTS_FILE, open_tensors
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.json_keys import read_json
from jaxspec.inputs.spec import ModelConfig
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.hf.policy_folders import NORM, file_of, opened, split


def test_a_damaged_index_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split(folder, monkeypatch)
    index = folder / f"{WEIGHTS_FILE}.index.json"
    places = read_json(index)
    lost = sorted(folder.glob("*.safetensors"))[1]
    hidden = lost.rename(lost.with_suffix(".away"))
    with pytest.raises(ConfigError, match=rf"lacks 1 of the \d+ files .*{lost.name}"):
        opened(folder)
    hidden.rename(lost)
    index.write_text(json.dumps({"weight_map": {**places["weight_map"], "other": lost.name}}))
    with pytest.raises(ConfigError, match=rf"{lost.name} lacks the tensor other"):
        opened(folder)
    index.write_text(json.dumps({"weights": 3}))
    with pytest.raises(ConfigError, match="no key 'weight_map'"):
        opened(folder)


@pytest.mark.parametrize(
    "shard",
    [
        "../other.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "a\\b",
        "a\0b",
        "x" * 300,
        3,
        None,
        ["a"],
        {"a": 1},
    ],
)
def test_an_index_may_only_name_files_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shard: Any
) -> None:
    """Whatever lies at the other end: here the checkpoint itself, whole."""
    split(folder, monkeypatch)
    index, elsewhere = folder / f"{WEIGHTS_FILE}.index.json", folder.parent / "other.safetensors"
    places = read_json(index)["weight_map"]
    shutil.copy(folder / places[NORM], elsewhere)
    index.write_text(json.dumps({"weight_map": {**places, NORM: shard}}))
    with pytest.raises(
        ConfigError,
        match=(
            r"index\.json: weight_map has 'model\.norm\.weight' in .* not the plain name of a file"
        ),
    ) as error:
        opened(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("places", [3, [], "x", {}, None])
def test_an_index_of_another_type_is_named(folder: Path, places: Any) -> None:
    (folder / f"{WEIGHTS_FILE}.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ConfigError, match=r"index\.json: .*weight_map"):
        opened(folder)


def test_several_files_hold_what_one_would(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = load_file(folder / WEIGHTS_FILE)
    several = open_tensors(split(folder, monkeypatch))
    assert several.keys() == one.keys()
    for name, stored in several.items():
        np.testing.assert_array_equal(stored.read(), one[name])
    sizes = {
        file: sum(tensor.nbytes for tensor in load_file(file).values())
        for file in folder.glob("*.safetensors")
    }
    assert all(size <= 4000 or len(load_file(file)) == 1 for file, size in sizes.items())
    assert read_json(folder / f"{WEIGHTS_FILE}.index.json")["metadata"]["total_size"] == sum(
        sizes.values()
    )


def _older(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Puts the shards of another training, and their index, beside the checkpoint in one file."""
    one = load_file(folder / WEIGHTS_FILE)
    split(folder, monkeypatch)
    shards = [*folder.glob("model-*.safetensors"), folder / f"{WEIGHTS_FILE}.index.json"]
    save_file(one, folder / WEIGHTS_FILE)
    return shards


@pytest.mark.parametrize("kept", ["the file", "the shards"])
def test_two_sets_of_weights_are_refused_until_one_is_moved_away(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    shards = _older(folder, monkeypatch)
    index = f"{WEIGHTS_FILE}.index.json"
    with pytest.raises(ConfigError, match="two sets of weights") as error:
        opened(folder)
    assert f"move {WEIGHTS_FILE} or {index} to another folder" in str(error.value)
    if kept == "the shards":
        (folder / WEIGHTS_FILE).rename(tmp_path / WEIGHTS_FILE)
        opened(folder)
        return
    (folder / index).rename(tmp_path / index)
    # vLLM and others read every file that they find
    with pytest.raises(ConfigError, match="move the files of the other to another folder"):
        opened(folder)
    for shard in shards[:-1]:
        shard.rename(tmp_path / shard.name)
    opened(folder)


def test_shards_that_no_index_names_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(folder, monkeypatch)
    other = folder / "model-00001-of-00099.safetensors"
    save_file({NORM: np.ones(16, np.float32)}, other)
    with pytest.raises(ConfigError, match=f"two sets of weights .*{other.name}"):
        opened(folder)
    other.unlink()
    opened(folder)


def test_an_index_may_name_the_file_itself(folder: Path) -> None:
    places = dict.fromkeys(load_file(folder / WEIGHTS_FILE), WEIGHTS_FILE)
    (folder / f"{WEIGHTS_FILE}.index.json").write_text(json.dumps({"weight_map": places}))
    opened(folder)


def test_a_tensor_in_two_shards_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split(folder, monkeypatch)
    other = next(file for file in folder.glob("model-*") if file.name != file_of(folder, NORM))
    save_file({**load_file(other), NORM: np.ones(16, np.float32)}, other)
    with pytest.raises(ConfigError, match=f"both hold the tensor {NORM}"):
        opened(folder)


def test_weights_that_are_not_read_are_said(folder: Path) -> None:
    adapters = "adapter_model.safetensors"
    for name in ("consolidated.safetensors", adapters):
        save_file({NORM: np.ones(16, np.float32)}, folder / name)
    for name in ("pytorch_model.bin", "optimizer.bin", "training_args.bin"):
        (folder / name).write_bytes(b"")
    character_tokenizer().save(str(folder))
    told: list[str] = []
    resolve_config(Config(model=ModelConfig(path=str(folder))), told.append)
    assert len(told) == 2
    assert f"{adapters} are not merged; --lora.path {folder} merges them" in told[0]
    assert told[1].endswith("not consolidated.safetensors, pytorch_model.bin")
