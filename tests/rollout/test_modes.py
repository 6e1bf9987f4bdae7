"""The mode of rounds follows from what is asked for, the draft and its temperatures."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.build import build_step
from jaxspec.drafts.base import DrawnProposal, PointProposal
from jaxspec.rollout.verification.modes import (
    Matching,
    MatchingNoise,
    PointMatching,
    Rejection,
    RejectionNoise,
)
from jaxspec.rollout.verify import block_rule, token_rule
from tests.conftest import small_mesh
from tests.whole_step import MODEL, STOP, config_of

CASES = [
    ({"verify": "block"}, Rejection(block_rule)),
    ({"verify": "token"}, Rejection(token_rule)),
    ({"verify": "block", "sampling": "argmax"}, PointMatching()),
    ({"verify": "block", "kind": "none"}, PointMatching()),
    ({"verify": "coupled"}, Matching()),
    ({"verify": "coupled", "kind": "none"}, Matching()),
]


@pytest.mark.parametrize(("changes", "wanted"), CASES)
def test_a_generator_has_the_mode_of_its_draft(changes: dict[str, Any], wanted: Any) -> None:
    generator = build_step(config_of(**changes), small_mesh(), STOP, MODEL.vocab).generator
    assert generator.settings.mode == wanted
    plain = generator.without_draft()
    assert plain.settings.mode == (Matching() if wanted == Matching() else PointMatching())
    # A variant that drafts again has the mode that was asked for, not that of plain decoding.
    lengths = generator.settings.lengths
    assert plain.make_variant(draft=generator.draft, lengths=lengths) == generator


def test_a_variant_may_have_another_mode_or_temperature() -> None:
    generator = build_step(config_of("block"), small_mesh(), STOP, MODEL.vocab).generator
    other = generator.make_variant(mode=Rejection(token_rule))
    assert other.settings.mode == Rejection(token_rule)
    greedy = other.make_variant(grid=(0.0,))
    assert greedy.settings.mode == PointMatching()
    assert greedy.make_variant(grid=(1.0,)) == other


def test_points_are_compared_without_logits() -> None:
    tokens, lengths = jnp.zeros((2, 3), jnp.int32), jnp.full((2,), 3, jnp.int32)
    drawn = DrawnProposal(tokens, jnp.zeros((2, 3, 5)), lengths)
    assert Matching().select_distributions(drawn) is drawn
    assert Rejection(block_rule).select_distributions(drawn) is drawn
    assert PointMatching().select_distributions(drawn) == PointProposal(tokens, lengths)


@pytest.mark.parametrize(("length", "wanted"), [(0, MatchingNoise), (1, RejectionNoise)])
def test_a_round_without_drafts_matches_under_every_rule(length: int, wanted: type) -> None:
    """The fast form of verification has no residual to draw from without a draft."""
    lengths = jnp.full((2,), 3, jnp.int32)
    for rule in (block_rule, token_rule):
        keys = jax.random.split(jax.random.key(0), 2)
        noise = Rejection(rule).draw_noise(keys, lengths, length, 5, np.dtype(np.float32))
        assert type(noise) is wanted
