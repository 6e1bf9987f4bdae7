"""What a job opens once for all programs: the tokenizer as the config wants it, and a step that knows it."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from jaxspec.config import Config, ConfigError, DataConfig, DraftConfig, DraftTrainingConfig, OfflineConfig, RolloutConfig, SftConfig
from jaxspec.program import make_job
from jaxspec.tokenizer import character_tokenizer
from jaxspec.train import random_draft
from tests.conftest import small_mesh, tiny_config, tiny_model


def test_the_tokenizers_size_ends_and_template_reach_the_step_and_the_prompts(tmp_path: Path) -> None:
    """A vocabulary of 32 rows for 21 tokens: the other 11 are never sampled."""
    character_tokenizer().save(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ 1 if enable_thinking else 0 }}{{ messages[0].content }}")
    data = DataConfig(tokenizer=str(tmp_path))
    config = tiny_config(tiny_model(vocab=32), rollout=RolloutConfig(banned=(7,)), data=data, sft=SftConfig(steps=0))
    job = make_job(config, small_mesh())
    processing = job.step.settings.processing
    assert (processing.known, processing.stop_ids, processing.banned) == (character_tokenizer().size, (1,), (7,))
    assert job.tokenizer.render("+2") == "1+2"
    told = replace(config, rollout=RolloutConfig(enable_thinking=False))
    assert make_job(told, small_mesh()).tokenizer.render("+2") == "0+2"


@pytest.mark.parametrize(
    ("banned", "least", "words"),
    [
        (range(21), 0, "rollout.banned has all 21 tokens"),
        (range(32), 0, "rollout.banned has all 21 tokens"),
        ([0, *range(2, 21)], 0, "only [] and end tokens are not in rollout.banned"),
        (range(20), 1, "only [20] and end tokens are not in rollout.banned"),
        ([0, *range(2, 20)], 0, "of the 21 tokens only [20] and end tokens are not in rollout.banned"),
    ],
)
def test_bans_that_leave_nothing_to_sample_are_refused(banned: Iterable[int], least: int, words: str) -> None:
    rollout = RolloutConfig(banned=tuple(banned), min_new_tokens=least)
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_job(tiny_config(tiny_model(vocab=32), rollout=rollout), small_mesh())


@pytest.mark.parametrize(("banned", "least"), [(range(19), 1), ([0, *range(2, 19)], 0)])
def test_bans_that_leave_two_tokens_are_taken(banned: Iterable[int], least: int) -> None:
    rollout = RolloutConfig(banned=tuple(banned), min_new_tokens=least)
    assert make_job(tiny_config(tiny_model(vocab=32), rollout=rollout), small_mesh()).config.rollout == rollout


@pytest.mark.parametrize(
    ("draft", "offline", "training", "words"),
    [
        (DraftConfig(), 0, DraftTrainingConfig(), "the eagle3 draft started from random weights (offline.steps 0, no rollout.draft.path)"),
        (DraftConfig(kind="mtp"), 0, DraftTrainingConfig(online=False), "the mtp draft started from random weights"),
        (DraftConfig(), 300, DraftTrainingConfig(), ""),
        (DraftConfig(path="folder"), 0, DraftTrainingConfig(), ""),
        (DraftConfig(kind="none"), 0, DraftTrainingConfig(), ""),
    ],
)
def test_a_random_draft_is_told(draft: DraftConfig, offline: int, training: DraftTrainingConfig, words: str) -> None:
    config = Config(rollout=RolloutConfig(draft=draft), offline=OfflineConfig(steps=offline), draft_training=training)
    remark = random_draft(config)
    assert bool(remark) == bool(words)
    assert words in remark
    assert ("never learns" in remark) == (bool(words) and not training.online)
