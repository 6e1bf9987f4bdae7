"""Writes a GGUF file of a Llama as a Hugging Face folder in float32: gguf_to_hf.py FILE FOLDER

Needs gguf, safetensors and tokenizers (launch/real_model.sh installs them apart from jaxspec).
FOLDER appears at once and whole: an interrupted conversion leaves only FOLDER.partial.
"""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
CONTROL = 3
"""Token type of GGUF for special tokens, such as the end of a turn."""


def fail(message: str) -> NoReturn:
    """Ends the program with a message and status 2."""
    print(message, file=sys.stderr)
    sys.exit(2)


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """Returns the file's keys and values."""
    return {name: field.contents() for name, field in reader.fields.items()}


def rename_tensor(name: str) -> str:
    """Returns the Hugging Face name of a GGUF tensor.

    Raises:
      KeyError: Llamas have no such tensor.
    """
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    return f"{OTHER_NAMES[stem]}.{kind}"


def split_rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows of a query or key projection for rotary embeddings over two halves.

    GGUF stores the pairs of a rotation side by side, Hugging Face half a head apart.
    """
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def convert_weights(reader: GGUFReader, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """Returns all weights in float32 by their Hugging Face names."""
    weights = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        try:
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
            name = rename_tensor(tensor.name)
        except NotImplementedError:
            fail(
                f"{tensor.name} is quantized as {kind}, which gguf cannot read; take a file of"
                " Q4_1, Q8_0 or F16"
            )
        except KeyError:
            fail(f"{tensor.name} is no tensor of a Llama; only such models are converted")
        if ".q_proj." in name or ".k_proj." in name:
            values = split_rotary_halves(values, heads if ".q_proj." in name else kv_heads)
        weights[name] = np.ascontiguousarray(values)
    return weights


def convert_config(metadata: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the contents of config.json."""

    def of_llama(key: str) -> Any:
        return metadata[f"llama.{key}"]

    width, heads = of_llama("embedding_length"), of_llama("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": of_llama("feed_forward_length"),
        "num_hidden_layers": of_llama("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of_llama("attention.head_count_kv"),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": of_llama("context_length"),
        # stored as float32, of which this is the shortest decimal
        "rms_norm_eps": float(str(np.float32(of_llama("attention.layer_norm_rms_epsilon")))),
        "rope_theta": of_llama("rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def convert_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Returns the tokenizer: byte-level BPE that splits numbers into digits, as SmolLM's does."""
    kind = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        fail(f"the tokenizer is {kind[0]}, {kind[1]}; only that of SmolLM (gpt2, smollm) is known")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def write_folder(reader: GGUFReader, folder: Path) -> None:
    """Writes weights, config and tokenizer into a folder that exists."""
    metadata = read_metadata(reader)
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        fail(f"the file holds a model of architecture {architecture}; only llama is converted")
    heads = metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"]
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    print("tensors: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    weights = convert_weights(reader, *heads)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(convert_config(metadata, weights), indent=1)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    convert_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    text = json.dumps(settings, indent=1, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    if len(sys.argv) != 3:
        fail(__doc__ or "")
    file, folder = map(Path, sys.argv[1:])
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError) as error:
        fail(f"{file} cannot be read as GGUF: {error}")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_folder(reader, partial)
    except KeyError as error:
        fail(f"{file} lacks the key {error}, without which it cannot be converted")
    partial.replace(folder)
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
