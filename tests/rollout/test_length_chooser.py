"""Which length a round drafts: worked numbers, and the seconds of many choices, by the table they
were made from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.mesh import ROWS, make_mesh, shard_map_rows
from jaxspec.rollout import loops
from jaxspec.rollout.feedback.acceptance import init_statistics
from jaxspec.rollout.feedback.cost_table import context_buckets
from jaxspec.rollout.feedback.length_chooser import (
    RemainingWork,
    choose_length,
    expected_tokens,
    init_chooser,
    slowest_row_tokens,
    update_chooser,
)
from jaxspec.state import AcceptanceEstimate, LengthChooser

LENGTHS = (0, 1, 3, 5)
COSTS = [
    (1, 1.1, 1.2, 1.3),
    (1, 1.3, 1.6, 2.0),
    (1, 1.02, 2.5, 4.0),
    (1, 2.0, 2.1, 2.2),
    (1, 1.5, 1.2, 3.0),
]


def work(rows: int, tokens: int) -> RemainingWork:
    return RemainingWork(jnp.int32(rows), jnp.int32(tokens))


ONE_ROW = work(1, 100)


def estimate(
    offered_in_turn: list[float], kept: list[float], seconds_to_lose: float = 0.0
) -> AcceptanceEstimate:
    return AcceptanceEstimate(
        reached=jnp.asarray(offered_in_turn, jnp.float32),
        accepted=jnp.asarray(kept, jnp.float32),
        seconds_to_lose=jnp.float32(seconds_to_lose),
    )


def test_contexts_end_ever_later() -> None:
    assert context_buckets(300) == (300,)
    assert context_buckets(512) == (512,)
    assert context_buckets(5000) == (512, 2048, 5000)


def test_expected_tokens_are_those_of_conditional_acceptance() -> None:
    """Where much is known, the fractions; a depth never reached does as well as the one before; of
    nothing, 0.8 at every depth."""
    many = expected_tokens(estimate([8e6, 4e6, 1e6, 1e6, 0], [4e6, 1e6, 1e6, 5e5, 0]), LENGTHS)
    np.testing.assert_allclose(
        many, [1, 1.5, 1.5 + 1 / 8 + 1 / 8, 1.75 + 1 / 16 + 1 / 32], rtol=1e-5
    )
    np.testing.assert_allclose(
        expected_tokens(estimate([0] * 5, [0] * 5), LENGTHS), [1, 1.8, 2.952, 3.68928], rtol=1e-5
    )
    # Two drafts of which one was kept, and the word of one draft that 0.8 are: 1.8 of 3.
    np.testing.assert_allclose(
        expected_tokens(estimate([2, 0, 0, 0, 0], [1, 0, 0, 0, 0]), (1,)), [1.6], rtol=1e-5
    )


def test_the_most_tokens_a_second_are_chosen() -> None:
    # 1, 1.5, 1.875, 1.96875 tokens
    half = estimate([1e6, 5e5, 2.5e5, 1e5, 1e5], [5e5, 2.5e5, 1.25e5, 5e4, 5e4])
    for cost, wanted in (
        ((1, 1.1, 1.2, 1.3), 2),
        ((1, 1.1, 1.5, 2), 1),
        ((1, 1.6, 1.9, 2), 0),
        ((1, 1, 1, 1), 3),
    ):
        place, seconds_to_lose = choose_length(
            half, jnp.asarray(cost, jnp.float32), LENGTHS, ONE_ROW
        )
        assert place == wanted
        assert seconds_to_lose == jnp.float32(0.01) * jnp.float32(cost[wanted])
        tried, seconds_to_lose = choose_length(
            half.replace(seconds_to_lose=jnp.float32(0.5)),
            jnp.asarray(cost, jnp.float32),
            LENGTHS,
            ONE_ROW,
        )
        longer = min(wanted + 1, 3)
        assert tried == (longer if cost[longer] - cost[wanted] <= 0.5 else wanted)
        assert seconds_to_lose >= 0
    place, _ = choose_length(half, jnp.asarray((1.1, 1.2), jnp.float32), (1, 3), ONE_ROW)
    assert place == 1


def simulated_tokens(rate: float, length: int, rows: int, tokens: int) -> float:
    """Tokens a round of the row that ends last, over many calls."""
    random, calls = np.random.default_rng(1), 200
    rounds, done = np.zeros((calls, rows), np.int32), np.zeros((calls, rows), np.int32)
    accepted_shares = rate ** np.arange(1, length + 1)
    while (open_rows := done < tokens).any():
        # With u uniform, u < rate^d has the chance of d accepted drafts.
        draws = random.random((calls, rows), np.float32)
        kept = 1 + (draws[..., None] < accepted_shares).sum(-1, dtype=np.int32)
        done, rounds = done + kept, rounds + open_rows
    return tokens / float(rounds.max(axis=1).mean())


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
@pytest.mark.parametrize(
    ("rows", "tokens", "error"),
    [
        (1, 200, 0.02),
        (1, 8, 0.07),  # a row ends within a few rounds, which is no normal law
        (8, 64, 0.02),
        (32, 8, 0.16),
        (32, 32, 0.06),
        (32, 200, 0.02),
        (128, 300, 0.02),
    ],
)
def test_the_last_of_many_rows_keeps_what_a_simulation_says(
    rate: float, rows: int, tokens: int, error: float
) -> None:
    known = estimate(list(1e6 * rate ** np.arange(5)), list(1e6 * rate ** np.arange(1, 6)))
    found = slowest_row_tokens(known, LENGTHS, work(rows, tokens))
    assert found[0] == 1
    for place, length in enumerate(LENGTHS[1:], 1):
        wanted = simulated_tokens(rate, length, rows, tokens)
        assert found[place] == pytest.approx(wanted, rel=error), length


@pytest.mark.parametrize("rows", [0, 1, 32])
def test_the_last_token_of_rows_takes_a_round_of_any_length(rows: int) -> None:
    known = estimate([1e6, 6e5, 3e5, 1e5, 1e5], [6e5, 3e5, 1e5, 5e4, 5e4])
    for tokens in (0, 1):
        np.testing.assert_array_equal(
            slowest_row_tokens(known, LENGTHS, work(rows, tokens)), np.ones(4)
        )


def test_one_row_and_long_answers_have_the_expected_tokens() -> None:
    known = estimate([1e6, 6e5, 3e5, 1e5, 1e5], [6e5, 3e5, 1e5, 5e4, 5e4])
    mean = expected_tokens(known, LENGTHS)
    np.testing.assert_allclose(slowest_row_tokens(known, LENGTHS, work(1, 10**6)), mean, rtol=1e-5)
    long = slowest_row_tokens(known, LENGTHS, work(32, 10**8))
    np.testing.assert_allclose(long, mean, rtol=1e-3)


def test_many_rows_that_end_together_need_a_cheaper_draft() -> None:
    """As those of SmolLM2-135M on two cores: at 32 rows three drafts cost 2.1 plain steps and keep
    2.3 tokens, but the last of 32 answers of 32 tokens keeps 1.8."""
    rates = np.array([0.65, 0.62, 0.6])
    reached = 1e6 * np.concatenate([[1], np.cumprod(rates)[:2], [0, 0]])
    known = estimate(list(reached), [*(1e6 * np.cumprod(rates)), 0, 0])
    cost = jnp.asarray((1.0, 1.9, 2.1, 4.0), jnp.float32)
    place, _ = choose_length(known, cost, LENGTHS, work(1, 32))
    assert LENGTHS[int(place)] == 3
    place, _ = choose_length(known, cost, LENGTHS, work(32, 32))
    assert LENGTHS[int(place)] == 0
    place, _ = choose_length(known, cost, LENGTHS, work(32, 4096))
    assert LENGTHS[int(place)] == 3


def spent(
    cost: tuple[float, ...],
    rates: list[float],
    rounds: int,
    start: AcceptanceEstimate,
    measured: int = 0,
) -> tuple[np.ndarray, float, AcceptanceEstimate]:
    """Rounds of each length, their tokens a second, and what is known after them, for a draft whose
    depths are kept at `rates`.

    Before them come `measured` rounds of the longest drafts, as at the start of a run.
    """
    random = np.random.default_rng(0)
    table, now = jnp.asarray(cost, jnp.float32), start
    decide = jax.jit(lambda estimate: choose_length(estimate, table, LENGTHS, ONE_ROW))
    counts, tokens, rows = np.zeros(len(LENGTHS)), 0, 4
    for number in range(-measured, rounds):
        place = 3
        if number >= 0:
            place, seconds_to_lose = decide(now)
            now = now.replace(seconds_to_lose=seconds_to_lose)
        length = LENGTHS[int(place)]
        kept = np.cumprod(random.random((rows, length)) < np.array(rates[:length]), axis=1)
        offered_in_turn = (
            np.concatenate([np.ones((rows, 1)), kept[:, :-1]], axis=1) if length else kept
        )
        change = np.zeros((2, 5), np.float32)
        change[:, :length] = offered_in_turn.sum(0), kept.sum(0)
        now = now.replace(reached=now.reached + change[0], accepted=now.accepted + change[1])
        counts[int(place)] += number >= 0
        tokens += (1 + kept.sum() / rows) * (number >= 0)
    return counts, tokens / float(counts @ np.array(cost)), now


@pytest.mark.parametrize("cost", COSTS)
def test_a_useless_draft_costs_a_hundredth(cost: tuple[float, ...]) -> None:
    """Over plain decoding, by the table, once it is known to be useless; finding out takes a few
    rounds."""
    counts, _, after = spent(cost, [0.0] * 5, 150, estimate([0] * 5, [0] * 5))
    assert counts[0] > 0
    counts, _, _ = spent(cost, [0.0] * 5, 2000, after)
    assert counts @ np.array(cost) <= 1.01 * 2000 * cost[0]
    assert counts[1] > 0, "it is tried again"


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_no_fixed_length_is_much_better(cost: tuple[float, ...], rate: float) -> None:
    best = max(
        (1 - rate ** (length + 1)) / (1 - rate) / seconds
        for length, seconds in zip(LENGTHS, cost, strict=True)
    )
    counts, speed, _ = spent(cost, [rate] * 5, 1000, estimate([0] * 5, [0] * 5), measured=16)
    assert speed * 1.05 >= best, counts


def test_a_draft_that_becomes_useful_is_found() -> None:
    cost = (1, 1.3, 1.6, 2.0)
    _, _, useless = spent(cost, [0.0] * 5, 300, estimate([0] * 5, [0] * 5))
    calls = estimate([4.0] * 5, [0] * 5)  # what halving at every call leaves of it
    counts, _, _ = spent(
        cost, [0.9] * 5, 600, calls.replace(seconds_to_lose=useless.seconds_to_lose)
    )
    assert counts[3] > 300


def test_a_call_counts_twice_as_much_as_the_one_before_it() -> None:
    made = init_statistics(2, 1, 5, 1, jnp.float32)
    fresh = made.replace(
        reached=made.reached.at[:, 0].set(jnp.asarray([3, 5])),
        accepted=made.accepted.at[:, 0].set(jnp.asarray([1, 4])),
    )
    before = LengthChooser(
        acceptance=estimate([10, 6, 0, 0, 0], [2, 2, 0, 0, 0], 5),
        round_cost=init_chooser(LENGTHS, 100).round_cost + 2,
    )
    after = update_chooser(before, fresh).acceptance
    np.testing.assert_allclose(after.reached, [13, 3, 0, 0, 0])
    np.testing.assert_allclose(after.accepted, [6, 1, 0, 0, 0])
    assert after.seconds_to_lose == 0
    # nothing was drafted: it earns
    idle = update_chooser(before, made.replace(rounds=jnp.asarray([10, 20]))).acceptance
    np.testing.assert_allclose(idle.reached, before.acceptance.reached)
    np.testing.assert_allclose(idle.seconds_to_lose, 5 + 0.01 * 2 * 15)


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(
    ("running", "waiting", "wanted"),
    [
        ([1, 0, 1, 1], [0, 0, 0, 0], (3, 18)),
        ([1, 0, 1, 1], [0, 0, 0, 1], (1, 18)),
        ([1, 0, 0, 0], [0, 1, 0, 0], (1, 12)),
        ([0, 0, 0, 0], [0, 0, 0, 0], (0, 0)),
    ],
)
def test_rows_of_all_expert_members_end_together(
    running: list[int], waiting: list[int], wanted: tuple[int, int], members: int
) -> None:
    def remaining(*rows: jax.Array) -> jax.Array:
        return jnp.stack(loops._remaining_work(*rows))[None]

    run = shard_map_rows(make_mesh(1, 1, members), remaining, (P(ROWS),) * 3, P(ROWS))
    tokens = jnp.asarray([12, 20, 18, 11])
    found = run(jnp.asarray(running, bool), jnp.asarray(waiting, bool), tokens)
    np.testing.assert_array_equal(found, [wanted] * members)
