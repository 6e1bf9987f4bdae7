"""What drafts are compared on: a small policy of one-digit sums, and a head like published ones."""

import dataclasses
import json
from pathlib import Path

import jax
from safetensors.numpy import save_file

from jaxspec.config.settings import (
    BatchConfig,
    DataConfig,
    DraftConfig,
    LookupConfig,
    OfflineConfig,
    ResolvedConfig,
    RolloutConfig,
    SftConfig,
)
from jaxspec.hf.eagle3_json import head_config_json
from jaxspec.inputs.spec import HeadSpec, ModelSpec
from jaxspec.models.eagle3 import Eagle3, llama_head_spec
from tests.hf_checkpoints import draft_tensors

MODEL = ModelSpec(vocab=24, layers=4, embed=16, heads=2, kv_heads=2, head_size=8, ffn=24)
CONFIG = ResolvedConfig(
    model=MODEL,
    rollout=RolloutConfig(
        max_new_tokens=8,
        draft=DraftConfig(draft_length=2),
        lookup=LookupConfig(past=2, min_match=1),
    ),
    batch=BatchConfig(prompts=4, group_size=4),
    data=DataConfig(digits=1, max_prompt_length=6),
    sft=SftConfig(steps=0),
    offline=OfflineConfig(steps=0),
)


def head(folder: Path) -> Path:
    """The folder of a head that is narrower than one that is made for the policy, and reads it
    elsewhere."""
    config = dataclasses.replace(llama_head_spec(MODEL, 8), rope_theta=77.0)
    network = Eagle3(config, HeadSpec(taps=(1, 3)), MODEL, jax.random.key(0))
    folder.mkdir()
    content = head_config_json(network.config, network.form, MODEL, "speculators", 0)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(draft_tensors(network, "speculators"), str(folder / "model.safetensors"))
    return folder
