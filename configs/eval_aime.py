"""How good a policy is at competition mathematics: avg@k, pass@k and cons@k on named sets, with
intervals, answered with speculative decoding.

  python -m jaxspec.evaluate --config eval_aime.py:qwen3_8b --model.path FOLDER \
    --eval.sets.0.data.path AIME24 --eval.sets.1.data.path AIME25 --eval.sets.2.data.path MATH500
  python -m jaxspec.evaluate --config eval_aime.py:qwen3_8b --checkpoint RUN \
    --eval.sets.0.data.path AIME24 --eval.sets.1.data.path AIME25 --eval.sets.2.data.path MATH500
  python -m jaxspec.evaluate --config eval_aime.py

The files hold JSON lines with columns problem and answer. The third command measures a tiny
model after a warm start on generated tasks, which is made if it is not in the cache.

Vary: --eval.samples (k), --eval.temperature, --eval.top_p and --eval.top_k (here those that Qwen3's
model card recommends for thinking; published protocols differ, and so do their numbers),
--eval.max_new_tokens, --rollout.draft.kind eagle3 --rollout.draft.path FOLDER (the same law, in
less time). Sets of your own: EvalConfig.sets in a config of your own.
Expect (tiny, seed 0, on 2 cores of an AMD EPYC that tests kept busy, 26 November 2026): sums avg@8
0.24, pass@8 0.88, cons@8 0.42, differences avg@8 0.14, pass@8 0.69, cons@8 0.22; 2 minutes and 26
seconds from an empty cache, 10 of them answering.
"""

from dataclasses import replace

from jaxspec.config.presets import QWEN3_0_6B, QWEN3_8B, TINY
from jaxspec.config.settings import (
    BatchConfig,
    Config,
    DataConfig,
    DraftConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SetConfig,
    SftConfig,
)

SCALES = ("tiny", "qwen3_0.6b", "qwen3_8b")
LOOKUP = DraftConfig(kind="ngram", draft_length=5)
"""Drafts that need no weights."""


def get_config(scale: str = "tiny") -> Config:
    if scale == "tiny":
        sets = tuple(
            SetConfig(name=task, data=DataConfig(task=task, eval_prompts=64))
            for task in ("add", "subtract")
        )
        return Config(
            model=TINY,
            rollout=RolloutConfig(draft=LOOKUP),
            data=DataConfig(task="mixed"),
            eval=EvalConfig(samples=8, sets=sets),
        )
    model = QWEN3_0_6B if scale == "qwen3_0.6b" else replace(QWEN3_8B, dtype="bfloat16")
    names = ("aime24", "aime25", "math500")
    return Config(
        model=model,
        rollout=RolloutConfig(draft=LOOKUP),
        batch=BatchConfig(prompts=16, group_size=32),
        data=DataConfig(max_prompt_length=1024),
        sft=SftConfig(steps=0),
        eval=EvalConfig(
            samples=32,
            temperature=0.6,
            top_p=0.95,
            top_k=20,
            max_new_tokens=32_768,
            sets=tuple(map(_mathematics, names)),
        ),
    )


def _mathematics(name: str) -> SetConfig:
    return SetConfig(
        name=name,
        data=DataConfig(
            path=f"{name}.jsonl",
            prompt_column="problem",
            answer_style="boxed",
            instruction="Please reason step by step, and put your final answer within \\boxed{}.",
        ),
        reward=RewardConfig(verifier="math"),
    )
