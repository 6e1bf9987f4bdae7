"""Folders of weights: what was written is read back bit for bit on any mesh, and what is wrong
is named before any array is made."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.hf import tensor_files
from jaxspec.hf.pretrained import (
    find_folder,
    fingerprint_checkpoint,
    load_policy_config,
    open_policy_checkpoint,
)
from jaxspec.hf.tensor_files import WEIGHTS_FILE
from jaxspec.inputs.checked import ConfigError
from jaxspec.inputs.spec import ModelSpec
from jaxspec.models.decoder import Decoder
from tests.conftest import tiny_network
from tests.hf.policy_folders import MODEL, NORM, file_of, opened, shapes_of, split


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (4, 2), (2, 1)])
def test_read_back_on_any_mesh(
    folder: Path, monkeypatch: pytest.MonkeyPatch, data: int, tensor: int
) -> None:
    if data > 1:
        split(folder, monkeypatch)
        assert len(list(folder.glob("*.safetensors"))) > 2
    config, seen = load_policy_config(ModelSpec(path=str(folder))), []
    checkpoint = open_policy_checkpoint(config, shapes_of(config, data, tensor))
    found = checkpoint.load(seen.append)
    for leaf, wanted in zip(
        jax.tree.leaves(found), jax.tree.leaves(tiny_network(Decoder, MODEL)), strict=True
    ):
        np.testing.assert_array_equal(leaf, wanted)
    assert found.layers.query[...].sharding.shard_shape(found.layers.query.shape) == (
        4,
        16 // data,
        4 // tensor,
        4,
    )
    assert seen == sorted(seen)
    assert seen[-1] == checkpoint.bytes


def test_no_more_than_the_shard_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a weight split over 8 devices, each device's eighth."""
    config = load_policy_config(ModelSpec(path=str(folder)))
    checkpoint, read = open_policy_checkpoint(config, shapes_of(config, 8, 1)), []
    plain = tensor_files.StoredTensor.read

    def counting(self: Any, index: Any = ()) -> np.ndarray:
        part = plain(self, index)
        read.append((self.name, part.size))
        return part

    monkeypatch.setattr(tensor_files.StoredTensor, "read", counting)
    checkpoint.load(lambda _: None)
    gates = [size for name, size in read if name == "model.layers.0.mlp.gate_proj.weight"]
    assert gates == [16 * 24 // 8] * 8


def change_tensors(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)

    return edit


def change_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        content = {**json.loads(file.read_text()), **changes}
        file.write_text(
            json.dumps({key: value for key, value in content.items() if value is not None})
        )

    return edit


def cut(folder: Path) -> None:
    content = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(content[:-100])


def pickled(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "pytorch_model.bin")


MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (cut, ["model.safetensors", "truncated", "download it again"]),
        (
            lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"no weights"),
            ["model.safetensors", "truncated or damaged"],
        ),
        (pickled, ["pytorch_model.bin", "can run code", "save_pretrained"]),
        (
            lambda folder: (folder / WEIGHTS_FILE).unlink(),
            ["neither model.safetensors nor model.safetensors.index.json"],
        ),
        (lambda folder: (folder / "config.json").unlink(), ["config.json", "No such file"]),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            ["config.json", "not valid JSON"],
        ),
        (change_tensors(lambda tensors: tensors.pop(NORM)), ["lacks tensors", NORM]),
        (
            change_tensors(lambda tensors: tensors.update({NORM: np.ones(3, np.float32)})),
            [NORM, "[3]", "[16]"],
        ),
        (
            change_tensors(lambda tensors: tensors.update({NORM: np.ones(16, np.int8)})),
            [NORM, "I8", "not quantized"],
        ),
        (
            change_tensors(lambda tensors: tensors.update(extra=np.ones(1))),
            ["no place here: extra", "--model.ignore"],
        ),
        (change_config(vocab_size=12), ["model.embed_tokens.weight is [11, 16]", "[12, 16]"]),
        (
            change_config(num_hidden_layers=5),
            ["lacks tensors", "model.layers.4.input_layernorm.weight", "and 6 more"],
        ),
        (
            change_config(num_hidden_layers=3),
            ["no place here: model.layers.3.input_layernorm.weight"],
        ),
        (
            change_config(num_hidden_layers=1000),
            ["num_hidden_layers 1000 in config.json", "there are 47 tensors in all; correct"],
        ),
        (
            change_config(**MOE, num_experts=2**31 - 1),
            [
                "num_hidden_layers 4 and num_experts 2147483647 in config.json",
                "ask for 8589934588 tensors",
                "correct config.json",
            ],
        ),
        (
            change_config(tie_word_embeddings=True),
            ["tie_word_embeddings is true, but lm_head.weight differs"],
        ),
        (
            change_config(architectures=["T5ForConditionalGeneration"]),
            ["T5ForConditionalGeneration is not supported"],
        ),
        (change_config(hidden_size=None), ["no key 'hidden_size'"]),
    ],
)
def test_what_is_wrong_is_named_before_any_array_is_made(
    folder: Path, spoil: Callable[[Path], Any], words: list[str]
) -> None:
    spoil(folder)
    before = len(jax.live_arrays())
    with pytest.raises(ConfigError) as error:
        opened(folder)
    for word in [str(folder), *words]:
        assert word in str(error.value)
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 1e39])
def test_weights_that_are_not_finite_are_named_by_file_and_tensor(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, value: float
) -> None:
    """One number of the last device's part, in one of several files, is enough, and of 64 bits one
    that float32 cannot hold; the largest and smallest numbers of a type are none."""
    name = "model.layers.3.mlp.gate_proj.weight"
    limits = ml_dtypes.finfo(np.float32 if kind is np.float64 else kind)
    tensors = {
        name: tensor.astype(kind) for name, tensor in load_file(folder / WEIGHTS_FILE).items()
    }
    tensors[name][:2, :4] = [
        [limits.max, limits.min, limits.tiny, -0.0],
        [limits.smallest_subnormal, -limits.smallest_subnormal, 0, 1],
    ]
    save_file(tensors, folder / WEIGHTS_FILE)
    assert len(load_file(split(folder, monkeypatch) / file_of(folder, name))) >= 1
    config = load_policy_config(ModelSpec(path=str(folder)))
    shapes = shapes_of(config, 4, 2)
    open_policy_checkpoint(config, shapes).load(lambda _: None)
    file = folder / file_of(folder, name)
    holds = load_file(file)
    with np.errstate(over="ignore"):
        holds[name][-1, -1] = value
    save_file(holds, file)
    checkpoint = open_policy_checkpoint(config, shapes)  # looks at headers only
    with pytest.raises(ConfigError) as error:
        checkpoint.load(lambda _: None)
    for word in (str(file), name, "not finite", "download the file again"):
        assert word in str(error.value)


def test_unknown_tensors_can_be_left_out(folder: Path) -> None:
    """So are those that follow from the config, and MiMo's own prediction layers, without being
    asked."""
    known = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2),
        "model.mtp_layers.0.input_proj.weight": np.ones(2),
    }
    change_tensors(lambda tensors: tensors.update(known))(folder)
    opened(folder).load(lambda _: None)
    change_tensors(lambda tensors: tensors.update(extra=np.ones(1)))(folder)
    opened(folder, ignore=True).load(lambda _: None)


def test_a_tied_head_may_be_written_out(folder: Path) -> None:
    change_tensors(
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]})
    )(folder)
    change_config(tie_word_embeddings=True)(folder)
    assert opened(folder).load(lambda _: None).head is None


def test_hub_ids_are_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, configs and templates only; never pickles or code."""
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, sorted(allow_patterns)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = load_policy_config(ModelSpec(path="Somebody/Something"))
    assert (config.path, config.vocab) == ("Somebody/Something", 11)
    assert asked == [("Somebody/Something", ["*.jinja", "*.json", "*.safetensors"])]

    def refuse(name: str, allow_patterns: list[str]) -> str:
        raise OSError("404 Client Error\nmore lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=r"model\.path Somebody/Nothing.*404 Client Error\)"):
        find_folder("Somebody/Nothing", "model.path")


@pytest.mark.parametrize("path", ["missing", "./a/b", "a/b/c", "/nowhere/at-all"])
def test_a_folder_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.path {path}: no such folder"):
        find_folder(path, "model.path")


def test_a_fingerprint_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    """The same for a copy, whatever its times; another for other weights or settings."""
    first = fingerprint_checkpoint(str(folder))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    os.utime(copy / WEIGHTS_FILE, (1, 1))
    assert fingerprint_checkpoint(str(copy)) == first
    change_tensors(lambda tensors: tensors.update({NORM: np.full(16, 2, np.float32)}))(copy)
    assert fingerprint_checkpoint(str(copy)) != first
    shutil.copy(folder / WEIGHTS_FILE, copy / WEIGHTS_FILE)
    assert fingerprint_checkpoint(str(copy)) == first
    change_config(rope_theta=7.0)(copy)
    assert fingerprint_checkpoint(str(copy)) != first


def test_a_fingerprint_passes_over_what_is_no_file(folder: Path) -> None:
    first = fingerprint_checkpoint(str(folder))
    (folder / "a.safetensors").mkdir()
    (folder / "b.safetensors").symlink_to("nowhere")
    os.mkfifo(folder / "c.safetensors")
    (folder / "foo_config.json").mkdir()
    assert fingerprint_checkpoint(str(folder)) == first
