"""Failures: a row whose logits fail ends there, as in plain decoding, and harms no other; a broken draft only costs acceptance."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafts.recurrent import recurrent
from jaxspec.models.decoder import Decoder
from jaxspec.models.eagle3 import Eagle3
from jaxspec.rollout.generate import Settings
from jaxspec.rollout.verify import block_rule, token_rule
from jaxspec.sampling import Processing
from jaxspec.state import EOS, FAILED, LENGTH
from tests.conftest import tiny_model, tiny_network, tiny_prompts
from tests.rollout.harness import bigram_draft, compiled, last_token_prompts

pytestmark = pytest.mark.usefixtures("x64")

POISON = 9
"""A token whose embedding is NaN: whoever has read it has no next token."""


def poisoned(target: Decoder) -> Decoder:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.at[POISON].set(jnp.nan) if "embedding" in jax.tree_util.keystr(path) else leaf, target
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
    network = tiny_network(Eagle3, tiny_model(), 2, 0.8)
    found = compiled(recurrent(3, with_taps=True), Settings(16, 8, processing, None))((target, network), made)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.lengths, wanted.lengths)
    np.testing.assert_array_equal(found.status, wanted.status)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-9)
    failed = wanted.status == FAILED
    assert (found.tokens[failed, found.lengths[failed] - 1] == POISON).all()
    assert found.statistics.accepted[failed].sum() > 0, "rows must fail inside blocks, too"


@pytest.mark.parametrize("rule", [block_rule, token_rule])
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
