"""Comparison of speculative with plain decoding."""

import time
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxspec.host.programs import SlicedAnswerer, TimedRollout
from jaxspec.processes.process_0 import broadcast_table
from jaxspec.state import Drafter, Prompts, RolloutWeights
from jaxspec.step import Step


class SpeedComparison(NamedTuple):
    """Speed of plain and of speculative decoding."""

    rows: int
    plain_passes: float
    """Target passes per row, without a draft."""
    spec_passes: float
    """Target passes per row, with the draft."""
    plain_seconds: float
    """Median time of a plain rollout, prefill included."""
    spec_seconds: float
    """Median time of a speculative rollout, prefill included."""
    round_cost: float
    """Seconds of a round (draft and verify) over seconds of a plain step, without prefill."""


def compare_decoding(
    step: Step, weights: RolloutWeights, prompts: Prompts, repeats: int = 5, budget: float = 10.0
) -> SpeedComparison:
    """Times generation with and without the draft.

    Both variants answer the same prompts. After a pair of calls to warm up, times up to `repeats`
    pairs within about `budget` seconds, but at least one. Times are medians over these pairs. The
    numbers of passes are those of the first pair.
    """
    no_draft = Drafter(network=None, factor_index=jnp.zeros((0,), jnp.int32))
    variants = (
        (step.generator.without_draft(), weights.replace(drafter=no_draft)),
        (step.generator, weights),
    )
    answerers = [
        (SlicedAnswerer(generator, own_weights, prompts), own_weights)
        for generator, own_weights in variants
    ]

    def time_pair() -> list[TimedRollout]:
        # Taking turns spreads drifts of the machine's speed over both variants.
        return [answerer.time_call(own_weights, prompts) for answerer, own_weights in answerers]

    start_time = time.perf_counter()
    # One pair suffices to count passes: answers to the same prompts differ in length only by
    # chance. It also warms up the programs, and its time sets the number of repeats.
    passes = [int(jnp.sum(timed.rollout.statistics.rounds)) for timed in time_pair()]
    pair_seconds = time.perf_counter() - start_time
    # Each call has collectives, so all processes must make the same number of calls.
    pair_seconds = float(broadcast_table(np.asarray([pair_seconds], np.float32))[0])
    pairs = [time_pair() for _ in range(max(1, min(repeats, int(budget / pair_seconds))))]
    medians = np.median(
        [
            [(timed.seconds, timed.loop_seconds / timed.rounds) for timed in timed_pair]
            for timed_pair in pairs
        ],
        axis=0,
    )
    rows = int(prompts.tokens.shape[0]) * step.generator.settings.group_size
    return SpeedComparison(
        rows=rows,
        plain_passes=passes[0] / rows,
        spec_passes=passes[1] / rows,
        plain_seconds=float(medians[0, 0]),
        spec_seconds=float(medians[1, 0]),
        round_cost=float(medians[1, 1] / medians[0, 1]),
    )
