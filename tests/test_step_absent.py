"""Depths of a draft that nothing reached have no metrics, however a step is run."""

from typing import Any

import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.host.programs import abstract_arguments, put_like
from jaxspec.run.schedules import compile_fused_schedule, compile_staged_schedule
from tests.conftest import small_mesh
from tests.whole_step import (
    LENGTH,
    MODEL,
    PROMPTS,
    STOP,
    config_of,
    nothing_finished,
    prompts_of,
    score,
    start,
)

pytestmark = pytest.mark.usefixtures("x64")
REACHED = "conditional_rate", "expected_acceptance", "draft_entropy"


@pytest.mark.parametrize(
    "compile_schedule",
    [compile_fused_schedule, pytest.param(compile_staged_schedule, marks=pytest.mark.slow)],
)
def test_depths_that_nothing_reached_are_absent(compile_schedule: Any) -> None:
    """Answers of one token reach one draft. Behind prompts of two tokens, they have no label of the
    second depth."""
    step = build_step(config_of(max_new_tokens=1), small_mesh(), STOP, MODEL.vocab)
    schedule, state, finished = compile_schedule(step, PROMPTS), start(step), nothing_finished(step)
    _, _, like = abstract_arguments(step, PROMPTS)
    said: dict[str, float] = {}
    for batch in range(2):
        prompts = prompts_of(step, batch)
        prompts = put_like(
            prompts.replace(lengths=np.full(PROMPTS, 2), history=np.zeros(like.history.shape)),
            like,
        )
        called = schedule(state, finished, prompts, lambda _: True)
        assert called.rollout is not None
        state, finished = called.state, score(step, called.rollout, batch)
        said = called.training_metrics | called.rollout_metrics
    assert LENGTH == 2
    for name in REACHED:
        assert f"rollout/{name}_1" in said
        assert f"rollout/{name}_2" not in said
    assert said["rollout/acceptance_rate_2"] == 0
    assert "draft/expected_acceptance_1" in said
    assert "draft/expected_acceptance_2" not in said
    assert "loss/draft" in said
