"""Failures: a row whose logits fail ends there, as in plain decoding, and harms no other; a broken
draft only costs acceptance."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.base import PLAIN
from jaxspec.drafts.recurrent import recurrent_draft
from jaxspec.models.decoder import Decoder
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.modes import Matching, Rejection
from jaxspec.rollout.verify import block_rule, token_rule
from jaxspec.sampling import Processing
from jaxspec.state import EOS, FAILED, LENGTH, RUNNING
from tests.conftest import chi_square, eagle3, no_history, tiny_model, tiny_network, tiny_prompts
from tests.rollout.harness import (
    GROUP,
    NEW,
    STOP,
    assert_same_rows,
    bigram_draft,
    bigram_target,
    compiled,
    draft_of,
    last_token_prompts,
    mode_of,
    network_of,
    plain,
)
from tests.rollout.laws import sequence_law

pytestmark = pytest.mark.usefixtures("x64")

POISON = 9
"""A token whose embedding is NaN: whoever has read it has no next token."""


def poisoned(target: Decoder, token: int = POISON) -> Decoder:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            leaf.at[token].set(jnp.nan) if "embedding" in jax.tree_util.keystr(path) else leaf
        ),
        target,
    )


def test_a_failing_token_costs_its_own_row_and_no_token_before_it() -> None:
    """Coupled: rows fail where plain decoding fails, with the tokens up to there, and a poisoned
    token that is drafted and rejected, or stands in the padding of a prompt, does nothing."""
    target = poisoned(tiny_network(Decoder, tiny_model(), 1, 0.8))
    processing = Processing(stop_ids=(1, 3))
    made = tiny_prompts(8)
    width = made.tokens.shape[1]
    made = made.replace(
        tokens=jnp.where(
            jnp.arange(width, dtype=jnp.int32) < made.lengths[:, None], made.tokens % 9, POISON
        )
    )
    wanted = compiled(PLAIN, Settings(16, 8, processing, Matching()))((target, None), made)
    assert {EOS, LENGTH, FAILED} == set(wanted.status.tolist())
    network = tiny_network(eagle3, tiny_model(), 2, 0.8)
    found = compiled(recurrent_draft(3, (1, 2, 3)), Settings(16, 8, processing, Matching()))(
        (target, network), made
    )
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.lengths, wanted.lengths)
    np.testing.assert_array_equal(found.status, wanted.status)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-9)
    failed = wanted.status == FAILED
    assert (found.tokens[failed, found.lengths[failed] - 1] == POISON).all()
    assert found.statistics.accepted[failed].sum() > 0, "rows must fail inside blocks, too"


@pytest.mark.parametrize("rule", [block_rule, pytest.param(token_rule, marks=pytest.mark.sweep)])
def test_the_law_up_to_a_failure_is_that_of_plain_decoding(rule: Any) -> None:
    """A draft that proposes the poisoned token often: as many rows fail, after as many tokens, as
    by plain decoding."""
    target, processing = poisoned(tiny_network(Decoder, tiny_model(), 1, 0.8)), Processing()
    table = np.zeros((tiny_model().vocab,) * 2)
    table[:, POISON] = 2
    group, new = 4000, 4
    made = last_token_prompts([4, 2])
    shares = []
    for draft, chosen in ((PLAIN, None), (bigram_draft(2, table), rule)):
        rollout = compiled(draft, Settings(group, new, processing, mode_of(chosen)))(
            (target, None), made
        )
        lengths = np.where(rollout.status == FAILED, rollout.lengths - 2, 0)
        shares.append(np.bincount(lengths, minlength=new + 1) / len(lengths))
    plain, found = shares
    assert plain[1:new].min() > 0.01
    error = np.sqrt(plain * (1 - plain) * 2 / (2 * group))
    np.testing.assert_array_less(np.abs(found - plain), 4 * error + 1e-9)


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (block_rule, np.nan),
        *(
            pytest.param(rule, value, marks=pytest.mark.sweep)
            for rule in (token_rule, None)
            for value in (np.nan, np.inf)
        ),
    ],
)
def test_a_broken_draft_costs_acceptance_and_nothing_else(rule: Any, value: float) -> None:
    """Logits that are not finite after token 5: no row fails, and the law of the tokens is the
    target's."""
    logits = np.random.default_rng(5).normal(size=(8, 8))
    target, table = bigram_target(logits)
    broken = table.copy()
    broken[5] = value
    chosen = Settings(3000, 3, Processing(), mode_of(rule))
    rollout = compiled(bigram_draft(2, broken), chosen)((target, None), last_token_prompts([5, 2]))
    assert (rollout.status == LENGTH).all()
    assert rollout.statistics.accepted.sum() > 0
    assert np.isfinite(rollout.statistics.overlap).all()
    for number, start in enumerate((5, 2)):
        law = sequence_law(target, [0, start], Processing(), 3)
        index = {sequence: place for place, sequence in enumerate(law)}
        found = [
            tuple(row) for row in rollout.tokens[number * 3000 : (number + 1) * 3000, 2:5].tolist()
        ]
        assert not set(found) - set(index), "sequences that cannot occur"
        counts = np.bincount([index[sequence] for sequence in found], minlength=len(law))
        assert chi_square(counts, 3000 * np.array(list(law.values()))) > 1e-3


@pytest.mark.slow
def test_a_failing_row_beside_good_ones_under_the_block_rule() -> None:
    """A NaN embedding of one prompt's token fails that group only."""
    target, made = plain()[0], tiny_prompts(8)
    made = made.replace(
        tokens=jnp.where(made.tokens == 7, 8, made.tokens).at[2, 0].set(7),
        history=no_history(8)["history"],
    )
    processing = Processing(banned=(7,), stop_ids=STOP)
    run = compiled(draft_of("eagle3", 3), Settings(GROUP, NEW, processing, Rejection(block_rule)))
    network = network_of("eagle3", 0.8)
    rollout, clean = run((poisoned(target, 7), network), made), run((target, network), made)
    hit = np.arange(32) // GROUP == 2
    assert (rollout.status[hit] == FAILED).all()
    np.testing.assert_array_equal(rollout.lengths[hit], rollout.prompt_lengths[hit])
    assert_same_rows(rollout, clean, ~hit)
    assert RUNNING not in rollout.status


OVERFLOW = 5
"""A token after which one logit over the temperature is more than float32 holds, so that the law is
NaN."""


@pytest.mark.parametrize(
    ("drafted", "rule"),
    [
        (2, block_rule),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in ((2, token_rule), (2, None), (0, None), (0, block_rule))
        ),
    ],
)
def test_a_row_whose_law_is_nan_fails_with_the_tokens_before_it(drafted: int, rule: Any) -> None:
    """At this temperature the law is uniform over the largest logits, until one overflows; the
    logits themselves are finite."""
    vocab, new, group = 8, 6, 64
    head = np.zeros((vocab, vocab))
    head[OVERFLOW, 2] = 100
    target, _ = bigram_target(head, "float32")
    draft = bigram_draft(drafted, np.zeros((vocab, vocab), np.float32)) if drafted else PLAIN
    rollout = compiled(draft, Settings(group, new, Processing(temperature=1e-37), mode_of(rule)))(
        (target, None), last_token_prompts([0, OVERFLOW])
    )
    ends, last = rollout.lengths, rollout.tokens[np.arange(2 * group), rollout.lengths - 1]
    np.testing.assert_array_equal(
        rollout.status, np.where((last == OVERFLOW) & (ends < 2 + new), FAILED, LENGTH)
    )
    np.testing.assert_array_equal(ends[group:], 2)
    assert {2, 3, 4, 5} < set(ends[rollout.status == FAILED].tolist())
    for tokens, end in zip(rollout.tokens, ends, strict=True):
        assert OVERFLOW not in tokens[2 : end - 1]
        assert not tokens[end:].any()
    written = (np.arange(2 + new) >= 2) & (np.arange(2 + new) < ends[:, None])
    np.testing.assert_allclose(rollout.logprobs, np.where(written, -np.log(vocab), 0), atol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(rollout.statistics))
    np.testing.assert_allclose(
        rollout.statistics.target_entropy, (ends - 2) * np.log(vocab), rtol=1e-5
    )
    if drafted:
        assert rollout.statistics.accepted[rollout.status == FAILED].any(axis=0).all(), (
            "rows must fail inside blocks, too"
        )


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.sweep)])
def test_a_row_without_any_possible_token_fails(temperature: float) -> None:
    """All tokens are banned but the end token, which may not come yet."""
    target, _ = bigram_target(np.random.default_rng(0).normal(size=(4, 4)))
    processing = Processing(
        banned=(0, 2, 3), min_new_tokens=2, stop_ids=(1,), temperature=temperature
    )
    rollout = compiled(PLAIN, Settings(2, 3, processing, Rejection(block_rule)))(
        (target, None), last_token_prompts([0, 1])
    )
    assert (rollout.status == FAILED).all()
    np.testing.assert_array_equal(rollout.lengths, rollout.prompt_lengths)
    assert not rollout.tokens[:, 2:].any()
