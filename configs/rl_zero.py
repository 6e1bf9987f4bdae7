"""RL from a model that only learnt to continue text ("zero": nobody taught it to answer), with
speculative rollouts.

  python -m jaxspec.train --config rl_zero.py
  python -m jaxspec.train --config rl_zero.py:qwen3_0.6b --model.path FOLDER --data.path FILE

FOLDER holds a base model, such as Qwen3-8B-Base, and FILE JSON lines with columns question and
answer. Problems are not put into a chat: see data.prompt_format.

Vary: --batch.group_size (a rare right answer needs a large group to be seen), --sft.steps (how well
it continues), --data.digits.
Expect (tiny, seed 0, on 2 cores of an Intel Xeon at 2.8 GHz, 22 November 2026): reward 0.14 -> 0.93
(first and last tenth), held-out exact match 0.12 -> 0.91, acceptance_length 2.8 -> 2.6 -> 2.95 at
K=3 (the policy leaves the text its draft was trained on, and the draft follows), 346 s from an
empty cache.
"""

from dataclasses import replace
from pathlib import Path

from jaxspec.config.cli import read_config
from jaxspec.config.presets import TINY
from jaxspec.config.settings import Config, DraftTrainingConfig, SftConfig

SCALES = ("tiny", "qwen3_0.6b", "qwen3_8b")


def get_config(scale: str = "tiny") -> Config:
    if scale == "tiny":
        # The policy changes far from where the draft was trained, so the draft follows with a
        # larger step.
        training = DraftTrainingConfig(learning_rate=1e-3)
        sft = SftConfig(steps=500, format="text", wrong_steps=0.1)
        return Config(steps=60, model=TINY, sft=sft, draft_training=training)
    think, _ = read_config(Path(__file__).with_name("rl_think.py"), scale)
    # A base model has never seen the marks of a chat: it is asked in the words of a textbook.
    data = replace(think.data, prompt_format="Problem: {problem}\n\nSolution:")
    batch = replace(think.batch, group_size=2 * think.batch.group_size)
    return replace(think, data=data, batch=batch)
