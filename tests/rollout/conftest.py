"""The forms of verification that rules are tested in."""

import pytest

from tests.rollout.harness import InUse

# The fast form takes seconds to compile for each shape. The fast part has `test_fused.py` for it.
PARAMS = ["plain", pytest.param("fused by ids", marks=pytest.mark.slow)]


@pytest.fixture(params=PARAMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A form of verification, which `RULES` and `match` have in the test."""
    monkeypatch.setattr(InUse, "form", request.param)
    return request.param
