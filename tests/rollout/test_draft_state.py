"""The draft inside the engine, after rounds of mixed lengths: it says what a draft that has just
read the row's whole text says."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import Context, Draft, DrawnProposal
from jaxspec.drafts.lookup.drafting import CombinedState
from jaxspec.models import contiguous
from jaxspec.models.decoder import Decoder
from jaxspec.rollout.decode_state import (
    DecodeState,
    active_slots,
    gather_rows,
    has_waiting_rows,
    pages_may_run_out,
)
from jaxspec.rollout.feedback import length_chooser
from jaxspec.rollout.generate import advance, begin
from jaxspec.rollout.prefill import append_unread_texts
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.slots import refill_slots
from jaxspec.rollout.verification.modes import Rejection
from jaxspec.rollout.verify import block_rule
from jaxspec.state import Drafter
from tests.conftest import tiny_prompts
from tests.rollout.harness import (
    GROUP,
    SPREAD,
    STOP,
    WIDTH,
    coupled_prompts,
    draft_of,
    drafter,
    network_of,
    plain,
)
from tests.whole_texts import read_whole

pytestmark = pytest.mark.usefixtures("x64")

NEW, DEPTHS = 16, 3


class Case(NamedTuple):
    kind: str
    turns: tuple[int, ...]
    """Lengths of the rounds, in turn."""
    paged: bool = True
    """With pages that run out, so that rows are evicted and are recomputed; else a row of
    cache for each slot."""

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({*self.turns, DEPTHS}))

    @property
    def settings(self) -> Settings:
        """Six slots for 32 rows, the last of which move to two."""
        pages = 8 * -(-WIDTH // 2) + -(-(WIDTH + NEW + DEPTHS) // 2) + 4
        processing = SPREAD._replace(stop_ids=STOP[:1])
        given = Settings(
            GROUP, NEW, processing, Rejection(block_rule), slots=6, tail=(2,), lengths=self.lengths
        )
        return given._replace(page_size=2, pages=pages) if self.paged else given

    def __str__(self) -> str:
        return f"{self.kind} {self.turns}, {'pages' if self.paged else 'rows'}"


ALL_PAIRS = 0, 1, 3, 1, 2, 3
"""Turns in which 0 is followed by 1, 1 by 2 and 3, 2 by 3, and 3 by 0 and 1."""
CASES = [
    Case("eagle3", ALL_PAIRS),
    Case("eagle3", (0, 0, 0, 0, 0, 0, 1, 3)),
    # the pairs of one kind are in two cases: every length is one more round to compile
    Case("mtp 2", (0, 1, 3)),
    Case("mtp 2", (1, 2, 3), paged=False),
    Case("model", (1, 2, 3)),
    Case("model+history", (0, 1, 3)),
    Case("eagle3+history", (1, 3)),
]


def forced(given: Drafter, lengths: tuple[int, ...], length: int) -> Drafter:
    """By which every round has this length: all others cost far more."""
    chooser = length_chooser.init_chooser(lengths, WIDTH + NEW)
    return given.replace(
        chooser=chooser.replace(
            round_cost=jnp.full_like(chooser.round_cost, 1e6).at[lengths.index(length)].set(1e-6)
        )
    )


def in_turn(logits: jax.Array, offset: int, ids: jax.Array | None = None) -> jax.Array:
    """Some tokens to draft, the same for both."""
    return jnp.full(len(logits), 4 + offset, jnp.int32)


def said(
    learned: Draft, target: Decoder, network: Any, state: DecodeState
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the learned draft would say in the engine's next round, what a fresh one says of the
    same texts, and how long these are."""
    lengths = jnp.where(active_slots(state), gather_rows(state.rollout.lengths, state.row), 0)
    context = Context(state.rollout.tokens, lengths, state.row, state.rollout.lengths)
    draft_state = state.draft.learned if isinstance(state.draft, CombinedState) else state.draft
    cache = state.caches.draft
    assert cache is not None
    cache = cache.replace(table=state.pages.table[: len(lengths)])
    ours = learned.propose(network, target, draft_state, cache, context, in_turn, DEPTHS)[2]
    texts = jnp.where(
        jnp.arange(state.rollout.tokens.shape[1], dtype=jnp.int32) < lengths[:, None],
        context.slot_tokens(),
        7,
    )
    forward = target(
        texts,
        jnp.broadcast_to(jnp.arange(texts.shape[1], dtype=jnp.int32), texts.shape),
        taps=learned.taps,
    )
    whole = tiny_prompts(len(texts)).replace(tokens=texts, lengths=jnp.maximum(lengths, 1))
    draft_state, cache = read_whole(
        learned, network, target, whole, forward.hidden if forward.taps is None else forward.taps
    )
    cache = contiguous.expand_prompts(cache, 1, texts.shape[1] + DEPTHS + 1)
    theirs = learned.propose(
        network, target, draft_state, cache, Context(texts, whole.lengths), in_turn, DEPTHS
    )[2]
    assert isinstance(ours, DrawnProposal)
    assert isinstance(theirs, DrawnProposal)
    return ours.logits, theirs.logits, lengths


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if place == 2 else pytest.mark.sweep)
        for place, case in enumerate(CASES)
    ],
    ids=str,
)
def test_rounds_of_mixed_lengths_leave_no_trace_in_what_is_proposed(case: Case) -> None:
    """Drafts of all depths, with pages, evictions and a tail, within 1e-9 of a prefill of the same
    text, before every round."""
    target, settings = plain()[0], case.settings
    draft, network = draft_of(case.kind, DEPTHS), network_of(case.kind, 0.8)
    learned = draft_of(case.kind.partition("+")[0], DEPTHS)
    given = drafter(network, draft, lengths=case.lengths)
    prompts = coupled_prompts()
    state = jax.jit(
        lambda prompts: begin(
            target, given, draft, prompts, jnp.int32(0), jax.random.key(5), settings
        )
    )(prompts)
    step = jax.jit(lambda state, drafter: advance(target, drafter, draft, state, 1, settings))
    evicts = pages_may_run_out(state, NEW)

    @jax.jit
    def compare(state: DecodeState) -> tuple[jax.Array, jax.Array, jax.Array]:
        block = draft.max_length + 1
        filled = refill_slots(state, settings.group_size, block, evicts)
        filled = append_unread_texts(target, given, draft, filled, settings)
        return said(learned, target, network, filled)

    by_turn = [forced(given, case.lengths, length) for length in case.turns]
    compared, number = 0, 0
    while bool(has_waiting_rows(state)) or bool(active_slots(state).any()):
        ours, theirs, lengths = jax.device_get(compare(state))
        there = lengths > 1  # a row of one token has nothing to draft from
        np.testing.assert_allclose(
            ours[there], theirs[there], rtol=0, atol=1e-9, err_msg=f"before round {number}"
        )
        compared, number = compared + int(there.sum()), number + 1
        state = step(state, by_turn[number % len(by_turn)])
    assert compared > 100
    found = state.rollout.statistics
    spent = found.end_round - found.start_round
    assert bool((found.rounds < spent).any()) == case.paged, (
        "rows lost their pages, or the case tests less than it says"
    )
