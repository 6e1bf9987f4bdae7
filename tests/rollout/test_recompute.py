"""A row that lost its pages costs a few passes, not a round for each few of its tokens."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.rollout import append, prefill
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.modes import Rejection
from jaxspec.rollout.verify import block_rule
from tests.rollout.harness import (
    GROUP,
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

NEW, PAGE, PIECE = 300, 4, 64
SHORT = 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_an_evicted_row_of_some_hundred_tokens_costs_a_few_passes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of 300 tokens in a pool for one and a half: one of them waits for the other, and
    takes part in as many rounds as a row that has all the pages it needs."""
    target = plain()[0]  # it is generated from, once in a process, which is not to be counted
    passes, select_pieces = [], append.select_pieces

    def counted(*arguments: Any) -> Any:
        jax.debug.callback(lambda: passes.append(1))
        return select_pieces(*arguments)

    monkeypatch.setattr(append, "select_pieces", counted)
    monkeypatch.setattr(prefill, "PASS_TOKENS", PIECE)
    draft, network = draft_of(kind, 3), network_of(kind, 0.8)
    longest = WIDTH + NEW + draft.max_length
    of_row = -(-longest // PAGE)
    prompts = jax.tree.map(lambda leaf: leaf[:1] if leaf.ndim else leaf, coupled_prompts())
    processing = SPREAD._replace(stop_ids=())
    settings = Settings(2, NEW, processing, Rejection(block_rule), slots=2)
    whole = compiled(draft, settings)((target, network), prompts)
    jax.effects_barrier()
    assert len(passes) == 1, "the prompt"
    passes.clear()
    pages = -(-WIDTH // PAGE) + of_row * 3 // 2
    small = settings._replace(page_size=PAGE, pages=pages)
    found = compiled(draft, small)((target, network), prompts)
    jax.effects_barrier()
    assert_same_rows(found, whole)
    counts, wanted = found.statistics, whole.statistics
    np.testing.assert_array_equal(counts.rounds, wanted.rounds)
    np.testing.assert_array_equal(counts.accepted, wanted.accepted)
    waiting = counts.end_round - counts.start_round - counts.rounds
    assert waiting.min() == 0
    assert 0 < waiting.max() < counts.rounds.max(), "one row waits until the other has ended"
    reads = len(passes) - 1  # the first one reads the prompt
    assert NEW / 2 / PIECE < reads <= -(-NEW // (PIECE // WIDTH * WIDTH))


@pytest.mark.parametrize(
    ("kind", "piece", "pieces"),
    [
        ("eagle3", 2, 3),
        pytest.param("none", 3, 2, marks=pytest.mark.sweep),
        pytest.param("mtp 2", 1, 3, marks=pytest.mark.sweep),
        pytest.param("mtp 2", 2, 8, marks=pytest.mark.sweep),
        pytest.param("model", 2, 2, marks=pytest.mark.sweep),
        pytest.param("eagle3+latest", 3, 4, marks=pytest.mark.sweep),
    ],
)
def test_text_that_is_read_in_pieces_leaves_the_same(
    kind: str, piece: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and evicted rows in pieces that share passes: same tokens, and as many accepted."""
    monkeypatch.setattr(prefill, "PIECES", pieces)
    draft, network = draft_of(kind, 3), network_of(kind, 0.8)
    length = draft.max_length
    processing = SPREAD._replace(min_new_tokens=6)  # rows that end sooner may find pages for all
    settings = Settings(GROUP, SHORT, processing, Rejection(block_rule), slots=8)
    weights, prompts = (plain()[0], network), coupled_prompts()
    whole = compiled(draft, settings)(weights, prompts)
    pages = len(prompts.tokens) * -(-WIDTH // 2) + -(-(WIDTH + SHORT + length) // 2)
    small = settings._replace(page_size=2, pages=pages, piece=piece)
    found = compiled(draft, small)(weights, prompts)
    assert_same_rows(found, whole)
    np.testing.assert_array_equal(found.statistics.rounds, whole.statistics.rounds)
    np.testing.assert_array_equal(found.statistics.accepted, whole.statistics.accepted)
    spent = found.statistics.end_round - found.statistics.start_round
    assert (found.statistics.rounds < spent).any(), "a row was evicted, or the case tests nothing"
