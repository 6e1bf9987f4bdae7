"""Offline training of the EAGLE-3 draft on the policy's own responses: policy and data of rl_think, a longer draft training.

  python -m jaxspec.train_draft --config draft_offline.py
  python -m jaxspec.train_draft --config draft_offline.py:qwen3_0.6b --data.path train.jsonl --data.tokenizer FOLDER

Vary: --offline.samples and --offline.steps (acceptance grows with both), --rollout.draft.ttt_steps (depths of the unroll),
--rollout.draft.draft_length.
Expect (tiny, seed 0, on 2 cores of an AMD EPYC, 21 November 2026): expected acceptance length 3.80 of 4 at K=3 on its own samples,
110 s when the policy is in the cache.
"""

from dataclasses import replace
from pathlib import Path

from jaxspec.cli import read_config
from jaxspec.config import Config, OfflineConfig

SCALES = ("tiny", "qwen3_0.6b", "qwen3_8b")


def get_config(scale: str = "tiny") -> Config:
    think, _ = read_config(Path(__file__).with_name("rl_think.py"), scale)
    if scale == "tiny":
        return replace(think, offline=OfflineConfig(samples=4096, steps=600))
    return replace(think, offline=OfflineConfig(samples=16_384, steps=2000, learning_rate=3e-4))
