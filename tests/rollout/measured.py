"""Verification rules, measured from outside: how likely each cut is and the law of the token after
it, whatever the rule's formulas.

The coin below which a draft is kept is found by bisection, what a pattern of low and high coins
leads to by running it, and the law of a token by bisection on the Gumbel noise, since argmax(log r
+ noise) is a draw from r.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from tests.conftest import bisect
from tests.rollout.harness import BELOW_ONE, RULES, log, match

Context = tuple[int, ...]
Table = dict[Context, np.ndarray]
Offers = Iterable[tuple[Context, int]]
"""Contexts, and how many drafts are on offer there."""
NEVER = -1e6
"""Noise that no log-probability outweighs."""


def constant_table(law: list[float], depth: int) -> Table:
    return {
        context: np.array(law)
        for done in range(depth + 1)
        for context in itertools.product(range(len(law)), repeat=done)
    }


class Rows:
    """One row for every context and all drafts on offer there; what stands beyond would always be
    accepted."""

    def __init__(self, target: Table, draft: Table, offers: Offers, length: int):
        self.vocab, self.length = len(next(iter(target.values()))), length
        self.rows = [
            (context, drafts)
            for context, count in offers
            for drafts in itertools.product(range(self.vocab), repeat=count)
        ]
        self.index = {row: number for number, row in enumerate(self.rows)}
        size = len(self.rows)
        self.count = np.array([len(drafts) for _, drafts in self.rows], np.int32)
        self.drafts = np.zeros((size, length), np.int32)
        self.target, self.draft = (
            np.full((size, count, self.vocab), -np.log(self.vocab))
            for count in (length + 1, length)
        )
        for number, (context, drafts) in enumerate(self.rows):
            self.drafts[number, : len(drafts)] = drafts
            self.target[number, : len(drafts) + 1] = [
                log(target[context + drafts[:i]]) for i in range(len(drafts) + 1)
            ]
            self.draft[number, : len(drafts)] = np.array(
                [log(draft[context + drafts[:i]]) for i in range(len(drafts))]
            ).reshape(-1, self.vocab)
        self.table, self.cache = draft, {}

    def chance(self, context: Context, drafts: Context) -> float:
        """Of these drafts being drawn."""
        return float(
            np.prod([self.table[context + drafts[:i]][drafts[i]] for i in range(len(drafts))])
        )

    def repeated(self, times: int) -> list[jax.Array]:
        """What a verdict is about, with each row repeated."""
        if times not in self.cache:
            arrays = (self.target, self.draft, self.drafts, self.count)
            self.cache[times] = [jnp.asarray(np.repeat(array, times, axis=0)) for array in arrays]
        return self.cache[times]

    def drawn_law(
        self, draw: Callable[[np.ndarray], np.ndarray], batch: tuple[int, ...]
    ) -> np.ndarray:
        """The law of `draw`, which turns Gumbel noise [*batch V V] into tokens [*batch V]: one
        experiment for each token."""
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
    """What a rule with coins does with each row: `cut`, how likely each cut is, and `law`, that of
    the token after it."""

    def __init__(self, rule: str, target: Table, draft: Table, offers: Offers, length: int):
        super().__init__(target, draft, offers, length)
        self.rule = rule
        self.thresholds = self._thresholds()
        size, cuts = len(self.rows), length + 1
        self.cut, best, leads_to = (
            np.zeros((size, cuts)),
            np.zeros((size, cuts)),
            np.zeros((size, cuts, length)),
        )
        for pattern in itertools.product([True, False], repeat=length):
            coins = np.tile(np.where(pattern, 0.0, BELOW_ONE), (size, 1))
            accepted = self.accepted(coins)
            likely = np.prod(np.where(pattern, self.thresholds, 1 - self.thresholds), axis=1)
            everyone = np.arange(size)
            self.cut[everyone, accepted] += likely
            leads_to[everyone, accepted] = np.where(
                (likely > best[everyone, accepted])[:, None], coins, leads_to[everyone, accepted]
            )
            best[everyone, accepted] = np.maximum(likely, best[everyone, accepted])
        self.leads_to, self.possible = leads_to, best > 0

    @functools.cached_property
    def law(self) -> np.ndarray:
        """Of the token after each cut, [rows, cuts, V]; NaN where there is no such cut."""
        coins = np.repeat(self.leads_to[:, :, None], self.vocab, axis=2)
        law = self.drawn_law(lambda noise: self.run(coins, noise)[1], self.possible.shape)
        return np.where(self.possible[:, :, None], law, np.nan)

    def mean_accepted(self) -> float:
        """Drafts kept in one round after the first context, on average over all drafts."""
        context, length = self.rows[0][0], self.length
        rows = [
            (drafts, self.index[context, drafts])
            for drafts in itertools.product(range(self.vocab), repeat=length)
        ]
        return sum(
            self.chance(context, drafts) * float(self.cut[row] @ np.arange(length + 1))
            for drafts, row in rows
        )

    def run(self, coins: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Accepted and next token for coins [rows, *batch, K] and noise [rows, *batch, V]."""
        batch = coins.shape[:-1]
        arrays = self.repeated(int(np.prod(batch[1:])))
        verdict = RULES[self.rule](
            *arrays, coins.reshape(-1, self.length), noise.reshape(-1, self.vocab)
        )
        return np.asarray(verdict.accepted).reshape(batch), np.asarray(verdict.next_token).reshape(
            batch
        )

    def accepted(self, coins: np.ndarray) -> np.ndarray:
        return self.run(coins, np.zeros((*coins.shape[:-1], self.vocab)))[0]

    def _thresholds(self) -> np.ndarray:
        """The coin below which each draft is kept, while the other coins let it be seen: low before
        it for a chain, high for a block."""
        depths = np.arange(self.length)
        others = np.where(
            depths < depths[:, None], 0.0 if self.rule == "token" else BELOW_ONE, BELOW_ONE
        )

        def kept(coin: np.ndarray) -> np.ndarray:
            accepted = self.accepted(
                np.where(
                    np.eye(self.length, dtype=bool), np.minimum(coin, BELOW_ONE)[..., None], others
                )
            )
            return accepted > depths if self.rule == "token" else accepted == depths + 1

        shape = (len(self.rows), self.length)
        return np.where(
            kept(np.zeros(shape)),
            np.where(kept(np.ones(shape)), 1.0, bisect(kept, 0.0, 1.0, shape, 52)),
            0.0,
        )

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
    """The same for the match rule, with drafts that know nothing of its noise: `law` is that of the
    token at each position."""

    def __init__(self, target: Table, draft: Table, offers: Offers, length: int):
        super().__init__(target, draft, offers, length)
        self.law = np.stack(
            [
                self.drawn_law(self._at(position), (len(self.rows),))
                for position in range(length + 1)
            ],
            axis=1,
        )

    def _at(self, position: int) -> Callable[[np.ndarray], np.ndarray]:
        """The token at a position, where the drafts before it are pulled up so far that they match;
        no token where they cannot."""
        size = len(self.rows)
        drafted = np.pad(self.drafts, ((0, 0), (0, 1)))
        pulled = np.full((size, self.vocab, self.length + 1, self.vocab), NEVER)
        np.put_along_axis(pulled, np.maximum(drafted, 0)[:, None, :, None], 0.0, axis=3)
        target, _, drafts, count = self.repeated(self.vocab)

        def draw(noise: np.ndarray) -> np.ndarray:
            pulled[:, :, position] = noise
            verdict = match(target, drafts, count, pulled.reshape(-1, self.length + 1, self.vocab))
            accepted, token = (np.asarray(part).reshape(size, self.vocab) for part in verdict)
            return np.where(
                accepted > position,
                drafted[:, position, None],
                np.where(accepted == position, token, -1),
            )

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
