"""RL from a model that only learnt to continue text ("zero": nobody taught it to answer), with speculative rollouts.

  python -m jaxspec.train --config rl_zero.py
  python -m jaxspec.train --config rl_zero.py:qwen3_0.6b --data.path train.jsonl --data.tokenizer FOLDER    (JSON lines: question, answer)

Vary: --grpo.group_size (a rare right answer needs a large group to be seen), --sft.steps (how well it continues), --data.digits.
# Expect: (filled from a real run)
"""

from dataclasses import replace
from pathlib import Path

from jaxspec.config import Config, DataConfig, DraftConfig, RolloutConfig, SftConfig, read_config
from jaxspec.models.presets import TINY

SCALES = ("tiny", "qwen3_0.6b", "qwen3_8b")


def get_config(scale: str = "tiny") -> Config:
    if scale == "tiny":
        # The policy changes far from where the draft was trained, so the draft follows with a larger step.
        rollout = RolloutConfig(draft=DraftConfig(learning_rate=1e-3))
        sft = SftConfig(steps=500, wrong_steps=0.1)
        return Config(steps=60, model=TINY, rollout=rollout, data=DataConfig(format="text"), sft=sft)
    think, _ = read_config(Path(__file__).with_name("rl_think.py"), scale)
    return replace(think, grpo=replace(think.grpo, group_size=2 * think.grpo.group_size))
