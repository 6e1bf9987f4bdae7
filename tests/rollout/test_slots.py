"""Slots, pages, evictions and the tail: in coupled mode the tokens are those of plain decoding with
a slot and a row of cache for each."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import PLAIN
from jaxspec.kernels import key_chunks
from jaxspec.rollout.decode_state import DecodeState, rows_may_wait
from jaxspec.rollout.generate import advance, begin, collect
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.slots import refill_slots
from jaxspec.rollout.verification.modes import Matching, Rejection
from jaxspec.rollout.verify import block_rule
from jaxspec.state import RUNNING, Prompts, Rollout
from tests.rollout.harness import (
    GROUP,
    NEW,
    SPREAD,
    STOP,
    WIDTH,
    assert_same_rows,
    compiled,
    coupled_prompts,
    draft_of,
    drafter,
    marked,
    network_of,
    plain,
)

pytestmark = pytest.mark.usefixtures("x64")


def fewest(page_size: int, length: int, prompts: int = 8, new: int = NEW) -> int:
    """Pages for all prompts, and for one row beside them."""
    return prompts * -(-WIDTH // page_size) + -(-(WIDTH + new + length) // page_size)


class Layout(NamedTuple):
    kind: str
    length: int
    slots: int
    page_size: int = 0
    spare: int | None = None
    """Pages beyond the fewest that work; None: all that can be needed."""
    tail: tuple[int, ...] = ()
    data: int = 1
    tensor: int = 1
    lengths: tuple[int, ...] = ()
    mark: str = "sweep"

    @property
    def settings(self) -> Settings:
        pages = (
            0
            if self.spare is None
            else fewest(self.page_size, self.length, 8 // self.data) + self.spare
        )
        return Settings(
            GROUP,
            NEW,
            SPREAD,
            Matching(),
            slots=self.slots,
            page_size=self.page_size,
            pages=pages,
            tail=self.tail,
            lengths=self.lengths,
        )

    def __str__(self) -> str:
        pool = (
            ""
            if not self.page_size
            else f" pages of {self.page_size}"
            + ("" if self.spare is None else f" fewest+{self.spare}")
        )
        length = self.lengths or self.length
        return (
            f"{self.kind} {length}, {self.slots} slots{pool}, tail {self.tail}, mesh"
            f" {self.data}x{self.tensor}"
        )


LAYOUTS = [
    Layout("eagle3", 3, 5, tail=(2, 1)),
    Layout("eagle3+history", 3, 8, 2, 3, (2,), mark=""),
    Layout("none", 0, 7, 3),
    Layout("eagle3", 3, 32, 3, tail=(8, 2)),
    Layout("eagle3", 3, 32, tail=(8,), data=2),
    Layout("eagle3", 2, 1, 4, 0),
    Layout("eagle3 other", 3, 8, 5, 2, data=2, tensor=2, mark="slow"),
    Layout("mtp 2", 3, 8, 1, 0, (3,), mark="slow"),
    Layout("model", 3, 3, 2, 0, data=4),
    Layout("model", 2, 16, tail=(4, 1)),
    Layout("history", 3, 6, 2, 0, mark="slow"),
    Layout("hf", 4, 3, 16, data=8),
    Layout("eagle3", 3, 8, tail=(2,), lengths=(0, 1, 3), mark="slow"),
    Layout("eagle3+history", 3, 8, 2, 3, (2,), data=2, tensor=2, lengths=(0, 1, 3)),
    Layout("mtp 2", 3, 32, tail=(8, 2), lengths=(0, 2, 3)),
    Layout("model", 2, 8, 5, 2, (4,), lengths=(0, 1, 2)),
    Layout("history", 3, 16, tail=(4,), lengths=(1, 3)),
]


CHUNKS = [
    Layout("eagle3", 3, 5, tail=(2, 1)),
    Layout("none", 0, 32, mark=""),
    Layout("mtp 2", 3, 32, tail=(8,), data=2, lengths=(0, 3), mark="slow"),
]


@pytest.mark.parametrize("layout", marked(CHUNKS))
def test_tokens_do_not_depend_on_chunks(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two slots; prompts are longer."""
    monkeypatch.setattr(key_chunks, "MIN_CHUNKED_BYTES", 0)
    draft, network = draft_of(layout.kind, layout.length), network_of(layout.kind, 0.8)
    target, wanted = plain()
    settings = layout.settings._replace(chunk=2)
    given = drafter(network, draft, lengths=layout.lengths)
    begun = jax.eval_shape(
        lambda prompts: begin(
            target, given, draft, prompts, jnp.int32(0), jax.random.key(5), settings
        ),
        coupled_prompts(),
    )
    assert jax.tree.leaves(begun.caches.target.keys)[0].shape[-1] == 2, "the case tests nothing"
    assert_same_rows(
        compiled(draft, settings, layout.data)((target, network), coupled_prompts()), wanted
    )


@pytest.mark.parametrize("layout", marked(LAYOUTS))
def test_tokens_do_not_depend_on_slots_pages_or_tail(layout: Layout) -> None:
    target, wanted = plain()
    draft, network = draft_of(layout.kind, layout.length), network_of(layout.kind, 0.8)
    found = compiled(draft, layout.settings, layout.data, layout.tensor)(
        (target, network), coupled_prompts()
    )
    assert_same_rows(found, wanted)
    np.testing.assert_allclose(
        found.statistics.target_entropy, wanted.statistics.target_entropy, rtol=0, atol=1e-9
    )
    if layout.lengths:
        drafted, rounds = (
            getattr(found.statistics, name).sum(axis=0) for name in ("draft_rounds", "rounds")
        )
        assert rounds > drafted[0] or 0 not in layout.lengths
        assert drafted[0] > drafted[-1] > 0, "rounds of several lengths"
    spent = found.statistics.end_round - found.statistics.start_round
    assert (found.statistics.rounds <= spent).all()
    if layout.spare is None:
        # nobody lost its slot in between
        np.testing.assert_array_equal(found.statistics.rounds, spent)
    elif layout.slots > 1:
        assert (found.statistics.rounds < spent).any()  # somebody did, or the case tests nothing


def occupied(rollout: Any, rounds: int) -> np.ndarray:
    """Rows in slots, by round."""
    began, ended = rollout.statistics.start_round, rollout.statistics.end_round
    return np.array([((began <= number) & (number < ended)).sum() for number in range(rounds)])


def assert_is_whole(state: DecodeState) -> None:
    """A row that has not ended is in one slot, or waits; a holder has pages for its first
    positions, and every page knows how many hold it."""
    rows = len(state.rollout.status)
    running = np.flatnonzero(np.asarray(state.rollout.status) == RUNNING)
    waiting = np.flatnonzero(state.queue.waiting)
    seated = [row for row in state.row.tolist() if row in running]
    np.testing.assert_array_equal(np.sort([*waiting, *seated]), running)
    table, held, references = (
        np.asarray(leaf)
        for leaf in (state.pages.table, state.pages.page_counts, state.pages.references)
    )
    assert (len(references) > 0) == (table.shape[1] > 0)
    there = np.arange(table.shape[1]) < held[:, None]
    np.testing.assert_array_equal(table < len(references), there)
    np.testing.assert_array_equal(np.bincount(table[there], minlength=len(references)), references)
    assert rows_may_wait(state) or set(state.row.tolist()) <= {*range(rows + 1)}


LONG = 16
"""Tokens: rows lose their pages when they have some, and the last rows need several slices."""
BY_LAW = Settings(GROUP, LONG, SPREAD._replace(stop_ids=STOP[:1]), Rejection(block_rule))
ORDER = np.random.default_rng(3).permutation(8 * GROUP)


@functools.cache
def sliced(settings: Settings, rounds: int) -> Rollout:
    """Rollouts in slices of some rounds, after each of which the engine is whole; rows take their
    turn in another order than they lie in."""
    target = plain()[0]
    draft, network = draft_of("eagle3", 3), network_of("eagle3", 0.8)

    @jax.jit
    def start(prompts: Prompts) -> DecodeState:
        given, key = drafter(network, draft), jax.random.key(5)
        state = begin(target, given, draft, prompts, jnp.int32(0), key, settings)
        return state.replace(
            queue=state.queue.replace(admission_order=jnp.asarray(ORDER, jnp.int32))
        )

    step = jax.jit(
        lambda state: advance(target, drafter(network, draft), draft, state, rounds, settings)
    )
    state = start(coupled_prompts())
    for _ in range(50):
        state = step(state)
        assert_is_whole(state)
    assert (np.asarray(collect(state).status) != RUNNING).all()
    ended = jax.jit(lambda state: refill_slots(state, GROUP, 4, True))(state)
    assert not np.asarray(ended.pages.references).any()
    return jax.tree.map(np.asarray, collect(state))


@pytest.mark.slow
def test_slots_are_full_until_nobody_waits() -> None:
    """By the rule of the law, whose tokens are those of slots for all rows."""
    whole, some = sliced(BY_LAW, 1000), sliced(BY_LAW._replace(slots=6, tail=(2,)), 3)
    assert_same_rows(some, whole)
    np.testing.assert_array_equal(some.statistics.accepted, whole.statistics.accepted)
    full = occupied(some, int(some.statistics.end_round.max()))
    assert (full[: some.statistics.start_round.max()] == 6).all()
    np.testing.assert_array_equal(
        np.argsort(some.statistics.start_round, kind="stable")[:6], np.sort(ORDER[:6])
    )


def test_rows_that_lose_their_pages_go_on_as_if_they_had_kept_them() -> None:
    whole = sliced(BY_LAW, 1000)
    pages = fewest(2, 3, new=LONG) + 4
    evicting = sliced(BY_LAW._replace(slots=6, page_size=2, pages=pages, tail=(2,)), 4)
    assert_same_rows(evicting, whole)
    for name in ("accepted", "rounds"):
        np.testing.assert_array_equal(
            getattr(evicting.statistics, name), getattr(whole.statistics, name), err_msg=name
        )
    waited = (
        evicting.statistics.end_round - evicting.statistics.start_round > evicting.statistics.rounds
    )
    assert waited.sum() > 5, "rows were evicted, or the case tests less than it says"


def few_prompts(count: int) -> Prompts:
    return jax.tree.map(lambda leaf: leaf[:count] if leaf.ndim else leaf, coupled_prompts())


@pytest.mark.parametrize(
    ("prompts", "slots", "page_size", "tail", "slices"),
    [
        pytest.param(8, 8, 0, (2,), 3, id="whole rows", marks=pytest.mark.slow),
        pytest.param(
            2, 6, 2, (3,), 1, id="rows of the tail lose their pages", marks=pytest.mark.sweep
        ),
    ],
)
def test_lengths_are_chosen_alike_in_slices(
    prompts: int, slots: int, page_size: int, tail: tuple[int, ...], slices: int
) -> None:
    """By the rule of the law, whose tokens follow what is drafted; where a slice ends, nothing is
    earned, spent or forgotten."""
    target = plain()[0]
    draft, network = draft_of("eagle3", 3), network_of("eagle3", 0.8)
    long, asked = 16, few_prompts(prompts)
    pages = fewest(page_size, 3, prompts, long) if page_size else 0
    processing = SPREAD._replace(stop_ids=STOP[:1])
    settings = Settings(
        GROUP,
        long,
        processing,
        Rejection(block_rule),
        slots=slots,
        page_size=page_size,
        pages=pages,
        tail=tail,
        lengths=(0, 1, 3),
    )
    choosing = drafter(network, draft, lengths=settings.lengths)
    start = jax.jit(
        lambda prompts: begin(
            target, choosing, draft, prompts, jnp.int32(0), jax.random.key(5), settings
        )
    )
    step = jax.jit(lambda state, rounds: advance(target, choosing, draft, state, rounds, settings))
    whole = step(start(asked), jnp.int32(1000))
    assert (np.asarray(whole.rollout.status) != RUNNING).all()
    state, evicted = start(asked), 0
    for _ in range(0, int(whole.round[0]), slices):
        state = step(state, jnp.int32(slices))
        assert_is_whole(state)
        left = np.asarray(state.rollout.status) == RUNNING
        waiting = np.asarray(state.queue.waiting)
        evicted += bool(left.sum() <= tail[0] and waiting.any())
    jax.tree.map(
        np.testing.assert_array_equal,
        (state.rollout, state.acceptance),
        (whole.rollout, whole.acceptance),
    )
    assert (
        whole.rollout.statistics.draft_rounds.sum(axis=0).tolist()
        != [int(whole.rollout.statistics.rounds.sum())] * 3
    )
    assert (evicted > 0) == (page_size > 0), "a slice must end while a row of the tail waits"


def test_a_pool_too_small_for_one_row_is_refused() -> None:
    settings = Settings(
        GROUP, NEW, SPREAD, Matching(), slots=4, page_size=2, pages=fewest(2, 0) - 1
    )
    with pytest.raises(
        ValueError,
        match=f"pages is {fewest(2, 0) - 1}, but .* 2 positions: set at least {fewest(2, 0)}",
    ):
        compiled(PLAIN, settings)((plain()[0], None), coupled_prompts())
