"""Jobs that train a draft on one-digit sums, in the built-in characters."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxspec.config.settings import (
    DataConfig,
    DraftConfig,
    DraftTrainingConfig,
    MeshConfig,
    OfflineConfig,
    ResolvedConfig,
    RolloutConfig,
    SftConfig,
)
from jaxspec.host.job import Job, make_job
from jaxspec.preparation import policy as warm_start
from jaxspec.preparation.draft import get_or_train_draft
from jaxspec.preparation.draft_data import read_training_text
from jaxspec.system.interrupt import Interrupt
from jaxspec.system.progress import Progress
from jaxspec.tokens.tokenizer import character_tokenizer
from tests.conftest import small_mesh, tiny_model

TOKENIZER = character_tokenizer()
END = TOKENIZER.stop_ids[0]
VOCAB = TOKENIZER.size


def a_config(rollout: dict[str, Any] | None = None, **offline: Any) -> ResolvedConfig:
    """One-digit sums, a random float32 policy, batches of 4 samples."""
    return ResolvedConfig(
        model=tiny_model(vocab=TOKENIZER.size, dtype="float32"),
        rollout=RolloutConfig(
            **{"max_new_tokens": 6, "draft": DraftConfig(draft_length=2), **(rollout or {})}
        ),
        data=DataConfig(digits=1, max_prompt_length=6),
        sft=SftConfig(steps=0),
        offline=OfflineConfig(**{"samples": 16, "rows": 4, **offline}),
        mesh=MeshConfig(data=1),
    )


class Killed(Exception):
    """Stands for a kill between two steps."""


class Seen(Progress):
    """Remembers the steps it is told of, and dies at one."""

    def __init__(self, dies_at: int | None = None) -> None:
        super().__init__("", 1, console=Console(quiet=True))
        self.steps: list[int] = []
        self.said: list[str] = []
        self._dies_at = dies_at

    def print_line(self, message: str) -> None:
        self.said.append(message)

    def update(self, step: int, **numbers: float | int | None) -> None:
        self.steps.append(step)
        if step == self._dies_at:
            raise Killed


def a_job(
    kind: Any = "eagle3", shards: int = 1, draft: dict[str, Any] | None = None, **parts: Any
) -> Job:
    """One-digit sums, a random float32 policy, 8 samples in batches of 4, 6 updates."""
    config = ResolvedConfig(
        **{
            "model": tiny_model(vocab=VOCAB, dtype="float32"),
            "rollout": RolloutConfig(
                max_new_tokens=6, draft=DraftConfig(kind=kind, draft_length=2, **(draft or {}))
            ),
            "data": DataConfig(digits=1, max_prompt_length=6),
            "sft": SftConfig(steps=0),
            "draft_training": DraftTrainingConfig(ttt_steps=2),
            "offline": OfflineConfig(samples=8, rows=4, steps=6, learning_rate=1e-2),
            "mesh": MeshConfig(data=shards),
            **parts,
        }
    )
    return make_job(config, small_mesh(shards))


def trained_draft(job: Job, interrupt: Interrupt) -> Path:
    text = read_training_text(job.config, job.tokenizer, job.say)
    return get_or_train_draft(job.config, job.step, job.tokenizer, text, interrupt, job.say)


def always_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is kept after every step."""
    monkeypatch.setattr(warm_start, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(warm_start, "KEEP_COST", 0.0)


def same_bits(one: Any, other: Any) -> bool:
    return jax.tree.all(
        jax.tree.map(
            lambda left, right: np.array_equal(np.asarray(left), np.asarray(right)), one, other
        )
    )
