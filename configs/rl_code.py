"""RL of a model that writes programs, which are run against tests, with speculative rollouts.

  python -m jaxspec.train --config rl_code.py
  python -m jaxspec.train --config rl_code.py:qwen3_0.6b --model.path FOLDER --data.path FILE

At scale tiny a problem is a list of steps, such as `add 3, mul 2, sub 7:`, and a response a
function of x in a block of code; it is right if it gives what the steps give at four places. FILE
holds MBPP's JSON lines (columns text and test_list; its training problems are those of task_id 601
to 974). The first of a problem's three tests is shown, because its text does not say what the
function is called.

This runs what the policy writes, in a sandbox: docs/rewards.md says what programs can reach there.
Where no sandbox works, JAXSPEC_WITHOUT_SANDBOX=1 must say that they may run all the same.

Vary: --data.digits 1..4 (steps; prompts and answers grow with it, and a message says to what),
--sft.wrong_steps (how well it begins), --reward.parts answer stated (pays for the form too),
--reward.workers, --batch.group_size.
Expect (tiny, seed 0, on 2 cores of an AMD EPYC, 26 November 2026): reward 0.43 -> 0.94 (first and
last tenth), held-out avg@8 0.40 -> 0.92, acceptance_length 3.85 at K=3 throughout, 11 minutes
from an empty cache on cores that other work kept busy (8 of processor time), of which the 50
batches took 3 and a half; three quarters of these ran programs.

All sizes of the larger scales are ours: no publication is behind them, and they have not been run
as they are here. Their draft is first trained on the policy's own answers, as in rl_think.py.
"""

from dataclasses import replace
from pathlib import Path

from jaxspec.config.cli import read_config
from jaxspec.config.settings import (
    BatchConfig,
    Config,
    DataConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
)

SCALES = ("tiny", "qwen3_0.6b", "qwen3_8b")


def get_config(scale: str = "tiny") -> Config:
    # Whoever chooses this config wants programs to be run.
    reward = RewardConfig(verifier="code", run_code=True)
    think, _ = read_config(Path(__file__).with_name("rl_think.py"), scale)
    if scale == "tiny":
        return replace(
            think,
            steps=50,
            rollout=RolloutConfig(max_new_tokens=49),
            # A program takes a twentieth of a second of a core: few rows a batch.
            batch=BatchConfig(prompts=8, group_size=8),
            reward=replace(reward, workers=2),
            data=DataConfig(task="programs", digits=3, max_prompt_length=21, answer_style="code"),
            # Copying steps is learnt sooner than adding digits.
            sft=SftConfig(steps=240, wrong_steps=0.25),
            offline=replace(think.offline, samples=1024, steps=150),
        )
    small = scale == "qwen3_0.6b"
    data = DataConfig(
        prompt_column="text",
        answer_column="test_list",
        instruction="It must pass tests such as this one:\n{test}\nAnswer with a block of Python.",
        answer_style="code",
        max_prompt_length=512,
    )
    return replace(
        think,
        data=data,
        rollout=replace(think.rollout, max_new_tokens=512 if small else 4096),
        batch=BatchConfig(prompts=8 if small else 32, group_size=8 if small else 16),
        reward=reward,
        draft_training=replace(think.draft_training, online=True),
    )
