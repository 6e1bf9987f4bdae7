"""Generation by a policy whose experts are split over members of a data shard, which step together:
the tokens of plain decoding on one device, whatever they decide while they go."""

import functools
from typing import Any, NamedTuple

import pytest

from jaxspec.drafts.base import PLAIN
from jaxspec.inputs.spec import FamilySpec
from jaxspec.models.decoder import Decoder
from jaxspec.models.mtp import Mtp
from jaxspec.rollout.settings import Settings
from jaxspec.rollout.verification.modes import Matching
from tests.conftest import eagle3, tiny_model, tiny_network
from tests.rollout.harness import (
    GROUP,
    NEW,
    SPREAD,
    assert_same_rows,
    compiled,
    coupled_prompts,
    draft_of,
    marked,
)
from tests.rollout.test_slots import fewest

pytestmark = pytest.mark.usefixtures("x64")

MODEL = tiny_model(
    family=FamilySpec(
        model_type="qwen3_moe", experts=4, experts_per_token=2, normalize_experts=False
    )
)
SETTINGS = Settings(GROUP, NEW, SPREAD, Matching())


class Split(NamedTuple):
    kind: str
    settings: Settings
    expert: int
    data: int = 1
    tensor: int = 1
    evicts: bool = False
    mark: str = "sweep"

    def __str__(self) -> str:
        return f"{self.kind} {self.data}x{self.expert}x{self.tensor}"


def pooled(prompts: int, spare: int, **settings: Any) -> Settings:
    """Pages of two positions, too few for all slots."""
    return SETTINGS._replace(page_size=2, pages=fewest(2, 3, prompts) + spare, **settings)


SPLITS = [
    Split("eagle3", pooled(4, 3, slots=6), expert=2, evicts=True, mark=""),
    Split("eagle3", pooled(4, 3, slots=6, tail=(2,), lengths=(0, 1, 3)), expert=2, evicts=True),
    Split("mtp", SETTINGS._replace(slots=3), expert=4, data=2, mark="slow"),
    Split("model", pooled(2, 2, slots=4), expert=2, data=2, tensor=2, evicts=True),
]
NETWORKS = {"eagle3": eagle3, "mtp": Mtp, "model": Decoder}
"""A draft with layers of its own has experts in them."""


@functools.cache
def target() -> Decoder:
    return tiny_network(Decoder, MODEL, 1)


@functools.cache
def plain() -> Any:
    return compiled(PLAIN, SETTINGS)((target(), None), coupled_prompts())


@pytest.mark.parametrize("split", marked(SPLITS))
def test_tokens_do_not_depend_on_who_holds_the_experts(split: Split) -> None:
    draft, network = draft_of(split.kind, 3), tiny_network(NETWORKS[split.kind], MODEL, 3, 0.8)
    run = compiled(draft, split.settings, split.data, split.tensor, expert=split.expert)
    found = run((target(), network), coupled_prompts())
    assert_same_rows(found, plain())
    statistics = found.statistics
    waited = statistics.end_round - statistics.start_round > statistics.rounds
    assert waited.any() == split.evicts
    if split.settings.lengths:
        drafted = statistics.draft_rounds.sum(axis=0)
        assert statistics.rounds.sum() > drafted[0] > drafted[-1] > 0, "rounds of several lengths"
