"""RL of a model that already reasons, imperfectly, with speculative rollouts.

  python -m jaxspec.train --config rl_think.py
  python -m jaxspec.train --config rl_think.py:qwen3_0.6b --model.path FOLDER --data.path FILE

FILE holds JSON lines with columns question and answer.

Vary: --rollout.draft.draft_length 1..5 or auto, --rollout.draft.kind none (plain decoding),
--rollout.verify coupled (exactly the tokens of plain decoding), --batch.group_size, --data.digits
and --data.task (harder tasks), --algorithm and --batch.epochs, --rollout.draft.path FOLDER (a
trained draft).
Expect (tiny, seed 0, on 2 cores of an AMD EPYC, 25 November 2026): reward 0.55 -> 0.89 (first and
last tenth), held-out exact match 0.50 -> 0.91, acceptance_length 3.6 at K=3 throughout, 3 minutes
and 12 seconds from an empty cache.
"""

from dataclasses import replace

from jaxspec.config.presets import QWEN3_0_6B, QWEN3_8B, TINY
from jaxspec.config.settings import (
    BatchConfig,
    Config,
    DataConfig,
    DraftTrainingConfig,
    ModelConfig,
    OfflineConfig,
    OptimizerConfig,
    RolloutConfig,
    SftConfig,
)

SCALES = ("tiny", "qwen3_0.6b", "qwen3_8b")


def get_config(scale: str = "tiny") -> Config:
    if scale == "qwen3_0.6b":
        return _qwen3(
            QWEN3_0_6B, prompts=4, group_size=8, max_prompt_length=256, max_new_tokens=128
        )
    if scale == "qwen3_8b":
        return _qwen3(
            replace(QWEN3_8B, dtype="bfloat16"),
            prompts=64,
            group_size=16,
            max_prompt_length=512,
            max_new_tokens=2048,
        )
    return Config(model=TINY)


def _qwen3(
    model: ModelConfig,
    *,
    prompts: int,
    group_size: int,
    max_prompt_length: int,
    max_new_tokens: int,
) -> Config:
    return Config(
        steps=500,
        model=model,
        rollout=RolloutConfig(max_new_tokens=max_new_tokens, temperature=1.0),
        batch=BatchConfig(prompts=prompts, group_size=group_size),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
        data=DataConfig(
            instruction="Please reason step by step, and put your final answer within \\boxed{}.",
            answer_style="boxed",
            max_prompt_length=max_prompt_length,
        ),
        sft=SftConfig(steps=0),
        draft_training=DraftTrainingConfig(learning_rate=1e-4),
        offline=OfflineConfig(steps=0, learning_rate=3e-4),
    )
