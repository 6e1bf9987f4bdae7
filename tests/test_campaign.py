"""A run of two processes that is killed in every way ends as if nothing had been."""

import random
from pathlib import Path

import pytest

from tests.campaign import WAYS, Campaign
from tests.compile_cache import compiled_programs


@pytest.mark.sweep
def test_a_run_of_two_processes_survives_every_way_to_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled_programs()))
    campaign = Campaign(tmp_path, 2)
    campaign.run(list(WAYS), random.Random(0))
    assert [kill.way for kill in campaign.kills] == list(WAYS)
    assert all(kill.moment != "ended before" for kill in campaign.kills)
