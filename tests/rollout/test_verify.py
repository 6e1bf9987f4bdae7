"""The lossless rules against the target's own law, by measuring the compiled rules and enumerating.

Nothing here repeats a rule's formulas; `measured.py` finds out what it does.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from tests.rollout.harness import BELOW_ONE, RULES, by_form
from tests.rollout.measured import Context, Matched, Measured, Offers, Table, constant_table

pytestmark = pytest.mark.usefixtures("x64", "fast_calls", "form")


@pytest.fixture(scope="module")
def fast_calls() -> Iterator[None]:
    """There are no keys here to be watched, and thousands of calls."""
    with jax.debug_key_reuse(False):
        yield


def random_tables(vocab: int, depth: int, seed: int, zeros: float = 0.25) -> Table:
    """One law for every context of up to `depth` tokens; about a share `zeros` of the entries is
    exactly 0."""
    random = np.random.default_rng(seed)
    tables = {}
    for length in range(depth + 1):
        for context in itertools.product(range(vocab), repeat=length):
            weights = random.gamma(0.7, size=vocab) * (random.random(vocab) >= zeros)
            weights[random.integers(vocab)] += 0.1
            tables[context] = weights / weights.sum()
    return tables


def measured(
    rule: str, target: Table, draft: Table, offers: Offers, length: int
) -> Measured | Matched:
    return (
        Matched(target, draft, offers, length)
        if rule == "match"
        else Measured(rule, target, draft, offers, length)
    )


def continued(reached: dict[Context, float], target: Table, tokens: int) -> dict[Context, float]:
    """The law of the first `tokens` tokens where plain decoding goes on from what was reached."""
    law: dict[Context, float] = defaultdict(float, reached)
    for done in range(tokens):
        for context in [context for context in law if len(context) == done]:
            for token, probability in enumerate(target[context]):
                law[(*context, token)] += law[context] * float(probability)
    return {sequence: mass for sequence, mass in law.items() if len(sequence) == tokens}


def assert_target_law(found: dict[Context, float], target: Table, tokens: int) -> None:
    wanted = continued({(): 1.0}, target, tokens)
    assert set(found) <= set(wanted)
    both = np.array(
        [(found.get(sequence, 0.0), probability) for sequence, probability in wanted.items()]
    )
    np.testing.assert_allclose(both[:, 0], both[:, 1], rtol=0, atol=1e-12)
    assert not both[both[:, 1] == 0, 0].any()


CASES: dict[str, Callable[[int, int], tuple[Table, Table]]] = {
    "zeros in both": lambda vocab, depth: (
        random_tables(vocab, depth, 1),
        random_tables(vocab, depth, 2),
    ),
    "no zeros": lambda vocab, depth: (
        random_tables(vocab, depth, 3, 0.0),
        random_tables(vocab, depth, 4, 0.0),
    ),
    "one-hot draft": lambda vocab, depth: (
        random_tables(vocab, depth, 5),
        random_tables(vocab, depth, 6, 1.0),
    ),
    "one-hot target": lambda vocab, depth: (
        random_tables(vocab, depth, 7, 1.0),
        random_tables(vocab, depth, 8),
    ),
    "equal": lambda vocab, depth: (random_tables(vocab, depth, 9), random_tables(vocab, depth, 9)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", [*RULES, "match"])
@pytest.mark.parametrize(
    ("form", "vocab", "length"),
    by_form([(2, 1), (2, 4), (4, 2), (4, 4)], (3, 3)),
    indirect=["form"],
)
def test_one_round_then_plain_decoding_has_the_targets_law(
    rule: str, case: str, vocab: int, length: int
) -> None:
    target, draft = CASES[case](vocab, length)
    rows = measured(rule, target, draft, [((), count) for count in range(length + 1)], length)
    for count in range(length + 1):
        assert_target_law(continued(rows.blocks((), count), target, length + 1), target, length + 1)


def offered(context: Context, length: int) -> int:
    """0 to K, by the tokens committed so far."""
    return (3 * sum(context) + 2 * len(context) + length) % (length + 1)


SEVERAL = [
    (case, *sizes)
    for case in ("zeros in both", "no zeros", "one-hot draft")
    for sizes in ((3, 2, 4), (2, 4, 5), (4, 3, 3))
]


@pytest.mark.parametrize("rule", [*RULES, "match"])
@pytest.mark.parametrize(
    ("form", "case", "vocab", "length", "tokens"),
    by_form(SEVERAL[1:], SEVERAL[0]),
    indirect=["form"],
)
def test_several_rounds_have_the_targets_law(
    rule: str, case: str, vocab: int, length: int, tokens: int
) -> None:
    target, draft = CASES[case](vocab, tokens - 1 + length)
    contexts = [
        context
        for done in range(tokens)
        for context in itertools.product(range(vocab), repeat=done)
    ]
    assert {offered(context, length) for context in contexts} == set(range(length + 1))
    rows = measured(
        rule, target, draft, [(context, offered(context, length)) for context in contexts], length
    )
    reached: dict[Context, float] = defaultdict(float, {(): 1.0})
    for context in contexts:  # shorter contexts first
        for block, probability in rows.blocks(context, offered(context, length)).items():
            # what exceeds the limit is cut
            reached[(context + block)[:tokens]] += reached[context] * probability
    assert_target_law(
        {sequence: mass for sequence, mass in reached.items() if len(sequence) == tokens},
        target,
        tokens,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_coins_are_compared_one_by_one(rule: str, case: str) -> None:
    """A chain stops at the first high coin; a block keeps the largest i with a low coin. Values
    close to the thresholds too."""
    vocab, length = 3, 3
    target, draft = CASES[case](vocab, length)
    rows = Measured(rule, target, draft, [((), count) for count in range(length + 1)], length)
    size, random = len(rows.rows), np.random.default_rng(0)
    near = np.minimum(
        rows.thresholds[:, None] * random.choice([1 - 1e-9, 1 + 1e-9], (size, 200, length)),
        BELOW_ONE,
    )
    coins = np.where(random.random(near.shape) < 0.5, near, random.random(near.shape))
    low = coins < rows.thresholds[:, None]
    stop = (
        np.cumprod(low, axis=-1).sum(-1)
        if rule == "token"
        else np.max(low * np.arange(1, length + 1), axis=-1)
    )
    noise = np.broadcast_to(random.gumbel(size=(size, 1, vocab)), (size, 200, vocab))
    accepted, next_token = rows.run(coins, noise)
    np.testing.assert_array_equal(accepted, stop)
    for row in range(size):  # the coins decide nothing but the cut
        assert len(set(zip(accepted[row], next_token[row], strict=True))) == len(set(accepted[row]))


@pytest.mark.parametrize(
    ("target", "draft", "rule", "kept"),
    [
        ([1 / 3, 2 / 3], [2 / 3, 1 / 3], "token", {2: 10 / 9}),
        ([1 / 3, 2 / 3], [2 / 3, 1 / 3], "block", {2: 11 / 9}),
        ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], "token", {1: 0.7, 2: 1.19, 3: 1.533, 4: 1.7731}),
        ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], "block", {1: 0.7, 2: 1.25, 3: 1.695, 4: 2.0635}),
    ],
)
def test_acceptance_of_the_published_vectors(
    target: list[float], draft: list[float], rule: str, kept: dict[int, float]
) -> None:
    """The vectors of Sun et al., arXiv 2403.10444."""
    for length, expected in kept.items():
        rows = Measured(
            rule,
            constant_table(target, length),
            constant_table(draft, length),
            [((), length)],
            length,
        )
        mean = sum(
            (len(block) - 1) * probability for block, probability in rows.blocks((), length).items()
        )
        assert (mean, rows.mean_accepted()) == pytest.approx((expected, expected), abs=1e-12, rel=0)


@pytest.mark.parametrize("case", CASES)
def test_a_block_keeps_at_least_as_many_drafts_as_a_chain(case: str) -> None:
    """On average over the drafts; with one-hot drafts both keep the sum of the products of the
    target at them."""
    vocab, length = 3, 4
    target, draft = CASES[case](vocab, length)
    token, block = (
        sum(
            (len(kept) - 1) * mass
            for kept, mass in Measured(rule, target, draft, [((), length)], length)
            .blocks((), length)
            .items()
        )
        for rule in RULES
    )
    assert token <= block + 1e-12
    if case == "one-hot draft":
        drafts: Context = ()
        for _ in range(length):
            drafts = (*drafts, int(draft[drafts].argmax()))
        reached = np.cumprod([target[drafts[:i]][drafts[i]] for i in range(length)]).sum()
        assert (token, block) == pytest.approx((reached, reached), abs=1e-12, rel=0)
    if case in ("zeros in both", "no zeros"):
        assert token < block - 1e-3
