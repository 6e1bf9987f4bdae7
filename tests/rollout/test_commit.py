"""`Rollout.origin` says of each token how it came about."""

import numpy as np
import pytest

from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.modes import Rejection
from jaxspec.rollout.verify import block_rule
from jaxspec.state import BONUS, CORRECTION, DRAFTED, EOS, PROMPT, UNDRAFTED
from tests.rollout.harness import (
    GROUP,
    NEW,
    SPREAD,
    compiled,
    coupled_prompts,
    draft_of,
    network_of,
    plain,
)

pytestmark = pytest.mark.usefixtures("x64")
LENGTH = 3


@pytest.mark.parametrize("kind", ["none", "eagle3", "history"])
def test_origins_add_up_to_the_statistics(kind: str) -> None:
    """Each round that a row took part in wrote one token that was not drafted, and its accepted
    drafts by depth, in this order."""
    draft, settings = draft_of(kind, LENGTH), Settings(GROUP, NEW, SPREAD, Rejection(block_rule))
    rollout = compiled(draft, settings)((plain()[0], network_of(kind, 0.8)), coupled_prompts())
    origin, counts = rollout.origin, rollout.statistics
    places = np.arange(origin.shape[1])
    response = (places >= rollout.prompt_lengths[:, None]) & (places < rollout.lengths[:, None])
    np.testing.assert_array_equal(origin >= UNDRAFTED, response)
    assert (origin[~response] == PROMPT).all()
    not_drafted = response & (origin < DRAFTED)
    # A round that ends inside its drafts writes no token of the target.
    cut = rollout.statistics.rounds - not_drafted.sum(axis=1)
    last = np.take_along_axis(origin, np.maximum(rollout.lengths - 1, 0)[:, None], axis=1)[:, 0]
    np.testing.assert_array_equal(cut, response.any(axis=1) & (last >= DRAFTED))
    if not draft.max_length:
        assert (origin[response] == UNDRAFTED).all()
        return
    for depth in range(1, LENGTH + 1):
        of_depth = (origin == DRAFTED + depth - 1).sum(axis=1)
        np.testing.assert_array_equal(of_depth, counts.accepted[:, depth - 1])
    np.testing.assert_array_equal(
        (origin == UNDRAFTED).sum(axis=1),
        counts.rounds - counts.draft_rounds[:, 0],
    )
    assert {BONUS, CORRECTION, UNDRAFTED} & {*origin[response].tolist()} >= {CORRECTION}
    # a draft of depth d + 1 follows one of depth d, and depth 1 follows a token of the target
    before, after = origin[:, :-1], origin[:, 1:]
    deeper = after > DRAFTED
    np.testing.assert_array_equal(before[deeper], after[deeper] - 1)
    assert (before[after == DRAFTED] != DRAFTED).all()
    # all drafts kept: the longest offer was used up
    assert (before[(after == BONUS)] >= DRAFTED).all()
    if kind == "eagle3":
        assert (before[(after == BONUS)] == DRAFTED + LENGTH - 1).all()
        assert (before[after == CORRECTION] < DRAFTED + LENGTH - 1).all()
    assert (rollout.status == EOS).any()
