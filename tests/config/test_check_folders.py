"""Folders are judged by their headers, where the policy's are, before anything is compiled; a
draft's vocabulary may have other padding than its policy's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.config.from_checkpoint import check_folders, resolve_config
from jaxspec.config.settings import ResolvedConfig
from jaxspec.hf.tensor_files import WEIGHTS_FILE, StoredTensor, open_tensors
from jaxspec.inputs.checked import ConfigError
from jaxspec.models.decoder import Decoder
from jaxspec.models.mtp import Mtp
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.config.test_from_checkpoint import MODEL, config_for, policy, read_back, save_head
from tests.conftest import eagle3, save_policy, tiny_model, tiny_network
from tests.hf_checkpoints import draft_tensors, edit_config

__all__ = ["policy"]
TOKENS = 9
"""Of the 11 rows of the policy's vocabulary."""


def judge(config: ResolvedConfig, tokens: int = TOKENS) -> None:
    shapes = jax.eval_shape(lambda: Decoder(config.model, jax.random.key(0)))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=""))
    check_folders(config, shapes, tokens)


def change(folder: Path, **changes: np.ndarray | None) -> None:
    """Changes tensors of a folder, by their names with `__` for dots; None takes one out."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    tensors = {**load_file(folder / WEIGHTS_FILE), **named}
    save_file(
        {name: value for name, value in tensors.items() if value is not None}, folder / WEIGHTS_FILE
    )


def draft_of(kind: str, policy: Path, folder: Path) -> Path:
    if kind == "eagle3":
        return save_head(folder, tiny_network(eagle3, MODEL, 2))
    save_policy(folder, MODEL, 1)
    if kind == "mtp":
        made = tiny_network(lambda config, key: Mtp(config, key, 1, True), MODEL, 3)
        change(folder, **draft_tensors(made, "raw", 4))
    return folder


GATE = {
    "eagle3": "midlayer.mlp.up_proj.weight",
    "mtp": "model.layers.4.mlp.up_proj.weight",
    "model": "model.layers.1.mlp.up_proj.weight",
}


@pytest.mark.parametrize("kind", GATE)
def test_a_drafts_tensors_are_judged_without_reading_a_weight(
    policy: Path, tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = draft_of(kind, policy, tmp_path / "draft")
    config = resolve_config(config_for(policy, folder, kind=kind), print)
    read: list[str] = []
    monkeypatch.setattr(StoredTensor, "read", lambda stored, index=(): read.append(stored.name))
    judge(config)
    assert read == []
    name, tensor = GATE[kind], load_file(folder / WEIGHTS_FILE)[GATE[kind]]
    for value in (None, tensor[:-1].copy(), tensor.astype(np.int8)):
        change(folder, **{name: value})
        with pytest.raises(ConfigError, match=None if kind == "mtp" else str(folder)) as error:
            judge(config)
        short = name.replace("midlayer", "layers.0")
        assert name in str(error.value) or short in str(error.value)
    assert read == []


def test_layers_of_a_head_are_those_of_its_tensors(policy: Path, tmp_path: Path) -> None:
    """SafeAILab's head for Vicuna 13B says 40, the policy's number, and has one."""
    folder = draft_of("eagle3", policy, tmp_path / "draft")
    edit_config(folder, num_hidden_layers=40)
    told: list[str] = []
    config = resolve_config(config_for(policy, folder), told.append)
    assert "num_hidden_layers is 1 by the tensors, not 40 as config.json has it" in told
    judge(config)
    assert read_back(config).config.layers == 1


def test_a_head_that_lacks_a_layer_is_refused_with_the_number_of_its_file(
    policy: Path, tmp_path: Path
) -> None:
    folder = draft_of("eagle3", policy, tmp_path / "draft")
    edit_config(folder, num_hidden_layers=40)
    change(folder, layers__2__self_attn__q_proj__weight=np.ones((16, 16), np.float32))
    config = resolve_config(config_for(policy, folder), print)
    with pytest.raises(ConfigError, match=r"num_hidden_layers 40 in config\.json"):
        judge(config)


def _padded(folder: Path, rows: int) -> None:
    """Another number of rows, of which those up to `TOKENS` are as they were."""
    edit_config(folder, vocab_size=rows)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "embed_tokens.weight"):
        tensors = load_file(folder / WEIGHTS_FILE)
        if name in tensors:
            held = tensors[name][:TOKENS]
            more = np.full((rows - TOKENS, held.shape[1]), 0.25, held.dtype)
            change(folder, **{name: np.concatenate([held, more])})


@pytest.mark.parametrize("rows", [9, 10, 30])
@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_another_padding_is_padded_or_cut(
    policy: Path, tmp_path: Path, kind: Any, rows: int
) -> None:
    plain = draft_of(kind, policy, tmp_path / "plain")
    other = draft_of(kind, policy, tmp_path / "other")
    _padded(other, rows)
    config = resolve_config(config_for(policy, other, kind=kind), print)
    judge(config)
    same = read_back(resolve_config(config_for(policy, plain, kind=kind), print))
    found = read_back(config)
    for one, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(same), strict=True):
        assert one.shape == wanted.shape
    np.testing.assert_array_equal(found.head[:, :TOKENS], same.head[:, :TOKENS])
    # the tokenizer decides, not the tables
    with pytest.raises(ConfigError, match=f"a vocabulary of {rows}, model.vocab is 11, .* 12 tok"):
        judge(config, 12)


def test_a_mask_of_a_heads_vocabulary_is_padded_too(policy: Path, tmp_path: Path) -> None:
    folder = draft_of("eagle3", policy, tmp_path / "draft")
    ids = np.array([0, 2, 5, 8])
    head = load_file(folder / WEIGHTS_FILE)["lm_head.weight"]
    edit_config(folder, vocab_size=30, draft_vocab_size=4)
    mask = np.isin(np.arange(30), ids)
    change(folder, d2t=ids - np.arange(4), t2d=mask, lm_head__weight=head[ids])
    config = resolve_config(config_for(policy, folder), print)
    judge(config)
    found = read_back(config)
    np.testing.assert_array_equal(found.vocabulary[...], ids)
    np.testing.assert_array_equal(found.head[...], head[ids].T)


@pytest.mark.parametrize("rows", [2, 7, 12])
def test_rows_that_a_file_lacks_are_zeros_in_every_slice(tmp_path: Path, rows: int) -> None:
    held = np.arange(14, dtype=np.float32).reshape(7, 2) + 1
    save_file({"a": held}, tmp_path / WEIGHTS_FILE)
    stored = open_tensors(tmp_path)["a"].resize_rows(rows)
    whole = np.zeros((rows, 2), np.float32)
    whole[: min(rows, 7)] = held[:rows]
    np.testing.assert_array_equal(stored.read(), whole)
    for start in range(rows):
        for stop in range(start, rows + 1):
            index = (slice(start, stop), slice(1, 2))
            np.testing.assert_array_equal(stored.read(index), whole[index])


def test_a_draft_of_another_tokenizer_is_refused_by_a_token(policy: Path, tmp_path: Path) -> None:
    folder = draft_of("model", policy, tmp_path / "draft")
    for each in (policy, folder):
        character_tokenizer().save(str(each))
    config = resolve_config(config_for(policy, folder, kind="model"), print)
    shapes = jax.eval_shape(lambda: Decoder(config.model, jax.random.key(0)))
    check_folders(config, shapes, TOKENS)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["3"], words["4"] = words["4"], words["3"]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"other tokens than .* for 2 ids: \d+ \('3', '4'\)"):
        check_folders(config, shapes, TOKENS)


QUANTIZED = {
    "modelopt": lambda folder: (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}})
    ),
    "packed": lambda folder: change(
        folder,
        model__layers__1__mlp__up_proj__weight=np.ones((24, 8), np.uint8),
        model__layers__1__mlp__up_proj__weight_scale=np.ones((24, 1), np.uint8),
    ),
    "narrow": lambda folder: change(
        folder, model__layers__1__mlp__up_proj__weight=np.ones((24, 8), np.uint8)
    ),
    "GPTQ": lambda folder: change(
        folder,
        model__layers__1__mlp__up_proj__weight=None,
        model__layers__1__mlp__up_proj__qweight=np.ones((2, 24), np.int32),
    ),
}


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("which", ["policy", "draft"])
def test_quantized_weights_are_said_so_whatever_their_shapes(
    policy: Path, tmp_path: Path, form: str, which: str
) -> None:
    folder = draft_of("model", policy, tmp_path / "draft")
    config = resolve_config(config_for(policy, folder, kind="model"), print)
    judge(config)
    QUANTIZED[form](policy if which == "policy" else folder)
    with pytest.raises(ConfigError, match="give weights that are not quantized") as error:
        judge(config)
    assert "correct config.json" not in str(error.value)


def test_a_quantized_cache_is_no_quantized_weight(policy: Path) -> None:
    quantization = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (policy / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    judge(resolve_config(config_for(policy, kind="none"), print))


def test_a_tokenizer_with_more_tokens_than_rows_is_told_what_works(tmp_path: Path) -> None:
    """Each remedy is followed: more rows, and the checkpoint's own tokenizer."""
    tokenizer = character_tokenizer()
    with pytest.raises(ConfigError, match=r"set --model\.vocab"):
        tokenizer.check_vocab(4)
    tokenizer.source = str(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json is 4, .*resize_token_embeddings") as error:
        tokenizer.check_vocab(4, str(tmp_path))
    assert "--model.vocab" not in str(error.value)
    assert "--data.tokenizer" not in str(error.value)
    tokenizer.check_vocab(tokenizer.size, str(tmp_path))
    with pytest.raises(ConfigError, match=r"leave out --data\.tokenizer"):
        tokenizer.check_vocab(4, "elsewhere")
    resized = save_policy(tmp_path / "resized", tiny_model(vocab=tokenizer.size, dtype="float32"))
    config = resolve_config(config_for(resized, kind="none"), print)
    tokenizer.check_vocab(config.model.vocab, config.model.path)
