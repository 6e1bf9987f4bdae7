"""Whatever drafts, and however it is verified: the tokens have the law of plain decoding, and in coupled mode are the very same.

Each draft and rule runs in the engine's own loop: against the exact law of whole sequences by enumeration, against plain decoding token by
token, and against acceptance that can be worked out by hand.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import Draft
from jaxspec.drafts.lookup import history, ngram, preferring
from jaxspec.drafts.model import external
from jaxspec.drafts.recurrent import recurrent
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3, with_vocabulary
from jaxspec.models.mtp import Mtp
from jaxspec.rl.logprob import positions_of, token_logprobs
from jaxspec.rollout.generate import Settings, advance, begin, collect
from jaxspec.rollout.verify import block_rule, token_rule
from jaxspec.sampling import Processing
from jaxspec.state import EOS, FAILED, LENGTH, RUNNING, Prompts, Rollout
from tests.conftest import chi_square, no_history, numpy_decoder, tiny_model, tiny_network, tiny_prompts
from tests.rollout.harness import (
    assert_same_rows,
    bigram_draft,
    bigram_target,
    compiled,
    drafter,
    last_token_prompts,
    numpy_processed,
    sequence_law,
)

pytestmark = pytest.mark.usefixtures("x64")

GROUP, WIDTH, NEW, PAST = 4, 5, 8, 2
STOP = (1, 3)


def draft_of(kind: str, length: int) -> Draft | None:
    """A draft by name; `a+b` prefers the look-up b to the learned a."""
    learned, _, beside = kind.partition("+")
    if beside:
        lookup, base = draft_of(beside, length), draft_of(learned, length)
        assert lookup is not None
        assert base is not None
        return preferring(lookup, base)
    match kind:
        case "none":
            return None
        case "eagle3" | "eagle3 small":
            return recurrent(length, with_taps=True)
        case "mtp" | "mtp reversed":
            return recurrent(length, with_taps=False)
        case "mtp 2":
            return recurrent(length, with_taps=False, depth=2)
        case "model":
            return external(length)
        case "history":
            return history(length, GROUP, 1, 4)
        case rule:
            return ngram(length, rule, 1, 3, STOP)  # pyright: ignore[reportArgumentType]


def network_of(kind: str, scale: float, **changes: Any) -> Any:
    """The weights that go with `draft_of`."""
    model = tiny_model(**changes)
    match kind.partition("+")[0]:
        case "eagle3":
            return tiny_network(Eagle3, model, 2, scale)
        case "eagle3 small":
            small = tiny_network(functools.partial(Eagle3, vocab=4), model, 2, scale)
            return with_vocabulary(small, np.array([0, 1, 3, 4]))
        case "mtp":
            return tiny_network(Mtp, model, 2, scale)
        case "mtp reversed":
            return tiny_network(functools.partial(Mtp, embedding_first=False), model, 2, scale)
        case "mtp 2":
            return tiny_network(functools.partial(Mtp, layers=2), model, 2, scale)
        case "model":
            return tiny_network(Decoder, tiny_model(**changes, embed=8, ffn=8), 2, scale)
        case _:
            return None


# ---- the law of whole sequences

PLAIN = Processing(stop_ids=(1,))
TRUNCATED = Processing(banned=(0,), min_new_tokens=2, stop_ids=(1,), temperature=0.8, top_k=4, top_p=0.9)


class Law(NamedTuple):
    kind: str
    length: int
    rule: Any
    grid: tuple[float, ...] = (1.0,)
    choice: tuple[int, ...] = ()
    processing: Processing = PLAIN

    def __str__(self) -> str:
        rule = self.rule.__name__.removesuffix("_rule") if self.rule else "coupled"
        sampling = "argmax" if self.grid == (0.0,) else "sample" if self.grid == (1.0,) else f"at {self.grid}"
        return f"{self.kind}, {rule}, {self.length}, {sampling}{'' if self.processing is PLAIN else ', truncated'}"


LAWS = [
    Law("eagle3", 2, block_rule),
    Law("eagle3", 3, block_rule, (0.0, 0.6, 1.7), (2, 0, 1)),
    Law("eagle3", 3, block_rule, (0.7,), (), TRUNCATED),
    Law("eagle3", 3, token_rule, (1.4,), (), TRUNCATED),
    Law("eagle3", 2, token_rule, (0.0,)),
    Law("eagle3", 2, None, (0.6,)),
    Law("eagle3 small", 3, block_rule),
    Law("eagle3 small", 2, token_rule),
    Law("mtp", 3, block_rule),
    Law("mtp 2", 3, token_rule),
    Law("model", 3, block_rule),
    Law("model", 2, token_rule),
    Law("vllm", 3, block_rule),
    Law("history", 3, block_rule),
    Law("eagle3+history", 2, block_rule),
    Law("model+latest", 2, token_rule),
    Law("none", 0, block_rule, (1.0,), (), TRUNCATED),
]
FAST = {0, 2, 6}
"""Run by `launch/test.sh` too; the slow part runs all others."""


@pytest.mark.parametrize("case", [pytest.param(law, marks=[] if i in FAST else pytest.mark.slow) for i, law in enumerate(LAWS)], ids=str)
def test_sequences_have_exactly_the_law_of_plain_decoding(case: Law) -> None:
    vocab, new, groups = 6, 4, 5000
    pair = tiny_network(Decoder, tiny_model(vocab=vocab, dtype="float32"), 1, 2.0), network_of(case.kind, 2.0, vocab=vocab, dtype="float32")
    texts = ([2, 0, 4], [3, 3])
    random = np.random.default_rng(0)
    made = Prompts(
        tokens=jnp.asarray([[*text, 0][:3] for text in texts] * groups, jnp.int32),
        lengths=jnp.asarray([len(text) for text in texts] * groups, jnp.int32),
        live=jnp.ones(2 * groups, bool),
        stream=jnp.int32(0),
        batch=jnp.int32(0),
        history=jnp.asarray(random.integers(0, vocab, (2 * groups, PAST, 6)), jnp.int32),
        history_lengths=jnp.asarray(random.integers(0, 7, (2 * groups, PAST)), jnp.int32),
    )
    draft = draft_of(case.kind, case.length)
    rollout = compiled(draft, Settings(GROUP, new, case.processing, case.rule, case.grid), choice=case.choice)(pair, made)
    if draft is not None:
        total = jax.tree.map(lambda leaf: leaf.sum(0), rollout.statistics)
        assert 0.02 < total.accepted[0] / total.drafted[0] < 0.98, "both acceptance and rejection must be common for this to test anything"
        assert total.accepted[-1 if draft.draws else 0] > 100  # a whole block found by look-up is rare in texts so short
    for number, text in enumerate(texts):
        law = sequence_law(pair[0], text, case.processing, new)
        assert sum(law.values()) == pytest.approx(1)
        index = {sequence: place for place, sequence in enumerate(law)}
        rows = np.flatnonzero(np.arange(len(rollout.status)) // GROUP % 2 == number)
        found = [index[tuple(rollout.tokens[row, rollout.prompt_lengths[row] : rollout.lengths[row]].tolist())] for row in rows]
        assert chi_square(np.bincount(found, minlength=len(law)), len(rows) * np.array(list(law.values()))) > 1e-3


# ---- the very tokens of plain decoding


class Coupled(NamedTuple):
    kind: str
    length: int
    grid: tuple[float, ...] = (1.0,)
    choice: tuple[int, ...] = ()
    data: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        return f"{self.kind}, {self.length}, mesh {self.data}x{self.tensor}"


COUPLED = [
    Coupled("eagle3", 1, (0.0,), (), 2),
    Coupled("eagle3", 3, (0.0, 0.6, 1.7), (2, 0, 1), 4, 2),
    Coupled("eagle3", 7, (0.8,), (), 8),
    Coupled("eagle3 small", 2),
    Coupled("mtp", 5),
    Coupled("mtp reversed", 2, (1.0,), (), 2, 2),
    Coupled("mtp 2", 5, (1.0,), (), 8),
    Coupled("model", 3, (0.0,), (), 2),
    Coupled("vllm", 5),
    Coupled("hf", 2, (1.0,), (), 8),
    Coupled("eagle3+history", 3, (0.5, 1.0), (0, 1, 1), 2),
    Coupled("model+latest", 1),
]
COUPLED_FAST = {1, 6, 7, 10}
SPREAD = Processing(stop_ids=STOP, temperature=0.9)


def coupled_prompts() -> Prompts:
    """Prompts of 1 to 5 tokens over a small part of the vocabulary, so that look-up has something to find, with earlier texts."""
    random = np.random.default_rng(4)
    made = tiny_prompts(8, WIDTH)
    tokens = jnp.asarray(random.integers(4, 7, (8, WIDTH)), jnp.int32)
    texts = jnp.asarray(random.integers(4, 7, (8, PAST, WIDTH + NEW)), jnp.int32)
    lengths = jnp.asarray(random.integers(0, WIDTH + NEW + 1, (8, PAST)), jnp.int32)
    return made.replace(tokens=tokens, lengths=made.lengths.at[3].set(1), history=texts, history_lengths=lengths)


@functools.cache
def plain(dtype: str = "float64") -> tuple[Decoder, Any]:
    target = tiny_network(Decoder, tiny_model(dtype=dtype), 1, 0.8)
    return target, compiled(None, Settings(GROUP, NEW, SPREAD, None))((target, None), coupled_prompts())


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if i in COUPLED_FAST else pytest.mark.slow) for i, case in enumerate(COUPLED)], ids=str
)
def test_coupled_tokens_are_those_of_plain_decoding(case: Coupled) -> None:
    """Both endings, inside a block of kept drafts too, on meshes of 1, 2 and 8 devices."""
    target, wanted = plain()
    draft = draft_of(case.kind, case.length)
    chosen = Settings(GROUP, NEW, SPREAD, None, case.grid)
    found = compiled(draft, chosen, case.data, case.tensor, case.choice)((target, network_of(case.kind, 0.8)), coupled_prompts())
    assert_same_rows(found, wanted)
    assert {EOS, LENGTH} == set(found.status.tolist())
    assert found.statistics.accepted.sum() > 0
    assert found.statistics.rounds.sum() < wanted.statistics.rounds.sum()
    np.testing.assert_allclose(found.statistics.target_entropy, wanted.statistics.target_entropy, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "kind", ["eagle3", pytest.param("mtp 2", marks=pytest.mark.slow), pytest.param("eagle3+history", marks=pytest.mark.slow)]
)
def test_permuted_rows_stay_themselves(kind: str) -> None:
    """Groups change places after the prefill, caches, drafts and all: each gives the tokens it would have given at its old place."""
    draft, chosen = draft_of(kind, 3), Settings(GROUP, NEW, SPREAD, block_rule)
    pair = plain()[0], network_of(kind, 0.8)
    order = np.random.default_rng(0).permutation(8)
    rows = (order[:, None] * GROUP + np.arange(GROUP)).reshape(-1)

    def moved(path: Any, leaf: jax.Array) -> jax.Array:
        axis = int(any(getattr(key, "name", "") == "cache" for key in path))
        return jnp.take(leaf, order if leaf.shape[axis] == 8 else rows, axis=axis)

    @functools.partial(jax.jit, static_argnums=1)
    def run(prompts: Prompts, permute: bool) -> Rollout:
        engine = begin(pair[0], drafter(pair[1], draft), draft, prompts, jnp.int32(0), jax.random.key(5), chosen)
        engine = jax.tree_util.tree_map_with_path(moved, engine) if permute else engine
        return collect(advance(pair[0], drafter(pair[1], draft), draft, engine, 100, chosen))

    found, wanted = (jax.tree.map(np.asarray, run(coupled_prompts(), permute)) for permute in (True, False))
    assert_same_rows(found, wanted, slice(None), rows)
    np.testing.assert_array_equal(found.statistics.accepted, wanted.statistics.accepted[rows])


@pytest.mark.slow
def test_float32_flips_are_near_ties_and_rare() -> None:
    """Products of width 1 and K+1 round differently: over 300,000 tokens at most 1 row in 100,000 tokens may part, at a near-tie.

    What a row samples after it parted is another text, so only the first difference of a row is judged.
    """
    model = tiny_model(vocab=64, layers=6, embed=32, head_size=8, ffn=64, dtype="float32")
    target, network = tiny_network(Decoder, model, 1, 0.8), tiny_network(Eagle3, model, 2, 0.8)
    processing = Processing(stop_ids=(1,))
    runs = [compiled(draft, Settings(64, 64, processing, None)) for draft in (None, recurrent(3, True))]
    tokens = flips = 0
    for seed in range(5):
        made = tiny_prompts(32, WIDTH, 64, seed)
        wanted, found = (run((target, network), made, seed) for run in runs)
        tokens += int((wanted.lengths - wanted.prompt_lengths).sum())
        for row in np.flatnonzero((wanted.tokens != found.tokens).any(1) | (wanted.lengths != found.lengths)):
            flips += 1
            place = int(np.argmax(wanted.tokens[row] != found.tokens[row]))
            laws = np.log(numpy_processed(numpy_decoder(target, wanted.tokens[row, :place])[0][-1], processing, 0))
            keys = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), 0), place)
            scores = laws + np.asarray(jax.random.gumbel(keys, (64,), jnp.float32))
            gap = abs(scores[wanted.tokens[row, place]] - scores[found.tokens[row, place]])
            assert gap < 1e-4, f"row {row} of seed {seed} parts at {place} with a gap of {gap}"
    print(f"{flips} of {tokens} tokens part at a near-tie")
    assert tokens >= 300_000
    assert flips <= tokens / 100_000


# ---- acceptance that is known


@pytest.mark.parametrize("rule", [pytest.param(token_rule, marks=pytest.mark.slow), block_rule, None])
def test_a_target_that_drafts_for_itself_keeps_every_draft(rule: Any) -> None:
    """The external draft has the target's own weights: K+1 tokens a round, exactly, and an expected acceptance of 1."""
    target = plain()[0]
    rollout = compiled(external(3), Settings(GROUP, NEW, Processing(temperature=0.9), rule))((target, target), tiny_prompts(8))
    np.testing.assert_array_equal(rollout.statistics.rounds, NEW // 4)
    np.testing.assert_array_equal(rollout.statistics.accepted, NEW // 4)
    np.testing.assert_allclose(rollout.statistics.overlap[:, :, 0], NEW // 4, rtol=0, atol=1e-12)


def independent_target() -> tuple[Decoder, np.ndarray]:
    """A target whose every token has the same law, and that law."""
    logits = np.random.default_rng(3).normal(size=8)
    target, table = bigram_target(np.tile(logits, (8, 1)))
    return target, np.exp(table[0]) / np.exp(table[0]).sum()


@pytest.mark.parametrize(
    ("rule", "grid"),
    [(token_rule, (1.0,)), (token_rule, (0.0,)), pytest.param(block_rule, (1.0,), marks=pytest.mark.slow)],
    ids=["uniform", "one-hot", "uniform block"],
)
def test_the_mean_kept_is_the_predicted_one(rule: Any, grid: tuple[float, ...]) -> None:
    """Uniform: each draft is accepted with probability sum min(target, 1/V); one-hot: with that of the drafted token."""
    target, law = independent_target()
    length = 3
    table = np.zeros((8, 8)) if grid != (0.0,) else np.tile(np.eye(8)[law.argmax()], (8, 1))
    chosen = Settings(1000, 8, Processing(), rule, grid)
    rollout = compiled(bigram_draft(length, table), chosen)((target, None), last_token_prompts([1, 2]))
    total = jax.tree.map(lambda leaf: leaf.sum(0), rollout.statistics)
    rate = np.minimum(law, 1 / 8).sum() if grid != (0.0,) else law.max()
    np.testing.assert_allclose(total.overlap[:, 0] / total.reached, rate, rtol=0, atol=1e-12)
    kept = first_round_kept(target, bigram_draft(length, table), chosen)
    error = 4 * kept.std() / np.sqrt(len(kept))
    predicted = sum(rate**depth for depth in range(length + 1))
    if rule is block_rule:
        assert predicted - error < kept.mean() < length + 1
    else:
        assert kept.mean() == pytest.approx(predicted, abs=error)


def first_round_kept(target: Decoder, draft: Draft, chosen: Settings) -> np.ndarray:
    """Tokens that each row keeps in its first round."""

    @jax.jit
    def run(prompts: Prompts) -> Rollout:
        engine = begin(target, drafter(None, draft), draft, prompts, jnp.int32(0), jax.random.key(5), chosen)
        return collect(advance(target, drafter(None, draft), draft, engine, 1, chosen))

    return np.asarray(run(last_token_prompts([1, 2])).statistics.kept)


def test_block_keeps_more_than_token_by_the_published_vector() -> None:
    """drafters.md 6.10 in the engine's loop: (1/3, 2/3) drafted as (2/3, 1/3) with K = 2 keeps 1 + 10/9 (token), 1 + 11/9 (block)."""
    target, table = bigram_target(np.tile(np.log([1 / 3, 2 / 3]) * np.sqrt((1 + 2e-6) / 2), (2, 1)))
    np.testing.assert_allclose(np.exp(table[0]) / np.exp(table[0]).sum(), [1 / 3, 2 / 3], atol=1e-12)
    draft = bigram_draft(2, np.tile(np.log([2 / 3, 1 / 3]), (2, 1)))
    for rule, accepted in ((token_rule, 10 / 9), (block_rule, 11 / 9)):
        kept = first_round_kept(target, draft, Settings(40_000, 6, Processing(), rule))
        assert kept.mean() == pytest.approx(1 + accepted, abs=4 * kept.std() / np.sqrt(len(kept)))


# ---- what is recorded


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("eagle3", "float32"), ("history", "float64"), pytest.param("eagle3", "float64", marks=pytest.mark.slow)],
)
def test_recorded_logprobs_are_those_of_a_teacher_forced_pass(kind: str, dtype: str) -> None:
    """At T != 1, with bans, a minimum length, top-k and top-p: against numpy, and against the learner's own recompute."""
    processing = Processing(banned=(0,), min_new_tokens=3, stop_ids=STOP, temperature=0.8, top_k=7, top_p=0.9)
    target = tiny_network(Decoder, tiny_model(dtype=dtype), 1, 0.8)
    chosen = Settings(GROUP, NEW, processing, block_rule, (0.8,))
    rollout = compiled(draft_of(kind, 3), chosen)((target, network_of(kind, 0.8, dtype=dtype)), coupled_prompts())
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    starts, ends = rollout.prompt_lengths, rollout.lengths
    for row in range(0, len(ends), 5):
        logits = numpy_decoder(target, rollout.tokens[row, : ends[row]])[0]
        wanted = [
            np.log(numpy_processed(logits[t - 1], processing, t - starts[row])[rollout.tokens[row, t]])
            for t in range(starts[row], ends[row])
        ]
        np.testing.assert_allclose(rollout.logprobs[row, starts[row] : ends[row]], wanted, rtol=0, atol=tolerance)

    @jax.jit
    def recompute(tokens: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
        return token_logprobs(target, target(tokens, positions_of(tokens)).hidden, tokens, starts, processing)

    picked, entropy = (np.asarray(leaf) for leaf in recompute(jnp.asarray(rollout.tokens), jnp.asarray(starts)))
    places = np.arange(rollout.tokens.shape[1])
    inside = (places >= starts[:, None]) & (places < ends[:, None])
    np.testing.assert_allclose(rollout.logprobs[inside], picked[inside], rtol=0, atol=tolerance)
    np.testing.assert_allclose(rollout.statistics.target_entropy, (entropy * inside).sum(1), rtol=0, atol=10 * tolerance)
    responses = [row[start:end].tolist() for row, start, end in zip(rollout.tokens, starts, ends, strict=True)]
    assert not any(0 in response for response in responses)
    assert not any(set(response[:3]) & set(STOP) for response in responses)
    assert min(map(len, responses)) == 4, "an end token is allowed right after the minimum, and comes"


def test_temperature_zero_takes_the_most_likely_token() -> None:
    target = plain()[0]
    greedy = Processing(stop_ids=STOP, temperature=0.0)
    for kind, rule, grid in (("eagle3", block_rule, (0.0,)), ("model", token_rule, (0.9,))):
        draft = draft_of(kind, 3)
        rollout = compiled(draft, Settings(2, NEW, greedy, rule, grid))((target, network_of(kind, 0.8)), tiny_prompts(8))
        for row in range(0, 16, 6):
            text = tiny_prompts(8).tokens[row // 2, : rollout.prompt_lengths[row]].tolist()
            while len(text) < rollout.lengths[row]:
                text.append(int(numpy_decoder(target, text)[0][-1].argmax()))
            assert rollout.tokens[row, : len(text)].tolist() == text
        assert not rollout.logprobs.any()


# ---- drafts that break


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (block_rule, np.nan),
        *(pytest.param(rule, value, marks=pytest.mark.slow) for rule in (token_rule, None) for value in (np.nan, np.inf)),
    ],
)
def test_a_broken_draft_costs_acceptance_and_nothing_else(rule: Any, value: float) -> None:
    """Logits that are not finite after token 5: no row fails, and the law of the tokens is the target's."""
    logits = np.random.default_rng(5).normal(size=(8, 8))
    target, table = bigram_target(logits)
    broken = table.copy()
    broken[5] = value
    chosen = Settings(3000, 3, Processing(), rule)
    rollout = compiled(bigram_draft(2, broken), chosen)((target, None), last_token_prompts([5, 2]))
    assert (rollout.status == LENGTH).all()
    assert rollout.statistics.accepted.sum() > 0
    assert np.isfinite(rollout.statistics.overlap).all()
    for number, start in enumerate((5, 2)):
        law = sequence_law(target, [0, start], Processing(), 3)
        index = {sequence: place for place, sequence in enumerate(law)}
        rows = rollout.tokens[number * 3000 : (number + 1) * 3000, 2:5]
        counts = np.bincount([index[tuple(row)] for row in rows.tolist()], minlength=len(law))
        assert chi_square(counts, 3000 * np.array(list(law.values()))) > 1e-3


def test_a_failing_row_beside_good_ones_under_the_block_rule() -> None:
    """A NaN embedding of one prompt's token fails that group only."""
    target, made = plain()[0], tiny_prompts(8)
    made = made.replace(tokens=jnp.where(made.tokens == 7, 8, made.tokens).at[2, 0].set(7), history=no_history(8)["history"])
    processing = Processing(banned=(7,), stop_ids=STOP)
    poisoned = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.at[7].set(jnp.nan) if "embedding" in jax.tree_util.keystr(path) else leaf, target
    )
    run = compiled(draft_of("eagle3", 3), Settings(GROUP, NEW, processing, block_rule))
    network = network_of("eagle3", 0.8)
    rollout, clean = run((poisoned, network), made), run((target, network), made)
    hit = np.arange(32) // GROUP == 2
    assert (rollout.status[hit] == FAILED).all()
    np.testing.assert_array_equal(rollout.lengths[hit], rollout.prompt_lengths[hit])
    assert_same_rows(rollout, clean, ~hit)
    assert RUNNING not in rollout.status
