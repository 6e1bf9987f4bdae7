"""Failures: a row whose logits fail ends there, as in plain decoding, and harms no other; a broken draft only costs acceptance."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.recurrent import recurrent
from jaxspec.models.decoder import Decoder
from jaxspec.rollout.round import Settings
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
    network_of,
    plain,
    sequence_law,
)

pytestmark = pytest.mark.usefixtures("x64")

POISON = 9
"""A token whose embedding is NaN: whoever has read it has no next token."""


def poisoned(target: Decoder, token: int = POISON) -> Decoder:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.at[token].set(jnp.nan) if "embedding" in jax.tree_util.keystr(path) else leaf, target
    )


def test_a_failing_token_costs_its_own_row_and_no_token_before_it() -> None:
    """Coupled: rows fail where plain decoding fails, with the tokens up to there, and a poisoned token that is drafted and rejected, or
    stands in the padding of a prompt, does nothing."""
    target, processing = poisoned(tiny_network(Decoder, tiny_model(), 1, 0.8)), Processing(stop_ids=(1, 3))
    made = tiny_prompts(8)
    width = made.tokens.shape[1]
    made = made.replace(tokens=jnp.where(jnp.arange(width, dtype=jnp.int32) < made.lengths[:, None], made.tokens % 9, POISON))
    wanted = compiled(None, Settings(16, 8, processing, None))((target, None), made)
    assert {EOS, LENGTH, FAILED} == set(wanted.status.tolist())
    network = tiny_network(eagle3, tiny_model(), 2, 0.8)
    found = compiled(recurrent(3, (1, 2, 3)), Settings(16, 8, processing, None))((target, network), made)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.lengths, wanted.lengths)
    np.testing.assert_array_equal(found.status, wanted.status)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-9)
    failed = wanted.status == FAILED
    assert (found.tokens[failed, found.lengths[failed] - 1] == POISON).all()
    assert found.statistics.accepted[failed].sum() > 0, "rows must fail inside blocks, too"


@pytest.mark.parametrize("rule", [block_rule, pytest.param(token_rule, marks=pytest.mark.slow)])
def test_the_law_up_to_a_failure_is_that_of_plain_decoding(rule: Any) -> None:
    """A draft that proposes the poisoned token often: as many rows fail, after as many tokens, as by plain decoding."""
    target, processing = poisoned(tiny_network(Decoder, tiny_model(), 1, 0.8)), Processing()
    table = np.zeros((tiny_model().vocab,) * 2)
    table[:, POISON] = 2
    group, new = 4000, 4
    made = last_token_prompts([4, 2])
    shares = []
    for draft, chosen in ((None, None), (bigram_draft(2, table), rule)):
        rollout = compiled(draft, Settings(group, new, processing, chosen))((target, None), made)
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
        found = [tuple(row) for row in rollout.tokens[number * 3000 : (number + 1) * 3000, 2:5].tolist()]
        assert not set(found) - set(index), "sequences that cannot occur"
        counts = np.bincount([index[sequence] for sequence in found], minlength=len(law))
        assert chi_square(counts, 3000 * np.array(list(law.values()))) > 1e-3


@pytest.mark.slow
def test_a_failing_row_beside_good_ones_under_the_block_rule() -> None:
    """A NaN embedding of one prompt's token fails that group only."""
    target, made = plain()[0], tiny_prompts(8)
    made = made.replace(tokens=jnp.where(made.tokens == 7, 8, made.tokens).at[2, 0].set(7), history=no_history(8)["history"])
    processing = Processing(banned=(7,), stop_ids=STOP)
    run = compiled(draft_of("eagle3", 3), Settings(GROUP, NEW, processing, block_rule))
    network = network_of("eagle3", 0.8)
    rollout, clean = run((poisoned(target, 7), network), made), run((target, network), made)
    hit = np.arange(32) // GROUP == 2
    assert (rollout.status[hit] == FAILED).all()
    np.testing.assert_array_equal(rollout.lengths[hit], rollout.prompt_lengths[hit])
    assert_same_rows(rollout, clean, ~hit)
    assert RUNNING not in rollout.status
