"""The token rule against the target's own law, by measuring the compiled rule and enumerating; the coupled rule against plain sampling.

Nothing here repeats the rule's formulas. How likely a draft is accepted is found by bisection on its coin, and the law of the token
after the cut by bisection on the Gumbel noise, since argmax(log r + noise) is a draw from r.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import sampling
from jaxspec.rollout.verify import coupled_rule, token_rule
from tests.conftest import bisect, chi_square

pytestmark = pytest.mark.usefixtures("x64")

Context = tuple[int, ...]
Table = dict[Context, np.ndarray]
BELOW_ONE = np.nextafter(1.0, 0.0)
NEVER = -1e6
"""Noise that no log-probability outweighs."""

rule = jax.jit(token_rule)


def log(probabilities: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(probabilities)


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


class Measured:
    """What the rule does with each row of (context, drafts): acceptance probabilities and laws of the next token."""

    def __init__(self, target: Table, draft: Table, contexts: list[Context], length: int):
        vocab = len(next(iter(target.values())))
        self.rows = [(context, drafts) for context in contexts for drafts in itertools.product(range(vocab), repeat=length)]
        self.index = {row: number for number, row in enumerate(self.rows)}
        self.target = log(np.array([[target[context + drafts[:i]] for i in range(length + 1)] for context, drafts in self.rows]))
        self.draft = log(np.array([[draft[context + drafts[:i]] for i in range(length)] for context, drafts in self.rows]))
        self.drafts = np.array([drafts for _, drafts in self.rows], np.int32).reshape(len(self.rows), length)
        self.vocab, self.length = vocab, length
        self.accept = np.stack([self._acceptance(depth) for depth in range(length)], axis=1)
        self.law = np.stack([self._next_law(cut) for cut in range(length + 1)], axis=1)

    def _run(self, coins: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        verdict = rule(self.target, self.draft, self.drafts, coins, noise)
        return np.asarray(verdict.accepted), np.asarray(verdict.next_token)

    def _acceptance(self, depth: int) -> np.ndarray:
        def kept(coin: np.ndarray) -> np.ndarray:
            coins = np.zeros((len(self.rows), self.length))
            coins[:, depth:] = BELOW_ONE
            coins[:, depth] = np.minimum(coin, BELOW_ONE)
            return self._run(coins, np.zeros((len(self.rows), self.vocab)))[0] > depth

        threshold = bisect(kept, 0.0, 1.0, (len(self.rows),))
        return np.where(kept(np.zeros(len(self.rows))), np.where(kept(np.ones(len(self.rows))), 1.0, threshold), 0.0)

    def _next_law(self, cut: int) -> np.ndarray:
        """NaN where the cut cannot happen."""
        coins = np.zeros((len(self.rows), self.length))
        coins[:, cut:] = BELOW_ONE
        possible = self._run(coins, np.zeros((len(self.rows), self.vocab)))[0] == cut
        everyone = np.arange(len(self.rows))

        def drawn(noise: np.ndarray) -> np.ndarray:
            return self._run(coins, noise)[1]

        supported = np.zeros((len(self.rows), self.vocab), bool)
        for token in range(self.vocab):
            noise = np.full((len(self.rows), self.vocab), NEVER)
            noise[:, token] = 0
            supported[:, token] = drawn(noise) == token
        reference = supported.argmax(axis=1)
        odds = np.zeros((len(self.rows), self.vocab))
        for token in range(self.vocab):

            def wins(lead: np.ndarray, token: int = token) -> np.ndarray:
                noise = np.full((len(self.rows), self.vocab), NEVER)
                noise[everyone, reference] = lead
                noise[:, token] = 0
                return (drawn(noise) == token) & (reference != token)

            odds[:, token] = np.where(supported[:, token], np.exp(bisect(wins, -200.0, 200.0, (len(self.rows),), 90)), 0)
        odds[everyone, reference] = 1
        return np.where(possible[:, None], odds / odds.sum(axis=1, keepdims=True), np.nan)

    def blocks(self, draft: Table, context: Context) -> dict[Context, float]:
        """The exact law of what one round commits after `context`."""
        law: dict[Context, float] = defaultdict(float)
        for drafts in itertools.product(range(self.vocab), repeat=self.length):
            row, reached = self.index[context, drafts], 1.0
            for depth in range(self.length + 1):
                accept = self.accept[row, depth] if depth < self.length else 0.0
                chance = np.prod([draft[context + drafts[:i]][drafts[i]] for i in range(self.length)])
                if chance * reached * (1 - accept) > 0:
                    assert np.isfinite(self.law[row, depth]).all()
                    for token in range(self.vocab):
                        law[(*drafts[:depth], token)] += chance * reached * (1 - accept) * self.law[row, depth, token]
                reached *= accept
        return law


def plain_law(target: Table, tokens: int, vocab: int) -> dict[Context, float]:
    return {
        sequence: float(np.prod([target[sequence[:i]][sequence[i]] for i in range(tokens)]))
        for sequence in itertools.product(range(vocab), repeat=tokens)
    }


def assert_same_law(found: dict[Context, float], wanted: dict[Context, float]) -> None:
    for sequence, probability in wanted.items():
        assert found.get(sequence, 0.0) == pytest.approx(probability, abs=1e-12), sequence
        if probability == 0:
            assert found.get(sequence, 0.0) == 0.0, sequence


CASES: dict[str, Callable[[int, int], tuple[Table, Table]]] = {
    "zeros in both": lambda vocab, depth: (random_tables(vocab, depth, 1), random_tables(vocab, depth, 2)),
    "no zeros": lambda vocab, depth: (random_tables(vocab, depth, 3, 0.0), random_tables(vocab, depth, 4, 0.0)),
    "one-hot draft": lambda vocab, depth: (random_tables(vocab, depth, 5), random_tables(vocab, depth, 6, 1.0)),
    "one-hot target": lambda vocab, depth: (random_tables(vocab, depth, 7, 1.0), random_tables(vocab, depth, 8)),
    "equal": lambda vocab, depth: (random_tables(vocab, depth, 9), random_tables(vocab, depth, 9)),
}


@pytest.mark.parametrize(("vocab", "length"), [(2, 1), (2, 3), (3, 2), (4, 3)])
@pytest.mark.parametrize("case", CASES)
def test_one_round_then_plain_decoding_has_the_targets_law(case: str, vocab: int, length: int) -> None:
    target, draft = CASES[case](vocab, length)
    measured = Measured(target, draft, [()], length)
    found: dict[Context, float] = defaultdict(float)
    for block, probability in measured.blocks(draft, ()).items():
        for rest in itertools.product(range(vocab), repeat=length + 1 - len(block)):
            sequence = block + rest
            found[sequence] += probability * float(np.prod([target[sequence[:i]][sequence[i]] for i in range(len(block), length + 1)]))
    assert_same_law(found, plain_law(target, length + 1, vocab))


@pytest.mark.parametrize(("vocab", "length", "tokens"), [(2, 3, 6), (3, 2, 4), (4, 3, 3)])
@pytest.mark.parametrize("case", ["zeros in both", "no zeros", "one-hot draft"])
def test_several_rounds_have_the_targets_law(case: str, vocab: int, length: int, tokens: int) -> None:
    target, draft = CASES[case](vocab, tokens - 1 + length)
    contexts = [context for done in range(tokens) for context in itertools.product(range(vocab), repeat=done)]
    measured = Measured(target, draft, contexts, length)
    reached: dict[Context, float] = defaultdict(float, {(): 1.0})
    for context in contexts:  # shorter contexts first
        for block, probability in measured.blocks(draft, context).items():
            reached[(context + block)[:tokens]] += reached[context] * probability  # what exceeds the limit is cut
    assert_same_law({sequence: mass for sequence, mass in reached.items() if len(sequence) == tokens}, plain_law(target, tokens, vocab))


def test_acceptance_of_the_published_vector() -> None:
    """drafters.md 6.10: (1/3, 2/3) drafted as (2/3, 1/3) keeps 10/9 of 2 drafts; three tokens keep .7, 1.19, 1.533."""
    for target, draft, expected in [
        ([1 / 3, 2 / 3], [2 / 3, 1 / 3], {2: 10 / 9}),
        ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], {1: 0.7, 2: 1.19, 3: 1.533}),
    ]:
        for length, kept in expected.items():
            laws = [defaultdict(lambda law=law: np.array(law)) for law in (target, draft)]
            for law in laws:
                law[()]
            measured = Measured(laws[0], laws[1], [()], length)
            mean = sum((len(block) - 1) * probability for block, probability in measured.blocks(laws[1], ()).items())
            assert mean == pytest.approx(kept, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_coins(dtype: type) -> None:
    """A coin of 0 never accepts what the target excludes, and the largest coin below 1 accepts what it prefers to the draft."""
    target, draft = np.array([0.0, 0.4, 0.6]), np.array([0.5, 0.4, 0.1])
    drafts = np.array([[0], [1], [2]], np.int32)
    laws = [log(np.broadcast_to(law, (3, count, 3))).astype(dtype) for law, count in ((target, 2), (draft, 1))]
    noise = np.tile(np.array([1e5, 0, 0], dtype), (3, 1))  # pulls towards the excluded token
    for coin in (0.0, np.nextafter(dtype(1), dtype(0))):
        verdict = rule(*laws, drafts, np.full((3, 1), coin, dtype), noise)
        assert verdict.accepted.tolist() == [0, 1, 1]
        assert 0 not in verdict.next_token.tolist()


def test_equal_laws_accept_everything_and_never_draw_from_an_empty_residual() -> None:
    law = np.random.default_rng(0).dirichlet(np.ones(5), (64, 3))
    law[:, :, 0], law[:, :, 1] = 0, law[:, :, 0] + law[:, :, 1]
    drafts = law[:, :2].argmax(-1).astype(np.int32)
    noise = np.tile(np.array([1e5, 0, 0, 0, 0]), (64, 1))
    verdict = rule(log(law), log(law[:, :2]), drafts, np.full((64, 2), BELOW_ONE), noise)
    np.testing.assert_array_equal(verdict.accepted, 2)
    assert 0 not in np.asarray(verdict.next_token)


def test_a_residual_that_rounding_emptied_falls_back_to_the_target() -> None:
    """The draft exceeds the target by a rounding error at the drafted token, and nowhere else do they differ."""
    draft = np.array([0.0, 0.4, 0.6])
    target = np.array([0.0, 0.4, np.nextafter(0.6, 0.0)])
    coins = np.full((1, 1), BELOW_ONE)
    for favoured in (1, 2):
        noise = np.zeros((1, 3))
        noise[:, 0], noise[:, favoured] = 2e5, 1e5
        verdict = rule(log(np.tile(target, (1, 2, 1))), log(draft)[None, None] + 1e-9, np.array([[2]], np.int32), coins, noise)
        assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([0], [favoured])


def sampled(vocab: int, case: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (first two after a round of K = 2, then plain) of `rows` independent rows, with the sampler's own noise; and the target."""
    random = np.random.default_rng(vocab)
    logits = random.normal(size=vocab) * 1.5
    drafted_from = {"opposite": -logits, "flat": np.zeros(vocab), "disjoint": np.where(np.arange(vocab) % 2, 0.0, -np.inf)}[case]
    if case == "disjoint":
        logits = np.where(np.arange(vocab) % 2, -np.inf, logits)

    @jax.jit
    def draw(target: jax.Array, draft: jax.Array) -> jax.Array:
        keys = sampling.row_keys(jax.random.key(0), jnp.arange(rows, dtype=jnp.int32))
        start = jnp.zeros((rows,), jnp.int32)
        noise = {
            stream: sampling.gumbel(sampling.offset_keys(keys, start, stream, 2), vocab, jnp.dtype(jnp.float32))
            for stream in (sampling.DRAFT, sampling.NEXT)
        }
        coins = sampling.uniform(sampling.offset_keys(keys, start, sampling.COIN, 2), jnp.dtype(jnp.float32))
        drafts = sampling.categorical(jnp.broadcast_to(draft, (rows, 2, vocab)), noise[sampling.DRAFT])
        wide = jnp.broadcast_to(target, (rows, 3, vocab))
        verdict = token_rule(wide, jnp.broadcast_to(draft, (rows, 2, vocab)), drafts, coins, noise[sampling.NEXT][:, 0])
        plain = sampling.categorical(wide[:, 0], noise[sampling.NEXT][:, 1])
        first = jnp.where(verdict.accepted > 0, drafts[:, 0], verdict.next_token)
        second = jnp.where(verdict.accepted > 1, drafts[:, 1], jnp.where(verdict.accepted == 1, verdict.next_token, plain))
        return first * vocab + second

    laws = [sampling.processed_logprobs(jnp.asarray(law, jnp.float32), 1.0) for law in (logits, drafted_from)]
    return np.asarray(draw(*laws)), np.exp(np.asarray(laws[0], np.float64))


@pytest.mark.parametrize("vocab", [3, 16])
@pytest.mark.parametrize("case", ["opposite", "flat", "disjoint"])
def test_sampled_rounds_pass_a_chi_square(case: str, vocab: int) -> None:
    rows = 200_000
    pairs, target = sampled(vocab, case, rows)
    expected = rows * np.outer(target, target).ravel()
    assert chi_square(np.bincount(pairs, minlength=vocab * vocab), expected) > 1e-3


def test_coupled_rule_gives_the_tokens_of_plain_sampling() -> None:
    """Whatever was drafted, the tokens are argmax(target + noise) of each position, up to and including the first that differs."""
    random = np.random.default_rng(0)
    rows, length, vocab = 4000, 3, 4
    target = log(random.dirichlet(np.ones(vocab), (rows, length + 1)))
    noise = random.gumbel(size=(rows, length + 1, vocab))
    plain = (target + noise).argmax(-1)
    drafts = np.where(random.random((rows, length)) < 0.7, plain[:, :length], random.integers(vocab, size=(rows, length))).astype(np.int32)
    verdict = jax.jit(coupled_rule)(target, drafts, noise)
    accepted = np.asarray(verdict.accepted)
    assert set(accepted) == {0, 1, 2, 3}
    for row in range(rows):
        kept = [*drafts[row, : accepted[row]], int(verdict.next_token[row])]
        assert kept == plain[row, : accepted[row] + 1].tolist()
        assert accepted[row] == length or drafts[row, accepted[row]] != plain[row, accepted[row]]


def test_coupled_drafts_agree_as_often_as_the_source_promises() -> None:
    """With shared noise, acceptance is at least (1 - TV) / (1 + TV) (Daliri et al., theorem 2), and at most 1 - TV."""
    random = np.random.default_rng(1)
    rows, vocab = 100_000, 8
    target, draft = random.dirichlet(np.ones(vocab), 2)
    noise = random.gumbel(size=(rows, 2, vocab))
    drafts = (log(draft) + noise[:, :1]).argmax(-1).astype(np.int32)
    verdict = jax.jit(coupled_rule)(log(np.broadcast_to(target, (rows, 2, vocab))), drafts, noise)
    rate, distance = float(np.asarray(verdict.accepted).mean()), np.abs(target - draft).sum() / 2
    slack = 4 / np.sqrt(rows)
    assert (1 - distance) / (1 + distance) - slack < rate < 1 - distance + slack
    counts = np.bincount(np.where(np.asarray(verdict.accepted) > 0, drafts[:, 0], np.asarray(verdict.next_token)), minlength=vocab)
    assert chi_square(counts, rows * target) > 1e-3
