"""Weights in several files: they hold what one would, and a damaged index is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.hf.tensor_files import WEIGHTS, open_tensors
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.json_keys import read_json
from tests.hf.policy_folders import NORM, opened, split


def test_a_damaged_index_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split(folder, monkeypatch)
    index = folder / f"{WEIGHTS}.index.json"
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
    index, elsewhere = folder / f"{WEIGHTS}.index.json", folder.parent / "other.safetensors"
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
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ConfigError, match=r"index\.json: .*weight_map"):
        opened(folder)


def test_several_files_hold_what_one_would(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = load_file(folder / WEIGHTS)
    several = open_tensors(split(folder, monkeypatch))
    assert several.keys() == one.keys()
    for name, stored in several.items():
        np.testing.assert_array_equal(stored.read(), one[name])
    sizes = {
        file: sum(tensor.nbytes for tensor in load_file(file).values())
        for file in folder.glob("*.safetensors")
    }
    assert all(size <= 4000 or len(load_file(file)) == 1 for file, size in sizes.items())
    assert read_json(folder / f"{WEIGHTS}.index.json")["metadata"]["total_size"] == sum(
        sizes.values()
    )
