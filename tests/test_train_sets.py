"""Published sets of problems through the main program: loaded, filtered, mixed, judged by rewards
of their own, and learnt from."""

import sys
import time
from pathlib import Path

import pytest

from tests.runs import ROOT, Process, environment, lines

DATA = ROOT.parent / "shared/data"
CONFIG = '''
"""Sets of problems, side by side, for a model that knows nothing."""

from jaxspec.config.settings import (
    BatchConfig, Config, DataConfig, EvalConfig, ModelConfig, OfflineConfig, RewardConfig,
    RolloutConfig, SetConfig, SftConfig,
)
from jaxspec.config.settings import DraftConfig

SCALES = ("words", "chats")
DATA = "DATA"
ONE_WORKER = RewardConfig(workers=1)


def problems(path, **columns):
    return DataConfig(path=f"{DATA}/{path}", eval_prompts=2, **columns)


WORDS = (
    SetConfig(name="gsm8k", weight=3, data=problems("gsm8k/train.jsonl")),
    SetConfig(
        name="math",
        data=problems(
            "math_train/train.jsonl",
            prompt_column="problem",
            answer_style="boxed",
            instruction="Put your final answer within \\\\boxed{}.",
        ),
        reward=RewardConfig(verifier="math"),
    ),
)
CHATS = (
    SetConfig(
        name="dapo",
        data=problems(
            "dapo_like/train.jsonl",
            prompt_column="prompt",
            answer_column="reward_model.ground_truth",
            answer_style="dapo",
        ),
    ),
    SetConfig(
        name="chat",
        data=problems("chat/oasst_en100.jsonl", prompt_column="messages"),
        reward=RewardConfig(function="brief.py:brief"),
    ),
)


def get_config(scale):
    return Config(
        steps=2,
        compare_plain=False,
        model=ModelConfig(
            vocab=151936, layers=4, embed=16, heads=2, kv_heads=2, head_size=8, ffn=32
        ),
        rollout=RolloutConfig(max_new_tokens=8, draft=DraftConfig(kind="none")),
        batch=BatchConfig(prompts=4, group_size=2),
        data=DataConfig(tokenizer=f"{DATA}/qwen_tokenizer", max_prompt_length=160),
        reward=ONE_WORKER,
        mixture=WORDS if scale == "words" else CHATS,
        sft=SftConfig(steps=0),
        offline=OfflineConfig(steps=0),
    )
'''
BRIEF = '''
def brief(prompts, responses, answers, rows):
    """Pays for short responses to the user's last message; the row comes along."""
    assert all(row["messages"][0]["role"] == "user" for row in rows)
    return [1 / (1 + len(response)) for response in responses]
'''


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason=f"needs the data in {DATA}")
@pytest.mark.parametrize(
    ("scale", "names", "told"),
    [
        (
            "words",
            ("gsm8k", "math"),
            ("gsm8k: 7", "75% of those asked", "math: ", "25% of those asked", "too long"),
        ),
        (
            "chats",
            ("dapo", "chat"),
            ("dapo: ", "chat: ", "50% of those asked", "have no reference answer"),
        ),
    ],
)
def test_two_published_sets_with_two_rewards_are_learnt_from(
    tmp_path: Path, scale: str, names: tuple[str, str], told: tuple[str, ...]
) -> None:
    (tmp_path / "mine.py").write_text(CONFIG.replace('DATA = "DATA"', f'DATA = "{DATA}"'))
    (tmp_path / "brief.py").write_text(BRIEF)
    settings = f"--config {tmp_path}/mine.py:{scale} --workdir {tmp_path}/run"
    if scale == "chats":
        settings += f" --mixture.1.reward.function {tmp_path}/brief.py:brief"
    words = [sys.executable, "-m", "jaxspec.train", *settings.split()]
    # a vocabulary of 151,936 takes longer to run than to compile
    variables = environment(tmp_path, 1) | {"XLA_FLAGS": ""}
    output = Process(words, variables, tmp_path / f"{time.monotonic_ns()}.log").finish()
    for text in told:
        assert text in output
    written = lines(tmp_path / "run")
    assert [line["step"] for line in written] == [0, 1]
    for name in names:
        assert f"reward/{name}/mean" in written[0]
        assert f"eval/{name}/avg@2" in written[1]
    if scale == "chats":
        rewards = [line["reward/chat/mean"] for line in written]
        assert any(reward is not None and 0 < reward < 1 for reward in rewards)
