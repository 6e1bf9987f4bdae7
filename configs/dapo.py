"""RL by DAPO (arXiv 2503.14476) as published, with speculative rollouts: the policy of rl_think at
scale tiny.

  python -m jaxspec.train --config dapo.py
  python -m jaxspec.train --config dapo.py:qwen3_0.6b --model.path FOLDER --data.path FILE

FILE is DAPO-Math-17k (columns prompt and reward_model.ground_truth; each prompt once, however often
the file has it), and --data.eval_path AIME-2024 in the same layout. Their prompts ask for a last
line `Answer: ...`, and data.answer_style dapo reads it by DAPO's own rule.

Vary: --dynamic_sampling.max_batches 0 (each rollout is a batch), --dynamic_sampling.surplus carry,
--batch.mini_batches, --overlong.buffer 0, --overlong.filter, --loss.clip_high.
Expect (tiny, seed 0, on 2 cores of an AMD EPYC, 26 November 2026): reward 0.60 -> 0.96 (first and
last tenth), held-out avg@8 0.50 -> 0.97, acceptance_length 3.6 at K=3 throughout, 1.5 -> 5.3
rollouts a batch as fewer groups differ, 10 and a half minutes from an empty cache on cores that
other work kept busy.

At all scales: token ratios clipped at 0.2 and 0.28, the mean over all tokens of a batch,
advantages by the group's mean and standard deviation, no KL penalty, a penalty for overlong
answers, and groups whose answers are all right or all wrong replaced by further ones.
`--algorithm dapo` sets the same.
Published, in the paper: all of that, and at qwen3_8b 512 prompts of 16 answers, 16 updates a
batch, AdamW with a constant learning rate of 1e-6, warm-up over 20 batches (320 updates), and
answers of 20,480 tokens, of which the last 4,096 lose reward along a line. There they lose up to 1,
where right is 1 and wrong -1; here right is 1 and wrong 0, so that the same penalty is 0.5.
Published in its code: prompts of 2,048 tokens, temperature 1, weight decay 0.1, gradients clipped
at 1, at most 10 rollouts a batch.
Stand-ins: the policy (the paper trains Qwen2.5-32B), all that concerns the draft (as in
rl_think.py, but trained further during the run), 500 batches, and rollouts of as many prompts as a
batch has (its code takes three times as many).
At qwen3_0.6b the sizes are ours: 32 prompts of 8 answers, 4 updates a batch, prompts of 1,024 and
answers of 4,096 tokens. At tiny they are those of rl_think.py in two updates a batch. No scale but
tiny has been run as it is here.
"""

from dataclasses import replace
from pathlib import Path

from jaxspec.config.algorithms import with_algorithm
from jaxspec.config.cli import read_config
from jaxspec.config.settings import BatchConfig, Config, DataConfig, OptimizerConfig

SCALES = ("tiny", "qwen3_0.6b", "qwen3_8b")


def get_config(scale: str = "tiny") -> Config:
    think, _ = read_config(Path(__file__).with_name("rl_think.py"), scale)
    dapo = with_algorithm(think, "dapo")
    if scale == "tiny":
        return replace(dapo, batch=replace(think.batch, mini_batches=2))
    whole = scale == "qwen3_8b"
    batch = (
        BatchConfig(prompts=512, group_size=16, mini_batches=16)
        if whole
        else BatchConfig(prompts=32, group_size=8, mini_batches=4)
    )
    return replace(
        dapo,
        rollout=replace(think.rollout, max_new_tokens=20_480 if whole else 4096),
        batch=batch,
        optimizer=OptimizerConfig(warmup_steps=20 * batch.mini_batches, weight_decay=0.1),
        data=DataConfig(
            prompt_column="prompt",
            answer_column="reward_model.ground_truth",
            answer_style="dapo",
            max_prompt_length=2048 if whole else 1024,
        ),
        draft_training=replace(think.draft_training, online=True),
    )
