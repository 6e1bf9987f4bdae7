"""Tiny steps, and what they take of a device by owner."""

import dataclasses
from typing import Any

from jaxspec.build import build_step
from jaxspec.config.settings import DraftConfig, ResolvedConfig
from jaxspec.host import memory
from jaxspec.step import Step
from tests.conftest import small_mesh, tiny_config, tiny_model

MODEL = tiny_model(vocab=12, dtype="float32")
PROMPTS = tiny_config(MODEL).batch.prompts


def step_of(config: ResolvedConfig, data: int = 2, tensor: int = 1) -> Step:
    return build_step(config, small_mesh(data, tensor), (1,), 11)


def sizes(step: Step, programs: Any = None) -> dict[str, int]:
    return {part.name: part.size for part in memory.list_memory_uses(step, PROMPTS, programs or {})}


def plain_config(tokens: int) -> ResolvedConfig:
    """Without a draft, which compiles faster."""
    config = tiny_config(MODEL, DraftConfig(kind="none"))
    return dataclasses.replace(config, batch=dataclasses.replace(config.batch, micro_tokens=tokens))
