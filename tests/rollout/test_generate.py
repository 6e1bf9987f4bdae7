"""The engine's whole loop on tiny transformers: identities in float64, and the exact law of sequences by enumeration."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import Draft, Kept, Proposal, Sampler
from jaxspec.drafts.eagle3 import Eagle3State, eagle3
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3
from jaxspec.rollout.generate import Settings, advance, begin, collect, generate
from jaxspec.state import EOS, FAILED, IDLE, LENGTH, RUNNING, Prompts, Rollout
from tests.conftest import (
    chi_square,
    numpy_decoder,
    numpy_softmax,
    numpy_taps,
    small_mesh,
    tiny_model,
    tiny_network,
    tiny_prompts,
    with_weights,
)

pytestmark = pytest.mark.usefixtures("x64")

KEY = 5
NEW = 8
STOP = (1, 3)
GROUP = 6


@functools.cache
def networks(scale: float = 0.6, **changes: Any) -> tuple[Decoder, Eagle3]:
    model = tiny_model(**changes)
    return tiny_network(Decoder, model, 1, scale), tiny_network(Eagle3, model, 2, scale)


def settings(coupled: bool, temperature: float = 1.0, new: int = NEW, stop: tuple[int, ...] = STOP, group: int = GROUP) -> Settings:
    return Settings(group_size=group, max_new_tokens=new, temperature=temperature, coupled=coupled, stop_ids=stop)


def compiled(draft: Draft | None, chosen: Settings, data: int = 1, tensor: int = 1) -> Callable[..., Any]:
    """Prompts in, numpy rollout out."""
    mesh = small_mesh(data, tensor)
    run = jax.jit(lambda target, network, prompts, key: generate(target, network, draft, prompts, key, chosen, mesh))

    def call(pair: tuple[Decoder, Any], prompts: Prompts, seed: int = KEY) -> Any:
        return jax.tree.map(np.asarray, run(*pair, prompts, jax.random.key(seed)))

    return call


@functools.cache
def program(length: int, coupled: bool, temperature: float = 1.0) -> Callable[..., Any]:
    return compiled(eagle3(length) if length else None, settings(coupled, temperature))


def prompts() -> Prompts:
    made = tiny_prompts(8)
    return made.replace(lengths=made.lengths.at[3].set(1))  # a prompt of one token has nothing to draft from at first


def assert_same_rows(found: Rollout, wanted: Rollout, rows: Any = slice(None), of: Any = None) -> None:
    of = rows if of is None else of
    for name in ("tokens", "lengths", "status"):
        np.testing.assert_array_equal(getattr(found, name)[rows], getattr(wanted, name)[of], err_msg=name)
    np.testing.assert_allclose(found.logprobs[rows], wanted.logprobs[of], rtol=0, atol=1e-9)


def cut_inside_drafts(rollout: Any) -> np.ndarray:
    """Rows whose last round kept no token of its own: it was cut among its accepted drafts."""
    return rollout.rounds + rollout.accepted.sum(1) - (rollout.lengths - rollout.prompt_lengths) == 1


@pytest.mark.parametrize(("length", "temperature"), [(1, 1.0), (3, 1.0), (5, 1.0), (3, 0.7)])
def test_coupled_tokens_are_those_of_plain_decoding(length: int, temperature: float) -> None:
    plain, coupled = (program(k, True, temperature)(networks(), prompts()) for k in (0, length))
    assert_same_rows(coupled, plain)
    # The run covers what it should: both endings, each inside a block of accepted drafts too, and rejections at every depth.
    assert {EOS, LENGTH} == set(coupled.status.tolist())
    assert coupled.rounds.sum() < plain.rounds.sum()
    cut = cut_inside_drafts(coupled)
    assert (cut & (coupled.status == EOS)).any()
    assert (cut & (coupled.status == LENGTH)).any()
    depths = coupled.accepted.sum(0)
    assert (depths > 0).all()
    assert (np.diff(depths) <= 0).all()


def test_plain_rows_end_as_they_should() -> None:
    rollout = program(0, True)(networks(), prompts())
    for row in range(len(rollout.status)):
        start, end = rollout.prompt_lengths[row], rollout.lengths[row]
        response = rollout.tokens[row, start:end]
        np.testing.assert_array_equal(rollout.tokens[row, :start], prompts().tokens[row // GROUP, :start])
        assert not np.isin(response[:-1], STOP).any()
        assert (rollout.status[row] == EOS) == (response[-1] in STOP)
        assert rollout.status[row] == EOS or (len(response) == NEW and rollout.status[row] == LENGTH)
        assert not rollout.tokens[row, end:].any()
        assert not rollout.logprobs[row, end:].any()
        assert not rollout.logprobs[row, :start].any()
        assert rollout.rounds[row] == end - start
    # Rows of a group differ: each has noise of its own.
    assert len({tuple(tokens) for tokens in rollout.tokens[:GROUP].tolist()}) > 1


def assert_pending_block_is_the_text(target: Decoder, draft: Eagle3State, rows: Rollout) -> None:
    """What a draft will read next is the text just committed, with the target's own taps: a wrong one would only cost acceptance."""
    for row in np.flatnonzero(rows.status == RUNNING)[:3]:
        text = rows.tokens[row, : rows.lengths[row]]
        first, count = int(draft.first[row]), int(draft.count[row])
        assert first + count == len(text) - 1
        np.testing.assert_array_equal(draft.tokens[row, :count], text[first + 1 :])
        taps = numpy_taps(numpy_decoder(target, text[:-1])[2])
        np.testing.assert_allclose(draft.taps[row, :count], taps[first:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("coupled", [pytest.param(True, marks=pytest.mark.slow), False])
def test_slices_give_the_tokens_of_one_call_and_consistent_counts(coupled: bool) -> None:
    length, chosen = 3, settings(coupled)
    target, network = networks()
    start = jax.jit(lambda prompts, key: begin(target, network, eagle3(length), prompts, jnp.int32(0), key, chosen))
    step = jax.jit(lambda engine, rounds: advance(target, network, eagle3(length), engine, rounds, chosen))
    engine = start(prompts(), jax.random.key(KEY))
    seen = jax.tree.map(np.asarray, collect(engine))
    while (seen.status == RUNNING).any():
        engine = step(engine, jnp.int32(1))
        now = jax.tree.map(np.asarray, collect(engine))
        was_running = seen.status == RUNNING
        count, accepted = now.lengths - seen.lengths, (now.accepted - seen.accepted).sum(1)
        np.testing.assert_array_equal(now.rounds - seen.rounds, was_running)
        assert (count[~was_running] == 0).all()
        assert ((count >= 1) & (count <= length + 1))[was_running].all()
        # All kept drafts count; a round adds one token of its own unless it was cut before it.
        cut = count == accepted
        assert (cut | (count == accepted + 1))[was_running].all()
        assert (now.status[was_running & cut] != RUNNING).all()
        before = np.arange(seen.tokens.shape[1]) < seen.lengths[:, None]
        np.testing.assert_array_equal(now.tokens[before], seen.tokens[before])
        np.testing.assert_array_equal(now.logprobs[before], seen.logprobs[before])
        assert_pending_block_is_the_text(target, engine.draft, now)
        seen = now
    whole = program(length, coupled)(networks(), prompts())
    for name in ("tokens", "lengths", "status", "rounds", "accepted"):
        np.testing.assert_array_equal(getattr(seen, name), getattr(whole, name), err_msg=name)
    engine = jax.tree.map(np.asarray, collect(step(start(prompts(), jax.random.key(KEY)), jnp.int32(0))))
    np.testing.assert_array_equal(engine.lengths, engine.prompt_lengths)


@pytest.mark.parametrize(("length", "coupled", "temperature"), [(3, False, 1.0), (3, False, 0.7), (3, True, 0.7), (0, True, 0.7)])
def test_recorded_logprobs_are_those_of_the_whole_sequence(length: int, coupled: bool, temperature: float) -> None:
    rollout = program(length, coupled, temperature)(networks(), prompts())
    for row in range(0, len(rollout.status), 3):
        start, end = rollout.prompt_lengths[row], rollout.lengths[row]
        logits = numpy_decoder(networks()[0], rollout.tokens[row, :end])[0]
        laws = np.log(numpy_softmax(logits / temperature))
        wanted = [laws[t - 1, rollout.tokens[row, t]] for t in range(start, end)]
        np.testing.assert_allclose(rollout.logprobs[row, start:end], wanted, rtol=0, atol=1e-9)


# ---- the law of whole sequences


def sequence_law(target: Decoder, prompt: list[int], temperature: float, new: int, stop: int) -> dict[tuple[int, ...], float]:
    """Every possible response and its probability, by plain decoding in numpy."""
    law, open_prefixes = {}, {(): 1.0}
    for _ in range(new):
        longer = {}
        for prefix, mass in open_prefixes.items():
            probabilities = numpy_softmax(numpy_decoder(target, [*prompt, *prefix])[0][-1] / temperature)
            for token, probability in enumerate(probabilities):
                (law if token == stop else longer)[*prefix, token] = mass * probability
        open_prefixes = longer
    return law | open_prefixes


@pytest.mark.parametrize(
    ("length", "coupled", "temperature", "new"),
    [(0, True, 1.0, 3), (2, False, 1.0, 4), (3, False, 0.7, 4)],
)
def test_sequences_have_exactly_the_law_of_plain_decoding(length: int, coupled: bool, temperature: float, new: int) -> None:
    vocab, stop, rows = 5, 1, 25_000
    pair = networks(2.0, vocab=vocab, dtype="float32")
    made = Prompts(
        tokens=jnp.array([[2, 0, 4], [3, 3, 0]], jnp.int32),
        lengths=jnp.array([3, 2], jnp.int32),
        live=jnp.array([True, True]),
        stream=jnp.int32(0),
        batch=jnp.int32(0),
    )
    run = compiled(eagle3(length) if length else None, settings(coupled, temperature, new, (stop,), rows))
    rollout = run(pair, made)
    if length:
        share = rollout.accepted[:, 0].sum() / rollout.rounds.sum()
        assert 0.05 < share < 0.95, "both acceptance and rejection must be common for this to test anything"
    for number, prompt in enumerate(([2, 0, 4], [3, 3])):
        law = sequence_law(pair[0], prompt, temperature, new, stop)
        assert sum(law.values()) == pytest.approx(1)
        index = {sequence: place for place, sequence in enumerate(law)}
        mine = slice(number * rows, (number + 1) * rows)
        starts, ends, tokens = rollout.prompt_lengths[mine], rollout.lengths[mine], rollout.tokens[mine]
        found = [index[tuple(row[start:end].tolist())] for row, start, end in zip(tokens, starts, ends, strict=True)]
        assert chi_square(np.bincount(found, minlength=len(law)), rows * np.array(list(law.values()))) > 1e-3


# ---- rows and failures


@pytest.mark.parametrize("coupled", [True, False])
def test_rows_do_not_depend_on_the_rest_of_the_batch(coupled: bool) -> None:
    run, made = program(3, coupled), prompts()
    whole = run(networks(), made)
    others = tiny_prompts(8, seed=9)
    mixed = jax.tree.map(lambda ours, theirs: jnp.concatenate([ours[:4], theirs[4:]]) if ours.ndim else ours, made, others)
    kept = slice(0, 4 * GROUP)
    assert_same_rows(run(networks(), mixed), whole, kept)
    assert (run(networks(), mixed).tokens[4 * GROUP :] != whole.tokens[4 * GROUP :]).any()
    # A shard that holds only the last four prompts knows them by their global numbers.
    target, network = networks()
    last = jax.tree.map(lambda leaf: leaf[4:] if leaf.ndim else leaf, made)

    @jax.jit
    def part(prompts: Prompts, first: jax.Array, key: jax.Array) -> Rollout:
        engine = begin(target, network, eagle3(3), prompts, first, key, settings(coupled))
        return collect(advance(target, network, eagle3(3), engine, 100, settings(coupled)))

    alone = jax.tree.map(np.asarray, part(last, jnp.int32(4), jax.random.key(KEY)))
    assert_same_rows(alone, whole, slice(None), slice(4 * GROUP, None))


@pytest.mark.parametrize(("data", "tensor"), [(4, 2)])
def test_token_rule_is_the_same_on_any_mesh(data: int, tensor: int) -> None:
    spread = compiled(eagle3(3), settings(False), data, tensor)(networks(), prompts())
    whole = program(3, False)(networks(), prompts())
    assert_same_rows(spread, whole)
    np.testing.assert_array_equal(spread.rounds, whole.rounds)
    np.testing.assert_array_equal(spread.accepted, whole.accepted)


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
    assert (rollout.rounds == 1).all()


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
    assert not rollout.rounds[idle].any()
    assert not rollout.accepted[idle].any()
    assert not rollout.logprobs[idle].any()
    assert_same_rows(rollout, whole, ~idle)
    nobody = program(3, coupled)(networks(), made.replace(live=jnp.zeros(8, bool)))
    assert (nobody.status == IDLE).all()


# ---- drafts that are right by construction


def bigram_draft(length: int, table: np.ndarray) -> Draft:
    """A draft that needs only the last token: row v of `table` holds the logits of what follows v."""
    logits = jnp.asarray(table)

    def prefill(network: Any, target: Decoder, tokens: jax.Array, lengths: jax.Array, taps: jax.Array, slots: int) -> jax.Array:
        return jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]

    def propose(network: Any, target: Decoder, state: jax.Array, sample: Sampler) -> tuple[jax.Array, Proposal]:
        token, drafted, laws = state, [], []
        for offset in range(length):
            token, law = sample(logits[token], offset)
            drafted.append(token)
            laws.append(law)
        return state, Proposal(jnp.stack(drafted, 1), jnp.stack(laws, 1))

    def commit(state: jax.Array, kept: Kept) -> jax.Array:
        last = jnp.take_along_axis(kept.tokens, jnp.maximum(kept.length - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(kept.length > 0, last, state)

    return Draft(length, prefill, lambda state, times: jnp.repeat(state, times), propose, commit)


def bigram_target(head: np.ndarray) -> tuple[Decoder, np.ndarray]:
    """A decoder that sees only the last token, and its logits by last token."""
    vocab = head.shape[1]
    target = tiny_network(Decoder, tiny_model(vocab=vocab, embed=vocab), 3)
    target = with_weights(target, output=0.0, down=0.0, embedding=np.eye(vocab), norm=1.0, head=head)
    return target, np.sqrt(vocab) / np.sqrt(1 + vocab * 1e-6) * head


def last_token_prompts(tokens: list[int]) -> Prompts:
    count = len(tokens)
    return Prompts(
        tokens=jnp.array([[0, token] for token in tokens], jnp.int32),
        lengths=jnp.full((count,), 2, jnp.int32),
        live=jnp.ones(count, bool),
        stream=jnp.int32(0),
        batch=jnp.int32(0),
    )


@pytest.mark.parametrize("coupled", [True, False])
def test_a_draft_with_the_targets_law_keeps_every_draft(coupled: bool) -> None:
    vocab, length, new = 8, 3, 10
    target, table = bigram_target(np.random.default_rng(0).normal(size=(8, vocab)) / 2)
    run = compiled(bigram_draft(length, table), settings(coupled, new=new, stop=(), group=16))
    rollout = run((target, None), last_token_prompts([1, 2, 3, 4]))
    np.testing.assert_array_equal(rollout.rounds, 3)  # 4 + 4 + 2
    np.testing.assert_array_equal(rollout.accepted, np.tile([3, 3, 2], (64, 1)))
    assert (rollout.status == LENGTH).all()
    assert len({tuple(row) for row in rollout.tokens[:16].tolist()}) > 10


@pytest.mark.parametrize("coupled", [True, False])
def test_the_end_token_cuts_the_block_at_every_offset(coupled: bool) -> None:
    """A chain t -> t + 1 with 9 as its end: from 8 - n, the end stands at offset n of the first blocks."""
    vocab, length = 10, 3
    target, table = bigram_target(40 * np.roll(np.eye(vocab), 1, axis=1))
    run = compiled(bigram_draft(length, table), settings(coupled, new=6, stop=(9, 0), group=2))
    starts = [8, 7, 6, 5, 4, 3, 2]
    rollout = run((target, None), last_token_prompts(starts))
    for row, start in enumerate(itertools.chain.from_iterable((s, s) for s in starts)):
        response = list(range(start + 1, 10))[:6]
        count = len(response)
        assert rollout.lengths[row] == 2 + count
        assert rollout.tokens[row].tolist() == [0, start, *response, *[0] * (6 - count)]
        assert rollout.status[row] == (EOS if response[-1] == 9 else LENGTH)
        assert rollout.rounds[row] == -(-count // (length + 1))
        kept = [min(length + 1, count - 4 * number) for number in range(rollout.rounds[row])]
        assert rollout.accepted[row].tolist() == [sum(k >= depth for k in kept) for depth in (1, 2, 3)]
        np.testing.assert_allclose(rollout.logprobs[row], 0, atol=1e-9)
