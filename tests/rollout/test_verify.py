"""The lossless rules against the target's own law, by measuring the compiled rules and enumerating.

Nothing here repeats a rule's formulas. The coin below which a draft is kept is found by bisection, what a pattern of low and high coins
leads to by running it, and the law of a token by bisection on the Gumbel noise, since argmax(log r + noise) is a draw from r.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import bisect
from tests.rollout.harness import BELOW_ONE, RULES, log, match

pytestmark = pytest.mark.usefixtures("x64", "fast_calls")

Context = tuple[int, ...]
Table = dict[Context, np.ndarray]
Offers = Iterable[tuple[Context, int]]
"""Contexts, and how many drafts are on offer there."""
NEVER = -1e6
"""Noise that no log-probability outweighs."""


@pytest.fixture(scope="module")
def fast_calls() -> Iterator[None]:
    """There are no keys here to be watched, and thousands of calls."""
    with jax.debug_key_reuse(False):
        yield


def random_tables(vocab: int, depth: int, seed: int, zeros: float = 0.25) -> Table:
    """One law for every context of up to `depth` tokens; about a share `zeros` of the entries is exactly 0."""
    random = np.random.default_rng(seed)
    tables = {}
    for length in range(depth + 1):
        for context in itertools.product(range(vocab), repeat=length):
            weights = random.gamma(0.7, size=vocab) * (random.random(vocab) >= zeros)
            weights[random.integers(vocab)] += 0.1
            tables[context] = weights / weights.sum()
    return tables


def constant_table(law: list[float], depth: int) -> Table:
    return {context: np.array(law) for done in range(depth + 1) for context in itertools.product(range(len(law)), repeat=done)}


class Rows:
    """One row for every context and all drafts on offer there; what stands beyond would always be accepted."""

    def __init__(self, target: Table, draft: Table, offers: Offers, length: int):
        self.vocab, self.length = len(next(iter(target.values()))), length
        self.rows = [(context, drafts) for context, count in offers for drafts in itertools.product(range(self.vocab), repeat=count)]
        self.index = {row: number for number, row in enumerate(self.rows)}
        size = len(self.rows)
        self.count = np.array([len(drafts) for _, drafts in self.rows], np.int32)
        self.drafts = np.zeros((size, length), np.int32)
        self.target, self.draft = (np.full((size, count, self.vocab), -np.log(self.vocab)) for count in (length + 1, length))
        for number, (context, drafts) in enumerate(self.rows):
            self.drafts[number, : len(drafts)] = drafts
            self.target[number, : len(drafts) + 1] = [log(target[context + drafts[:i]]) for i in range(len(drafts) + 1)]
            self.draft[number, : len(drafts)] = np.array([log(draft[context + drafts[:i]]) for i in range(len(drafts))]).reshape(
                -1, self.vocab
            )
        self.table, self.cache = draft, {}

    def chance(self, context: Context, drafts: Context) -> float:
        """Of these drafts being drawn."""
        return float(np.prod([self.table[context + drafts[:i]][drafts[i]] for i in range(len(drafts))]))

    def repeated(self, times: int) -> list[jax.Array]:
        """What a verdict is about, with each row repeated."""
        if times not in self.cache:
            arrays = (self.target, self.draft, self.drafts, self.count)
            self.cache[times] = [jnp.asarray(np.repeat(array, times, axis=0)) for array in arrays]
        return self.cache[times]

    def drawn_law(self, draw: Callable[[np.ndarray], np.ndarray], batch: tuple[int, ...]) -> np.ndarray:
        """The law of `draw`, which turns Gumbel noise [*batch V V] into tokens [*batch V]: one experiment for each token."""
        only = np.where(np.eye(self.vocab, dtype=bool), 0.0, NEVER)
        tokens = np.arange(self.vocab)
        supported = draw(np.broadcast_to(only, (*batch, self.vocab, self.vocab))) == tokens
        reference = supported.argmax(axis=-1)[..., None]
        leading = tokens == reference

        def wins(lead: np.ndarray) -> np.ndarray:
            noise = np.where(leading[..., None, :], lead[..., None], only)
            return (draw(np.where(only == 0, 0.0, noise)) == tokens) & ~leading

        odds = np.where(supported, np.exp(bisect(wins, -200.0, 200.0, leading.shape, 56)), 0)
        odds = np.where(leading, 1.0, odds)
        return odds / odds.sum(axis=-1, keepdims=True)


class Measured(Rows):
    """What a rule with coins does with each row: `cut`, how likely each cut is, and `law`, that of the token after it."""

    def __init__(self, rule: str, target: Table, draft: Table, offers: Offers, length: int):
        super().__init__(target, draft, offers, length)
        self.rule = rule
        self.thresholds = self._thresholds()
        size, cuts = len(self.rows), length + 1
        self.cut, best, leads_to = np.zeros((size, cuts)), np.zeros((size, cuts)), np.zeros((size, cuts, length))
        for pattern in itertools.product([True, False], repeat=length):
            coins = np.tile(np.where(pattern, 0.0, BELOW_ONE), (size, 1))
            accepted = self.accepted(coins)
            likely = np.prod(np.where(pattern, self.thresholds, 1 - self.thresholds), axis=1)
            everyone = np.arange(size)
            self.cut[everyone, accepted] += likely
            leads_to[everyone, accepted] = np.where((likely > best[everyone, accepted])[:, None], coins, leads_to[everyone, accepted])
            best[everyone, accepted] = np.maximum(likely, best[everyone, accepted])
        coins = np.repeat(leads_to[:, :, None], self.vocab, axis=2)
        law = self.drawn_law(lambda noise: self.run(coins, noise)[1], (size, cuts))
        self.law = np.where((best > 0)[:, :, None], law, np.nan)

    def run(self, coins: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Accepted and next token for coins [rows, *batch, K] and noise [rows, *batch, V]."""
        batch = coins.shape[:-1]
        arrays = self.repeated(int(np.prod(batch[1:])))
        verdict = RULES[self.rule](*arrays, coins.reshape(-1, self.length), noise.reshape(-1, self.vocab))
        return np.asarray(verdict.accepted).reshape(batch), np.asarray(verdict.next_token).reshape(batch)

    def accepted(self, coins: np.ndarray) -> np.ndarray:
        return self.run(coins, np.zeros((*coins.shape[:-1], self.vocab)))[0]

    def _thresholds(self) -> np.ndarray:
        """The coin below which each draft is kept, while the other coins let it be seen: low before it for a chain, high for a block."""
        depths = np.arange(self.length)
        others = np.where(depths < depths[:, None], 0.0 if self.rule == "token" else BELOW_ONE, BELOW_ONE)

        def kept(coin: np.ndarray) -> np.ndarray:
            accepted = self.accepted(np.where(np.eye(self.length, dtype=bool), np.minimum(coin, BELOW_ONE)[..., None], others))
            return accepted > depths if self.rule == "token" else accepted == depths + 1

        shape = (len(self.rows), self.length)
        return np.where(kept(np.zeros(shape)), np.where(kept(np.ones(shape)), 1.0, bisect(kept, 0.0, 1.0, shape, 52)), 0.0)

    def blocks(self, context: Context, count: int) -> dict[Context, float]:
        """The exact law of what one round commits after `context`."""
        law: dict[Context, float] = defaultdict(float)
        for drafts in itertools.product(range(self.vocab), repeat=count):
            row = self.index[context, drafts]
            for cut in range(self.length + 1):
                likely = self.chance(context, drafts) * self.cut[row, cut]
                if likely > 0:
                    assert cut <= count
                    assert np.isfinite(self.law[row, cut]).all()
                    for token in range(self.vocab):
                        law[(*drafts[:cut], token)] += likely * self.law[row, cut, token]
        return law


class Matched(Rows):
    """The same for the match rule, with drafts that know nothing of its noise: `law` is that of the token at each position."""

    def __init__(self, target: Table, draft: Table, offers: Offers, length: int):
        super().__init__(target, draft, offers, length)
        self.law = np.stack([self.drawn_law(self._at(position), (len(self.rows),)) for position in range(length + 1)], axis=1)

    def _at(self, position: int) -> Callable[[np.ndarray], np.ndarray]:
        """The token at a position, where the drafts before it are pulled up so far that they match; no token where they cannot."""
        size = len(self.rows)
        drafted = np.pad(self.drafts, ((0, 0), (0, 1)))
        pulled = np.full((size, self.vocab, self.length + 1, self.vocab), NEVER)
        np.put_along_axis(pulled, np.maximum(drafted, 0)[:, None, :, None], 0.0, axis=3)
        target, _, drafts, count = self.repeated(self.vocab)

        def draw(noise: np.ndarray) -> np.ndarray:
            pulled[:, :, position] = noise
            verdict = match(target, drafts, count, pulled.reshape(-1, self.length + 1, self.vocab))
            accepted, token = (np.asarray(part).reshape(size, self.vocab) for part in verdict)
            return np.where(accepted > position, drafted[:, position, None], np.where(accepted == position, token, -1))

        return draw

    def blocks(self, context: Context, count: int) -> dict[Context, float]:
        law: dict[Context, float] = defaultdict(float)
        for drafts in itertools.product(range(self.vocab), repeat=count):
            row, reached = self.index[context, drafts], self.chance(context, drafts)
            for depth in range(count + 1):
                for token in range(self.vocab):
                    if depth == count or token != drafts[depth]:
                        law[(*drafts[:depth], token)] += reached * self.law[row, depth, token]
                reached *= self.law[row, depth, drafts[depth]] if depth < count else 0.0
                if reached == 0:
                    break
        return law


def measured(rule: str, target: Table, draft: Table, offers: Offers, length: int) -> Measured | Matched:
    return Matched(target, draft, offers, length) if rule == "match" else Measured(rule, target, draft, offers, length)


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
    both = np.array([(found.get(sequence, 0.0), probability) for sequence, probability in wanted.items()])
    np.testing.assert_allclose(both[:, 0], both[:, 1], rtol=0, atol=1e-12)
    assert not both[both[:, 1] == 0, 0].any()


CASES: dict[str, Callable[[int, int], tuple[Table, Table]]] = {
    "zeros in both": lambda vocab, depth: (random_tables(vocab, depth, 1), random_tables(vocab, depth, 2)),
    "no zeros": lambda vocab, depth: (random_tables(vocab, depth, 3, 0.0), random_tables(vocab, depth, 4, 0.0)),
    "one-hot draft": lambda vocab, depth: (random_tables(vocab, depth, 5), random_tables(vocab, depth, 6, 1.0)),
    "one-hot target": lambda vocab, depth: (random_tables(vocab, depth, 7, 1.0), random_tables(vocab, depth, 8)),
    "equal": lambda vocab, depth: (random_tables(vocab, depth, 9), random_tables(vocab, depth, 9)),
}


@pytest.mark.parametrize(("vocab", "length"), [(2, 1), (2, 4), (3, 3), (4, 2), (4, 4)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", [*RULES, "match"])
def test_one_round_then_plain_decoding_has_the_targets_law(rule: str, case: str, vocab: int, length: int) -> None:
    target, draft = CASES[case](vocab, length)
    rows = measured(rule, target, draft, [((), count) for count in range(length + 1)], length)
    for count in range(length + 1):
        assert_target_law(continued(rows.blocks((), count), target, length + 1), target, length + 1)


def offered(context: Context, length: int) -> int:
    """0 to K, by the tokens committed so far."""
    return (3 * sum(context) + 2 * len(context) + length) % (length + 1)


@pytest.mark.parametrize(("vocab", "length", "tokens"), [(2, 4, 5), (3, 2, 4), (4, 3, 3)])
@pytest.mark.parametrize("case", ["zeros in both", "no zeros", "one-hot draft"])
@pytest.mark.parametrize("rule", [*RULES, "match"])
def test_several_rounds_have_the_targets_law(rule: str, case: str, vocab: int, length: int, tokens: int) -> None:
    target, draft = CASES[case](vocab, tokens - 1 + length)
    contexts = [context for done in range(tokens) for context in itertools.product(range(vocab), repeat=done)]
    assert {offered(context, length) for context in contexts} == set(range(length + 1))
    rows = measured(rule, target, draft, [(context, offered(context, length)) for context in contexts], length)
    reached: dict[Context, float] = defaultdict(float, {(): 1.0})
    for context in contexts:  # shorter contexts first
        for block, probability in rows.blocks(context, offered(context, length)).items():
            reached[(context + block)[:tokens]] += reached[context] * probability  # what exceeds the limit is cut
    assert_target_law({sequence: mass for sequence, mass in reached.items() if len(sequence) == tokens}, target, tokens)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_coins_are_compared_one_by_one(rule: str, case: str) -> None:
    """A chain stops at the first high coin; a block keeps the largest i with a low coin. Values close to the thresholds too."""
    vocab, length = 3, 3
    target, draft = CASES[case](vocab, length)
    rows = Measured(rule, target, draft, [((), count) for count in range(length + 1)], length)
    size, random = len(rows.rows), np.random.default_rng(0)
    near = np.minimum(rows.thresholds[:, None] * random.choice([1 - 1e-9, 1 + 1e-9], (size, 200, length)), BELOW_ONE)
    coins = np.where(random.random(near.shape) < 0.5, near, random.random(near.shape))
    low = coins < rows.thresholds[:, None]
    stop = np.cumprod(low, axis=-1).sum(-1) if rule == "token" else np.max(low * np.arange(1, length + 1), axis=-1)
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
def test_acceptance_of_the_published_vectors(target: list[float], draft: list[float], rule: str, kept: dict[int, float]) -> None:
    """Sun et al.; drafters.md 6.10."""
    for length, expected in kept.items():
        rows = Measured(rule, constant_table(target, length), constant_table(draft, length), [((), length)], length)
        mean = sum((len(block) - 1) * probability for block, probability in rows.blocks((), length).items())
        assert mean == pytest.approx(expected, abs=1e-12, rel=0)


@pytest.mark.parametrize("case", CASES)
def test_a_block_keeps_at_least_as_many_drafts_as_a_chain(case: str) -> None:
    """On average over the drafts; with one-hot drafts both keep the sum of the products of the target at them."""
    vocab, length = 3, 4
    target, draft = CASES[case](vocab, length)
    token, block = (
        sum((len(kept) - 1) * mass for kept, mass in Measured(rule, target, draft, [((), length)], length).blocks((), length).items())
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
