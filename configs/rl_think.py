"""RL of a model that already reasons, imperfectly, with speculative rollouts.

  python -m jaxspec.train --config rl_think.py
  python -m jaxspec.train --config rl_think.py:qwen3_0.6b --model.path FOLDER --data.path FILE

  bash launch/real_model.sh

The script fetches SmolLM2-135M-Instruct and runs rl_think.py:smollm2_135m on word problems
(docs/real_model.md). This policy marks no answer: the last number of its text is read. Expect (seed
0, on 2 cores of an Intel Xeon, 28 November 2026): held-out avg@8 0.14 -> 0.47 in 60 batches,
and 0.15 -> 0.35 on another machine.
At qwen3_0.6b FILE holds JSON lines with columns question and answer. At qwen3_8b, qwen3_30b_a3b and
qwen3_235b_a22b it is DAPO-Math-17k (columns prompt and reward_model.ground_truth; each prompt once,
however often the file has it), and --data.eval_path AIME-2024 in the same layout.

Vary: --rollout.draft.draft_length 1..5 or auto, --rollout.draft.kind none (plain decoding),
--rollout.verify coupled (exactly the tokens of plain decoding), --batch.group_size, --data.digits
and --data.task (harder tasks), --algorithm and --batch.epochs, --rollout.draft.path FOLDER (a
trained draft).
Expect (tiny, seed 0, on 2 cores of an AMD EPYC, 25 November 2026): reward 0.55 -> 0.89 (first and
last tenth), held-out avg@8 0.50 -> 0.91, acceptance_length 3.6 at K=3 throughout, 3 minutes
and 12 seconds from an empty cache.

Learning rates: at scale tiny 2e-4, and 4e-4 and 1e-2 for its draft, online and offline, which are
for a model of this size alone: a warning says so beside --model.path, and
--optimizer.learning_rate auto is 1e-6 there. At the larger scales they are left to what is trained,
with --model.path: 1e-6, or 2e-5 with --lora.rank, and 1e-4 for the draft during the run.

With a policy from a folder the draft is first trained in domain: on answers of the policy to the
training prompts. A draft of --rollout.draft.path FOLDER goes on from its weights in this; it is
used as it is with --offline.steps 0.

qwen3_8b is RL-Think of arXiv 2604.26779, as far as public notes on it say.
Disclosed: Qwen3-8B, GRPO without lag, DAPO-Math-17k, AIME-2024, an EAGLE-3 draft of K=3 that is
trained in domain before the run and frozen during it.
Stand-ins of other public runs, because they do not say: answers of 14,336 tokens behind
prompts of 2,048 (NeMo RL's dapo-qwen2.5-7b), learning rate 1e-6, weight decay 0.1 and no KL penalty
(its grpo-qwen3-8b-base and dapo-qwen2.5-7b), 64 prompts (a later script of one of the authors).
Ours: 16 answers a prompt, 500 batches, 10 updates of warm-up, temperature 1, the standard deviation
of the group, which answers count as right (the last box, or the last `Answer:` line), and all of
offline: 8,192 answers, 256 updates of 256, 3e-4. The draft's vocabulary of 32,000 is that of
published heads (SpecForge); over all 151,936 tokens its head would be a quarter of a plain step.
qwen3_8b_async is its asynchronous run: lag 1, 4 nodes of GB200 that learn and 12 that generate
(docs/asynchronous.md). 96 prompts are ours, since 48 GPUs generate whole groups.
At the two larger scales all is a stand-in but the models and K=3; the draft has the width of
published heads, too. No scale of 8B or more has been run as it is here.
"""

from dataclasses import replace

from jaxspec.config.presets import (
    QWEN3_0_6B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    SMOLLM2_135M,
    TINY,
)
from jaxspec.config.settings import (
    AdamConfig,
    BatchConfig,
    Config,
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    EvalConfig,
    GenerationConfig,
    LossConfig,
    ModelConfig,
    OfflineConfig,
    OptimizerConfig,
    RolloutConfig,
    ScheduleConfig,
    SftConfig,
)
from jaxspec.drafts.eagle3.settings import Eagle3Config

SCALES = (
    "tiny",
    "smollm2_135m",
    "qwen3_0.6b",
    "qwen3_8b",
    "qwen3_8b_async",
    "qwen3_30b_a3b",
    "qwen3_235b_a22b",
)
TINY_OPTIMIZER = OptimizerConfig(learning_rate=2e-4, adam=AdamConfig(betas=(0.9, 0.95)))
"""For a model of half a million weights and 80 updates, which a mean over 1,000 updates of squared
gradients would outlast."""


def get_config(scale: str = "tiny") -> Config:
    match scale:
        case "tiny":
            return Config(
                model=TINY,
                optimizer=TINY_OPTIMIZER,
                draft_training=DraftTrainingConfig(learning_rate=4e-4),
                offline=OfflineConfig(learning_rate=1e-2),
            )
        case "smollm2_135m":
            return Config(
                steps=60,
                # its activations are small, and a CPU takes a third longer to recompute them
                model=replace(SMOLLM2_135M, remat=False),
                # a tail of unlikely tokens makes every other answer nonsense
                rollout=RolloutConfig(
                    max_new_tokens=32, min_p=0.1, draft=DraftConfig(eagle3=Eagle3Config(vocab=4096))
                ),
                batch=BatchConfig(prompts=4),
                optimizer=OptimizerConfig(learning_rate=4e-5, warmup_steps=5),
                draft_training=DraftTrainingConfig(learning_rate=5e-4),
                data=DataConfig(
                    # without an instruction it answers at length
                    instruction=" Answer in one short sentence.",
                    answer_style="number",
                    max_prompt_length=96,
                ),
                eval=EvalConfig(every=30),
                sft=SftConfig(steps=0),
                offline=OfflineConfig(samples=1024, steps=128, rows=32, learning_rate=1e-3),
            )
        case "qwen3_0.6b":
            return Config(
                steps=500,
                model=QWEN3_0_6B,
                rollout=RolloutConfig(max_new_tokens=128),
                batch=BatchConfig(prompts=4),
                data=DataConfig(
                    instruction=(
                        "Please reason step by step, and put your final answer within \\boxed{}."
                    ),
                    answer_style="boxed",
                    max_prompt_length=256,
                ),
                sft=SftConfig(steps=0),
                offline=OfflineConfig(samples=2048, steps=256, rows=64, learning_rate=3e-4),
            )
        case "qwen3_8b":
            return _as_published(
                QWEN3_8B, DraftConfig(eagle3=Eagle3Config(vocab=32_000)), prompts=64
            )
        case "qwen3_8b_async":
            config = _as_published(
                QWEN3_8B, DraftConfig(eagle3=Eagle3Config(vocab=32_000)), prompts=96
            )
            # 4 nodes learn, and 12 generate
            return replace(
                config,
                schedule=ScheduleConfig(kind="pipelined", lag=1),
                generation=GenerationConfig(devices=48),
                # NeMo RL requires this correction in asynchronous runs.
                loss=LossConfig(importance="tis", logprobs="recompute"),
            )
        case "qwen3_30b_a3b":
            draft = DraftConfig(eagle3=Eagle3Config(ffn=12_288, vocab=32_000))
            return _as_published(QWEN3_30B_A3B, draft, prompts=64)
        case _:
            draft = DraftConfig(eagle3=Eagle3Config(ffn=24_576, vocab=32_000))
            return _as_published(QWEN3_235B_A22B, draft, prompts=128)


def _as_published(model: ModelConfig, draft: DraftConfig, prompts: int) -> Config:
    """The paper's run, with stand-ins for what is not disclosed."""
    return Config(
        steps=500,
        model=replace(model, dtype="bfloat16"),
        rollout=RolloutConfig(max_new_tokens=14_336, draft=draft),
        batch=BatchConfig(prompts=prompts, group_size=16),
        optimizer=OptimizerConfig(weight_decay=0.1),
        data=DataConfig(
            # the data's prompts say how to answer
            prompt_column="prompt",
            answer_column="reward_model.ground_truth",
            answer_style="either",
            max_prompt_length=2048,
        ),
        sft=SftConfig(steps=0),
        draft_training=DraftTrainingConfig(online=False),
        # the larger the batch, the better sampling fills the devices
        offline=OfflineConfig(samples=8192, steps=256, rows=256, learning_rate=3e-4),
    )
