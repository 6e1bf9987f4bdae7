"""`rollout.draft.eagle3.vocab auto`: which drafts have a vocabulary of their own."""

from typing import Any

import pytest

from jaxspec.config.from_checkpoint import resolve_config
from jaxspec.config.settings import DraftConfig, OfflineConfig, ResolvedConfig, RolloutConfig
from jaxspec.drafts.eagle3.settings import Eagle3Config
from tests.conftest import tiny_model


@pytest.mark.parametrize(
    ("tokens", "offline", "draft", "own"),
    [
        (32_768, 300, {}, 0),
        (49_152, 300, {}, 12_288),
        (151_936, 300, {}, 32_000),
        (151_936, 0, {}, 0),  # nothing would choose them
        (151_936, 300, {"eagle3": Eagle3Config(vocab=0)}, 0),
        (151_936, 300, {"eagle3": Eagle3Config(vocab=64_000)}, 64_000),
        (151_936, 300, {"kind": "mtp"}, 0),
    ],
)
def test_a_draft_for_a_large_vocabulary_has_a_part_of_it_unless_the_config_says(
    tokens: int, offline: int, draft: dict[str, Any], own: int
) -> None:
    config = ResolvedConfig(
        model=tiny_model(vocab=tokens),
        rollout=RolloutConfig(draft=DraftConfig(**draft)),
        offline=OfflineConfig(steps=offline),
    )
    assert resolve_config(config, print).draft_spec.vocab == own
