"""The forms of verification that rules are tested in."""

import pytest

from tests.rollout.harness import FORMS, InUse


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A form of verification, which `RULES` and `match` have in the test."""
    monkeypatch.setattr(InUse, "form", request.param)
    return request.param
