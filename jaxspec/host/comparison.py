"""Compares speculative with plain decoding on the same prompts."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.host.programs import Timed, TimedGeneration
from jaxspec.state import Drafter, Prompts, TrainState
from jaxspec.step import Step


class Comparison(NamedTuple):
    """Plain and speculative decoding of the same rows."""

    rows: int
    plain_passes: float
    spec_passes: float
    plain_seconds: float
    spec_seconds: float
    round_cost: float
    """Seconds of a round of draft and verification over seconds of a plain step, prefill left
    out."""


def compare(
    step: Step, state: TrainState, prompts: Prompts, repeats: int = 5, budget: float = 10.0
) -> Comparison:
    """Times generation of the same prompts with and without the draft, in turn; medians, and target
    passes a sequence.

    Of the `repeats` pairs no more than take about `budget` seconds are made, but at least one.
    """
    ready = jax.jit(step.sync)(state)
    nothing = Drafter(network=None, choice=jnp.zeros((0,), jnp.int32))
    made = (step.generator.plain(), ready.replace(drafter=nothing)), (step.generator, ready)
    calls = [(TimedGeneration(generator, weights, prompts), weights) for generator, weights in made]

    def pair() -> list[Timed]:
        return [call(weights, prompts) for call, weights in calls]

    began = time.perf_counter()
    # The same prompts in both, so that lengths differ by chance alone.
    passes = [int(jnp.sum(each.rollout.statistics.rounds)) for each in pair()]  # also warms up
    once = np.float32(time.perf_counter() - began)
    if jax.process_count() > 1:  # all must make the same number of calls
        once = multihost_utils.broadcast_one_to_all(once)
    pairs = [pair() for _ in range(max(1, min(repeats, int(budget / once))))]
    taken = np.median(
        [[(each.seconds, each.loop_seconds / each.rounds) for each in timed] for timed in pairs],
        axis=0,
    )
    rows = int(prompts.tokens.shape[0]) * step.generator.settings.group_size
    return Comparison(
        rows=rows,
        plain_passes=passes[0] / rows,
        spec_passes=passes[1] / rows,
        plain_seconds=float(taken[0, 0]),
        spec_seconds=float(taken[1, 0]),
        round_cost=float(taken[1, 1] / taken[0, 1]),
    )
