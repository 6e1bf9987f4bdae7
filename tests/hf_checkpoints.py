"""Random small checkpoints of every family, written by transformers, and what transformers and we
compute with them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafts.mtp.files import mtp_mappings
from jaxspec.hf.draft_tensors import export_tensors
from jaxspec.hf.eagle3_json import HeadFormat
from jaxspec.hf.eagle3_tensors import head_tensors
from jaxspec.hf.pretrained import load_policy_config, open_policy_checkpoint
from jaxspec.inputs.spec import ModelSpec
from jaxspec.mesh import TRAIN_RULES, assign_shardings
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.mtp import Mtp
from tests.conftest import small_mesh

LENGTH = 40
"""More positions than the stretched cases were made for (16)."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-biases": (
        "Qwen3",
        {
            "head_dim": 8,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3-yarn": (
        "Qwen3",
        {"head_dim": 8, "rope_parameters": YARN, "max_position_embeddings": 64},
    ),
    "qwen3-yarn-keys": (
        "Qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "attention_factor": 0.8,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "truncate": False,
            },
            "max_position_embeddings": 64,
        },
    ),
    "qwen2-mscale": (
        "Qwen2",
        {
            "rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7},
            "max_position_embeddings": 64,
        },
    ),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-unnormalized": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    ),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
    "llama3": (
        "Llama",
        {"rope_parameters": LLAMA3, "max_position_embeddings": 64, "num_key_value_heads": 4},
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "head_dim": 12, "rms_norm_eps": 1e-5}),
}
"""transformers' class, and how the config differs from the common sizes."""
SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make(
    name: str, folder: Path, dtype: str = "float32", shards: str = "50GB", **changes: Any
) -> Any:
    """Writes the checkpoint of a case and returns transformers' model, in evaluation mode; every
    parameter is random."""
    import torch
    import transformers

    family, special = CASES[name]
    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **special, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, dtype=parameter.dtype)
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1
            parameter.copy_(
                1 + 0.2 * noise
                if parameter.ndim == 1 and parameter.mean() > 0.5
                else noise / fan_in**0.5
            )
    model.save_pretrained(folder, max_shard_size=shards)
    return model


def logits(model: Any, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """transformers' logits; `mask` leaves positions out on the left."""
    import torch

    arguments = {}
    if mask is not None:
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
        arguments = {"attention_mask": torch.tensor(mask), "position_ids": torch.tensor(positions)}
    with torch.no_grad():
        return model(torch.tensor(tokens), **arguments).logits.float().numpy()


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes keys of config.json; None removes one."""
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def load(folder: Path, mesh: Any = None, dtype: str = "float32") -> Decoder:
    config = load_policy_config(ModelSpec(path=str(folder), remat=False, dtype=dtype))  # pyright: ignore[reportArgumentType]
    shapes = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))
    placed = assign_shardings(mesh or small_mesh(), shapes, TRAIN_RULES)
    wanted = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        placed,
    )
    return open_policy_checkpoint(config, wanted).load(lambda _: None)


def tokens_of(rows: int = 2) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 37, (rows, LENGTH)).astype(np.int32)


@jax.jit
def whole(policy: Decoder, tokens: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return policy.logits(policy(tokens, positions).hidden)


def draft_tensors(
    network: Eagle3 | Mtp, form: HeadFormat, target_layers: int = 0
) -> dict[str, Any]:
    """A draft's tensors by their published names; MTP layers have one form only, and are numbered
    on from `target_layers`."""
    if isinstance(network, Eagle3):
        return head_tensors(network, form)
    return export_tensors(
        mtp_mappings(network.config, network.embedding_first, target_layers), network
    )
