"""The engine's whole loop on tiny transformers in float64: how rows start and end.
`test_lossless.py` has the law of their tokens."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import PLAIN
from jaxspec.drafts.recurrent import RecurrentState, recurrent_draft
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3
from jaxspec.rollout.generate import advance, begin, collect
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verify import block_rule, token_rule
from jaxspec.sampling import Processing
from jaxspec.state import EOS, FAILED, IDLE, LENGTH, RUNNING, Prompts, Rollout
from tests.conftest import eagle3, tiny_model, tiny_network, tiny_prompts, with_weights
from tests.rollout.harness import (
    assert_same_rows,
    bigram_draft,
    bigram_target,
    compiled,
    drafter,
    last_token_prompts,
    mode_of,
)
from tests.twins import numpy_decoder, numpy_softmax, numpy_taps

pytestmark = pytest.mark.usefixtures("x64")

KEY = 5
NEW = 8
STOP = (1, 3)
GROUP = 6


@functools.cache
def networks() -> tuple[Decoder, Eagle3]:
    return tiny_network(Decoder, tiny_model(), 1, 0.6), tiny_network(eagle3, tiny_model(), 2, 0.6)


def settings(
    coupled: bool,
    temperature: float = 1.0,
    new: int = NEW,
    stop: tuple[int, ...] = STOP,
    group: int = GROUP,
) -> Settings:
    processing = Processing(stop_ids=stop, temperature=temperature)
    return Settings(
        group_size=group,
        max_new_tokens=new,
        processing=processing,
        mode=mode_of(None if coupled else token_rule),
    )


@functools.cache
def program(length: int, coupled: bool, temperature: float = 1.0) -> Callable[..., Any]:
    return compiled(
        recurrent_draft(length, (1, 2, 3)) if length else PLAIN, settings(coupled, temperature)
    )


def prompts() -> Prompts:
    made = tiny_prompts(8)
    # a prompt of one token has nothing to draft from at first
    return made.replace(lengths=made.lengths.at[3].set(1))


def cut_inside_drafts(rollout: Any) -> np.ndarray:
    """Rows whose last round kept no token of its own: it was cut among its accepted drafts."""
    return (
        rollout.statistics.rounds
        + rollout.statistics.accepted.sum(1)
        - (rollout.lengths - rollout.prompt_lengths)
        == 1
    )


def test_a_block_may_end_among_its_accepted_drafts() -> None:
    """By an end token and by the limit; and drafts are rejected at every depth."""
    plain, coupled = (program(length, True)(networks(), prompts()) for length in (0, 3))
    assert_same_rows(coupled, plain)
    cut = cut_inside_drafts(coupled)
    assert (cut & (coupled.status == EOS)).any()
    assert (cut & (coupled.status == LENGTH)).any()
    depths = coupled.statistics.accepted.sum(0)
    assert (depths > 0).all()
    assert (np.diff(depths) <= 0).all()


def test_plain_rows_end_as_they_should() -> None:
    rollout = program(0, True)(networks(), prompts())
    for row in range(len(rollout.status)):
        start, end = rollout.prompt_lengths[row], rollout.lengths[row]
        response = rollout.tokens[row, start:end]
        np.testing.assert_array_equal(
            rollout.tokens[row, :start], prompts().tokens[row // GROUP, :start]
        )
        assert not np.isin(response[:-1], STOP).any()
        assert (rollout.status[row] == EOS) == (response[-1] in STOP)
        assert rollout.status[row] == EOS or (
            len(response) == NEW and rollout.status[row] == LENGTH
        )
        assert not rollout.tokens[row, end:].any()
        assert not rollout.logprobs[row, end:].any()
        assert not rollout.logprobs[row, :start].any()
        assert rollout.statistics.rounds[row] == end - start
    # Rows of a group differ: each has noise of its own.
    assert len({tuple(tokens) for tokens in rollout.tokens[:GROUP].tolist()}) > 1


def assert_pending_block_is_the_text(target: Decoder, draft: RecurrentState, rows: Rollout) -> None:
    """What a draft will read next is the text just committed, with the target's own taps: a wrong
    one would only cost acceptance."""
    for row in np.flatnonzero(rows.status == RUNNING)[:3]:
        text = rows.tokens[row, : rows.lengths[row]]
        first = int(draft.first_position[row])
        taps = numpy_taps(numpy_decoder(target, text[:-1])[2])
        np.testing.assert_allclose(
            draft.features[row, : len(text) - 1 - first], taps[first:], rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("coupled", [pytest.param(True, marks=pytest.mark.sweep), False])
def test_slices_give_the_tokens_of_one_call_and_consistent_counts(coupled: bool) -> None:
    draft, chosen = recurrent_draft(3, (1, 2, 3)), settings(coupled)
    target, network = networks()
    start = jax.jit(
        lambda prompts, key: begin(
            target, drafter(network, draft), draft, prompts, jnp.int32(0), key, chosen
        )
    )
    step = jax.jit(
        lambda state, rounds: advance(target, drafter(network, draft), draft, state, rounds, chosen)
    )
    state = start(prompts(), jax.random.key(KEY))
    seen = jax.tree.map(np.asarray, collect(state))
    while (seen.status == RUNNING).any():
        state = step(state, jnp.int32(1))
        now = jax.tree.map(np.asarray, collect(state))
        was_running = seen.status == RUNNING
        count = now.lengths - seen.lengths
        accepted = (now.statistics.accepted - seen.statistics.accepted).sum(1)
        np.testing.assert_array_equal(now.statistics.rounds - seen.statistics.rounds, was_running)
        # each statistic too
        for before, after in zip(jax.tree.leaves(seen), jax.tree.leaves(now), strict=True):
            # some are kept for the first row of each group only
            ended = ~was_running[:: len(was_running) // len(before)]
            np.testing.assert_array_equal(after[ended], before[ended])
        assert ((count >= 1) & (count <= draft.max_length + 1))[was_running].all()
        # All kept drafts count; a round adds one token of its own unless it was cut before it.
        cut = count == accepted
        assert (cut | (count == accepted + 1))[was_running].all()
        assert (now.status[was_running & cut] != RUNNING).all()
        before = np.arange(seen.tokens.shape[1]) < seen.lengths[:, None]
        np.testing.assert_array_equal(now.tokens[before], seen.tokens[before])
        np.testing.assert_array_equal(now.logprobs[before], seen.logprobs[before])
        assert_pending_block_is_the_text(target, state.draft, now)
        seen = now
    whole = program(draft.max_length, coupled)(networks(), prompts())
    for found, wanted in zip(jax.tree.leaves(seen), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    state = jax.tree.map(
        np.asarray, collect(step(start(prompts(), jax.random.key(KEY)), jnp.int32(0)))
    )
    np.testing.assert_array_equal(state.lengths, state.prompt_lengths)


@pytest.mark.parametrize(
    ("length", "coupled", "temperature"),
    [(3, False, 0.7), pytest.param(3, True, 0.7, marks=pytest.mark.sweep), (0, True, 0.7)],
)
def test_recorded_logprobs_are_those_of_the_whole_sequence(
    length: int, coupled: bool, temperature: float
) -> None:
    rollout = program(length, coupled, temperature)(networks(), prompts())
    for row in range(0, len(rollout.status), 3):
        start, end = rollout.prompt_lengths[row], rollout.lengths[row]
        logits = numpy_decoder(networks()[0], rollout.tokens[row, :end])[0]
        laws = np.log(numpy_softmax(logits / temperature))
        wanted = [laws[t - 1, rollout.tokens[row, t]] for t in range(start, end)]
        np.testing.assert_allclose(rollout.logprobs[row, start:end], wanted, rtol=0, atol=1e-9)


# ---- rows and failures


@pytest.mark.parametrize("coupled", [pytest.param(True, marks=pytest.mark.sweep), False])
def test_rows_do_not_depend_on_the_rest_of_the_batch(coupled: bool) -> None:
    run, made = program(3, coupled), prompts()
    whole = run(networks(), made)
    others = tiny_prompts(8, seed=9)
    mixed = jax.tree.map(
        lambda ours, theirs: jnp.concatenate([ours[:4], theirs[4:]]) if ours.ndim else ours,
        made,
        others,
    )
    kept = slice(0, 4 * GROUP)
    assert_same_rows(run(networks(), mixed), whole, kept)
    assert (run(networks(), mixed).tokens[4 * GROUP :] != whole.tokens[4 * GROUP :]).any()
    # A shard that holds only the last four prompts knows them by their global numbers.
    target, network = networks()
    last = jax.tree.map(lambda leaf: leaf[4:] if leaf.ndim else leaf, made)

    @jax.jit
    def part(prompts: Prompts, first: jax.Array, key: jax.Array) -> Rollout:
        draft = recurrent_draft(3, (1, 2, 3))
        state = begin(
            target, drafter(network, draft), draft, prompts, first, key, settings(coupled)
        )
        return collect(
            advance(target, drafter(network, draft), draft, state, 100, settings(coupled))
        )

    alone = jax.tree.map(np.asarray, part(last, jnp.int32(4), jax.random.key(KEY)))
    assert_same_rows(alone, whole, slice(None), slice(4 * GROUP, None))


@pytest.mark.slow
def test_token_rule_is_the_same_on_any_mesh() -> None:
    spread = compiled(recurrent_draft(3, (1, 2, 3)), settings(False), data=4, tensor=2)(
        networks(), prompts()
    )
    whole = program(3, False)(networks(), prompts())
    assert_same_rows(spread, whole)
    np.testing.assert_array_equal(spread.statistics.rounds, whole.statistics.rounds)
    np.testing.assert_array_equal(spread.statistics.accepted, whole.statistics.accepted)


def test_noise_follows_the_key() -> None:
    run = program(3, False)
    first, again, other = (run(networks(), prompts(), seed).tokens for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(("length", "coupled"), [(0, True), (3, True), (3, False)])
def test_nan_weights_fail_every_row_and_write_no_token(length: int, coupled: bool) -> None:
    target, network = networks()
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), target)
    rollout = program(length, coupled)((broken, network), prompts())
    assert (rollout.status == FAILED).all()
    np.testing.assert_array_equal(rollout.lengths, rollout.prompt_lengths)
    assert not rollout.logprobs.any()
    inside = np.arange(rollout.tokens.shape[1]) < rollout.lengths[:, None]
    assert not rollout.tokens[~inside].any()
    assert (rollout.statistics.rounds == 1).all()


def test_a_failing_row_keeps_what_it_had_and_leaves_others_alone() -> None:
    """Token 7 has a NaN embedding: plain decoding fails right after it, and only there."""
    made = prompts()
    made = made.replace(tokens=jnp.where(made.tokens == 7, 8, made.tokens).at[2, 0].set(7))
    target, network = networks()
    clean = program(0, True)((target, network), made)
    poisoned = with_weights(target, embedding=target.embedding[...].at[7].set(jnp.nan))
    rollout = program(0, True)((poisoned, network), made)
    hit = 0
    for row in range(len(clean.status)):
        start, end = clean.prompt_lengths[row], clean.lengths[row]
        read = clean.tokens[row, : end - 1].tolist()  # the last token is never fed back
        if 7 not in read:
            assert_same_rows(rollout, clean, [row])
            continue
        hit += row // GROUP != 2
        length = max(start, read.index(7) + 1)
        assert rollout.status[row] == FAILED
        assert rollout.lengths[row] == length
        np.testing.assert_array_equal(rollout.tokens[row, :length], clean.tokens[row, :length])
        assert not rollout.tokens[row, length:].any()
    assert hit > 0


@pytest.mark.parametrize("coupled", [True, False])
def test_rows_that_are_not_live_generate_nothing(coupled: bool) -> None:
    made = prompts()
    whole = program(3, coupled)(networks(), made)
    live = np.arange(8) % 3 > 0
    rollout = program(3, coupled)(networks(), made.replace(live=jnp.asarray(live)))
    idle = np.repeat(~live, GROUP)
    assert (rollout.status[idle] == IDLE).all()
    np.testing.assert_array_equal(rollout.lengths[idle], rollout.prompt_lengths[idle])
    for leaf in (rollout.logprobs, *jax.tree.leaves(rollout.statistics)):
        assert not leaf[idle[:: len(idle) // len(leaf)]].any()
    inside = np.arange(rollout.tokens.shape[1]) < rollout.prompt_lengths[:, None]
    np.testing.assert_array_equal(rollout.tokens[idle], np.where(inside, whole.tokens, 0)[idle])
    assert_same_rows(rollout, whole, ~idle)
    nobody = program(3, coupled)(networks(), made.replace(live=jnp.zeros(8, bool)))
    assert (nobody.status == IDLE).all()


# ---- drafts that are right by construction


@pytest.mark.parametrize("coupled", [pytest.param(True, marks=pytest.mark.sweep), False])
def test_a_draft_with_the_targets_law_keeps_every_draft(coupled: bool) -> None:
    vocab, length, new = 8, 3, 10
    target, table = bigram_target(np.random.default_rng(0).normal(size=(8, vocab)) / 2)
    run = compiled(bigram_draft(length, table), settings(coupled, new=new, stop=(), group=16))
    rollout = run((target, None), last_token_prompts([1, 2, 3, 4]))
    np.testing.assert_array_equal(rollout.statistics.rounds, 3)  # 4 + 4 + 2
    np.testing.assert_array_equal(rollout.statistics.accepted, np.tile([3, 3, 2], (64, 1)))
    assert (rollout.status == LENGTH).all()
    assert len({tuple(row) for row in rollout.tokens[:16].tolist()}) > 10


FAST_CUTS = (None, 6), (block_rule, 7)


@pytest.mark.parametrize(
    ("rule", "new"),
    [
        pytest.param(*cut, marks=[] if cut in FAST_CUTS else pytest.mark.sweep)
        for cut in itertools.product((None, token_rule, block_rule), (5, 6, 7, 8))
    ],
)
def test_the_end_token_and_the_limit_cut_the_block_at_every_offset(rule: Any, new: int) -> None:
    """A chain t -> t + 1 with 11 as its end: from 10 - n, the end stands at offset n of the first
    blocks; the last has room for 1 to 4."""
    length, end = 3, 11
    target, table = bigram_target(40 * np.roll(np.eye(end + 1), 1, axis=1))
    chosen = Settings(
        group_size=2,
        max_new_tokens=new,
        processing=Processing(stop_ids=(end, 0)),
        mode=mode_of(rule),
    )
    starts = [10, 9, 8, 7, 6, 5, 4, 3, 2]
    rollout = compiled(bigram_draft(length, table), chosen)(
        (target, None), last_token_prompts(starts)
    )
    for row, start in enumerate(itertools.chain.from_iterable((s, s) for s in starts)):
        response = list(range(start + 1, end + 1))[:new]
        count = len(response)
        assert rollout.lengths[row] == 2 + count
        assert rollout.tokens[row].tolist() == [0, start, *response, *[0] * (new - count)]
        assert rollout.status[row] == (EOS if response[-1] == end else LENGTH)
        assert rollout.statistics.rounds[row] == -(-count // (length + 1))
        kept = [
            min(length + 1, count - 4 * number) for number in range(rollout.statistics.rounds[row])
        ]
        assert rollout.statistics.accepted[row].tolist() == [
            sum(k >= depth for k in kept) for depth in (1, 2, 3)
        ]
        # four tokens a round, so that round n begins behind 4 n of them
        in_quarter = [
            [k for number, k in enumerate(kept) if 16 * number // new == quarter]
            for quarter in range(4)
        ]
        assert rollout.statistics.quarter_rounds[row].tolist() == list(map(len, in_quarter))
        assert rollout.statistics.quarter_tokens[row].tolist() == list(map(sum, in_quarter))
        np.testing.assert_allclose(rollout.logprobs[row], 0, atol=1e-9)
