"""Responses end with the token in which their text first contains a stop string: in coupled mode
those of plain decoding without any, cut by plain Python."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import PLAIN
from jaxspec.rollout.generate import advance, begin, collect
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.modes import Matching
from jaxspec.state import EOS, LENGTH, RUNNING, Rollout
from jaxspec.tokens.stop_strings import build_stop_table
from tests.rollout.harness import (
    GROUP,
    NEW,
    SPREAD,
    WIDTH,
    assert_same_rows,
    compiled,
    coupled_prompts,
    draft_of,
    drafter,
    network_of,
    plain,
)

pytestmark = pytest.mark.usefixtures("x64")

TOKENS = ["", "", "ab", "", "a", "b", "ba", "\n", "aba", "c", ""]
"""The text of each id. Ids 1 and 3 are end tokens, and prompts are of 4, 5 and 6."""
STRINGS = ("abba", "bb\n", "cc", "cb", "ac")
MINIMUM = 3
TABLE = build_stop_table(STRINGS, [text.encode() for text in TOKENS], "its")


def cut(whole: Rollout, least: int) -> tuple[Rollout, np.ndarray]:
    """What stop strings leave of rows that were generated without them, and which rows they end:
    token by token, with the text of the response alone, and none before `least` tokens."""
    lengths, status = whole.lengths.copy(), whole.status.copy()
    tokens, logprobs = whole.tokens.copy(), whole.logprobs.copy()
    for row, start in enumerate(whole.prompt_lengths):
        text = ""
        for place in range(start, whole.lengths[row]):
            longer = text + TOKENS[tokens[row, place]]
            ends = [longer[:end] for end in range(len(text) + 1, len(longer) + 1)]
            text = longer
            if place - start >= least and any(end.endswith(STRINGS) for end in ends):
                lengths[row], status[row] = place + 1, EOS
                break
    beyond = np.arange(tokens.shape[1]) >= lengths[:, None]
    tokens[beyond], logprobs[beyond] = 0, 0
    left = whole.replace(lengths=lengths, status=status, tokens=tokens, logprobs=logprobs)
    return left, np.asarray(lengths < whole.lengths)


@functools.cache
def wanted(least: int) -> tuple[Rollout, np.ndarray]:
    """Answers to `coupled_prompts`, by plain decoding."""
    processing = SPREAD._replace(min_new_tokens=least)
    settings, prompts = Settings(GROUP, NEW, processing, Matching()), coupled_prompts()
    whole = compiled(PLAIN, settings)((plain()[0], None), prompts) if least else plain()[1]
    return cut(whole, least)


def test_the_cases_have_every_ending() -> None:
    for least in (0, MINIMUM):
        left, stopped = wanted(least)
        assert 5 < stopped.sum() < len(stopped) - 5
        responses = left.lengths - left.prompt_lengths
        assert responses.min() > least
        ids = left.tokens[np.arange(len(stopped)), left.lengths - 1]
        assert {EOS, LENGTH} == set(left.status[~stopped].tolist())
        assert not np.isin(ids[stopped], [1, 3]).any()
    early = cut(wanted(MINIMUM)[0], 0)[1]
    assert early.any(), "a string before the minimum is passed over"
    assert (early & wanted(MINIMUM)[1]).any(), "and what follows is found all the same"
    prompted = cut(plain()[1].replace(prompt_lengths=0 * plain()[1].prompt_lengths), 0)[0]
    assert (prompted.lengths < wanted(0)[0].lengths).any(), "prompts have some, which do not count"


class Case(NamedTuple):
    kind: str
    length: int
    least: int = 0
    slots: int = 0
    page_size: int = 0
    spare: int | None = None
    tail: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    data: int = 1

    def __str__(self) -> str:
        return f"{self.kind} {self.length}, least {self.least}, {self.slots} slots"

    @property
    def pages(self) -> int:
        """So few that rows lose them."""
        row = WIDTH + NEW + self.length
        return 8 // self.data * -(-WIDTH // self.page_size) + -(-row // self.page_size) + 3

    @property
    def settings(self) -> Settings:
        return Settings(
            GROUP,
            NEW,
            SPREAD._replace(min_new_tokens=self.least),
            Matching(),
            slots=self.slots,
            page_size=self.page_size,
            pages=self.pages if self.page_size else 0,
            tail=self.tail,
            lengths=self.lengths,
            stop=TABLE,
        )


CASES = [
    Case("none", 0, MINIMUM),
    Case("eagle3", 5, data=2),
    pytest.param(
        Case("model", 3, MINIMUM, 8, tail=(2,), lengths=(0, 1, 3)), marks=pytest.mark.sweep
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drafts_slots_and_shards_end_rows_where_plain_decoding_does(case: Case) -> None:
    draft, network = draft_of(case.kind, case.length), network_of(case.kind, 0.8)
    run = compiled(draft, case.settings, case.data)
    found = run((plain()[0], network), coupled_prompts())
    assert_same_rows(found, wanted(case.least)[0])
    if draft.max_length:
        rows, stopped = found.statistics, wanted(case.least)[1]
        assert (rows.accepted.sum(axis=1) > 0)[stopped].any()


@pytest.mark.slow
def test_rows_that_lose_their_pages_go_on_with_what_they_match() -> None:
    """In slices of two rounds, from pages so few that rows are evicted amid a string."""
    case = Case("history", 3, MINIMUM, slots=8, page_size=2, tail=(2,))
    target, draft = plain()[0], draft_of(case.kind, case.length)
    given = drafter(None, draft)
    start = jax.jit(
        lambda prompts: begin(
            target, given, draft, prompts, jnp.int32(0), jax.random.key(5), case.settings
        )
    )
    step = jax.jit(lambda state: advance(target, given, draft, state, 2, case.settings))
    state, between = start(coupled_prompts()), 0
    while (np.asarray(state.rollout.status) == RUNNING).any():
        state = step(state)
        running = np.asarray(state.rollout.status) == RUNNING
        begun = np.asarray(state.rollout.lengths > state.rollout.prompt_lengths)
        waiting = np.asarray(state.queue.waiting) & running & begun
        between += (waiting & (np.asarray(state.stop_state) > 0)).sum()
    found = jax.tree.map(np.asarray, collect(state))
    assert_same_rows(found, wanted(case.least)[0])
    assert between > 0, "the case tests nothing"
