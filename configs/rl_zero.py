"""RL from a model that only learnt to continue text ("zero": nobody taught it to answer), with
speculative rollouts.

  python -m jaxspec.train --config rl_zero.py
  python -m jaxspec.train --config rl_zero.py:qwen3_0.6b --model.path FOLDER --data.path FILE

FOLDER holds a base model, such as Qwen3-0.6B-Base. FILE is as for rl_think.py: JSON lines with
columns question and answer, and at qwen3_8b, qwen3_30b_a3b and qwen3_235b_a22b DAPO-Math-17k.
Problems are not put into a chat: see data.prompt_format.

Vary: --batch.group_size (a rare right answer needs a large group to be seen), --sft.steps (how well
it continues), --data.digits.
Expect (tiny, seed 0, on 2 cores of an Intel Xeon at 2.8 GHz, 22 November 2026): reward 0.14 -> 0.93
(first and last tenth), held-out avg@8 0.12 -> 0.91, acceptance_length 2.8 -> 2.6 -> 2.95 at
K=3 (the policy leaves the text its draft was trained on, and the draft follows), 346 s from an
empty cache.

qwen3_8b is RL-Zero of arXiv 2604.26779, as far as public notes on it say. Disclosed: Qwen3-8B-Base,
and the rest as for rl_think.py.
Stand-ins of other public runs, because they do not say: prompts of 1,024 and answers of 7,168
tokens (together the 8,192 of NeMo RL's grpo-qwen3-8b-base), 64 prompts of 32 answers (a later
script of one of the authors), and those of rl_think.py.
Ours: the words around a problem, and those of rl_think.py.
At qwen3_235b_a22b the 4,096 rows of a batch, the model and K=3 are of the paper's simulated runs;
all else at the two larger scales is a stand-in. No scale of 8B or more has been run as it is here.
"""

from dataclasses import replace
from pathlib import Path

from jaxspec.config.cli import read_config
from jaxspec.config.settings import Config, DraftTrainingConfig, SftConfig

SCALES = ("tiny", "qwen3_0.6b", "qwen3_8b", "qwen3_30b_a3b", "qwen3_235b_a22b")


def get_config(scale: str = "tiny") -> Config:
    think, _ = read_config(Path(__file__).with_name("rl_think.py"), scale)
    if scale == "tiny":
        # The policy changes far from where the draft was trained, so the draft follows with a
        # larger step.
        training = DraftTrainingConfig(learning_rate=1e-3)
        sft = SftConfig(steps=500, format="text", wrong_steps=0.1)
        return replace(think, steps=60, sft=sft, draft_training=training)
    # A base model has never seen the marks of a chat: it is asked in the words of a textbook.
    data = replace(think.data, prompt_format="Problem: {problem}\n\nSolution:")
    batch = replace(think.batch, group_size=2 * think.batch.group_size)
    zero = replace(think, data=data, batch=batch)
    if scale == "qwen3_0.6b":
        return zero
    # A base model's answers are shorter than a reasoning trace.
    rollout = replace(zero.rollout, max_new_tokens=7168)
    return replace(zero, rollout=rollout, data=replace(data, max_prompt_length=1024))
