"""The whole step where a model's experts are split over members of a data shard, or its vocabulary
unevenly over `tensor`: the numbers of one device, in float64."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jaxspec.config.settings import EngineConfig, LoraConfig
from tests.whole_step import (
    MODEL,
    WITH_EXPERTS,
    Run,
    assert_close,
    assert_same_rollout,
    drive,
    moved,
    program,
)

pytestmark = pytest.mark.usefixtures("x64")

CALLS = 3
NARROW = dataclasses.replace(WITH_EXPERTS, embed=12)
"""Of a width that two data shards divide, and their eight members do not."""
FEW_SLOTS = EngineConfig(tail=False, slots=1)


@functools.cache
def driven(data: int = 1, expert: int = 1, tensor: int = 1, **options: Any) -> Run:
    options = {"model": WITH_EXPERTS, "shard_above": 0} | options
    return drive(program(data, tensor, expert, **options), CALLS)


@pytest.mark.parametrize(
    ("data", "expert", "tensor", "options"),
    [
        pytest.param(1, 2, 2, {}, marks=pytest.mark.slow),
        pytest.param(2, 4, 1, {"model": NARROW}, marks=pytest.mark.sweep),
        pytest.param(1, 4, 1, {"engine": FEW_SLOTS}, marks=pytest.mark.sweep),
        pytest.param(2, 2, 1, {"lora": LoraConfig(rank=2)}, marks=pytest.mark.sweep),
    ],
)
def test_members_that_hold_experts_give_the_numbers_of_one_device(
    data: int, expert: int, tensor: int, options: dict[str, Any]
) -> None:
    one = driven(**{name: value for name, value in options.items() if name != "engine"})
    spread = driven(data, expert, tensor, **options)
    for batch in range(CALLS):
        found, wanted = spread.rollouts[batch], one.rollouts[batch]
        if "engine" in options:  # a row's turn depends on who is before it
            found, wanted = (each.replace(statistics=None) for each in (found, wanted))
        assert_same_rollout(found, wanted)
        np.testing.assert_array_equal(spread.rewards[batch], one.rewards[batch])
        assert_close(spread.states[batch], one.states[batch], 1e-9)
    learnt = [run.learner.policy.network for run in spread.states]
    assert moved(learnt[-1], learnt[0])


@pytest.mark.slow
def test_a_vocabulary_that_does_not_split_evenly_gives_the_numbers_of_one_device() -> None:
    uneven = {"model": dataclasses.replace(MODEL, vocab=15), "shard_above": 0}
    one, spread = (drive(program(*mesh, **uneven), 3) for mesh in ((1, 1), (2, 4)))
    for batch in range(3):
        assert_same_rollout(spread.rollouts[batch], one.rollouts[batch])
        assert_close(spread.states[batch], one.states[batch], 1e-9)
