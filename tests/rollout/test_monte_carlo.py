"""200,000 short answers of the engine itself, in float32, against their exact law: drafts that are
opposite, disjoint, one-hot or equal."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.rollout.feedback import length_chooser
from jaxspec.rollout.generate import advance, begin, collect
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verify import block_rule, token_rule
from jaxspec.sampling import Processing
from tests.conftest import FOR_LONG_RUNS, chi_square
from tests.rollout.harness import (
    bigram_draft,
    bigram_target,
    compiled,
    drafter,
    last_token_prompts,
    marked,
    mode_of,
)
from tests.twins import numpy_softmax

pytestmark = pytest.mark.usefixtures("x64")

LENGTH, NEW, CALLS, GROUP = 3, 5, 4, 25_000
STARTS = [0, 1]
NEVER = -1e9
"""A logit of the target whose probability is exactly 0; the engine takes one that is not finite for
a failure."""


def opposite(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return logits, -logits


def disjoint(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The target has tokens 0, 2, 4, ..., the draft the others."""
    odd = np.arange(len(logits)) % 2 == 1
    return np.where(odd, NEVER, logits), np.where(odd, 0.0, -np.inf) * np.ones_like(logits)


def one_hot(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The draft always says the second likeliest token."""
    second = np.argsort(logits, axis=1)[:, -2:-1]
    return logits, np.where(np.arange(len(logits)) == second, 0.0, -np.inf)


def equal(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return logits, logits


class Trial(NamedTuple):
    rule: Any
    tables: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    vocab: int
    mark: str = "sweep"

    def __str__(self) -> str:
        rule = self.rule.__name__.removesuffix("_rule") if self.rule else "coupled"
        return f"{rule}, {self.tables.__name__}, {self.vocab}"


MARKS = {
    (block_rule, opposite, 3): "slow",
    (token_rule, opposite, 3): "slow",
    (None, opposite, 3): "slow",
}
TRIALS = [
    Trial(rule, tables, vocab, MARKS.get((rule, tables, vocab), "sweep"))
    for rule in (token_rule, block_rule, None)
    for tables in (opposite, disjoint, one_hot, equal)
    for vocab in ((3, 16) if tables is opposite else (3,))
]


@pytest.mark.parametrize("trial", marked(TRIALS))
def test_answers_of_the_engine_pass_a_chi_square(trial: Trial) -> None:
    """At 3 tokens the law of all five together, at 16 that of each pair."""
    vocab = trial.vocab
    wanted, drafted = trial.tables(1.2 * np.random.default_rng(vocab).normal(size=(vocab, vocab)))
    target, table = bigram_target(wanted * np.sqrt((1 + vocab * 1e-6) / vocab), "float32")
    np.testing.assert_allclose(table, wanted)
    run = compiled(
        bigram_draft(LENGTH, drafted.astype(np.float32)),
        Settings(GROUP, NEW, Processing(), mode_of(trial.rule)),
        options=FOR_LONG_RUNS,
    )
    counts, rounds, accepted = np.zeros((len(STARTS), vocab**NEW)), 0, 0
    for seed in range(CALLS):
        rollout = run((target, None), last_token_prompts(STARTS), seed)
        assert (rollout.lengths == 2 + NEW).all()
        index = rollout.tokens[:, 2:] @ vocab ** np.arange(NEW)[::-1]
        counts += [
            np.bincount(part, minlength=vocab**NEW) for part in index.reshape(len(STARTS), GROUP)
        ]
        rounds = rounds + rollout.statistics.rounds.mean() / CALLS
        accepted = accepted + rollout.statistics.accepted.sum()
    if trial.tables is disjoint:
        assert (rounds, accepted) == (NEW, 0)
    elif trial.tables is equal:
        assert rounds == pytest.approx(2, abs=1e-3)  # weights that agree to rounding
    else:
        assert 1.1 < rounds < 4.9, (
            "both acceptance and rejection must be common for this to test anything"
        )
    laws = numpy_softmax(table)
    expected = np.einsum("sa,ab,bc,cd,de->sabcde", laws[STARTS], laws, laws, laws, laws)
    counts = counts.reshape(expected.shape)
    assert counts.sum() == CALLS * GROUP * len(STARTS)
    for summed in ((),) if vocab == 3 else itertools.combinations(range(1, NEW + 1), NEW - 2):
        seen, law = counts.sum(summed), CALLS * GROUP * expected.sum(summed)
        assert chi_square(seen.ravel(), law.ravel()) > 1e-3


@pytest.mark.parametrize(
    "vocab", [pytest.param(3, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.sweep)]
)
def test_pairs_of_tokens_of_two_plain_rounds_pass_a_chi_square(vocab: int) -> None:
    """Rounds that could draft, and do not: each token has its law given the one before it, whatever
    coin gave that one."""
    target, table = bigram_target(
        1.2 * np.random.default_rng(vocab).normal(size=(vocab, vocab)), "float32"
    )
    draft = bigram_draft(1, np.zeros((vocab, vocab), np.float32))
    settings = Settings(GROUP, 2, Processing(), mode_of(block_rule), lengths=(0, 1))
    chooser = length_chooser.init_chooser(settings.lengths, 4)
    plain = drafter(None, draft).replace(
        chooser=chooser.replace(round_cost=jnp.full_like(chooser.round_cost, 1e6).at[0].set(1e-6))
    )

    @functools.partial(jax.jit, compiler_options=FOR_LONG_RUNS)
    def run(key: jax.Array) -> Any:
        state = begin(target, plain, draft, last_token_prompts(STARTS), jnp.int32(0), key, settings)
        return collect(advance(target, plain, draft, state, 1000, settings))

    rollout = jax.tree.map(np.asarray, run(jax.random.key(1)))
    assert (rollout.statistics.rounds == 2).all()
    assert not rollout.statistics.draft_rounds.any()
    laws = numpy_softmax(table)
    wanted = GROUP * np.einsum("sa,ab->sab", laws[STARTS], laws)
    index = (rollout.tokens[:, 2:] @ np.array([vocab, 1])).reshape(len(STARTS), GROUP)
    seen = np.array([np.bincount(part, minlength=vocab**2) for part in index])
    assert chi_square(seen.ravel(), wanted.ravel()) > 1e-3


@pytest.mark.parametrize("rule", [block_rule, pytest.param(token_rule, marks=pytest.mark.sweep)])
def test_a_round_counts_drafts_up_to_its_cut(rule: Any) -> None:
    """After one round, in which no row can end: a draft is reached where the one before it was
    kept, and nowhere else."""
    logits = 1.2 * np.random.default_rng(3).normal(size=(3, 3))
    target, _ = bigram_target(logits, "float32")
    draft = bigram_draft(LENGTH, (-logits).astype(np.float32))
    settings = Settings(500, 20, Processing(), mode_of(rule))
    given = drafter(None, draft)

    @jax.jit
    def run(key: jax.Array) -> Any:
        return advance(
            target,
            given,
            draft,
            begin(target, given, draft, last_token_prompts(STARTS), jnp.int32(0), key, settings),
            1,
            settings,
        )

    rollout = jax.tree.map(np.asarray, collect(run(jax.random.key(1))))
    found, kept = rollout.statistics, rollout.lengths - rollout.prompt_lengths
    np.testing.assert_array_equal(found.draft_rounds, 1)
    np.testing.assert_array_equal(found.reached[:, 0], 1)
    np.testing.assert_array_equal(found.reached[:, 1:], found.accepted[:, :-1])
    np.testing.assert_array_equal(found.accepted.sum(axis=1), kept - 1)
    assert set(kept.tolist()) == {1, 2, 3, 4}
    assert ((found.overlap > 0) == (found.reached > 0)).all()
