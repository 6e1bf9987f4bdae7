"""Whatever drafts, and however it is verified: the tokens have the law of plain decoding.

Each draft and rule runs in the engine's own loop: against the exact law of whole sequences by
enumeration, and against acceptance that can be worked out by hand. `test_coupled.py` compares token
by token.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import Draft
from jaxspec.drafts.model.drafting import model_draft
from jaxspec.models.decoder import Decoder
from jaxspec.rl.loss_terms import label_logprobs
from jaxspec.rollout.generate import advance, begin, collect
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verify import block_rule, token_rule
from jaxspec.sampling import Processing
from jaxspec.state import Prompts, Rollout
from tests.conftest import FOR_LONG_RUNS, tiny_model, tiny_network, tiny_prompts
from tests.dense import positions_of
from tests.rollout.harness import (
    FORMS,
    GROUP,
    NEW,
    PAST,
    STOP,
    bigram_draft,
    bigram_target,
    compiled,
    coupled_prompts,
    draft_of,
    drafter,
    last_token_prompts,
    marked,
    mode_of,
    network_of,
    numpy_processed,
    plain,
)
from tests.rollout.laws import law_p_value, sequence_law
from tests.rollout.measured import Measured, constant_table
from tests.twins import numpy_decoder

pytestmark = pytest.mark.usefixtures("x64")

# ---- the law of whole sequences

PLAIN = Processing(stop_ids=(1,))
TRUNCATED = Processing(
    banned=(0,), min_new_tokens=2, stop_ids=(1,), temperature=0.8, top_k=3, top_p=0.9, vocab_size=5
)
MIN_P = Processing(stop_ids=(1,), temperature=0.8, min_p=0.08)
TEMPERED = TRUNCATED._replace(top_k=0, top_p=1.0)


class Law(NamedTuple):
    kind: str
    length: int
    rule: Any
    grid: tuple[float, ...] = (1.0,)
    choice: tuple[int, ...] = ()
    processing: Processing = PLAIN
    lengths: tuple[int, ...] = ()
    mark: str = "sweep"
    form: str = "plain"

    def __str__(self) -> str:
        drawn = self.kind.partition("+")[0] not in (
            "none",
            "vllm",
            "hf",
            "history",
        ) and self.grid != (0.0,)
        rule = (
            "match"
            if not drawn
            else self.rule.__name__.removesuffix("_rule")
            if self.rule
            else "coupled"
        )
        truncated = {PLAIN: "", MIN_P: ", min-p"}.get(self.processing, ", truncated")
        names = {0.0: "argmax", 1.0: "sample"}
        sampling = names.get(self.grid[0]) if len(self.grid) == 1 else None
        sampling = sampling or f"at {self.grid}"
        return (
            f"{self.kind}, {rule}, {self.lengths or self.length},"
            f" {sampling}{truncated}"
            f"{'' if self.form == 'plain' else ', fused'}"
        )


LAWS = [
    Law("eagle3", 2, block_rule),
    Law("eagle3", 3, block_rule, (0.0, 0.6, 1.7), (2, 0, 1)),
    Law("eagle3", 3, block_rule, (0.7,), (), TRUNCATED, mark="slow"),
    Law("eagle3", 3, token_rule, (1.4,), (), TRUNCATED),
    Law("eagle3", 3, block_rule, (0.7,), (), MIN_P),
    Law("model", 2, token_rule, (1.4,), (), MIN_P, mark="slow"),
    Law("eagle3", 2, token_rule, (0.0,)),
    Law("eagle3", 2, None, (0.6,), mark="slow"),
    Law("eagle3 small", 3, block_rule),
    Law("eagle3 small", 2, token_rule),
    Law("mtp", 3, block_rule, mark="slow"),
    Law("mtp", 2, token_rule),
    Law("mtp", 2, None),
    Law("mtp reversed", 2, block_rule),
    Law("mtp 2", 3, token_rule),
    Law("model", 3, block_rule),
    Law("model", 2, token_rule),
    Law("model", 2, None),
    Law("vllm", 3, block_rule),
    Law("hf", 3, token_rule),
    Law("history", 3, None, mark="slow"),
    Law("eagle3+history", 2, block_rule),
    Law("model+latest", 2, token_rule),
    Law("none", 0, block_rule, (1.0,), (), TRUNCATED),
    Law("eagle3", 3, block_rule, (0.7,), lengths=(0, 1, 3)),
    Law("model", 2, token_rule, lengths=(0, 2)),
    Law("eagle3 small", 3, block_rule, mark="", form="fused"),
    Law("eagle3 small", 3, token_rule, (0.0, 0.6, 1.7), (2, 0, 1), TEMPERED, form="fused"),
    Law("eagle3 small+history", 2, block_rule, form="fused", mark="slow"),
    Law("mtp", 3, block_rule, (0.0, 1.0), (1, 0, 1), TEMPERED, form="fused"),
    Law("model", 2, token_rule, lengths=(0, 2), form="fused"),
]


@functools.cache
def law_target() -> Decoder:
    return tiny_network(Decoder, tiny_model(vocab=6, dtype="float32"), 1, 2.0)


@functools.cache
def law_of(text: tuple[int, ...], processing: Processing, new: int) -> dict[tuple[int, ...], float]:
    return sequence_law(law_target(), [*text], processing, new)


@pytest.mark.parametrize("case", marked(LAWS))
def test_sequences_have_exactly_the_law_of_plain_decoding(case: Law) -> None:
    vocab, new, groups = 6, 4, 5000
    pair = law_target(), network_of(case.kind, 2.0, vocab=vocab, dtype="float32")
    texts = (2, 0, 4), (3, 3)
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
    # so many rows are left after a round without drafts, and draft again
    tail = (27 * groups // 5,) if case.lengths else ()
    settings = Settings(
        GROUP,
        new,
        case.processing,
        mode_of(case.rule),
        case.grid,
        tail=tail,
        lengths=case.lengths,
        verification=FORMS[case.form],
    )
    # rounds of several lengths take longer to compile than they run
    options = None if case.lengths else FOR_LONG_RUNS
    run = compiled(draft, settings, choice=case.choice, options=options)
    rollout = run(pair, made)
    if draft.max_length:
        total = jax.tree.map(lambda leaf: leaf.sum(0), rollout.statistics)
        assert 0.02 < total.accepted[0] / total.draft_rounds[0] < 0.98, (
            "both acceptance and rejection must be common for this to test anything"
        )
        # A whole block found by look-up is rare in texts so short, and the longest of several
        # drafts come when little is left to say.
        assert total.accepted[-1 if draft.is_stochastic and not case.lengths else 0] > 100
        assert total.draft_rounds[-1] > 100
    for number, text in enumerate(texts):
        rows = np.flatnonzero(np.arange(len(rollout.status)) // GROUP % 2 == number)
        assert law_p_value(rollout, rows, law_of(text, case.processing, new)) > 1e-3


# ---- acceptance that is known


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(token_rule, marks=pytest.mark.sweep),
        block_rule,
        pytest.param(None, marks=pytest.mark.sweep),
    ],
)
def test_a_target_that_drafts_for_itself_keeps_every_draft(rule: Any) -> None:
    """The external draft has the target's own weights: K+1 tokens a round, exactly, and an expected
    acceptance of 1."""
    target = plain()[0]
    rollout = compiled(
        model_draft(3), Settings(GROUP, NEW, Processing(temperature=0.9), mode_of(rule))
    )((target, target), tiny_prompts(8))
    np.testing.assert_array_equal(rollout.statistics.rounds, NEW // 4)
    np.testing.assert_array_equal(rollout.statistics.accepted, NEW // 4)
    np.testing.assert_allclose(rollout.statistics.overlap, NEW // 4, rtol=0, atol=1e-12)


def independent_target() -> tuple[Decoder, np.ndarray]:
    """A target whose every token has the same law, and that law."""
    logits = np.random.default_rng(3).normal(size=8)
    target, table = bigram_target(np.tile(logits, (8, 1)))
    return target, np.exp(table[0]) / np.exp(table[0]).sum()


@pytest.mark.parametrize(
    ("rule", "grid"),
    [
        pytest.param(token_rule, (1.0,), marks=pytest.mark.slow),
        (token_rule, (0.0,)),
        pytest.param(block_rule, (1.0,), marks=pytest.mark.sweep),
    ],
    ids=["uniform", "one-hot", "uniform block"],
)
def test_the_mean_kept_is_the_predicted_one(rule: Any, grid: tuple[float, ...]) -> None:
    """Uniform: a chain accepts each draft with probability sum min(target, 1/V); one-hot: with that
    of the drafted token."""
    target, law = independent_target()
    length = 3
    table = np.zeros((8, 8)) if grid != (0.0,) else np.tile(np.eye(8)[law.argmax()], (8, 1))
    chosen = Settings(1000, 8, Processing(), mode_of(rule), grid)
    rollout = compiled(bigram_draft(length, table), chosen)(
        (target, None), last_token_prompts([1, 2])
    )
    total = jax.tree.map(lambda leaf: leaf.sum(0), rollout.statistics)
    rate = np.minimum(law, 1 / 8).sum() if grid != (0.0,) else law.max()
    np.testing.assert_allclose(total.overlap / total.reached, rate, rtol=0, atol=1e-12)
    kept = first_round_kept(target, bigram_draft(length, table), chosen)
    predicted = (
        1 + block_acceptance(law, length)
        if rule is block_rule
        else sum(rate**depth for depth in range(length + 1))
    )
    assert kept.mean() == pytest.approx(predicted, abs=4 * kept.std() / np.sqrt(len(kept)))


def block_acceptance(law: np.ndarray, length: int) -> float:
    """Drafts that the block rule keeps of uniform ones, where every token has this law: by
    enumeration, and more than the chain's."""
    target, draft = (
        constant_table(list(table), length) for table in (law, np.full(len(law), 1 / len(law)))
    )
    with jax.debug_key_reuse(False):  # there are no keys here, and many calls
        chain, block = (
            Measured(rule, target, draft, [((), length)], length).mean_accepted()
            for rule in ("token", "block")
        )
    assert chain == pytest.approx(
        sum(np.minimum(law, 1 / len(law)).sum() ** depth for depth in range(1, length + 1)),
        abs=1e-12,
    )
    assert block > chain + 1e-2
    return block


def first_round_kept(target: Decoder, draft: Draft, chosen: Settings) -> np.ndarray:
    """Tokens that each row keeps in its first round."""

    @jax.jit
    def run(prompts: Prompts) -> Rollout:
        state = begin(
            target, drafter(None, draft), draft, prompts, jnp.int32(0), jax.random.key(5), chosen
        )
        return collect(advance(target, drafter(None, draft), draft, state, 1, chosen))

    return np.asarray(run(last_token_prompts([1, 2])).statistics.quarter_tokens).sum(axis=1)


@pytest.mark.slow
def test_block_keeps_more_than_token_by_the_published_vector() -> None:
    """In the engine's loop, (1/3, 2/3) drafted as (2/3, 1/3) with K = 2 keeps 1 + 10/9 tokens by
    the token rule and 1 + 11/9 by the block rule (Sun et al., arXiv 2403.10444)."""
    target, table = bigram_target(np.tile(np.log([1 / 3, 2 / 3]) * np.sqrt((1 + 2e-6) / 2), (2, 1)))
    np.testing.assert_allclose(
        np.exp(table[0]) / np.exp(table[0]).sum(), [1 / 3, 2 / 3], atol=1e-12
    )
    draft = bigram_draft(2, np.tile(np.log([2 / 3, 1 / 3]), (2, 1)))
    for rule, accepted in ((token_rule, 10 / 9), (block_rule, 11 / 9)):
        kept = first_round_kept(target, draft, Settings(40_000, 6, Processing(), mode_of(rule)))
        assert kept.mean() == pytest.approx(1 + accepted, abs=4 * kept.std() / np.sqrt(len(kept)))


# ---- what is recorded


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("eagle3", "float32"),
        *(pytest.param(kind, "float64", marks=pytest.mark.sweep) for kind in ("eagle3", "history")),
    ],
)
def test_recorded_logprobs_are_those_of_a_teacher_forced_pass(kind: str, dtype: str) -> None:
    """At T != 1, with unknown ids, bans, a minimum length, top-k and top-p: against numpy, and
    against the learner's own recompute."""
    processing = Processing(
        banned=(0,),
        min_new_tokens=3,
        stop_ids=STOP,
        temperature=0.8,
        top_k=7,
        top_p=0.9,
        vocab_size=10,
    )
    target = tiny_network(Decoder, tiny_model(dtype=dtype), 1, 0.8)
    chosen = Settings(GROUP, NEW, processing, mode_of(block_rule), (0.8,))
    rollout = compiled(draft_of(kind, 3), chosen)(
        (target, network_of(kind, 0.8, dtype=dtype)), coupled_prompts()
    )
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    starts, ends = rollout.prompt_lengths, rollout.lengths
    for row in range(0, len(ends), 5):
        logits = numpy_decoder(target, rollout.tokens[row, : ends[row]])[0]
        wanted = [
            np.log(
                numpy_processed(logits[t - 1], processing, t - starts[row])[rollout.tokens[row, t]]
            )
            for t in range(starts[row], ends[row])
        ]
        np.testing.assert_allclose(
            rollout.logprobs[row, starts[row] : ends[row]], wanted, rtol=0, atol=tolerance
        )

    @jax.jit
    def recompute(tokens: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = positions_of(tokens)
        logits = target.logits(target(tokens, positions).hidden)[:, :-1]
        labels = label_logprobs(
            logits, tokens[:, 1:], positions[:, 1:] - starts[:, None], processing
        )
        # nothing precedes position 0
        picked, entropy = (jnp.pad(part, ((0, 0), (1, 0))) for part in labels)
        return picked, entropy

    picked, entropy = (
        np.asarray(leaf) for leaf in recompute(jnp.asarray(rollout.tokens), jnp.asarray(starts))
    )
    places = np.arange(rollout.tokens.shape[1])
    inside = (places >= starts[:, None]) & (places < ends[:, None])
    np.testing.assert_allclose(rollout.logprobs[inside], picked[inside], rtol=0, atol=tolerance)
    np.testing.assert_allclose(
        rollout.statistics.target_entropy, (entropy * inside).sum(1), rtol=0, atol=10 * tolerance
    )
    responses = [
        row[start:end].tolist()
        for row, start, end in zip(rollout.tokens, starts, ends, strict=True)
    ]
    assert not any(0 in response or 10 in response for response in responses)
    assert not any(set(response[:3]) & set(STOP) for response in responses)
    assert min(map(len, responses)) == 4, (
        "an end token is allowed right after the minimum, and comes"
    )


@pytest.mark.parametrize(
    ("kind", "rule", "grid"),
    [
        ("eagle3", block_rule, (0.0,)),
        pytest.param("model", token_rule, (0.9,), marks=pytest.mark.sweep),
    ],
)
def test_temperature_zero_takes_the_most_likely_token(
    kind: str, rule: Any, grid: tuple[float, ...]
) -> None:
    target = plain()[0]
    chosen = Settings(2, NEW, Processing(stop_ids=STOP, temperature=0.0), mode_of(rule), grid)
    rollout = compiled(draft_of(kind, 3), chosen)((target, network_of(kind, 0.8)), tiny_prompts(8))
    for row in range(0, 16, 6):
        text = tiny_prompts(8).tokens[row // 2, : rollout.prompt_lengths[row]].tolist()
        while len(text) < rollout.lengths[row]:
            text.append(int(numpy_decoder(target, text)[0][-1].argmax()))
        assert rollout.tokens[row, : len(text)].tolist() == text
    assert not rollout.logprobs.any()
