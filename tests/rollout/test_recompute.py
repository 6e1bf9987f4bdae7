"""A row that lost its pages costs a few passes, not a round for each few of its tokens."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.rollout import recompute
from jaxspec.rollout.round import Settings
from jaxspec.rollout.verify import block_rule
from tests.rollout.harness import (
    SPREAD,
    WIDTH,
    assert_same_rows,
    compiled,
    coupled_prompts,
    draft_of,
    network_of,
    plain,
)

pytestmark = pytest.mark.usefixtures("x64")

NEW, PAGE, BLOCK = 300, 4, 64


@pytest.mark.parametrize("kind", ["none", "eagle3"])
def test_an_evicted_row_of_some_hundred_tokens_costs_a_few_passes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of 300 tokens in a pool for one and a half: one of them waits for the other, and
    takes part in as many rounds as a row that has all the pages it needs."""
    passes, features = [], recompute.features

    def counted(forward: Any) -> jax.Array:
        jax.debug.callback(lambda: passes.append(1))
        return features(forward)

    monkeypatch.setattr(recompute, "features", counted)
    monkeypatch.setattr(recompute, "BLOCK", BLOCK)
    draft, network = draft_of(kind, 3), network_of(kind, 0.8)
    longest = WIDTH + NEW + (draft.length if draft else 0)
    of_row = -(-longest // PAGE)
    prompts = jax.tree.map(lambda leaf: leaf[:1] if leaf.ndim else leaf, coupled_prompts())
    processing = SPREAD._replace(stop_ids=())
    settings = Settings(2, NEW, processing, block_rule, slots=2)
    whole = compiled(draft, settings)((plain()[0], network), prompts)
    assert not passes
    pages = -(-WIDTH // PAGE) + of_row * 3 // 2
    small = settings._replace(page_size=PAGE, pages=pages)
    found = compiled(draft, small)((plain()[0], network), prompts)
    jax.effects_barrier()
    assert_same_rows(found, whole)
    counts, wanted = found.statistics, whole.statistics
    np.testing.assert_array_equal(counts.rounds, wanted.rounds)
    np.testing.assert_array_equal(counts.accepted, wanted.accepted)
    waiting = counts.ended - counts.began - counts.rounds
    assert waiting.min() == 0
    assert 0 < waiting.max() < counts.rounds.max(), "one row waits until the other has ended"
    assert NEW / 2 / BLOCK < len(passes) <= -(-(WIDTH + NEW) // BLOCK)
